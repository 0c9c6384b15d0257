"""The owner of some ledgers: grants leases, accepts results, and knows which groups the open training step may take.

Files: `ledger.py` has the positions of one ledger, `ledgers.py` all ledgers of an owner, `holder_table.py` the leases
of each holder, `hedging.py` copies for second holders, `partials.py` tokens of running samples; this file connects them
and composes the messages. No clock, no socket: `handle`, `tick`, `take`, `advance` return the messages to send.

State of an owner: it is at version v, with training step v *open*. Asks are answered at once while a ledger is
leasable, otherwise refused or parked, and answered evenly as soon as something is leasable again. The
step is *closed* when its set has arrived in all own ledgers, and *complete* when all of it is taken; then
`advance(v + 1)` opens the next. At v = T (or after `finish`) every report is answered with Finished until Bye comes.

Example (one ledger, b = 2, s = 0, T = 1):
    Ask(groups=3)            -> Grant of k 0, 1            the gate allows (v + 1 + s)·b = 2
    Result(k=0, dropped=…)   -> Ack                        leased − dropped = 1: one more may be leased
    Ask(groups=1)            -> Grant of k 2
    Result(k=2)              -> Ack; consumable() = [k 2]  it is among the first two whatever k 1 becomes
    Result(k=1)              -> Ack; take([1, 2]); step_complete() is true; advance(1) -> Finished to everybody
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from msgspec import structs

from distflow.errors import ProtocolError
from distflow.exchange.entry import Entry, OpenLease
from distflow.exchange.hedging import NEVER, CopyCandidates
from distflow.exchange.holder_table import HolderState, Peer, Peers, PendingGrant
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.ledger import RefillsExhausted
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
    """Owner `name` of `ledgers`. `prompt_at(position)` returns the prompt, or None if it has not been read yet.

    With `snapshot` (a value of `snapshot()`), it begins in that state. Raises UserError if the snapshot does not fit.
    `begins`: training steps at which terms of the run began, by number; earlier samples may still count.
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
        """Why the run is to end: nothing is leased any more. Whoever drives the core looks at it with every tick."""
        self.progress_count = 0
        """Increases with every accepted result and every report of new tokens: the progress that waits look at."""
        self.lapsed: list[tuple[str, int]] = []  # Who lost leases by silence, and how many; the caller empties it.
        self.settings = settings
        self.reading: Callable[[], bool] = bool  # Whether prompts that may be leased are still being read.
        self.held_up: Callable[[], str] = str  # Who has to read samples before anything may be leased; "": nobody.
        self.lacks: Callable[[], str] = str  # Which prompts clients have yet to put; "": none.
        self._begins = dict(begins or {})
        self.ledgers = LedgerSet(name, ledgers, settings, prompt_at)
        self._peers = Peers()
        self._copies = CopyCandidates(settings)
        self._closed = -1
        self._stopped = False
        if snapshot is not None:
            self.version = self.ledgers.restore(lambda ledgers: read_snapshot(snapshot, settings, ledgers))
            self._closed = self.version - 1

    # -- events
    def handle(self, message: Message, now: float) -> list[Outgoing]:
        """Process a holder's message. Raises ProtocolError for one that no holder can send."""
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
        """Repeat unconfirmed messages and look for groups to copy. Call it a few times per `resend_s`."""
        if self.finished:
            return self._announce_finished(now, now - self.settings.resend_s)
        # A holder confirms with its next report, so allow for one more interval.
        before = now - self.settings.resend_s - self.settings.report_s
        out = [self._grant_again(peer, number, now) for peer, number in self._peers.overdue(before)]
        if self.settings.host_silence_s is not None:
            for peer in self._peers.lapsed(self.settings.host_silence_s, now):
                self.lapsed.append((peer.name, len(peer.granted_by)))
                self._peers.unpark(peer)
                self._release(peer, tuple(peer.granted_by))
        self._copies.look(self._peers, self.ledgers.entry, now)
        return out + self._serve_parked(now)

    def worker_lost(self, worker: str, incarnation: int | None, now: float) -> list[Outgoing]:
        """A worker died or left: its groups are leased again. `incarnation` None: the one known here.

        That incarnation and older ones get no leases any more (late results are still accepted).
        """
        peer = self._peers.remove(worker, incarnation)
        if peer is None:
            return []
        self._release(peer, tuple(peer.granted_by))
        self.ledgers.left(worker)
        return self._serve_parked(now)

    def prompts_arrived(self, now: float) -> list[Outgoing]:
        """`prompt_at` now has prompts that were missing: lease them. Before the first ask, this requests prompts."""
        self.ledgers.prompts_arrived(self.term, now)
        return self._serve_parked(now)

    def draw(self, now: float, worker: str = "", held: int = 0) -> Entry | None:
        """Lease what may be leased; to nobody yet, as an owner does that makes its samples itself."""
        return None if self.held_up() else self.ledgers.draw(self.term, now, worker, held)

    # -- the training loop
    def keeps(self, result: Result) -> bool:
        """Call it before `handle(result)`: whether this is the first complete copy, whose payload must be stored."""
        entry = self.ledgers.entry(result.position)
        wanted = awaited(entry) and not entry.voids(result.oldest, self.term, self._begins)
        return wanted and not result.dropped and result.term == self.term and not self.finished

    def consumable(self) -> list[int]:
        """Positions that the open training step may take now, ordered by (k, ledger)."""
        return self.ledgers.consumable()

    def take(self, positions: Iterable[int], now: float, *, keep: bool = False) -> list[Outgoing]:
        """Hand groups named by `consumable` to the open step (the caller has their payloads from here on).

        With `keep`, their memory stays reserved until `advance`. Raises ProtocolError if a worker broke the staleness
        bound.
        """
        for position in positions:
            self.ledgers.take(position, keep=keep).check_lag(self.version, self.settings.max_staleness)
        return self._serve_parked(now)

    def step_complete(self) -> bool:
        """All b groups of every own ledger are taken for the open step."""
        return self.ledgers.complete()

    def set_complete(self) -> bool:
        """All b groups of every own ledger have arrived (or are taken already) for the open step."""
        return self.ledgers.set_complete()

    def advance(self, version: int, now: float) -> list[Outgoing]:
        """The open step is trained and `version` (one more) published: open the next step and answer parked asks."""
        assert version == self.version + 1, f"owner {self.name} is at version {self.version}, asked to go to {version}"
        self.version = version
        self.ledgers.advance()
        if self.finished:
            return self._announce_finished(now)
        return self._announce_closed() + self._serve_parked(now)

    def finish(self, now: float) -> list[Outgoing]:
        """End the run early: nothing is leased or awaited any more, and the holders are told."""
        self._stopped = True
        return self._announce_finished(now)

    @property
    def finished(self) -> bool:
        """All T training steps are done, or `finish` was called."""
        return self._stopped or self.version >= self.settings.training_steps

    @property
    def all_left(self) -> bool:
        """Whether all workers have said Bye or are lost."""
        return not self._peers

    # -- state for checkpoints and status
    def snapshot(self) -> dict[str, object]:
        """The state of each ledger at the current version, as plain JSON values.

        Groups of training steps < version and recorded drops are terminal; all others will be leased again. Groups
        taken by the open step do not count: take the snapshot for weights v after `advance(v)`.
        """
        return write_snapshot(self.version, self.settings, self.ledgers)

    def open_leases(self) -> list[OpenLease]:
        """Leased groups that have not arrived, by (k, ledger): the first ones block the open step."""
        return [OpenLease.of(entry) for entry in self.ledgers.unfinished()]

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
        # Behind the asks that are parked already: this message may have freed lost leases.
        self._peers.park(peer, ask.groups, idle=ask.idle)
        out += self._serve_parked(now)
        if not peer.parked or (ask.park and self.reading()):
            return out
        if not ask.park:
            self._peers.unpark(peer)
        return [*out, self._to(peer, Refuse(self.name, self.term, peer.incarnation, ask.ask, ask.park))]

    def _on_progress(self, progress: Progress, now: float) -> list[Outgoing]:
        if self.finished:
            return self._finished_reply(progress.report, now)
        # A group begun before this term is leased to its worker, as if it had asked, once its prompt has been read.
        begun = [running.position for running in progress.running] if self._begins else []
        if progress.report.term == self.term and not self.ledgers.reach(begun, self.term, now):
            return []
        peer, out = self._read(progress.report, now)
        if peer is None or progress.report.term != self.term:
            return out
        self.ledgers.reported(progress, now)
        useless = []
        for running in progress.running:
            entry = self.ledgers.entry(running.position)
            if not awaited(entry) or (self._begins and entry.forbids(running.version)):
                useless.append(running.position)
                continue
            if running.version >= 0 and not entry.started:
                self._copies.started(entry, peer, running.version, self.ledgers.entry)
            if running.tokens > entry.tokens:
                entry.tokens = running.tokens
                self.progress_count += 1
        if useless:
            out.append(self._to(peer, Cancel(self.name, self.term, peer.incarnation, tuple(useless))))
        missing = self.ledgers.keep(progress.pieces, peer.name, peer.incarnation, self._begins)
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
            # Before its leases are released: pieces are accepted only from holders.
            missing = self.ledgers.keep(message.pieces, peer.name, peer.incarnation, self._begins)
            if missing:
                return [self._to(peer, Again(self.name, self.term, peer.incarnation, missing))]
            self._read(report, now)
            self._peers.unpark(peer)
            self._release(peer, message.positions)
        ack = Ack(self.name, self.term, report.incarnation, message.positions)
        return [Outgoing(report.worker, ack), *self._serve_parked(now)]

    def _read(self, report: Report, now: float) -> tuple[Peer | None, list[Outgoing]]:
        """Update the worker's record. None: the report is stale or of an incarnation that is gone."""
        out: list[Outgoing] = []
        if self._peers.replaces(report):
            out = self.worker_lost(report.worker, report.incarnation - 1, now)
        peer = self._peers.admit(report, now)
        if peer is not None:
            self._copies.heard(peer, self.ledgers.entry)
        if peer is not None and report.term == self.term:
            self._reconcile(peer, report)
            if self.settings.announce_closed and report.closed_seen < self._closed:
                out.append(self._to(peer, Closed(self.name, self.term, self._closed)))
        return peer, out

    def _reconcile(self, peer: Peer, report: Report) -> None:
        self._release(peer, peer.confirm(report))
        for position in report.held:
            entry = None if position in peer.granted_by else self.ledgers.entry(position)
            if awaited(entry):
                self.ledgers.adopt(entry, peer.name, peer.incarnation)
                self._peers.adopt(peer, position, report)
                self._copies.note(entry)

    def _release(self, peer: Peer, positions: Iterable[int]) -> None:
        for position in positions:
            peer.forget(position)
            self._copies.note(self.ledgers.release(position, peer.name))

    # -- results
    def _on_result(self, result: Result, now: float) -> list[Outgoing]:
        ledger, k = self.ledgers.place(result.position)
        about = (result.position,)
        if self._begins and result.term == self.term and not ledger.knows(k) and ledger.unread:
            return []  # begun before this term, and its prompt is being read: the result will be sent again
        if result.term != self.term or not ledger.knows(k):
            # A lease of another term: its tokens may come from weights that were abandoned.
            return [Outgoing(result.worker, Cancel(self.name, result.term, result.incarnation, about))]
        out = [Outgoing(result.worker, Ack(self.name, self.term, result.incarnation, about))]
        entry = ledger.entries.get(k)
        if awaited(entry) and entry.voids(result.oldest, self.term, self._begins):
            return [Outgoing(result.worker, Cancel(self.name, self.term, result.incarnation, about))]
        if awaited(entry):
            self.progress_count += 1
            holder = self._peers.find(result.worker, result.incarnation)
            self._copies.arrived(entry, holder, self.ledgers.entry, now)
            out += self._settle(entry, result)
            self.exhausted = self.ledgers.settle(result) or self.exhausted
            self._peers.grow(result.worker, result.incarnation, result.wanted)
            out += self._announce_closed()
        return out + self._serve_parked(now)

    def _settle(self, entry: Entry, result: Result) -> list[Outgoing]:
        """The first result of a group has arrived: cancel all other copies."""
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
        """Answer the parked asks with one grant each: stranded groups, new groups, then copies for idle workers."""
        if not self._peers.wanted or self.exhausted is not None or self.finished:
            return []
        out = [self._grant(pending, now) for pending in self._copies.stranded(self._peers)]
        dealt = self._peers.deal(partial(self.draw, now), self.ledgers.keeps_back, self.settings.message_bytes)
        out += [self._grant(pending, now) for pending in dealt]
        return out + [self._grant(pending, now) for pending in self._copies.slow(self._peers)]

    def _grant(self, pending: PendingGrant, now: float) -> Outgoing:
        peer = pending.peer
        for entry in pending.entries:
            if entry.holders:
                entry.lease = structs.replace(entry.lease, attempt=entry.lease.attempt + 1)
            entry.holders[peer.name] = peer.incarnation
            self._copies.note(entry)
        return self._grant_message(peer, self._peers.grant(peer, pending.entries, now), pending.entries)

    def _grant_again(self, peer: Peer, number: int, now: float) -> Outgoing:
        self._peers.grant_again(peer, number, now)
        entries, rest = self.ledgers.fitting(peer.still_granted(number), self.settings.message_bytes)
        # Another holder has produced so many tokens since that not all leases fit any more.
        self._release(peer, rest)
        return self._grant_message(peer, number, entries)

    def _grant_message(self, peer: Peer, number: int, entries: Sequence[Entry]) -> Outgoing:
        about = (self.name, self.term, peer.incarnation, number, peer.unconfirmed[number].ask)
        step = max((entry.step for entry in entries), default=0)
        return self._to(peer, Grant(*about, tuple([entry.to_grant() for entry in entries]), step))

    # -- announcements
    def _announce_closed(self) -> list[Outgoing]:
        """Tell every known holder once; one that missed it is told again after its next report."""
        closed = self.version if self.set_complete() else self.version - 1
        if not self.settings.announce_closed or closed <= self._closed:
            return []
        self._closed = closed
        return [self._to(peer, Closed(self.name, self.term, closed)) for peer in self._peers]

    def _announce_finished(self, now: float, before: float = NEVER) -> list[Outgoing]:
        """Tell holders that were neither heard from nor told since `before`."""
        peers = [peer for peer in self._peers if peer.heard_at <= before]
        for peer in peers:
            peer.heard_at = now
        return [Outgoing(peer.name, Finished(self.name, self.term)) for peer in peers]

    def _finished_reply(self, report: Report, now: float) -> list[Outgoing]:
        self._read(report, now)
        return [Outgoing(report.worker, Finished(self.name, self.term))]

    def _to(self, peer: Peer, message: OwnerMessage) -> Outgoing:
        return Outgoing(peer.name, message)
