"""The two ends of a rows edge: owners deal a training step's groups to the replicas that train a further model on them.

Messages are decided by `distflow/exchange/rows_core.py`; here are the rows. What was sent is kept as bytes until it is
acknowledged.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from distflow.comm.membership import Lost
from distflow.comm.message import Message
from distflow.comm.outbox import SentOnce
from distflow.config.schema import LimitsConfig
from distflow.data.batch import Batch, group_ranges, join, part_lengths
from distflow.data.batch_wire import decode_batch, encode_batch
from distflow.errors import ProtocolError, StepError
from distflow.exchange.dealing import DealRule, Offer, in_messages
from distflow.exchange.rows_core import RowsReceiver, RowsSender
from distflow.exchange.rows_messages import (
    TO_HOMES,
    TO_OWNERS,
    OutgoingRows,
    RowsAck,
    RowsSent,
    Then,
    from_wire,
    kind_of,
)
from distflow.flow.edges import Edge
from distflow.parts import Lengths
from distflow.runtime.metrics import MetricStore
from distflow.runtime.node import Node
from distflow.types import Version

GROUP = "group"
"""Column with each row's prompt position, by which receivers put the rows in order."""


class OutboundRows:
    """An owner's end. `receivers`: all replicas of the other home; `start`: the version that this term begins with."""

    def __init__(
        self,
        edge: Edge,
        receivers: Sequence[str],
        start: Version,
        node: Node,
        limits: LimitsConfig,
        metrics: MetricStore,
    ) -> None:
        self.edge = edge
        self._receivers = tuple(receivers)
        self._node = node
        self._board = node.board
        self._limits = limits
        self._metrics = metrics
        self._core = RowsSender(edge.name, start.term, receivers, start.number)
        self._rows: dict[tuple[str, int], tuple[Mapping[str, Any], bytearray]] = {}
        """Description and bytes of what is not acknowledged, by receiver and number."""
        self._sent = SentOnce()
        node.on_tick(self._post)
        node.on_lost(self._lost)
        # Generating workers see only owners, which wait for this home as long as it trains on the last step.
        node.count_work(lambda: sum(node.membership.peers[name].progress for name in receivers))

    def send(self, batch: Batch, rule: DealRule, window: Mapping[int, Lengths]) -> None:
        """Deal whole groups of the open training step to the receivers, each a like amount to compute.

        `window`: lengths of all groups of the step, of all owners, where they are known. Waits for receivers that are
        more than one step behind. Raises StepError if the batch lacks a field.
        """
        self._await(self._core.step - 2)
        rows = batch.only(self._fields(batch))
        with self._metrics.timed("timing_s/send_rows"):
            ranges, tokens = group_ranges(rows), part_lengths(rows)
            lengths = {position: tokens[rows.start : rows.stop] for position, rows in ranges.items()}
            for to, positions in self._core.deal(lengths, rule, window).items():
                # One without rows gets an empty batch: it takes part in every optimizer step.
                for piece in in_messages(positions, lengths, rule.cost) or [()]:
                    part = join([ranges[position] for position in piece]) if piece else rows.slice(0, 0)
                    self._put(to, {position: lengths[position] for position in piece}, part)
        with self._board.condition:
            self._post(time.monotonic())

    @property
    def groups(self) -> int:
        """Groups dealt in the open training step."""
        return self._core.groups

    def close(self, then: Then) -> None:
        """All rows of the open training step have been sent: say what all replicas of the other home do with them."""
        self._await(self._core.step - 2)
        with self._board.condition:
            self._core.close(then)
            self._post(time.monotonic())

    def settle(self) -> None:
        """Wait until all receivers have begun with the last step that was closed."""
        self._await(self._core.step - 1)

    def _await(self, t: int) -> None:
        if self._core.behind(t):
            with self._metrics.timed("timing_s/wait_homes"):
                self._board.until(
                    lambda: None if self._core.behind(t) else True,
                    name=f"the rows of training step {t + 1} to be trained on",
                    peers=lambda: self._core.behind(t),
                    limit_s=self._limits.no_progress_s,
                    progress=lambda: [self._node.membership.peers[name].progress for name in self._receivers],
                    even_when_stopping=True,
                )

    def _fields(self, batch: Batch) -> list[str]:
        wanted = list(dict.fromkeys((GROUP, *self.edge.fields)))
        missing = [name for name in wanted if name not in batch]
        if missing:
            raise StepError(
                f"w.send({self.edge.name!r}): the rows lack {', '.join(missing)}, which {', '.join(self.edge.steps)} "
                f"read — a script must call the steps that write them before; there are {sorted(batch.columns)}"
            )
        return wanted

    def _put(self, to: str, groups: Mapping[int, Lengths], rows: Batch) -> None:
        described, data = encode_batch(rows)
        with self._board.condition:
            self._rows[to, self._core.send(to, groups, len(data))] = described, data

    # -- on the endpoint's thread, too

    def acknowledged(self, sender: str, said: RowsAck) -> None:
        """A receiver has said what it has."""
        for number in self._core.handle(sender, said):
            self._rows.pop((sender, number), None)
        self._post(time.monotonic())

    def _lost(self, lost: Lost) -> None:
        for number in self._core.left(lost.name) if lost.orderly else ():
            self._rows.pop((lost.name, number), None)

    def _post(self, now: float) -> None:
        for item in self._core.due(now):
            assert not isinstance(item.message, RowsAck), "senders acknowledge nothing"
            key = item.to, item.message.number
            if self._sent.under_way(*key):
                continue
            body: dict[str, Any] = msgspec.to_builtins(item.message, builtin_types=(bytes,))
            if isinstance(item.message, RowsSent):
                body["batch"], data = self._rows[key]
                self._sent.note(*key, self._node.endpoint.send(item.to, kind_of(item.message), body, (data,)))
            else:
                self._node.send(item.to, kind_of(item.message), body)


