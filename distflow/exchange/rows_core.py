"""Rows that owners deal to the home of another trained model: each reaches one replica there, once.

A sender numbers what it sends to each receiver, keeps it until it is acknowledged, and sends it again until then: a cut
link loses seconds of traffic without any death. Behind the last rows of a training step it sends `close` to every
receiver: the groups that this sender has dealt to each of them, with their lengths, and what to do with them. All
senders say the same of that. A receiver has a step once every sender has closed it and everything numbered before that
is there, also a message without groups, which tells what the rows are; what all senders have closed gives each group's
rank, wherever it was dealt, and the rounds of a divided model.

Groups are dealt as at the senders' own home (`dealing.py`). Where senders wait for the whole step, they know all its
groups and deal them alike. Where rows stream, each deals its own, by what each receiver has got from it.

A sender begins a step only when every receiver has taken the last but one: neither side is more than one step ahead.
What comes from another term is thrown away.

Memory: a receiver *holds* the rows of the step that it trains on until it releases them, and those that wait. It has
room for the first step that is not released, which is always sent; of what is left beside that, each sender gets a like
part for the steps after it (`ahead`, in bytes). What has no room waits at its sender: nobody trains on it yet.

Nothing here reads a clock or a socket; the rows themselves are the driver's.

Example: send("critic/0", t=7, groups=(56, 60)) → RowsSent #3 → RowsAck(numbers=(3,), taken=6, released=6)
         close(7, "train") → RowsClose(dealt=((56, 60), (57, 61))) with lengths → … → RowsAck(numbers=(4,), taken=7, …)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distflow.errors import ProtocolError
from distflow.exchange.dealing import DealRule, Offer, deal, deal_step, ranks
from distflow.exchange.rows_messages import DealtGroup, OutgoingRows, RowsAck, RowsClose, RowsSent, Then
from distflow.parts import Lengths

RESEND_S, LONGEST_RESEND_S = 1.0, 8.0
"""Seconds without an acknowledgement before something is sent again: at first, and at most, since they double."""
WINDOW_BYTES = 16 << 20
"""Most bytes sent to one receiver and not acknowledged, unless a single message is larger."""


@dataclass(slots=True)
class _Kept:
    """A message that its receiver has not acknowledged."""

    message: RowsSent | RowsClose
    nbytes: int
    wait: float = 0.0
    due: float = 0.0
    """When it is sent again."""

    @property
    def sent(self) -> bool:
        return self.wait > 0


@dataclass(slots=True)
class _Receiver:
    """One receiver, as a sender knows it. What is kept is in the order of its numbers."""

    taken: int
    released: int
    ahead: int = 0
    number: int = 0
    left: bool = False
    """In order, so it has taken everything: only its last words are missing."""
    sent: Counter[int] = field(default_factory=Counter)
    """Bytes that were sent to it of each training step that it has not released."""
    kept: dict[int, _Kept] = field(default_factory=dict)

    def heard(self, message: RowsAck) -> None:
        """Note what it has, unless that was overtaken."""
        self.taken = max(self.taken, message.taken)
        if message.released > self.released:
            self.released, self.ahead = message.released, 0
            self.sent = Counter({t: nbytes for t, nbytes in self.sent.items() if t > self.released})
        if message.released == self.released:
            self.ahead = max(self.ahead, message.ahead)

    def has_room(self, kept: _Kept) -> bool:
        """Whether a message may be sent to it for the first time."""
        behind = sum(nbytes for t, nbytes in self.sent.items() if t > self.released + 1)
        return kept.message.t <= self.released + 1 or not kept.nbytes or behind + kept.nbytes <= self.ahead


class RowsSender:
    """One owner's end of the edge. `receivers`: all replicas of the home; `start`: the first step of this term."""

    def __init__(self, edge: str, term: int, receivers: Sequence[str], start: int) -> None:
        self._edge = edge
        self._term = term
        self._receivers = {name: _Receiver(start - 1, start - 1) for name in receivers}
        self._dealt: dict[str, list[DealtGroup]] = {name: [] for name in receivers}
        """Groups of the open step, by receiver."""
        self._loads = [0.0] * len(receivers)
        """Their costs, as far as they were dealt as they came."""
        self.step = start
        """The step that is not closed yet."""

    @property
    def groups(self) -> int:
        """Groups dealt in the open step."""
        return sum(map(len, self._dealt.values()))

    def behind(self, t: int) -> tuple[str, ...]:
        """The receivers that have not taken training step t."""
        return tuple(name for name, one in self._receivers.items() if one.taken < t and not one.left)

    def deal(
        self, groups: Mapping[int, Lengths], rule: DealRule, window: Mapping[int, Lengths]
    ) -> dict[str, list[int]]:
        """Groups of the open step (by position) for each receiver, in rising order; the same for the same lengths.

        `window`: all groups of the step, of all owners, among them these; empty where rows stream.
        """
        replicas = len(self._receivers)
        # Of equal loads each gets what is its own here, so that owners do not all begin with the same one.
        offers = {position: Offer(position % replicas, lengths) for position, lengths in (window or groups).items()}
        if window:
            # Nobody has these rows yet, and their home cuts them into rounds itself.
            free = replace(rule, divided=False, pinned=False)
            hands = [list(hand) for hand in deal_step(offers, replicas, ranks(window, rule.ledgers), free)]
        else:
            hands = deal(offers, replicas, rule.cost, loads=self._loads)
        return {
            name: [position for position in hand if position in groups]
            for name, hand in zip(self._receivers, hands, strict=True)
        }

    def send(self, to: str, groups: Mapping[int, Lengths], nbytes: int) -> int:
        """Deal groups of the open step; returns the number. Call `due` afterwards."""
        assert not self.behind(self.step - 2), f"{self.behind(self.step - 2)} are more than one training step behind"
        self._dealt[to] += [DealtGroup(position, tuple(lengths)) for position, lengths in groups.items()]
        receiver = self._receivers[to]
        receiver.number += 1
        message = RowsSent(self._edge, self._term, receiver.number, self.step, tuple(groups))
        receiver.kept[receiver.number] = _Kept(message, nbytes)
        return receiver.number

    def close(self, then: Then) -> None:
        """All groups of the open step have been dealt. Call `due` afterwards."""
        dealt = tuple(map(tuple, self._dealt.values()))
        for name, receiver in self._receivers.items():
            receiver.number += 1
            message = RowsClose(self._edge, self._term, receiver.number, self.step, dealt, then)
            receiver.kept[receiver.number] = _Kept(message, 0)
            self._dealt[name] = []
        self._loads = [0.0] * len(self._loads)
        self.step += 1

    def handle(self, sender: str, message: RowsAck) -> list[int]:
        """Take an acknowledgement; returns the numbers whose rows are not needed any more. Call `due` afterwards."""
        receiver = self._receivers.get(sender)
        if receiver is None or message.term != self._term:
            return []
        receiver.heard(message)
        done = [number for number in message.numbers if isinstance(self._message(receiver, number), RowsSent)]
        # A close is kept until its step is released: what a receiver says of that may be lost, and is then asked for.
        done += [n for n, kept in receiver.kept.items() if self._is_over(kept, receiver.released)]
        for number in done:
            receiver.kept.pop(number, None)
        return done

    def left(self, name: str) -> list[int]:
        """A worker has left in order; returns the numbers of the rows that were kept for it."""
        if name not in self._receivers:
            return []
        receiver = self._receivers[name]
        kept, receiver.kept, receiver.left = list(receiver.kept), {}, True
        return kept

    def due(self, now: float) -> list[OutgoingRows]:
        """What to send now: what fits and was not sent yet, and what was not acknowledged in time."""
        out: list[OutgoingRows] = []
        for name, receiver in self._receivers.items():
            under_way = sum(kept.nbytes for kept in receiver.kept.values() if kept.sent)
            for kept in receiver.kept.values():
                if not kept.sent:
                    if (under_way and under_way + kept.nbytes > WINDOW_BYTES) or not receiver.has_room(kept):
                        break
                    under_way += kept.nbytes
                    receiver.sent[kept.message.t] += kept.nbytes
                elif now < kept.due:
                    continue
                kept.wait = min(LONGEST_RESEND_S, max(RESEND_S, 2 * kept.wait))
                kept.due = now + kept.wait
                out.append(OutgoingRows(name, kept.message))
        return out

    def _message(self, receiver: _Receiver, number: int) -> RowsSent | RowsClose | None:
        return receiver.kept[number].message if number in receiver.kept else None

    def _is_over(self, kept: _Kept, released: int) -> bool:
        return isinstance(kept.message, RowsClose) and kept.message.t <= released


