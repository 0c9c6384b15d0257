"""The store as a service: an owner's samples for clients outside the run, with the messages between them.

A client asks an owner (`ASK`); the answer comes when there is something, over the connection of the ask. Afterwards the
client says that it is done with what it got, or gives it back (`SETTLE`); in between, that it is alive (`ALIVE`).
Where the flow has a step that clients write, they are done with what they got once they have written it (`PUT`): the
claim decides whose fields count, so they are written once.
Everything is numbered by the client and may be repeated. `Consumers` decides who gets what; this file has the rows.

All methods run on the endpoint's thread under the worker's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple

import msgspec
import torch

from distflow.comm.message import Buffer
from distflow.comm.message import Message as Envelope
from distflow.data.batch import Batch, Column, join
from distflow.data.batch_wire import decode_batch, encode_batch
from distflow.data.decoding import Form, Whole, read
from distflow.errors import ProtocolError, UserError
from distflow.exchange.consumer_types import Handed, Offered, SamplesWanted
from distflow.exchange.consumers import Consumers
from distflow.exchange.kept_samples import KeptConsumer, KeptSamples, trained_by
from distflow.exchange.listing import Listing
from distflow.exchange.sample_channel import ArrivedGroup, InboundSamples
from distflow.parts import Lengths, whole_lengths
from distflow.types import TOKENS, is_reward_part

ASK, SETTLE, PUT = "client.ask", "client.settle", "client.put"
ALIVE, LEAVE, FORGET = "client.alive", "client.leave", "client.forget"
KINDS = (ASK, SETTLE, PUT, ALIVE, LEAVE, FORGET)
OWNERS = "client.owners"
"""Whom to ask; every worker can tell."""
SILENCE_S = 10.0
"""After so long without a word of a client, what it has claimed goes to others who want it."""
ALIVE_S = 2.0
"""How often a client says that it is there."""
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Field = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Numbers = Annotated[tuple[Whole, ...], msgspec.Meta(max_length=1 << 12)]
Reply = Callable[[Envelope, Mapping[str, Any], Sequence[Buffer]], None]
Accept = Callable[[Batch], Batch]
"""What clients have written for rows, beside their response tokens, in the form that samples have; raises UserError."""
Write = Callable[[str, int, Batch], None]
"""Takes the fields of a step for the group of a position."""
Lacking = Callable[[Iterable[str]], str]
"""Why these fields cannot be read, with what can be done; "": they can."""


def refusal(request: Envelope, why: str) -> dict[str, Any]:
    """Body of the reply to a request that is refused; it names the request as far as that can be read."""
    body = request.body if isinstance(request.body, dict) else {}
    parts = (("number", int), ("consumer", str))
    return {name: body[name] for name, kind in parts if name in body and type(body[name]) is kind} | {"error": why}


class Asked(Form, frozen=True):
    """Body of ASK; see `SamplesWanted`."""

    client: Text
    number: Whole
    consumer: Text
    fields: Annotated[tuple[Field, ...], msgspec.Meta(min_length=1, max_length=256)]
    lossless: bool
    rows: Whole
    tokens: Whole
    holds: bool
    again: bool = False
    """Whether it was sent before."""


class Settled(Form, frozen=True):
    """Body of SETTLE: the numbers of the asks whose answers were used, and of those that are given back."""

    client: Text
    number: Whole
    consumer: Text
    used: Numbers = ()
    returned: Numbers = ()


class Written(Form, frozen=True):
    """Body of PUT; `batch` describes the fields that are written for the rows of one claim, in their order.

    `looks`: nothing is written; the reply says whether it could be.
    """

    client: Text
    number: Whole
    step: Text
    claim: Whole
    """The number of the ask."""
    batch: Any
    looks: bool = False


class ClientStep(NamedTuple):
    """A step of the flow that clients write. It is a consumer of the same name."""

    name: str
    reads: tuple[str, ...]
    accept: Accept


class From(Form, frozen=True):
    """Body of ALIVE and LEAVE. `feeds`: it puts prompts, and has not said that these are all."""

    client: Text
    feeds: bool = False


class Forgotten(Form, frozen=True):
    """Body of FORGET."""

    client: Text
    number: Whole
    consumer: Text


class SampleStore:
    """The samples of `inbound` for clients, who write `steps`; each consumer keeps at most `limit_bytes` or so."""

    def __init__(
        self,
        inbound: InboundSamples,
        limit_bytes: int,
        lacking: Lacking,
        reply: Reply,
        steps: Sequence[ClientStep] = (),
    ) -> None:
        self.consumers = Consumers(limit_bytes, SILENCE_S)
        self._held: dict[int, ArrivedGroup] = {}
        self._lacking = lacking
        self._reply = reply
        self._heard: dict[str, tuple[Envelope, float]] = {}
        """The newest word of each client, and when it came."""
        self._asks: dict[str, Envelope] = {}
        """The newest ask of each client: answers go over its connection."""
        self._parts: set[str] = set()
        """Parts of the reward that are asked for: a sample may lack some, which are then NaN."""
        self._inbound = inbound
        self._steps = {step.name: step for step in steps}
        self._write: Write | None = None
        self.listing = Listing()
        for step in steps:
            self.consumers.open(step.name, step.reads)
        self._handlers = {
            ASK: self._on_ask,
            SETTLE: self._on_settle,
            PUT: self._on_put,
            ALIVE: self._on_alive,
            LEAVE: self._on_leave,
            FORGET: self._on_forget,
        }
        inbound.on_arrival(self._arrived)
        inbound.on_answer(self._answered)
        inbound.on_leaving(self._left)
        inbound.core.held_up = lambda: self.consumers.held_up_by

    def writes_to(self, write: Write) -> None:
        """Hand on what clients write."""
        self._write = write

    def kept(self, ledgers: Mapping[str, Any]) -> KeptSamples:
        """What goes with the checkpoint of these ledgers."""
        trained = trained_by(ledgers)
        found = [
            KeptConsumer(name, fields, tuple(filter(trained, self.consumers.unacknowledged(name))))
            for name, fields in self.consumers.lossless().items()
        ]
        positions = dict.fromkeys(position for one in found for position in one.positions)
        return KeptSamples(found, {p: (self._held[p], self.consumers.kept[p].tokens) for p in positions})

    def open_again(self, listed: Mapping[str, Sequence[str]]) -> None:
        """Open lossless consumers that were there before this owner was restarted: they get all that arrives."""
        for name, fields in listed.items():
            if name not in self._steps:
                self.consumers.restore(name, fields, {})

    def restore(self, kept: KeptSamples, own: Callable[[int], bool]) -> None:
        """Go on with what went with a checkpoint, as far as its positions are of the ledgers here."""
        self._held |= {position: group for position, (group, _) in kept.groups.items() if own(position)}
        for one in kept.consumers:
            groups = {p: _offered(*kept.groups[p], ()) for p in one.positions if own(p)}
            if one.name not in self._steps:
                self.consumers.restore(one.name, one.fields, groups)
        self._prune()

    def on_message(self, message: Envelope, now: float) -> None:
        """A client's message; raises ProtocolError if it is malformed."""
        consumers, core = self.consumers, self._inbound.core
        held_up, listed = bool(consumers.held_up_by), consumers.lossless()
        before = consumers.progress + consumers.signs
        self._handlers[message.kind](message, now)
        core.progress_count += consumers.progress + consumers.signs - before
        if self.consumers.lossless() != listed:
            self.listing.changed(self.consumers.lossless())
        if held_up and not self.consumers.held_up_by:
            # Asks of generating workers were left unanswered meanwhile.
            self._inbound.send(core.prompts_arrived(now))

    def listed(self, names: Iterable[str]) -> None:
        """These lossless consumers are listed on the disk: what has waited for that is said."""
        answers, forgotten = self.listing.written(names)
        consumers = self.consumers
        self._send(one for one in answers if consumers.claimed(one.client, one.consumer, one.number) == one.positions)
        for message in forgotten:
            self._reply(message, {"number": message.body["number"]}, ())

    def tick(self, now: float) -> None:
        """Look which clients are silent; say when nothing more will come."""
        self._send(self.consumers.tick(now))
        self._asks = {client: ask for client, ask in self._asks.items() if self.consumers.knows(client)}
        self._heard = {client: one for client, one in self._heard.items() if now - one[1] < SILENCE_S}
        if self._inbound.core.finished:
            self._send(self.consumers.finish())

    def close(self) -> None:
        """Tell all who wait that nothing more comes, and all who are there whether the run is over."""
        self._send(self.consumers.close())
        for message, _ in self._heard.values() if self._inbound.core.finished else ():
            self._reply(message, {"over": True}, ())

    def _on_ask(self, message: Envelope, now: float) -> None:
        asked = read(message.body, Asked, message.kind)
        self._asks[asked.client] = message
        try:
            lacking = self._lacking(asked.fields)
            if lacking:
                raise ProtocolError(lacking)
            wanted = SamplesWanted(asked.consumer, asked.fields, asked.lossless, asked.rows, asked.tokens, asked.holds)
            self._parts.update(filter(is_reward_part, asked.fields))
            answers = self.consumers.ask(asked.client, asked.number, wanted, now, again=asked.again)
        except ProtocolError as error:
            self._reply(message, refusal(message, str(error)), ())
            return
        self._send(answers)

    def _on_settle(self, message: Envelope, now: float) -> None:
        settled = read(message.body, Settled, message.kind)
        if settled.used and settled.consumer in self._steps:
            error = f"the samples of step {settled.consumer!r} are done once its fields are written: samples.put(…)"
            self._reply(message, refusal(message, error), ())
            return
        about = (settled.client, settled.consumer, settled.used, settled.returned)
        stale, answers = self.consumers.settle(*about, now)
        self._reply(message, {"number": settled.number, "stale": stale}, ())
        self._send(answers)

    def _on_put(self, message: Envelope, now: float) -> None:
        put = read(message.body, Written, message.kind)
        try:
            fields = self._fields(put, message)
        except (ProtocolError, UserError) as error:
            self._reply(message, refusal(message, str(error)), ())
            return
        if put.looks:
            self._reply(message, {"number": put.number, "stale": []}, ())
            return
        stale, answers = self.consumers.settle(put.client, put.step, (put.claim,), (), now)
        self._reply(message, {"number": put.number, "stale": stale}, ())
        for position, batch in fields.items():
            assert self._write is not None, "set before samples arrive"
            self._write(put.step, position, batch)
        self._send(answers)

    def _fields(self, put: Written, message: Envelope) -> dict[int, Batch]:
        """The fields of each group of a claim; none if the claim is not this client's (any more)."""
        step = self._steps.get(put.step)
        if step is None:
            known = ", ".join(self._steps) or "none"
            raise ProtocolError(f"the flow has no step {put.step!r} that clients write; it has {known}")
        if len(message.payload) != 1:
            raise ProtocolError(f"fields in {len(message.payload)} payload frames; expected 1")
        given = decode_batch(put.batch, message.payload[0])
        groups = [self._held[position] for position in self.consumers.claimed(put.client, put.step, put.claim)]
        if not groups:
            return {}
        sizes = [group.rows.stop - group.rows.start for group in groups]
        if given.rows != sum(sizes):
            raise ProtocolError(f"{given.rows} values for {sum(sizes)} samples of step {put.step!r}")
        if TOKENS in given:
            raise ProtocolError(f"field {TOKENS!r} is not written by clients")
        tokens = _joined(groups, [TOKENS])
        fields = step.accept(given.with_columns(**tokens.columns))
        ends = list(accumulate(sizes))
        return {
            group.position: fields.slice(start, stop)
            for group, (start, stop) in zip(groups, pairwise([0, *ends]), strict=True)
        }

    def _on_alive(self, message: Envelope, now: float) -> None:
        alive = read(message.body, From, message.kind)
        self.consumers.alive(alive.client, now)
        if alive.feeds and self._inbound.core.lacks():
            self._inbound.core.progress_count += 1
        self._heard[alive.client] = message, now
        self._reply(message, {"over": False}, ())

    def _on_leave(self, message: Envelope, now: float) -> None:
        client = read(message.body, From, message.kind).client
        self._send(self.consumers.leave(client))
        self._asks.pop(client, None)
        self._heard.pop(client, None)

    def _on_forget(self, message: Envelope, now: float) -> None:
        forgotten = read(message.body, Forgotten, message.kind)
        try:
            self._send(self.consumers.forget(forgotten.consumer))
        except ProtocolError as error:
            self._reply(message, refusal(message, str(error)), ())
            return
        if not self.listing.holds_word(forgotten.client, forgotten.consumer, message):
            self._reply(message, {"number": forgotten.number}, ())

    # -- samples
    def _arrived(self, lengths: Mapping[int, Lengths]) -> None:
        offered = {
            position: _offered(self._inbound.peek(position), sum(whole_lengths(of_rows)), self._parts)
            for position, of_rows in lengths.items()
        }
        answers = self.consumers.arrived(offered)
        for position in offered:
            if position in self.consumers.kept:
                self._held[position] = self._inbound.peek(position)
        self._send(answers)

    def _answered(self, position: int, columns: Mapping[str, Column]) -> None:
        if position in self._held:
            self._held[position] = self._inbound.peek(position)
            self._send(self.consumers.gained(position, columns, Batch(columns).nbytes))

    def _left(self, positions: Iterable[int]) -> None:
        self.consumers.left(positions)
        self._prune()

    def _send(self, answers: Iterable[Handed]) -> None:
        lossless = self.consumers.lossless()
        for answer in answers:
            ask = self._asks.get(answer.client)
            if ask is not None and not (answer.consumer in lossless and self.listing.holds(answer)):
                self._reply(ask, *self._answer(answer))
        self._prune()

    def _answer(self, answer: Handed) -> tuple[dict[str, Any], Sequence[Buffer]]:
        body: dict[str, Any] = {**answer._asdict(), "batch": None}
        if not answer.positions:
            return body, ()
        fields = self.consumers.fields_of(answer.consumer)
        body["batch"], buffer = encode_batch(_joined([self._held[position] for position in answer.positions], fields))
        return body, (buffer,)

    def _prune(self) -> None:
        for position in [position for position in self._held if position not in self.consumers.kept]:
            del self._held[position]


