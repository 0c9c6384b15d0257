"""The owner's end of the sample channel: lease messages in and out, payloads kept beside the ledger.

Called by the endpoint's thread (messages, ticks) and by the training loop, always under the worker's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distflow.comm.message import Buffer, Message
from distflow.comm.outbox import Delivery, SentOnce
from distflow.data.batch import Batch, Ragged, RowRange, group_ranges
from distflow.data.batch_wire import decode_batch
from distflow.data.decoding import Form, decoder, read
from distflow.errors import ProtocolError
from distflow.exchange.lease_wire import check_sender, kind_of, lease_message, to_wire
from distflow.exchange.messages import Grant, Outgoing, Result, merge_acks
from distflow.exchange.owner import OwnerCore

Post = Callable[[str, str, Mapping[str, Any], Sequence[Buffer]], Delivery]
"""`post(to, kind, body, payload)`: hands a message to the endpoint; never blocks."""

HOLDER_KINDS = ("ask", "progress", "handback", "bye")
RESULTS = "results"


@dataclass(frozen=True, slots=True)
class ArrivedGroup:
    """One group in the owner's custody."""

    position: int
    rows: RowRange
    worker: str


class _Results(Form, frozen=True):
    """Body of RESULTS; `batch` describes the rows of all that are not dropped."""

    results: tuple[Result, ...]
    batch: Any


class InboundSamples:
    """Connects an OwnerCore with sockets on one side and the training loop on the other."""

    def __init__(self, core: OwnerCore, post: Post) -> None:
        self.core = core
        self._post = post
        self._grants = SentOnce()
        self._stored: dict[int, ArrivedGroup] = {}
        self._arrived: Callable[[], None] = lambda: None

    def on_arrival(self, handler: Callable[[], None]) -> None:
        """Called after results have come in."""
        self._arrived = handler

    def peek(self, position: int) -> ArrivedGroup:
        """A group that has arrived; it stays in custody."""
        return self._stored[position]

    def on_message(self, message: Message, now: float) -> None:
        """A lease message from the wire; raises ProtocolError if it is malformed."""
        if message.kind == RESULTS:
            self._on_results(message, now)
        else:
            self.send(self.core.handle(lease_message(message), now))

    def accept(self, results: Sequence[Result], batch: Batch | None, now: float) -> None:
        """Results with the rows of all groups that are not dropped; the first copy of each is kept."""
        groups = {} if batch is None else _by_group(batch)
        out: list[Outgoing] = []
        for result in results:
            if self.core.keeps(result):
                if result.position not in groups:
                    raise ProtocolError(
                        f"{result.worker} sent a result for position {result.position} without its rows"
                    )
                group = ArrivedGroup(result.position, groups[result.position], result.worker)
                out += self.core.handle(result, now)
                self._stored[result.position] = group
            else:
                out += self.core.handle(result, now)
        self.send(out)
        self._arrived()

    def take(self, positions: Iterable[int], now: float) -> list[ArrivedGroup]:
        """Hand consumable groups over to the open training step."""
        wanted = list(positions)
        self.send(self.core.take(wanted, now))
        return [self._stored.pop(position) for position in wanted]

    def send(self, out: Iterable[Outgoing]) -> None:
        """Put the core's messages on the wire."""
        for item in merge_acks(out):
            message = item.message
            if isinstance(message, Grant) and self._grants.under_way(item.to, message.number):
                continue
            delivery = self._post(item.to, kind_of(message), *to_wire(message))
            if isinstance(message, Grant):
                self._grants.note(item.to, message.number, delivery)

    def _on_results(self, message: Message, now: float) -> None:
        results, batch = read_results(message)
        self.accept(results, batch, now)


@decoder
def read_results(message: Message) -> tuple[list[Result], Batch | None]:
    """Results and the rows of all those that are not dropped; raises ProtocolError if they do not fit together."""
    found = read(message.body, _Results, RESULTS)
    results = [check_sender(message, result) for result in found.results]
    if found.batch is None:
        return results, None
    if len(message.payload) != 1:
        raise ProtocolError(f"results with {len(message.payload)} payload frames; expected 1")
    return results, decode_batch(found.batch, message.payload[0])


@decoder
def _by_group(batch: Batch) -> dict[int, RowRange]:
    if "group" not in batch:
        raise ProtocolError("a batch of samples without field 'group'")
    group = batch["group"]
    if isinstance(group, Ragged) or group.dtype != torch.int64 or group.dim() != 1:
        raise ProtocolError("a batch of samples whose field 'group' is not one int64 a row")
    return group_ranges(batch)