@dataclass(slots=True)
class _Sender:
    """One sender, as a receiver knows it."""

    seen: set[int] = field(default_factory=set)
    """Numbers received above `low`, below which there is no gap."""
    low: int = 0
    closes: dict[int, RowsClose] = field(default_factory=dict)

    def note(self, number: int) -> bool:
        """Whether it is new."""
        if number <= self.low or number in self.seen:
            return False
        self.seen.add(number)
        while self.low + 1 in self.seen:
            self.low += 1
            self.seen.remove(self.low)
        return True


class RowsReceiver:
    """The end of replica `rank` of a home. `start`: the first training step of this term.

    It reserves `memory` bytes for rows, of which one training step takes `step_bytes` at most.
    """

    def __init__(
        self, edge: str, term: int, senders: Sequence[str], start: int, memory: int, step_bytes: int, rank: int
    ) -> None:
        self._edge = edge
        self._rank = rank
        self._term = term
        self._senders = {name: _Sender() for name in senders}
        self._memory = memory
        self._step_bytes = step_bytes
        self._bytes: Counter[int] = Counter()
        """Bytes of rows that are held, by training step."""
        self.taken = start - 1
        self.released = start - 1

    @property
    def held(self) -> int:
        """Bytes of all rows that are here."""
        return self._bytes.total()

    def expects(self, sender: str, message: RowsSent | RowsClose) -> bool:
        """Whether it is of this term; raises ProtocolError for one that no sender can send."""
        if sender not in self._senders or message.edge != self._edge:
            raise ProtocolError(f"{sender} sends no {message.edge}; {self._edge} come from {', '.join(self._senders)}")
        if message.term != self._term:
            return False
        if message.t > self.taken + 2:
            raise ProtocolError(
                f"{message.edge} of training step {message.t + 1} from {sender}: this is {self.taken + 2}"
            )
        if isinstance(message, RowsClose) and len(message.dealt) <= self._rank:
            raise ProtocolError(
                f"{message.edge} from {sender} for {len(message.dealt)} replicas: this is number {self._rank}, from 0"
            )
        return True

    def handle(self, sender: str, message: RowsSent | RowsClose, nbytes: int = 0) -> bool:
        """Take a message that is expected, with so many bytes of rows; returns whether it is new.

        Acknowledge it in any case; once nothing is `missing` any more, to all senders: there may be more room.
        """
        known = self._senders[sender]
        if not known.note(message.number):
            return False
        if isinstance(message, RowsClose):
            known.closes[message.t] = message
        else:
            self._bytes[message.t] += nbytes
        return True

    def acks(self, to: Iterable[str], numbers: Sequence[int] = ()) -> list[OutgoingRows]:
        """Say what is here, and for how much more there is room."""
        said = RowsAck(self._edge, self._term, tuple(numbers), self.taken, self.released, self._ahead)
        return [OutgoingRows(name, said) for name in to]

    @property
    def senders(self) -> tuple[str, ...]:
        """All senders."""
        return tuple(self._senders)

    @property
    def missing(self) -> tuple[str, ...]:
        """The senders that have not closed the next step, or whose rows of it are not all here."""
        return tuple(name for name, sender in self._senders.items() if not self._has_all(sender))

    def take(self) -> tuple[Then, dict[int, Offer]]:
        """What to do with the next step, of which nothing is missing, and all its groups by position, in order, each
        with the number of the replica that has it.

        Tell all senders that it is taken (`acks`).
        """
        assert self.released == self.taken, f"the rows of training step {self.taken + 1} are still held"
        self.taken += 1
        closes = [sender.closes.pop(self.taken) for sender in self._senders.values()]
        said = {close.then for close in closes}
        assert len(said) == 1, f"senders disagree on training step {self.taken + 1}: {sorted(said)}"
        dealt = [(replica, group) for close in closes for replica, some in enumerate(close.dealt) for group in some]
        dealt.sort(key=lambda one: one[1].position)
        return said.pop(), {group.position: Offer(replica, group.lengths) for replica, group in dealt}

    def release(self) -> None:
        """The rows of the step that was taken are not held any more. Tell all senders (`acks`)."""
        self.released = self.taken
        self._bytes.pop(self.taken, None)

    @property
    def _ahead(self) -> int:
        """Bytes that each sender may send of the steps behind the first that is not released."""
        first = self.released + 1
        whole = self.taken == first or not self.missing
        kept = self._bytes[first] if whole else max(self._step_bytes, self._bytes[first])
        return max(0, self._memory - kept) // len(self._senders)

    def _has_all(self, sender: _Sender) -> bool:
        close = sender.closes.get(self.taken + 1)
        return close is not None and sender.low >= close.number
