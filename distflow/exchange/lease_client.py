"""A generating worker's side of the leases: asks for them, holds them, sends results until the owner has them.

Nothing here reads a clock or a socket: `want`, `handle`, `finished`, `tick` return the messages to send. The caller
keeps the payloads: it attaches payload p to every Result about p, until p appears in `take_acked`.

With partial rollouts, `produced` updates the samples and reports include their new tokens; `hand_back` gives up leases
together with the remaining tokens and is complete when `unfinished` is empty.

The life of a lease: granted (`take_granted` hands it to the engine) → running (`report`) → finished (`finished`;
sent again until acknowledged) → acknowledged (`take_acked`). Or cancelled, by its owner or because this worker has
declined it (`take_cancelled`: stop generating it).

Example: want(16) → Ask(groups=3) → Grant → take_granted() = 3 leases → finished(position, …) → Result → Ack.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Mapping, Sequence

from distflow.errors import ProtocolError, UserError
from distflow.exchange.lease_settings import LeaseSettings
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
    HolderMessage,
    Lease,
    Message,
    Outgoing,
    OwnerMessage,
    Progress,
    Refuse,
    Report,
    Result,
)
from distflow.exchange.owner_links import FIRST, AskState, AskWalk, Held, Home, Link, OwnerLinks, surviving
from distflow.types import SampleOutput, Scores, Version

_LEFT_ALONE = 5
"""Reports for which a holder asks for nothing once it has declined something."""


class HolderCore:
    """Holder `name` of `incarnation`. `owners` are in the order of the training pool; `home` is asked first.

    `seed` (for example the run's) makes the walk over the owners repeatable. Raises UserError for more owners than
    ledgers.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        owners: Sequence[str],
        settings: LeaseSettings,
        *,
        home: Home = FIRST,
        term: int = 0,
        seed: int = 0,
    ) -> None:
        if len(owners) > settings.ledgers:
            raise UserError(f"{len(owners)} owners share {settings.ledgers} ledgers: set batch.ledgers ≥ {len(owners)}")
        self.name, self.incarnation = name, incarnation
        self._settings, self._home = settings, home
        self._walk = AskWalk(home.among(owners), settings, random.Random(f"{seed}/{name}/{incarnation}"))
        self._wanted = 0
        self._idle = self._told_idle = False
        self._leaving = False
        self._asks_again: float | None = None
        """Until when it asks for nothing, because it has left groups to others."""
        self._reports, self._report_due = 0, 0.0
        self._links = OwnerLinks(owners, term)
        self._granted: dict[int, Lease] = {}
        self._cancelled: list[int] = []
        self._acked: list[int] = []

    # -- called by the worker
    def want(self, free_slots: int, now: float, *, idle: bool = False) -> list[Outgoing]:
        """Ask for leases if the worker has room and no ask is in flight. Call it whenever the room may have changed.

        `free_slots`: decoding slots minus samples queued or running, negative if more is queued than fits. Leases not
        yet taken by `take_granted` are subtracted here. One group more than fits is prefetched. `idle`: so little is
        running that the worker would take a copy of another worker's group (`hedging`).
        """
        self._wanted = max(0, free_slots // self._settings.samples_per_prompt + 1 - len(self._granted))
        self._idle = idle and self._settings.hedging
        if self.to_ask:
            self._walk.begin(self._askable(), now)
            return [self._ask()]
        return [self._ask()] if self._idle and not self._told_idle and self._askable() else []

    def report(self, position: int, tokens: int, version: int) -> None:
        """Progress of a running group: tokens so far (all samples), and the version its first sample started on."""
        held = self.find(position)
        if held is not None:
            held.tokens = tokens
            held.version = version if held.version < 0 else held.version

    def produced(self, outputs: Iterable[SampleOutput]) -> None:
        """All that the current samples of unfinished groups have, finished ones too: a request that is not answered yet
        has finish reason `abort`. It replaces what was told of these samples before. The next tick reports it: it would
        be up to `report_s` old by then, if reports had a clock of their own."""
        told: dict[int, list[SampleOutput]] = {}
        for output in outputs if self._settings.partial_rollouts else ():
            told.setdefault(output.position, []).append(output)
        for position, found in told.items():
            held = self.find(position)
            if held is not None and held.result is None:
                samples = {output.sample for output in found}
                others = {key: output for key, output in held.outputs.items() if key[0] not in samples}
                held.outputs = others | {(output.sample, output.call): output for output in found}
                self._report_due = 0.0

    def finished(
        self, position: int, oldest: Version | None, nbytes: int, dropped: str, now: float, scores: Scores = ()
    ) -> list[Outgoing]:
        """The group is generated: `nbytes` of payload, `oldest` version of any token, `dropped` reason or "".

        Its tokens are as last reported. If it was cancelled, nothing is sent and its payload is acknowledged at once.
        """
        held = self.find(position)
        if held is None:
            self._acked.append(position)
            return []
        assert held.result is None, f"position {position} was finished twice"
        assert dropped or oldest is not None, f"position {position}: a result names its oldest version"
        link = self._link_of(position)
        about = (self.name, self.incarnation, link.term, position, held.lease.attempt)
        held.result = Result(*about, nbytes, oldest, dropped, self._wanted, scores, held.tokens)
        held.outputs.clear()
        held.wait = self._settings.resend_s
        held.due = now + held.wait
        if dropped:
            # The owner leases another group instead.
            self._walk.prefer(self._links.numbers[link.name], now)
        return [Outgoing(link.name, held.result)]

    def not_sent(self, positions: Iterable[int]) -> None:
        """Results for which the outbox had no room: send them again with the next tick."""
        for held in filter(None, map(self.find, positions)):
            held.due, held.wait = 0.0, self._settings.resend_s

    def decline(self, positions: Iterable[int], now: float) -> list[Outgoing]:
        """Give up groups that this worker cannot make, with all their tokens: others are to lease them.

        It asks for nothing for a while, so that they do not come back to it at once.
        """
        links = {position: self._link_of(position) for position in positions}
        for position, link in links.items():
            self._release(link, [position])
        self._asks_again = now + _LEFT_ALONE * self._settings.report_s
        told = {link.name: link for link in links.values()}
        return [*self._withdraw_ask(), *(self._progress(link) for link in told.values())]

    def hand_back(self, now: float) -> list[Outgoing]:
        """This worker stops generating: give up all unfinished leases, with their tokens known from `produced`."""
        out = self._withdraw_ask()
        self._leaving = True
        return out + self._hand_back_again(now)

    def leave(self) -> list[Outgoing]:
        """This worker stops for good: its leases may be given to others."""
        return [self._bye(link) for link in self._links]

    def owner_left(self, owner: str) -> None:
        """An owner has left the run: treat it as finished even if its Finished was lost."""
        self._on_finished(self._links[self._links.numbers[owner]])

    def begin_term(
        self, term: int, owners: Sequence[str], begins: Mapping[int, int], loaded: Version | None, now: float
    ) -> list[Outgoing]:
        """Begin a term with these owners, in this order (`begins`: training steps by term).

        Held groups continue if `loaded`, the newest weights they come from, survives. All others are cancelled.
        """
        if term < self.term or (term == self.term and tuple(owners) == self.owners):
            return []
        kept = surviving(self._links, begins, loaded)
        for link in self._links:
            self._release(link, [position for position in link.held if position not in kept])
        self._links = OwnerLinks(owners, term)
        self._walk.settle(self._home.among(owners))
        for position, one in kept.items():
            one.go_on(term, now)
            self._links.hold(self._link_of(position), position, one)
        return [message for owner in owners for message in self.offer(owner)]

    def offer(self, owner: str) -> list[Outgoing]:
        """Report the groups begun of an owner's positions: the first message to an owner of a new term."""
        link = self._links.holding.get(owner)
        return [] if link is None else [self._progress(link, finished_too=True)]

    @property
    def owners(self) -> tuple[str, ...]:
        """The owners, in order."""
        return tuple(self._links.numbers)

    @property
    def term(self) -> int:
        """The newest term known of any owner."""
        return max(link.term for link in self._links)

    # -- events
    def handle(self, message: Message, now: float) -> list[Outgoing]:
        """Process an owner's message. Raises ProtocolError for one that no owner can send."""
        if isinstance(message, HolderMessage):
            raise ProtocolError(f"holder {self.name} got {type(message).__name__}, which only holders send")
        if message.owner not in self._links.numbers:
            raise ProtocolError(f"holder {self.name} got {type(message).__name__} from unknown owner {message.owner!r}")
        link = self._links[self._links.numbers[message.owner]]
        if not self._is_current(link, message):
            return []
        match message:
            case Grant() if not link.finished:
                return self._on_grant(link, message)
            case Refuse():
                return self._on_refuse(link, message, now)
            case Ack() | Cancel():
                self._release(link, message.positions)
                return self._hand_back_again(now)
            case Again():
                link.send_again(message.positions)
            case Closed():
                link.closed = max(link.closed, message.step)
            case Finished():
                return self._on_finished(link)
        return []

    def tick(self, now: float) -> list[Outgoing]:
        """Repeat unanswered messages and send progress reports. Call it a few times per `resend_s`."""
        if self._asks_again is not None and now >= self._asks_again:
            self._asks_again = None
        out: list[Outgoing] = []
        for link in self._links.holding.values():
            out += [Outgoing(link.name, result) for result in link.results_due(now, self._settings.park_limit_s)]
        if self._walk.due(now):
            out += self._ask_again(now)
        out += self._hand_back_again(now)
        if now >= self._report_due:
            self._report_due = now + self._settings.report_s
            links = self._links if self._settings.announce_closed else self._links.holding.values()
            out += [self._progress(link) for link in links if not self._is_silent(link)]
        return out

    # -- read by the worker
    def take_granted(self) -> list[Lease]:
        """New leases, each returned once, in order of arrival."""
        granted = list(self._granted.values())
        self._granted.clear()
        return granted

    def take_cancelled(self) -> list[int]:
        """Positions (among those taken) whose generation must be stopped, each returned once."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def take_acked(self) -> list[int]:
        """Positions whose payload may be freed, each returned once."""
        acked, self._acked = self._acked, []
        return acked

    def held(self) -> list[int]:
        """All positions held, finished ones until they are acknowledged."""
        return [position for link in self._links.holding.values() for position in link.held]

    def unfinished(self) -> list[int]:
        """Positions that are still to be generated."""
        return [position for link in self._links.holding.values() for position in link.unfinished()]

    def closed(self, step: int) -> bool:
        """Whether every owner has closed this training step (`announce_closed`) or has no more work."""
        return all(link.finished or link.closed >= step for link in self._links)

    @property
    def to_ask(self) -> bool:
        """Whether there is room and no ask in flight: an owner has finished, a later term has begun, or leases were
        taken back before they started.
        """
        return self._walk.owner is None and bool(self._askable())

    def asking(self) -> AskState | None:
        """The ask that waits for a grant, if any."""
        if self._walk.owner is None:
            return None
        return AskState(self._links[self._walk.owner].name, self._walk.parked, self._walk.since)

    @property
    def settings(self) -> LeaseSettings:
        """What owners and holders have agreed on."""
        return self._settings

    @property
    def run_finished(self) -> bool:
        """Whether all owners have said Finished."""
        return not self._links.open

    # -- answers of owners
    def _is_current(self, link: Link, message: OwnerMessage) -> bool:
        if message.term > link.term:
            # The owner restarted from a checkpoint: its earlier leases are void.
            self._release(link, tuple(link.held))
            self._links.begin(link, message.term)
        addressed = isinstance(message, Closed | Finished) or message.incarnation == self.incarnation
        return addressed and message.term == link.term

    def _on_grant(self, link: Link, grant: Grant) -> list[Outgoing]:
        if self._walk.is_answer(self._links.numbers[link.name], grant.ask):
            self._walk.end()
        if not link.first_time(grant.number):
            # The owner does not know yet that the grant arrived: report it.
            return [] if self._leaving and link.unfinished() else [self._progress(link)]
        self._walk.granted(self._links.numbers[link.name], grant.step)
        for lease in grant.leases:
            rightful = self._link_of(lease.position)
            if rightful is not link:
                raise ProtocolError(
                    f"{link.name} granted position {lease.position}, which is for {rightful.name} to lease: "
                    "owners and holders disagree about the ledgers"
                )
            if lease.position in link.held:
                held = link.held[lease.position]
                held.lease = lease
                if held.version < 0 or held.version >= lease.min_version:
                    continue
                # Begun before this term, on weights that are too old now.
                self._release(link, [lease.position])
            self._links.hold(link, lease.position, Held(lease))
            self._granted[lease.position] = lease
        return []

    def _on_refuse(self, link: Link, refuse: Refuse, now: float) -> list[Outgoing]:
        if not self._walk.is_answer(self._links.numbers[link.name], refuse.ask) or not self._links.open:
            return []
        return [self._ask()] if self._walk.refused(refuse.parked, self._links.open, now) else []

    def _on_finished(self, link: Link) -> list[Outgoing]:
        self._links.finish(link)
        self._release(link, tuple(link.held))
        if self._walk.owner == self._links.numbers[link.name]:
            self._walk.end()
        return [self._bye(link)]

    def _release(self, link: Link, positions: Sequence[int]) -> None:
        """These positions are settled or cancelled by their owner."""
        for position in positions:
            held = self._links.release(link, position)
            if held is None:
                continue
            if held.result is not None:
                self._acked.append(position)
            elif self._granted.pop(position, None) is None:
                self._cancelled.append(position)

    # -- messages to owners
    def _ask(self) -> Outgoing:
        walk = self._walk
        assert walk.owner is not None, "no ask is in flight"
        link = self._links[walk.owner]
        self._told_idle = self._idle
        return Outgoing(link.name, Ask(self._report(link), walk.number, self._wanted, walk.park, self._idle))

    def _withdraw_ask(self) -> list[Outgoing]:
        walk = self._walk
        if walk.owner is None:
            return []
        link = self._links[walk.owner]
        withdrawn = Outgoing(link.name, Ask(self._report(link), walk.number, 0, False, False))
        walk.end()
        return [withdrawn]

    def _ask_again(self, now: float) -> list[Outgoing]:
        walk = self._walk
        assert walk.owner is not None, "no ask is in flight"
        old = self._links[walk.owner]
        owners = self._askable()
        if owners and not walk.go_on(owners, now):
            return [self._ask()]
        # The ask moves on or is no longer needed: withdraw it, so that this owner does not answer it later.
        out = [] if old.finished else [Outgoing(old.name, Ask(self._report(old), walk.number, 0, False, False))]
        if not owners:
            walk.end()
            return out
        return [*out, self._ask()]

    def _hand_back_again(self, now: float) -> list[Outgoing]:
        out = []
        for link in self._links.holding.values() if self._leaving else ():
            if link.back_due(now):
                link.back_again, pieces = now + self._settings.resend_s, link.hand_back(self._settings.message_bytes)
                out.append(Outgoing(link.name, HandBack(self._report(link, set(link.back)), link.back, pieces)))
        return out

    def _is_silent(self, link: Link) -> bool:
        # A report without the leases that are handed back must not precede their tokens.
        return link.finished or (self._leaving and bool(link.unfinished()))

    def _progress(self, link: Link, *, finished_too: bool = False) -> Outgoing:
        running = link.running(finished_too=finished_too)
        return Outgoing(link.name, Progress(self._report(link), running, link.new_pieces()))

    def _report(self, link: Link, without: Container[int] = ()) -> Report:
        self._reports += 1
        held = tuple([position for position in link.held if position not in without])
        return Report(self.name, self.incarnation, link.term, self._reports, held, link.grant_seen, link.closed)

    def _bye(self, link: Link) -> Outgoing:
        return Outgoing(link.name, Bye(self.name, self.incarnation))

    # -- details
    def _askable(self) -> list[int]:
        """Whom to ask for what is wanted; nobody if nothing is."""
        return self._links.open if self._wanted and not self._leaving and self._asks_again is None else []

    def _link_of(self, position: int) -> Link:
        return self._links[self._settings.owner_of(position, len(self._links))]

    def find(self, position: int) -> Held | None:
        """The lease of a position, unless the worker has not taken it yet."""
        return None if position in self._granted else self._link_of(position).held.get(position)
