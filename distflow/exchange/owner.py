"""The owner of some ledgers: grants leases, takes results in, and says which groups the open training step may take.

Map: `ledger.py` knows the positions of one ledger, `ledgers.py` an owner's ledgers together, `holder_table.py` what one
holder was given, `hedging.py` what a second holder gets, `partials.py` what running samples have produced; this file
connects them and speaks. No clock, no socket: `handle`, `tick`, `take`, `advance` return the messages to send.

State of an owner, in words. It is at version v, with training step v *open*. Asks are answered at once while a ledger
is leasable, else refused or parked, and answered in fair shares as soon as something is leasable again. The
step is *closed* when its set has arrived in all own ledgers, and *complete* when all of it is taken; then
`advance(v + 1)` opens the next. At v = T (or after `finish`) every report is answered with Finished until the worker
says Bye.

Example (one ledger, b = 2, s = 0, T = 1):
    Ask(groups=3)            -> Grant of k 0, 1            the gate allows (v + 1 + s)·b = 2
    Result(k=0, dropped=…)   -> Ack                        leased − dropped = 1: one more may be leased
    Ask(groups=1)            -> Grant of k 2
    Result(k=2)              -> Ack; consumable() = [k 2]  it is among the first two whatever k 1 becomes
    Result(k=1)              -> Ack; take([1, 2]); step_complete() is true; advance(1) -> Finished to everybody
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from distflow.errors import ProtocolError
from distflow.exchange.hedging import NEVER, Copies
from distflow.exchange.holder_table import HolderState, Peer, Peers, Share
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.ledger import Entry, OpenLease, RefillsExhausted
from distflow.exchange.ledgers import LedgerSet, awaited, read_snapshot, write_snapshot
from distflow.exchange.messages import (
    Ack,
    Again,
    Ask,
    Bye,
    Cancel,
    Closed,
    Finished,
    Grant,
    HandBack,
    Message,
    Outgoing,
    OwnerMessage,
    Progress,
    PromptAt,
    Refuse,
    Report,
    Result,
)


class OwnerCore:
    """Owner `name` of `ledgers`. `prompt_at(position)` gives the data order, or None for what has not been read yet.

    With `snapshot` (a value of `snapshot()`), begins where that one stood. Raises UserError when one does not fit.
    `begins`: training steps at which terms of the run began, by number; what was produced before may still count.
    """

    def __init__(
        self,
        name: str,
        settings: LeaseSettings,
        ledgers: Sequence[int],
        prompt_at: PromptAt,
        *,
        term: int = 0,
        snapshot: Mapping[str, object] | None = None,
        begins: Mapping[int, int] | None = None,
    ) -> None:
        self.name = name
        self.term = term
        self.version = 0
        self.exhausted: RefillsExhausted | None = None
        self.progress_count = 0
        """Rises with every accepted result and every report of new tokens: a wait that sees it rise goes on waiting."""
        self.oversized = 0
        """Results that were larger than what `group_bytes` promised."""
        self.lapsed: list[tuple[str, int]] = []
        """Workers that lost leases by silence (`host_silence_s`), and how many; whoever tells of it empties it."""
        self._settings = settings
        self._begins = dict(begins or {})
        self._ledgers = LedgerSet(name, ledgers, settings, prompt_at)
        self._peers = Peers()
        self._copies = Copies(settings)
        self._closed = -1
        self._stopped = False
        if snapshot is not None:
            self.version = self._ledgers.restore(lambda ledgers: read_snapshot(snapshot, settings, ledgers))
            self._closed = self.version - 1

    # -- events
    def handle(self, message: Message, now: float) -> list[Outgoing]:
        """Take a holder's message in. Raises ProtocolError for one that no holder of ours can have sent."""
        match message:
            case Result():
                return self._on_result(message, now)
            case Ask():
                return self._on_ask(message, now)
            case Progress():
                return self._on_progress(message, now)
            case HandBack():
                return self._on_hand_back(message, now)
            case Bye():
                return self.worker_lost(message.worker, message.incarnation, now)
        raise ProtocolError(f"owner {self.name} got {type(message).__name__}, which only owners send")

    def tick(self, now: float) -> list[Outgoing]:
        """Send again what nobody confirmed, and look for what to copy. Call it a few times a `resend_s`."""
        if self.finished:
            return self._announce_finished(now, now - self._settings.resend_s)
        # A holder confirms with its next report, so give it the time of one on top.
        before = now - self._settings.resend_s - self._settings.report_s
        out = [self._grant_again(peer, number, now) for peer, number in self._peers.overdue(before)]
        if self._settings.host_silence_s is not None:
            for peer in self._peers.lapsed(self._settings.host_silence_s, now):
                self.lapsed.append((peer.name, len(peer.granted_by)))
                self._peers.unpark(peer)
                self._release(peer, tuple(peer.granted_by))
        self._copies.look(self._peers, self._ledgers.entry, now)
        return out + self._serve_parked(now)

    def worker_lost(self, worker: str, incarnation: int | None, now: float) -> list[Outgoing]:
        """A worker died or left: lease again what it held. `incarnation` None: the one known here.

        That incarnation and older ones get nothing any more (late results are still welcome); it takes a new
        incarnation to be served again.
        """
        peer = self._peers.remove(worker, incarnation)
        if peer is None:
            return []
        self._release(peer, tuple(peer.granted_by))
        return self._serve_parked(now)

    def prompts_arrived(self, now: float) -> list[Outgoing]:
        """`prompt_at` has what it was asked for and lacked: lease it. Before the first ask: it is asked for prompts."""
        self._ledgers.prompts_arrived(self.term, now)
        return self._serve_parked(now)

    # -- the training loop
    def keeps(self, result: Result) -> bool:
        """Ask before `handle(result)`: is this the first complete copy, whose payload is to be stored?"""
        entry = self._ledgers.entry(result.position)
        wanted = awaited(entry) and not entry.voids(result.oldest, self.term, self._begins)
        return wanted and not result.dropped and result.term == self.term and not self.finished

    def consumable(self) -> list[int]:
        """Positions that the open training step may take now, ordered by (k, ledger)."""
        return self._ledgers.consumable()

    def take(self, positions: Iterable[int], now: float) -> list[Outgoing]:
        """Hand groups named by `consumable` to the open step (their payloads are the caller's from here on).

        Raises ProtocolError if a worker broke the staleness bound.
        """
        for position in positions:
            self._ledgers.take(position).check_lag(self.version, self._settings.max_staleness)
        return self._serve_parked(now)

    def step_complete(self) -> bool:
        """All b groups of every own ledger are taken for the open step."""
        return self._ledgers.complete()

    def set_complete(self) -> bool:
        """All b groups of every own ledger have arrived (or are taken already) for the open step."""
        return self._ledgers.set_complete()

    def advance(self, version: int, now: float) -> list[Outgoing]:
        """The open step is trained and `version` (one more) published: open the next and answer parked asks."""
        assert version == self.version + 1, f"owner {self.name} is at version {self.version}, asked to go to {version}"
        self.version = version
        self._ledgers.advance()
        if self.finished:
            return self._announce_finished(now)
        return self._announce_closed() + self._serve_parked(now)

    def finish(self, now: float) -> list[Outgoing]:
        """End the run early: nothing is leased or awaited any more, and holders are told."""
        self._stopped = True
        return self._announce_finished(now)

    @property
    def finished(self) -> bool:
        """All T training steps are done, or `finish` was called."""
        return self._stopped or self.version >= self._settings.training_steps

    @property
    def all_left(self) -> bool:
        """No worker is left that has not said Bye (or been lost)."""
        return not self._peers

    # -- state for checkpoints and onlookers
    def snapshot(self) -> dict[str, object]:
        """Where each ledger stands at the current version, as plain JSON values.

        Terminal are the groups of training steps < version, and recorded drops; all else will be leased again. Groups
        taken by the open step do not count: take the snapshot that goes with weights v after `advance(v)`.
        """
        return write_snapshot(self.version, self._settings, self._ledgers)

    def open_leases(self) -> list[OpenLease]:
        """Groups that are leased and have not arrived, by (k, ledger): the first ones block the open step."""
        return [OpenLease.of(entry) for entry in self._ledgers.unfinished()]

    def holders(self) -> list[HolderState]:
        """All workers known here, by name."""
        return [HolderState.of(peer) for peer in sorted(self._peers, key=lambda peer: peer.name)]

    # -- asks and reports
    def _on_ask(self, ask: Ask, now: float) -> list[Outgoing]:
        if self.finished:
            return self._finished_reply(ask.report, now)
        peer, out = self._read(ask.report, now)
        if peer is None:
            return out
        if ask.ask == peer.ask:
            again = peer.unconfirmed_answer(ask.ask)
            if again:
                return out + [self._grant_again(peer, number, now) for number in again]
        self._peers.unpark(peer)
        peer.ask = ask.ask
        if not ask.groups:
            return out
        # Behind those that wait already: this very message may have brought news of lost leases.
        self._peers.park(peer, ask.groups, idle=ask.idle)
        out += self._serve_parked(now)
        if not peer.parked:
            return out
        if not ask.park:
            self._peers.unpark(peer)
        return [*out, self._to(peer, Refuse(self.name, self.term, peer.incarnation, ask.ask, ask.park))]

    def _on_progress(self, progress: Progress, now: float) -> list[Outgoing]:
        if self.finished:
            return self._finished_reply(progress.report, now)
        # Begun before this term, it can be leased to that worker, as if it had asked, once its prompts have been read.
        begun = [running.position for running in progress.running] if self._begins else []
        if progress.report.term == self.term and not self._ledgers.reach(begun, self.term, now):
            return []
        peer, out = self._read(progress.report, now)
        if peer is None or progress.report.term != self.term:
            return out
        useless = []
        for running in progress.running:
            entry = self._ledgers.entry(running.position)
            if not awaited(entry) or (self._begins and entry.forbids(running.version)):
                useless.append(running.position)
                continue
            if running.version >= 0 and not entry.started:
                entry.started = True
                self._copies.note(entry)
            if running.tokens > entry.tokens:
                entry.tokens = running.tokens
                self.progress_count += 1
        if useless:
            out.append(self._to(peer, Cancel(self.name, self.term, peer.incarnation, tuple(useless))))
        missing = self._ledgers.keep(progress.pieces, peer.name, peer.incarnation, self._begins)
        if missing:
            out.append(self._to(peer, Again(self.name, self.term, peer.incarnation, missing)))
        return out + self._serve_parked(now)

    def _on_hand_back(self, message: HandBack, now: float) -> list[Outgoing]:
        report = message.report
        if self.finished:
            return self._finished_reply(report, now)
        peer = self._peers.find(report.worker, report.incarnation)
        missing: tuple[int, ...] = ()
        if peer is not None and report.term == self.term:
            # Before its leases are taken back: who holds nothing has nothing to say.
            missing = self._ledgers.keep(message.pieces, peer.name, peer.incarnation, self._begins)
            if missing:
                return [self._to(peer, Again(self.name, self.term, peer.incarnation, missing))]
            self._read(report, now)
            self._peers.unpark(peer)
            self._release(peer, message.positions)
        ack = Ack(self.name, self.term, report.incarnation, message.positions)
        return [Outgoing(report.worker, ack), *self._serve_parked(now)]

    def _read(self, report: Report, now: float) -> tuple[Peer | None, list[Outgoing]]:
        """Bring the worker's record up to date. None: the report is stale, or of an incarnation that is gone."""
        out: list[Outgoing] = []
        if self._peers.replaces(report):
            out = self.worker_lost(report.worker, report.incarnation - 1, now)
        peer = self._peers.admit(report, now)
        if peer is not None:
            self._copies.heard(peer, self._ledgers.entry)
        if peer is not None and report.term == self.term:
            self._reconcile(peer, report)
            if self._settings.announce_closed and report.closed_seen < self._closed:
                out.append(self._to(peer, Closed(self.name, self.term, self._closed)))
        return peer, out

    def _reconcile(self, peer: Peer, report: Report) -> None:
        self._release(peer, peer.confirm(report))
        for position in report.held:
            entry = None if position in peer.granted_by else self._ledgers.entry(position)
            if awaited(entry):
                self._ledgers.adopt(entry, peer.name, peer.incarnation)
                self._peers.adopt(peer, position, report)
                self._copies.note(entry)

    def _release(self, peer: Peer, positions: Iterable[int]) -> None:
        """A worker holds these no more."""
        for position in positions:
            peer.forget(position)
            self._copies.note(self._ledgers.release(position, peer.name))

    # -- results
    def _on_result(self, result: Result, now: float) -> list[Outgoing]:
        ledger, k = self._ledgers.place(result.position)
        about = (result.position,)
        if self._begins and result.term == self.term and not ledger.knows(k) and ledger.unread:
            return []  # Begun before this term, and its prompt is being read: the result is sent again.
        if result.term != self.term or not ledger.knows(k):
            # A lease of another term: its tokens may come from weights that no longer count.
            return [Outgoing(result.worker, Cancel(self.name, result.term, result.incarnation, about))]
        out = [Outgoing(result.worker, Ack(self.name, self.term, result.incarnation, about))]
        entry = ledger.entries.get(k)
        if awaited(entry) and entry.voids(result.oldest, self.term, self._begins):
            return [Outgoing(result.worker, Cancel(self.name, self.term, result.incarnation, about))]
        if awaited(entry):
            self.progress_count += 1
            self._copies.arrived(entry, now)
            out += self._settle(entry, result)
            self.oversized += not result.dropped and result.nbytes > entry.reserved
            exhausted = self._ledgers.settle(result)
            self.exhausted = self.exhausted or exhausted
            self._peers.grow(result.worker, result.incarnation, result.wanted)
            out += self._announce_closed()
        return out + self._serve_parked(now)

    def _settle(self, entry: Entry, result: Result) -> list[Outgoing]:
        """A result came first: nobody else needs to go on with that group."""
        out: list[Outgoing] = []
        for worker, incarnation in entry.holders.items():
            self._peers.forget(worker, result.position)
            if (worker, incarnation) != (result.worker, result.incarnation):
                cancel = Cancel(self.name, self.term, incarnation, (result.position,))
                out.append(Outgoing(worker, cancel))
        entry.holders.clear()
        return out

    # -- leasing
    def _serve_parked(self, now: float) -> list[Outgoing]:
        """Deal among the parked asks, in one grant each: first what nobody is at work on, then copies for the idle."""
        if not self._peers.wanted or self.exhausted is not None or self.finished:
            return []
        out = [self._grant(share, now) for share in self._copies.stranded(self._peers)]
        drawn = self._ledgers.draw(self.term, now)
        out += [self._grant(share, now) for share in self._peers.deal(drawn, self._settings.message_bytes)]
        return out + [self._grant(share, now) for share in self._copies.slow(self._peers)]

    def _grant(self, share: Share, now: float) -> Outgoing:
        peer = share.peer
        for entry in share.entries:
            if entry.holders:
                entry.lease = structs.replace(entry.lease, attempt=entry.lease.attempt + 1)
            entry.holders[peer.name] = peer.incarnation
            self._copies.note(entry)
        return self._grant_message(peer, self._peers.grant(peer, share.entries, now), share.entries)

    def _grant_again(self, peer: Peer, number: int, now: float) -> Outgoing:
        self._peers.grant_again(peer, number, now)
        entries, rest = self._ledgers.fitting(peer.still_granted(number), self._settings.message_bytes)
        # Another holder has produced so much since that not all of it fits any more.
        self._release(peer, rest)
        return self._grant_message(peer, number, entries)

    def _grant_message(self, peer: Peer, number: int, entries: Sequence[Entry]) -> Outgoing:
        leases, ask = tuple([entry.to_grant() for entry in entries]), peer.unconfirmed[number].ask
        return self._to(peer, Grant(self.name, self.term, peer.incarnation, number, ask, leases))

    # -- announcements
    def _announce_closed(self) -> list[Outgoing]:
        """Tell every known holder once; one that missed it is told again when its next report shows that."""
        closed = self.version if self.set_complete() else self.version - 1
        if not self._settings.announce_closed or closed <= self._closed:
            return []
        self._closed = closed
        return [self._to(peer, Closed(self.name, self.term, closed)) for peer in self._peers]

    def _announce_finished(self, now: float, before: float = NEVER) -> list[Outgoing]:
        """Tell those that have not been heard of, or told, since `before`."""
        peers = [peer for peer in self._peers if peer.heard_at <= before]
        for peer in peers:
            peer.heard_at = now
        return [self._finished_to(peer.name) for peer in peers]

    def _finished_reply(self, report: Report, now: float) -> list[Outgoing]:
        self._read(report, now)
        return [self._finished_to(report.worker)]

    def _finished_to(self, worker: str) -> Outgoing:
        return Outgoing(worker, Finished(self.name, self.term))

    def _to(self, peer: Peer, message: OwnerMessage) -> Outgoing:
        return Outgoing(peer.name, message)
