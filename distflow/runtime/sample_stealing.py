"""Moves arrived groups from busy training replicas to idle ones: payloads and messages around `StealCore`.

All methods run under the worker's lock, except `take`, which the training loop of the requester calls; messages come on
the endpoint's thread.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable

from distflow.comm.message import Message
from distflow.comm.outbox import SentOnce
from distflow.data.batch import group_ranges, join, padded_tokens, with_same_parts
from distflow.data.batch_wire import decode_batch, encode_batch
from distflow.data.decoding import decoder, read
from distflow.errors import ProtocolError
from distflow.exchange.sample_channel import ArrivedGroup, InboundSamples
from distflow.exchange.steal_core import GROUPS, KINDS, Send, StealCore, Transfer
from distflow.runtime.node import Node
from distflow.runtime.replicas import Replicas


class Stealing:
    """One replica's part. `budget`: padded tokens of a micro-batch, the most that a requester gets at once."""

    def __init__(self, inbound: InboundSamples, replicas: Replicas, node: Node, budget: int, seed: int) -> None:
        self._inbound = inbound
        self._node = node
        self._budget = budget
        self._size = replicas.size
        rng = random.Random(f"{seed}/{replicas.rank}")
        self._core = StealCore(replicas.others, self._backlog, self._give, rng)
        self._sent = SentOnce()
        self._handed: dict[int, ArrivedGroup] = {}
        self._returned: dict[int, ArrivedGroup] = {}
        self._stolen: deque[ArrivedGroup] = deque()
        for kind in sorted(KINDS):
            node.on(kind, self._on_message)
        node.on_tick(lambda now: self._send(self._core.tick(now)))
        inbound.on_arrival(lambda: self._send(self._core.offer()))

    def begin(self, step: int) -> None:
        """Open a training step."""
        with self._node.board.condition:
            self._handed.clear()
            self._core.begin(step)
            self._send(self._core.offer())

    def search(self) -> None:
        """Look for groups of others: this replica has none left of its own."""
        self._send(self._core.search(time.monotonic()))

    @property
    def settled(self) -> bool:
        """Whether every group that was given away is known to have been kept, or has come back."""
        return self._core.settled

    def take(self) -> list[ArrivedGroup]:
        """What has been stolen since the last call."""
        groups = list(self._stolen)
        self._stolen.clear()
        return groups

    def take_back(self) -> list[ArrivedGroup]:
        """Groups that were given away and have come back for good: this replica has to train on them itself."""
        groups = list(self._returned.values())
        self._returned.clear()
        return groups

    # -- on the endpoint's thread

    def _on_message(self, message: Message) -> None:
        core = self._core
        if message.kind == GROUPS and core.expects(message.sender, message.body):
            try:
                self._stolen.extend(_groups(message))
            except ProtocolError:
                self._send(core.decline(message.sender, message.body))
                raise
        self._send(core.handle(message.kind, message.sender, message.body, time.monotonic()))
        returned = core.take_returned()
        if returned:
            self._returned |= {position: self._handed.pop(position) for position in returned}
            self._send(core.offer())

    def _send(self, out: Iterable[Send]) -> None:
        for item in out:
            if item.kind == GROUPS:
                self._send_groups(item)
            else:
                self._node.send(item.to, item.kind, item.body)

    def _send_groups(self, item: Send) -> None:
        if self._sent.under_way(item.to, item.positions):
            return
        groups = [self._handed[position] for position in item.positions]
        described, buffer = encode_batch(join(with_same_parts([group.rows for group in groups])))
        body = {**item.body, "workers": [group.worker for group in groups], "batch": described}
        self._sent.note(item.to, item.positions, self._node.endpoint.send(item.to, GROUPS, body, (buffer,)))

    def _backlog(self) -> int:
        return len(self._idle_groups())

    def _idle_groups(self) -> list[ArrivedGroup]:
        """Groups that the open step may take and that no replica has begun."""
        core = self._inbound.core
        consumable = core.consumable() if core.version == self._core.step else []
        return [*map(self._inbound.peek, consumable), *self._returned.values()]

    def _give(self, requester: str) -> tuple[int, ...]:
        """Give away the requester's equal share, of the last groups in the order of training."""
        idle = self._idle_groups()
        share, tokens = -(-len(idle) // self._size), 0
        chosen: list[ArrivedGroup] = []
        for group in reversed(idle[len(idle) - share :]):
            tokens += padded_tokens(group.rows)
            if chosen and tokens > self._budget:
                break
            chosen.append(group)
        positions = tuple([group.position for group in chosen])
        self._inbound.take([p for p in positions if p not in self._returned], time.monotonic())
        for group in chosen:
            self._returned.pop(group.position, None)
            self._handed[group.position] = group
        return positions


@decoder
def _groups(message: Message) -> list[ArrivedGroup]:
    transfer = read(message.body, Transfer, message.kind)
    if len(message.payload) != 1:
        raise ProtocolError(f"stolen groups from {message.sender} in {len(message.payload)} payload frames; expected 1")
    ranges = group_ranges(decode_batch(transfer.batch, message.payload[0]))
    if len(ranges) != len(transfer.workers):
        raise ProtocolError(f"{len(ranges)} stolen groups with {len(transfer.workers)} workers")
    named = zip(ranges.items(), transfer.workers, strict=True)
    return [ArrivedGroup(position, rows, worker) for (position, rows), worker in named]
