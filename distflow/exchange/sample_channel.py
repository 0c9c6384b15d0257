"""The sample channel: finished groups from a generating worker to the owners of their leases, with all lease messages.

Both ends connect a core with the endpoint and are called under the worker's lock: by the endpoint's thread (messages,
ticks), and by the generating or the training loop.

The sender keeps each group until its owner has acknowledged it. Groups that finish together travel as one message per
owner, with one buffer, up to `MESSAGE_BYTES`. What is not acknowledged is sent again, but only once the last copy has
left this process: an owner that was unreachable for a while finds one copy of each group when it comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from distflow.comm.message import Body, Buffer
from distflow.comm.message import Message as Envelope
from distflow.comm.outbox import Delivery, SentOnce
from distflow.data.batch import Batch, Column, RowRange, group_ranges, join, part_lengths
from distflow.data.batch_wire import decode_batch, encode_batch
from distflow.data.decoding import Form, decoder, read
from distflow.data.samples import group_scores
from distflow.errors import ProtocolError
from distflow.exchange.lease_client import HolderCore
from distflow.exchange.lease_settings import MESSAGE_BYTES
from distflow.exchange.lease_wire import OF_VALIDATION, check_sender, kind_of, lease_message, to_wire
from distflow.exchange.messages import Grant, HandBack, Message, Outgoing, Result, merge_acks
from distflow.exchange.owner import OwnerCore
from distflow.parts import Lengths
from distflow.types import TOKENS, UNJUDGED, LeaseKind, Version

Post = Callable[[str, str, Body, Sequence[Buffer]], Delivery]
"""`post(to, kind, body, payload)`: hands a message to the endpoint; never blocks."""
LocalAccept = Callable[[Sequence[Result], Batch | None], None]

HOLDER_KINDS = ("ask", "progress", "handback", "bye")
RESULTS = "results"
OWNER_KINDS = ("grant", "refuse", "ack", "cancel", "again", "closed", "finished")


def names_of(kinds: Iterable[str], leases: LeaseKind) -> tuple[str, ...]:
    """What these kinds of messages are called on the wire, about leases for training or for validation."""
    return tuple((OF_VALIDATION if leases == "val" else "") + kind for kind in kinds)


class OutboundSamples:
    """Connects a HolderCore with sockets on one side and the generating loop on the other.

    `local_accept` takes results for an owner in this very process (colocated layouts), without any encoding.
    Always called under the worker's lock.
    """

    def __init__(
        self, core: HolderCore, post: Post, local_owner: str = "", local_accept: LocalAccept | None = None
    ) -> None:
        self.core = core
        self._post = post
        self._local_owner = local_owner
        self._local_accept = local_accept
        self._sent = SentOnce(core.settings.resend_s)
        self._kept: dict[int, RowRange] = {}
        self._names = dict(
            zip((*HOLDER_KINDS, RESULTS), names_of((*HOLDER_KINDS, RESULTS), core.settings.kind), strict=True)
        )
        self.kinds = names_of(OWNER_KINDS, core.settings.kind)
        """The messages it takes."""

    def on_message(self, message: Envelope, now: float) -> None:
        """A lease message from the wire; raises ProtocolError if it is malformed."""
        self.send(self.core.handle(lease_message(message), now))
        for position in self.core.take_acked():
            self._kept.pop(position, None)

    def finish(self, batch: Batch, dropped: Mapping[int, str], now: float) -> None:
        """Whole groups are finished; those in `dropped` are reported with the reason, without their rows."""
        out: list[Outgoing] = []
        oldest = _oldest(batch)
        scores = {uid.position: found for uid, found in group_scores(batch).items()} if dropped else {}
        share = batch.nbytes // max(1, batch.rows)
        for position, rows in group_ranges(batch).items():
            reason = dropped.get(position, "")
            if not reason:
                self._kept[position] = rows
            size = 0 if reason else share * (rows.stop - rows.start)
            judged = scores.get(position, ()) if reason and not reason.startswith(UNJUDGED) else ()
            began = oldest(rows)
            self.core.report(position, _tokens(rows), -1 if began is None else began.number)
            out += self.core.finished(position, began, size, reason, now, judged)
        self.send(out)
        for position in self.core.take_acked():
            self._kept.pop(position, None)

    def send(self, out: Iterable[Outgoing]) -> None:
        """Send the core's messages, results with their rows."""
        results: dict[str, list[Result]] = {}
        for item in out:
            key = _key(item.message)
            if key is not None and self._sent.under_way(item.to, key):
                continue
            if isinstance(item.message, Result):
                results.setdefault(item.to, []).append(item.message)
                continue
            delivery = self._post(item.to, self._names[kind_of(item.message)], *to_wire(item.message))
            if key is not None:
                self._sent.note(item.to, key, delivery)
        for owner, found in results.items():
            for alike in self._by_columns(found):
                for some in _by_size(alike):
                    self._send_results(owner, some)

    def _by_columns(self, results: Sequence[Result]) -> Iterable[list[Result]]:
        """Results that can share a batch: repeated ones may come from steps that wrote different fields."""
        if len(results) == 1:
            return [list(results)]
        alike: dict[frozenset[str], list[Result]] = {}
        for result in results:
            fields = frozenset() if result.dropped else frozenset(self._kept[result.position].batch.columns)
            alike.setdefault(fields, []).append(result)
        return alike.values()

    def _send_results(self, owner: str, results: list[Result]) -> None:
        rows = [self._kept[result.position] for result in results if not result.dropped]
        batch = join(rows) if rows else None
        if owner == self._local_owner and self._local_accept is not None:
            self._local_accept(results, batch)
            return
        described, buffer = (None, None) if batch is None else encode_batch(batch)
        payload = () if buffer is None else (buffer,)
        delivery = self._post(owner, self._names[RESULTS], _Results(tuple(results), described), payload)
        if delivery.dropped:
            self.core.not_sent(result.position for result in results)
        for result in results:
            self._sent.note(owner, result.position, delivery)