def _offered(group: ArrivedGroup, tokens: int, parts: Iterable[str]) -> Offered:
    """A group as consumers see it; `parts`: of the reward, which it may lack."""
    rows = group.rows
    whole = rows.batch.nbytes
    share = whole * (rows.stop - rows.start) // max(1, rows.batch.rows)
    fields = frozenset((*rows.batch.columns, *group.more, *parts))
    # The batch is kept with its groups, so that no other one has its id.
    return Offered(rows.stop - rows.start, tokens, share, fields, (id(rows.batch), whole))


def _joined(groups: Sequence[ArrivedGroup], fields: Sequence[str]) -> Batch:
    """The rows of these groups with these fields; what came in messages of the same columns is copied as bytes."""
    names = groups[0].rows.batch.columns.keys()
    alike = all(group.rows.batch.columns.keys() == names for group in groups)
    came = [name for name in fields if alike and name in names and not any(name in group.more for group in groups)]
    found: dict[str, Column] = dict(join([group.rows for group in groups]).only(came).columns) if came else {}
    later = [name for name in fields if name not in found]
    if later:
        found |= Batch.concat([_only(group, later) for group in groups]).columns
    return Batch({name: found[name] for name in fields})


def _only(group: ArrivedGroup, fields: Iterable[str]) -> Batch:
    """The rows of a group with these fields."""
    rows = group.rows.batch.only([name for name in fields if name in group.rows.batch])
    found: dict[str, Column] = dict(rows.slice(group.rows.start, group.rows.stop).columns)
    count = group.rows.stop - group.rows.start
    for name in fields:
        if name in group.more:
            found[name] = group.more[name]
        elif name not in found:
            found[name] = torch.full((count,), torch.nan)
    return Batch({name: found[name] for name in fields})
