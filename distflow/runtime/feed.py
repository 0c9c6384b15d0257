"""What a generate step draws from: leases in, weights in, finished samples out; and the wait when idle.

Leases and half-generated groups live here, not in the step function: a colocated worker leaves its generate step to
train and finds them again at the next training step, frozen in the engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distflow.config.schema import Recipe
from distflow.exchange.messages import Lease
from distflow.exchange.outbound import OutboundSamples
from distflow.runtime.metrics import MetricStore
from distflow.runtime.node import Node
from distflow.runtime.protocols import Engine
from distflow.runtime.waits import WaitBoard
from distflow.types import SampleOutput
from distflow.weights.inbox import WeightInbox


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """All samples of one lease, ordered by sample number."""

    lease: Lease
    samples: tuple[SampleOutput, ...]


@dataclass(slots=True)
class _Open:
    lease: Lease
    done: dict[int, SampleOutput] = field(default_factory=dict)


class LeaseFeed:
    """The generating side of one worker. Its methods are called by the generate step, on the worker's main thread."""

    def __init__(
        self,
        channel: OutboundSamples,
        inbox: WeightInbox,
        node: Node,
        metrics: MetricStore,
        recipe: Recipe,
    ) -> None:
        self._channel = channel
        self._inbox = inbox
        self._node = node
        self._board: WaitBoard = node.board
        self._metrics = metrics
        self._group_size = recipe.batch.samples_per_prompt
        self._no_progress_s = recipe.limits.no_progress_s
        self._queued: deque[Lease] = deque()
        self._open: dict[int, _Open] = {}
        self._cancelled: list[int] = []
        self._until: int | None = None
        self._on_version: Callable[[int], None] = lambda number: None

    def until_closed(self, step: int | None) -> LeaseFeed:
        """Colocated: `open` until every owner has its set for this training step. None: until the run is over."""
        self._until = step
        return self

    @property
    def endless(self) -> bool:
        """Whether it goes on until the run is over: nothing else is to be done here in between."""
        return self._until is None

    def on_version(self, handler: Callable[[int], None]) -> None:
        """Called with the number of each version that the engine has taken."""
        self._on_version = handler

    def open(self) -> bool:
        """Whether to go on. Raises RunStopped, or the fault, that ends this worker."""
        self._board.raise_if_over()
        with self._board.condition:
            return not self._over()

    def refresh(self, engine: Engine) -> None:
        """Take newer weights, if there are any; to be called between two decode steps."""
        if not self._inbox.waiting:
            return
        with self._metrics.timed("timing_s/weight_sync"):
            self._inbox.load(engine)
            if self._inbox.loaded is not None:
                term, number = self._inbox.loaded
                self._metrics.trace.arrive("weights", [f"{self._inbox.model}:{term}:{number}"])
        if self._inbox.loaded is not None:
            self._node.work_done()
            self._on_version(self._inbox.loaded.number)

    def cancelled(self) -> list[int]:
        """Positions to abort: another copy came first, or they belong to a former term."""
        with self._board.condition:
            positions = set(self._cancelled + self._channel.core.take_cancelled())
            self._cancelled = []
        if positions:
            self._queued = deque(lease for lease in self._queued if lease.position not in positions)
        return [position for position in positions if self._open.pop(position, None) is not None]

    def discard(self, outputs: Sequence[SampleOutput]) -> None:
        """Aborted samples; counted, their tokens are of no further use."""
        if outputs:
            self._metrics.add("rollout/aborted_samples", len(outputs))

    def take(self, engine: Engine) -> list[Lease]:
        """Leases to submit now: there is room for the whole group, and the weights are new enough. Asks for more."""
        with self._board.condition:
            self._queued.extend(self._channel.core.take_granted())
            taken = self._startable(engine)
            self._ask(engine, len(taken))
        for lease in taken:
            self._open[lease.position] = _Open(lease)
        return taken

    def collect(self, outputs: Sequence[SampleOutput], engine: Engine) -> list[FinishedGroup]:
        """Add finished samples; returns the groups that are whole now. Progress and free room go to the owners."""
        finished = []
        for out in outputs:
            group = self._open[out.position]
            group.done[out.sample] = out
            if len(group.done) == self._group_size:
                del self._open[out.position]
                finished.append(FinishedGroup(group.lease, tuple(group.done[i] for i in range(self._group_size))))
        with self._board.condition:
            for position, tokens in engine.progress().items():
                self._channel.core.report(position, tokens, self._version())
            if finished:
                # Their results will tell the owner how much room there is now, so that a parked ask grows with it.
                self._ask(engine, 0)
        if self._open:
            self._node.work_done()
        return finished

    def wait_if_idle(self) -> None:
        """Block until there is something to do; at once if the engine still has samples to decode."""
        if self._open and self._inbox.loaded is not None:
            return
        with self._board.condition:
            name, peers = self._reason()
        with self._metrics.timed(f"timing_s/wait_{name.split()[0]}"):
            self._board.until(
                self._something,
                name=name,
                peers=peers,
                limit_s=self._no_progress_s,
                progress=lambda: [(p.progress, p.facts) for p in self._node.membership.peers.values()],
            )

    def _ask(self, engine: Engine, starting: int) -> None:
        room = engine.free_slots - self._group_size * (starting + len(self._queued))
        self._channel.send(self._channel.core.want(room, time.monotonic()))

    def _startable(self, engine: Engine) -> list[Lease]:
        version, room = engine.version, engine.free_slots
        taken: list[Lease] = []
        while self._queued and version is not None and room >= self._group_size:
            if self._queued[0].min_version > version.number or self._queued[0].term > version.term:
                break
            taken.append(self._queued.popleft())
            room -= self._group_size
        return taken

    def _over(self) -> bool:
        core = self._channel.core
        return core.run_finished or (self._until is not None and core.closed(self._until))

    def _something(self) -> bool | None:
        core = self._channel.core
        self._queued.extend(core.take_granted())
        self._cancelled += core.take_cancelled()
        startable = bool(self._queued) and self._fresh_enough(self._queued[0])
        return True if startable or self._cancelled or self._inbox.waiting or self._over() else None

    def _fresh_enough(self, lease: Lease) -> bool:
        loaded = self._inbox.loaded
        return loaded is not None and loaded.number >= lease.min_version and loaded.term >= lease.term

    def _reason(self) -> tuple[str, tuple[str, ...]]:
        asking = self._channel.core.asking()
        if self._inbox.loaded is None or (self._queued and not self._fresh_enough(self._queued[0])):
            wanted = self._queued[0].min_version if self._queued else 0
            return f"weights of version {wanted} or newer", tuple(self._node.membership.peers)
        return "leases", (asking.owner,) if asking else ()

    def _version(self) -> int:
        return -1 if self._inbox.loaded is None else self._inbox.loaded.number