def _key(message: Message) -> Hashable:
    """A key that identifies copies of this message; None for small messages and those never repeated."""
    if isinstance(message, Result):
        return message.position
    return message.positions if isinstance(message, HandBack) else None


def _by_size(results: Iterable[Result]) -> Iterator[list[Result]]:
    """Split into messages of at most `MESSAGE_BYTES`, unless a single group is larger."""
    some: list[Result] = []
    size = 0
    for result in results:
        if some and size + result.nbytes > MESSAGE_BYTES:
            yield some
            some, size = [], 0
        some.append(result)
        size += result.nbytes
    if some:
        yield some


def _oldest(batch: Batch) -> Callable[[RowRange], Version | None]:
    """The oldest version of any token in some rows, of any model; None if there are no tokens.

    All models count the same training steps: the bound of their staleness is that of the oldest.
    """
    columns = [(spans.values.tolist(), spans.offsets.tolist()) for spans in batch.of_all_models("policy_versions")]

    def of(rows: RowRange) -> Version | None:
        # A span begins with its term and version.
        found = [span for spans, bounds in columns for span in spans[bounds[rows.start] : bounds[rows.stop]]]
        return Version(*min(found)[:2]) if found else None

    return of


def _tokens(rows: RowRange) -> int:
    """Tokens of the responses in some rows, of any model."""
    responses = [column.offsets for column in rows.batch.of_all_models(TOKENS)]
    return sum(int(offsets[rows.stop] - offsets[rows.start]) for offsets in responses)


@dataclass(frozen=True, slots=True)
class ArrivedGroup:
    """One group stored at the owner."""

    position: int
    rows: RowRange
    worker: str
    more: Mapping[str, Column] = field(default_factory=dict)
    """Answers of calls for these rows."""


class _Results(Form, frozen=True):
    """Body of RESULTS; `batch` describes the rows of all that are not dropped."""

    results: tuple[Result, ...]
    batch: Any


Arrived = Callable[[Mapping[int, Lengths]], None]
"""Takes the tokens of each row, by position of the group."""