def register_rows(node: Node, edges: Mapping[str, OutboundRows]) -> None:
    """Handle the acknowledgements of everything that this owner sends, by name of the edge."""

    def on_ack(message: Message) -> None:
        said = from_wire(message.kind, message.body)
        assert isinstance(said, RowsAck), f"{message.kind} acknowledges"
        if said.edge not in edges:
            raise ProtocolError(f"{message.sender} acknowledges {said.edge}; this worker sends {', '.join(edges)}")
        edges[said.edge].acknowledged(message.sender, said)

    for kind in TO_OWNERS:
        node.on(kind, on_ack)


@dataclass(frozen=True, slots=True)
class ReceivedRows:
    """A training step's rows at one replica."""

    then: Then
    batch: Batch | None
    """In the order of their prompt positions; None unless `then` is "train"."""
    groups: Mapping[int, Offer] = field(default_factory=dict)
    """Those of all replicas, by prompt position."""


class InboundRows:
    """The end of replica `rank` at the other home. `senders`: all owners. Its methods run under the worker's lock.

    It reserves `memory` bytes for rows, of which one training step takes `step_bytes` at most.
    """

    def __init__(
        self, edge: Edge, senders: Sequence[str], start: Version, node: Node, memory: int, step_bytes: int, rank: int
    ) -> None:
        self.edge = edge
        self._node = node
        self._core = RowsReceiver(edge.name, start.term, senders, start.number, memory, step_bytes, rank)
        self._kept: dict[int, list[Batch]] = {}
        """Rows by training step."""
        for kind in TO_HOMES:
            node.on(kind, self._on_message)

    @property
    def missing(self) -> tuple[str, ...]:
        """Owners that have not closed the next training step, or whose rows of it are not all here."""
        return self._core.missing

    @property
    def held(self) -> int:
        """Bytes of all rows that are here, with those that are trained on."""
        return self._core.held

    def take(self) -> ReceivedRows | None:
        """The rows of the next training step; None: wait. Release them when they have been trained on."""
        if self._core.missing:
            return None
        then, groups = self._core.take()
        kept = self._kept.pop(self._core.taken, [])
        self._say(self._core.acks(self._core.senders))
        if then != "train":
            return ReceivedRows(then, None)
        ranges = {position: rows for batch in kept for position, rows in group_ranges(batch).items()}
        whole = join([ranges[position] for position in sorted(ranges)]) if ranges else kept[0]
        return ReceivedRows(then, whole, groups)

    def release(self) -> None:
        """The rows that were taken have been trained on."""
        self._core.release()
        self._say(self._core.acks(self._core.senders))

    # -- on the endpoint's thread

    def _on_message(self, message: Message) -> None:
        said = from_wire(message.kind, message.body)
        assert not isinstance(said, RowsAck), f"{message.kind} acknowledges nothing"
        if not self._core.expects(message.sender, said):
            return
        rows = self._read(said, message) if isinstance(said, RowsSent) else None
        missing = bool(self._core.missing)
        if self._core.handle(message.sender, said, sum(map(len, message.payload))) and rows is not None:
            self._kept.setdefault(said.t, []).append(rows)
            self._node.work_done()
        self._say(self._core.acks([message.sender], [said.number]))
        if missing and not self._core.missing:
            # There may be more room now.
            self._say(self._core.acks(self._core.senders))

    def _read(self, said: RowsSent, message: Message) -> Batch:
        if len(message.payload) != 1:
            raise ProtocolError(f"rows with {len(message.payload)} payload frames; expected 1")
        rows = decode_batch(said.batch, message.payload[0])
        missing = [name for name in (GROUP, *self.edge.fields) if name not in rows]
        if missing:
            raise ProtocolError(f"rows of {self.edge.name} without {', '.join(missing)}")
        if tuple(group_ranges(rows)) != said.groups:
            raise ProtocolError(f"rows of {self.edge.name} of groups {list(group_ranges(rows))}, not {said.groups}")
        return rows

    def _say(self, out: Iterable[OutgoingRows]) -> None:
        for item in out:
            body: dict[str, Any] = msgspec.to_builtins(item.message, builtin_types=(bytes,))
            self._node.send(item.to, kind_of(item.message), body)
