"""The generating side of one worker: its script's `leases`, `generate` and `send`."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from distflow.data.batch import Batch
from distflow.errors import StepError
from distflow.exchange.sample_channel import OutboundSamples
from distflow.flow.edges import Edge
from distflow.runtime.device_sharing import Turns
from distflow.runtime.lease_feed import LeaseFeed
from distflow.runtime.metrics import MetricStore
from distflow.runtime.node import Node
from distflow.runtime.protocols import Engine
from distflow.runtime.steps import StepRunner

DROP_REASON = "drop_reason"
"""A text column that a step may write: a group with a reason in any of its rows is dropped, not trained on."""


class Generating:
    """Leases in, groups out."""

    def __init__(
        self,
        feed: LeaseFeed,
        channel: OutboundSamples,
        steps: StepRunner,
        engine: Engine,
        node: Node,
        edge: Edge,
        metrics: MetricStore,
        turns: Turns,
    ) -> None:
        self.feed = feed
        self._channel = channel
        self._steps = steps
        self._engine = engine
        self._node = node
        self._edge = edge
        self._metrics = metrics
        self._turns = turns

    def generate(self, step: str, feed: LeaseFeed) -> Iterator[Batch]:
        """Batches of whole groups, as they finish."""
        self._node.facts |= {"state": "generating"}
        if feed.open():
            self._turns.generate()
        groups = self._steps.generate(step, feed)
        return groups if feed.endless else self._phase(groups)

    def _phase(self, groups: Iterator[Batch]) -> Iterator[Batch]:
        """A colocated worker generates for a part of each training step: how long is measured."""
        with self._metrics.timed("timing_s/generation", "phase"):
            yield from groups

    def send(self, groups: Batch) -> None:
        """Give groups to the owners of their leases: only the fields that are read there, none of dropped groups."""
        dropped = _dropped(groups)
        if dropped:
            self._metrics.add("group/dropped", len(dropped))
        with self._metrics.timed("timing_s/send"):
            whole = groups.with_columns(**self._filled(groups))
            kept = whole.only(self._sent_fields(whole))
            sent = [str(group) for group in dict.fromkeys(kept.dense("group").tolist()) if group not in dropped]
            self._metrics.trace.depart("group", sent)
            with self._node.board.condition:
                self._channel.finish(kept, dropped, time.monotonic())
        self._node.work_done()

    def leave(self) -> None:
        """Free what is held here for others, and let go of the engine.

        After `feed.drain` no token is lost: what running samples have produced goes to their owners first.
        """
        if self.feed.draining and not self._node.board.over:
            self.feed.hand_back(self._engine)
        with self._node.board.condition:
            self._channel.send(self._channel.core.leave())
        self._engine.close()

    def _filled(self, groups: Batch) -> dict[str, Tensor]:
        """Optional fields that only some workers write: here, where nothing wrote them, their fill value."""
        fills = self._edge.fills.items()
        return {name: torch.full((groups.rows,), value) for name, value in fills if name not in groups}

    def _sent_fields(self, groups: Batch) -> list[str]:
        wanted: list[str] = []
        for field in self._edge.fields:
            if field.endswith("*"):
                wanted += [name for name in groups.columns if name.startswith(field[:-1])]
            elif field in groups:
                wanted.append(field)
            else:
                raise StepError(
                    f"field {field!r} is read by the training side, but the groups to send have only "
                    f"{sorted(groups.columns)} — a script must call the step that writes it before w.send"
                )
        return wanted


def _dropped(groups: Batch) -> dict[int, str]:
    if DROP_REASON not in groups:
        return {}
    positions = groups.dense("group").tolist()
    return {position: reason for position, reason in zip(positions, groups.texts(DROP_REASON), strict=True) if reason}