class InboundSamples:
    """Connects an OwnerCore with sockets on one side and the training loop on the other.

    `later_bytes`: of each response token, in fields that a group gets while it is stored. `asked_for`: fields that go
    to other workers on arrival; samples without them are refused.
    """

    def __init__(self, core: OwnerCore, post: Post, later_bytes: int = 0, asked_for: Sequence[str] = ()) -> None:
        self.core = core
        self._later_bytes = later_bytes
        self._asked_for = tuple(asked_for)
        self._post = post
        self._grants = SentOnce(core.settings.resend_s)
        self._stored: dict[int, ArrivedGroup] = {}
        self._arrived: list[Arrived] = []
        self._answered: list[Callable[[int, Mapping[str, Column]], None]] = []
        self._leaving: list[Callable[[Sequence[int]], None]] = []
        self._names = dict(zip(OWNER_KINDS, names_of(OWNER_KINDS, core.settings.kind), strict=True))
        self.kinds = names_of((*HOLDER_KINDS, RESULTS), core.settings.kind)
        """The messages it takes."""

    def on_arrival(self, handler: Arrived) -> None:
        """Called after each message with results, with the groups that have been stored, if any.

        First of all, now, with those that are here already.
        """
        self._arrived.append(handler)
        handler({position: part_lengths(group.rows.rows) for position, group in self._stored.items()})

    def on_answer(self, handler: Callable[[int, Mapping[str, Column]], None]) -> None:
        """Called with the position of a stored group, and the fields that it has got."""
        self._answered.append(handler)

    def on_leaving(self, handler: Callable[[Sequence[int]], None]) -> None:
        """Called with the groups that are not stored any longer."""
        self._leaving.append(handler)

    def peek(self, position: int) -> ArrivedGroup:
        """A group that has arrived; it stays stored."""
        return self._stored[position]

    def on_message(self, message: Envelope, now: float) -> None:
        """A lease message from the wire; raises ProtocolError if it is malformed."""
        if message.kind == self.kinds[-1]:
            self._on_results(message, now)
        else:
            self.send(self.core.handle(lease_message(message), now))

    def accept(self, results: Sequence[Result], batch: Batch | None, now: float) -> None:
        """Accept results with the rows of all groups that are not dropped; keeps the first copy of each.

        Raises ProtocolError for results without their rows, once all others have been accepted.
        """
        groups, lengths = ({}, []) if batch is None else _by_group(batch, self._asked_for)
        out: list[Outgoing] = []
        new: dict[int, Lengths] = {}
        lacking: list[Result] = []
        for result in results:
            if not self.core.keeps(result):
                out += self.core.handle(result, now)
            elif result.position not in groups:
                lacking.append(result)
            else:
                rows = groups[result.position]
                out += self.core.handle(self._with_room(result, rows), now)
                self._stored[result.position] = ArrivedGroup(result.position, rows, result.worker)
                new[result.position] = lengths[rows.start : rows.stop]
        self.send(out)
        self._tell_of(new)
        for result in lacking[:1]:
            raise ProtocolError(f"{result.worker} sent a result for position {result.position} without its rows")

    def store(self, results: Sequence[Result], batch: Batch, now: float) -> None:
        """Keep the rows of groups that this owner has made itself: nobody is to be told that they have arrived."""
        groups, lengths = _by_group(batch, self._asked_for)
        for result in results:
            rows = groups[result.position]
            self.core.handle(self._with_room(result, rows), now)
            self._stored[result.position] = ArrivedGroup(result.position, rows, result.worker)
        self._tell_of({position: lengths[rows.start : rows.stop] for position, rows in groups.items()})

    def answer(self, position: int, columns: Mapping[str, Column]) -> None:
        """Store the answer of a call with the group."""
        group = self._stored[position]
        self._stored[position] = replace(group, more={**group.more, **columns})
        for handler in self._answered:
            handler(position, columns)

    def pop(self, positions: Iterable[int]) -> list[ArrivedGroup]:
        """Groups that have arrived, which are not stored any longer."""
        popped = [self._stored.pop(position) for position in positions]
        for handler in self._leaving if popped else ():
            handler([group.position for group in popped])
        return popped

    def _tell_of(self, lengths: Mapping[int, Lengths]) -> None:
        # Even if nothing is to be stored: after a drop, the open step may take groups that came before.
        for handler in self._arrived:
            handler(lengths)

    def send(self, out: Iterable[Outgoing]) -> None:
        """Send the core's messages."""
        for item in merge_acks(out):
            message = item.message
            if isinstance(message, Grant) and self._grants.under_way(item.to, message.number):
                continue
            delivery = self._post(item.to, self._names[kind_of(message)], *to_wire(message))
            if isinstance(message, Grant):
                self._grants.note(item.to, message.number, delivery)

    def _with_room(self, result: Result, rows: RowRange) -> Result:
        """The result as it counts here: by its real size, and with the fields that it will have."""
        batch = rows.batch
        nbytes = max(result.nbytes, batch.nbytes * (rows.stop - rows.start) // max(1, batch.rows))
        if self._later_bytes:
            nbytes += _tokens(rows) * self._later_bytes
        return structs.replace(result, nbytes=nbytes)

    def _on_results(self, message: Envelope, now: float) -> None:
        results, batch = read_results(message)
        self.accept(results, batch, now)


@decoder
def read_results(message: Envelope) -> tuple[list[Result], Batch | None]:
    """Decode results and the rows of those that are not dropped; raises ProtocolError if they do not match."""
    found = read(message.body, _Results, RESULTS)
    results = [check_sender(message, result) for result in found.results]
    if found.batch is None:
        return results, None
    if len(message.payload) != 1:
        raise ProtocolError(f"results with {len(message.payload)} payload frames; expected 1")
    return results, decode_batch(found.batch, message.payload[0])


@decoder
def _by_group(batch: Batch, asked_for: Sequence[str]) -> tuple[dict[int, RowRange], Lengths]:
    """The rows of each group, and the tokens of each row."""
    missing = [name for name in ("group", *asked_for) if name not in batch]
    if missing:
        raise ProtocolError(f"a batch of samples without field {missing[0]!r}")
    if batch.integers("group") is None:
        raise ProtocolError("a batch of samples whose field 'group' is not one int64 a row")
    ranges = group_ranges(batch)
    if sum([rows.stop - rows.start for rows in ranges.values()]) < batch.rows:
        raise ProtocolError("a batch of samples in which the rows of a group do not lie side by side")
    return ranges, part_lengths(batch)
