"""Rows and messages around `IntakeCore`: groups that arrive, are answered, are taken, or change hands.

All methods run under the worker's lock; messages come on the endpoint's thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from distflow.comm.message import Message
from distflow.comm.outbox import SentOnce
from distflow.data.batch import Batch, Column, RowRange, group_ranges, join, with_same_parts
from distflow.data.batch_wire import decode_batch, encode_batch
from distflow.data.decoding import decoder, read
from distflow.errors import ProtocolError
from distflow.exchange.deal_core import DealCore, ReadyGroups
from distflow.exchange.group_transfer import GROUPS, Send, Transfer
from distflow.exchange.intake_core import IntakeCore, IntakeRule, Sending, Take
from distflow.exchange.messages import Outgoing
from distflow.exchange.sample_channel import ArrivedGroup, InboundSamples
from distflow.exchange.steal_core import KINDS
from distflow.parts import Lengths
from distflow.runtime.calls import Calls
from distflow.runtime.node import Node

Ask = Callable[[Sequence[tuple[str, int]]], None]
Waiting = Callable[[], tuple[str, tuple[str, ...]] | None]


class ComputedHere(NamedTuple):
    """Groups for a step that this replica runs itself, before they are taken."""

    step: str
    positions: Sequence[int]
    rows: Sequence[RowRange]
    """Of each group."""

    @property
    def batch(self) -> Batch:
        """The rows of all, as they have arrived."""
        return join(with_same_parts(self.rows))


class Intake:
    """One replica's part. `others`: those it steals from or deals with; `answers`: the fields that calls bring."""

    def __init__(
        self,
        inbound: InboundSamples,
        node: Node,
        rule: IntakeRule,
        others: Sequence[str] = (),
        rng: random.Random | None = None,
        answers: Mapping[str, Sequence[str]] | None = None,
        dealing: DealCore | None = None,
    ) -> None:
        self.owner = inbound.core
        self.deals = dealing is not None
        self.steals = bool(others) and not self.deals
        self.core = IntakeCore(inbound.core, rule, others if self.steals else (), rng, dealing)
        self._inbound = inbound
        self._node = node
        self._sent = SentOnce()
        self._others: dict[int, ArrivedGroup] = {}
        """Groups that other replicas have sent."""
        self._answers = dict(answers or {})
        self._ask: Ask | None = None
        self._waiting: Waiting = lambda: None
        if others:
            for kind in sorted(KINDS):
                node.on(kind, self._on_message)
            node.on_tick(lambda now: self._send(self.core.tick(now)))
        with node.board.condition:
            inbound.on_arrival(self._arrived)

    # -- calls
    def asks_by(self, ask: Ask, waiting: Waiting) -> None:
        """Have `ask` called, now and later, with the calls to make, as (edge, position); `waiting` tells what the
        oldest of them waits for, and who could answer.
        """
        with self._node.board.condition:
            self._ask, self._waiting = ask, waiting
            self._call()

    def waits_for_answers(self) -> tuple[str, tuple[str, ...]] | None:
        """What others are asked for about groups of the open step, and those who could answer; None: samples lack."""
        if not self._answers or not self.owner.set_complete():
            return None
        outside = self.core.outside()
        if self._waiting() is not None or outside is None:
            return self._waiting()
        step, groups = outside
        fields = ", ".join(map(repr, self._answers[step]))
        return f"a client outside the run to write {fields} of {groups} groups (consumer {step!r})", ()

    @property
    def calls(self) -> Collection[str]:
        """The steps whose fields groups get between their arrival and when they are taken."""
        return self._answers.keys()

    def rows_of(self, position: int) -> RowRange:
        """The rows of a group that lacks an answer."""
        return self._inbound.peek(position).rows

    def answered(self, edge: str, position: int, answer: Batch) -> None:
        """The answer of a call for a group is there: a batch with its fields, row by row."""
        self._inbound.answer(position, {name: answer[name] for name in self._answers[edge]})
        self._send(self.core.answered(position, edge))

    def written(self, step: str, position: int, fields: Batch) -> None:
        """Clients outside the run have written a step's fields for a group. Called under the worker's lock."""
        self.owner.progress_count += 1
        self.answered(step, position, fields)

    # -- what this replica computes while it waits
    def wants_here(self) -> ComputedHere | None:
        """A step to run now over some groups; None: wait."""
        wanted = self.core.wants_here()
        if wanted is None:
            return None
        step, positions = wanted
        rows = [self._inbound.peek(position).rows for position in positions]
        return ComputedHere(step, positions, rows)

    def computed(self, done: ComputedHere, result: Batch) -> None:
        """The step has run: `result` has its fields for the rows of all groups, in their order."""
        start = 0
        for position, rows in zip(done.positions, done.rows, strict=True):
            stop = start + rows.stop - rows.start
            self.answered(done.step, position, result.slice(start, stop))
            start = stop

    # -- the training loop
    def begin(self, step: int) -> None:
        """Open a training step."""
        with self._node.board.condition:
            self._inbound.pop(self.core.forget())
            self._send(self.core.begin(step))
            self._call()

    def take(self, *, called: bool) -> tuple[Take, list[ArrivedGroup], int] | None:
        """What to do next, with groups for the batch under way, and how many are of others; None: wait."""
        taken = self.core.take(time.monotonic(), called=called)
        if taken is None:
            return None
        self._send(taken.messages)
        return taken, *self._groups(taken.positions)

    def tell(self) -> ReadyGroups:
        """What to tell the other replicas where they meet, to deal the groups."""
        return self.core.news()

    def hear(self, news: Sequence[ReadyGroups]) -> None:
        """What all replicas have told there."""
        self._send(self.core.heard(news, time.monotonic()))

    def rest(self, report: Callable[[], None]) -> tuple[list[ArrivedGroup], int]:
        """Groups that came back or were stolen, and the number of the latter; calls `report` when it is due."""
        while (taken := self.core.rest()) is not None:
            if not taken.report:
                return self._groups(taken.positions)
            report()
        return [], 0

    def search(self) -> None:
        """Look for groups of others: this replica has none left of its own."""
        self._send(self.core.search(time.monotonic()))

    # -- on the endpoint's thread
    def _arrived(self, lengths: Mapping[int, Lengths]) -> None:
        self._send(self.core.arrived(lengths))
        self._call()

    def _call(self) -> None:
        # Samples that the data gives may be here before there is anybody to ask; each is named once.
        if self._ask is not None and (wanted := self.core.wants_calls()):
            self._ask(wanted)

    def _on_message(self, message: Message) -> None:
        core, positions = self.core, []
        if message.kind == GROUPS and core.expects(message.sender, message.body):
            try:
                groups = self._read(message)
            except ProtocolError:
                self._send(core.decline(message.sender, message.body))
                raise
            positions = [group.position for group in groups]
            self._others |= {group.position: group for group in groups}
        self._send(core.handle(message.kind, message.sender, message.body, time.monotonic(), positions))

    def _send(self, out: Iterable[Sending]) -> None:
        leasing: list[Outgoing] = []
        for item in out:
            if isinstance(item, Outgoing):
                leasing.append(item)
            elif item.kind == GROUPS:
                self._send_groups(item)
            else:
                self._node.send(item.to, item.kind, item.body)
        self._inbound.send(leasing)

    def _send_groups(self, item: Send) -> None:
        if self._sent.under_way(item.to, item.positions):
            return
        groups = [self._inbound.peek(position) for position in item.positions]
        described, buffer = encode_batch(join_groups(groups))
        body = {**item.body, "workers": [group.worker for group in groups], "batch": described}
        self._sent.note(item.to, item.positions, self._node.endpoint.send(item.to, GROUPS, body, (buffer,)))

    def _groups(self, positions: Sequence[int]) -> tuple[list[ArrivedGroup], int]:
        """The rows of these positions, which are kept no longer, and how many others have sent."""
        others = self._others
        sent = sum(position in others for position in positions)
        return [others.pop(p) if p in others else self._inbound.pop([p])[0] for p in positions], sent

    @decoder
    def _read(self, message: Message) -> list[ArrivedGroup]:
        transfer = read(message.body, Transfer, message.kind)
        if len(message.payload) != 1:
            raise ProtocolError(f"groups from {message.sender} in {len(message.payload)} payload frames; expected 1")
        batch = decode_batch(transfer.batch, message.payload[0])
        answered = {name for fields in self._answers.values() for name in fields}
        ranges = group_ranges(batch.only([name for name in batch.columns if name not in answered]))
        if len(ranges) != len(transfer.workers):
            raise ProtocolError(f"{len(ranges)} groups with {len(transfer.workers)} workers")
        more = batch.only(sorted(answered))
        return [
            ArrivedGroup(position, rows, worker, more.slice(rows.start, rows.stop).columns if answered else {})
            for (position, rows), worker in zip(ranges.items(), transfer.workers, strict=True)
        ]


def join_groups(groups: Sequence[ArrivedGroup]) -> Batch:
    """The rows of these groups in this order, with the answers of calls."""
    rows = join(with_same_parts([group.rows for group in groups]))
    if not groups or not groups[0].more:
        return rows
    return rows.with_columns(**{name: _joined([group.more[name] for group in groups]) for name in groups[0].more})


def _joined(columns: Sequence[Column]) -> Column:
    return Batch.concat([Batch({"column": column}) for column in columns])["column"]


def ask_on_arrival(
    calls: Calls, intake: Intake, asked: Collection[str], prompts: int, versioned: Collection[str]
) -> None:
    """Ask for steps over the groups that arrive; `prompts`: groups of a training step."""

    def ask(wanted: Sequence[tuple[str, int]]) -> None:
        for step, position in wanted:
            # Those in the window are for the step that is open for leasing. For others this is exact unless groups were
            # dropped, and orders the requests.
            t = intake.owner.version if step in versioned else max(intake.core.step, position // prompts)
            calls.ask(step, position, intake.rows_of(position), t)

    for step in asked:
        calls.deliver(step, partial(intake.answered, step))
    intake.asks_by(ask, calls.waiting)
