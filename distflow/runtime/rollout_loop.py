"""The decode loop of a generating worker: leases in, weights in, finished groups out; and the wait when idle.

Leases and half-generated groups stay here and in the engine while a colocated worker trains, until it generates again.

Newer weights are taken according to `layout.refresh`. In any case nothing starts below the minimum version of its
lease, and a group that cannot start for that reason makes the engine take newer weights, at the latest when it is idle.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distflow.config.schema import Recipe
from distflow.errors import NoProgressError
from distflow.exchange.messages import Lease
from distflow.exchange.sample_channel import OutboundSamples
from distflow.log import logger
from distflow.runtime.metrics import MetricStore
from distflow.runtime.node import Node
from distflow.runtime.protocols import Engine
from distflow.runtime.waits import WaitBoard
from distflow.types import GroupRequest, SampleOutput, SamplingParams
from distflow.weights.receiver import WeightInbox

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """All samples of one lease, ordered by sample number."""

    lease: Lease
    samples: tuple[SampleOutput, ...]


@dataclass(slots=True)
class _Open:
    lease: Lease
    done: dict[int, SampleOutput] = field(default_factory=dict)


class RolloutLoop:
    """Drives the engine of one worker, on its main thread."""

    def __init__(
        self,
        engine: Engine,
        channel: OutboundSamples,
        inbox: WeightInbox,
        node: Node,
        metrics: MetricStore,
        recipe: Recipe,
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._inbox = inbox
        self._node = node
        self._board: WaitBoard = node.board
        self._metrics = metrics
        self._group_size = recipe.batch.samples_per_prompt
        self._no_progress_s = recipe.limits.no_progress_s
        # Half of it, to be done before the host agent, which counts `drain_s` too, kills this worker.
        self._drain_s = recipe.limits.drain_s / 2
        self._policy = recipe.layout.refresh
        self._keeps_partials = recipe.layout.partial_rollouts
        self._queued: deque[Lease] = deque()
        self._open: dict[int, _Open] = {}
        self._cancelled: list[int] = []
        """Positions to abort in the engine."""
        self._slots = 0
        """The most free slots seen so far."""
        self._partials_due = 0.0
        self._draining = False
        self._until: int | None = None
        self._over_in: int | None = None
        self._on_version: Callable[[int], None] = lambda number: None

    def until_closed(self, step: int | None) -> RolloutLoop:
        """Set how long `open` is true: until every owner has its set for this step; None: until the run is over."""
        self._until = step
        return self

    @property
    def endless(self) -> bool:
        """Whether the loop goes on until the run is over, because this worker does nothing else."""
        return self._until is None

    def on_version(self, handler: Callable[[int], None]) -> None:
        """Call `handler` with the number of each version that the engine has taken."""
        self._on_version = handler

    def drain(self) -> None:
        """End the loop, because the worker is to leave. Any thread may call this."""
        with self._board.condition:
            self._draining = True
            self._board.condition.notify_all()

    @property
    def draining(self) -> bool:
        """Whether this worker was asked to leave."""
        return self._draining

    @property
    def over_in(self) -> int | None:
        """The owners' term in which an endless loop was found to be over; a later term may need more groups."""
        return self._over_in

    def open(self) -> bool:
        """Whether to continue; an endless loop never reopens. Raises RunStopped, or the fault that ends the worker."""
        if self._until is None:
            self._board.raise_if_over()
        # A worker that also trains stops together with the other training workers, after it has generated.
        self._board.raise_fault()
        with self._board.condition:
            over = self._over()
            if over and self._until is None and self._over_in is None:
                self._over_in = self._channel.core.term
            return not over

    def groups(self, params: SamplingParams) -> list[FinishedGroup]:
        """Generate until groups are finished, and return them; none once the loop is over."""
        while self.open():
            self.refresh()
            self.discard(self._engine.abort(self.cancelled()))
            self._engine.submit([self._request(lease, params) for lease in self.take()])
            with self._metrics.timed("timing_s/gen"):
                outputs = self._engine.poll()
            finished = self.collect(outputs)
            if finished:
                return finished
            if not outputs:
                self.wait_if_idle()
        return []

    def refresh(self) -> None:
        """Take newer weights if there are any and it is time for them; call this between two decode steps."""
        if not self._refreshable():
            return
        with self._metrics.timed("timing_s/weight_sync"):
            self._inbox.load(self._engine)
            if self._inbox.loaded is not None:
                term, number = self._inbox.loaded
                self._metrics.trace.arrive("weights", [f"{self._inbox.model}:{term}:{number}"])
        if self._inbox.loaded is not None:
            self._node.work_done()
            self._on_version(self._inbox.loaded.number)
            if self._inbox.difference is not None:
                # After `_on_version`: what was measured before belongs to the previous version.
                self._metrics.mean("weights/canary_diff", self._inbox.difference)

    def cancelled(self) -> list[int]:
        """Positions to abort: another copy finished first, or they belong to an earlier term."""
        with self._board.condition:
            self._sync()
        positions, self._cancelled = self._cancelled, []
        return positions

    def discard(self, outputs: Sequence[SampleOutput]) -> None:
        """Count aborted samples, whose tokens are lost."""
        if outputs:
            self._metrics.add("rollout/aborted_samples", len(outputs))
            self._metrics.add("rollout/lost_tokens", sum(len(out.token_ids) for out in outputs))

    def take(self) -> list[Lease]:
        """Leases to submit now, with room for their whole group and new enough weights. Asks for more leases."""
        self._slots = max(self._slots, self._engine.free_slots)
        with self._board.condition:
            self._sync()
            # A group that was cancelled and granted anew must leave the engine before it starts again.
            taken = [] if self._cancelled else self._startable()
            self._ask(len(taken))
        for lease in taken:
            self._open[lease.position] = _Open(lease)
            self._count(lease)
        return taken

    def collect(self, outputs: Sequence[SampleOutput]) -> list[FinishedGroup]:
        """Add finished samples; return the groups that are now whole. Reports progress and free room to the owners."""
        finished = []
        for out in outputs:
            if out.position not in self._open:
                continue  # cancelled, and about to be aborted
            group = self._open[out.position]
            group.done[out.sample] = out
            if len(group.done) == self._group_size:
                del self._open[out.position]
                finished.append(FinishedGroup(group.lease, tuple(group.done[i] for i in range(self._group_size))))
        partials = self._partials()
        progress = self._engine.progress()
        with self._board.condition:
            # A cancelled group is still in the engine, and its position may have been leased again.
            self._channel.core.produced([out for out in partials if out.position in self._open])
            for position in self._open.keys() & progress.keys():
                self._channel.core.report(position, progress[position], self._version())
            if finished:
                # Their results tell the owner how much room there is now, so that a parked ask grows with it.
                self._ask(0)
        if self._open:
            self._node.work_done()
        return finished

    def wait_if_idle(self) -> None:
        """Wait until there is something to do; return at once if the engine has samples to decode."""
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
                progress=self._signs_of_life,
                even_when_stopping=self._until is not None,
            )

    def hand_back(self) -> None:
        """Give up all leases, with what their samples have produced, so that other workers continue from there.

        Returns when the owners have taken over everything, or half of `limits.drain_s` after the last one did.
        """
        core = self._channel.core
        aborted = self._engine.abort(list(self._open))
        with self._board.condition:
            core.produced([*aborted, *self._done()])
            self._channel.send(core.hand_back(time.monotonic()))
        self._open.clear()
        self._queued.clear()
        try:
            self._board.until(
                lambda: True if core.run_finished or not core.held() else None,
                name="the owners to take over leases and results",
                peers=tuple(self._node.membership.peers),
                limit_s=self._drain_s,
                limit="limits.drain_s",
                progress=lambda: len(core.held()),
                even_when_stopping=True,
            )
        except NoProgressError as error:
            log.warning("%s; shutting down anyway", error)

    def _signs_of_life(self) -> object:
        """A value that changes as long as peers make progress or weights arrive."""
        return self._inbox.chunks, [(p.progress, p.facts) for p in self._node.membership.peers.values()]

    def _sync(self) -> None:
        """Apply what the owners have sent. Cancellations concern leases from before the new grants."""
        core = self._channel.core
        cancelled = set(core.take_cancelled())
        if cancelled:
            self._queued = deque(lease for lease in self._queued if lease.position not in cancelled)
            self._cancelled += [position for position in cancelled if self._open.pop(position, None) is not None]
        granted = core.take_granted()
        if granted:
            # The oldest first: others wait for them, and they need no newer weights.
            self._queued = deque(sorted((*self._queued, *granted), key=lambda lease: lease.position))

    def _ask(self, starting: int) -> None:
        free = self._engine.free_slots - self._group_size * starting
        room = free - self._group_size * len(self._queued)
        self._channel.send(self._channel.core.want(room, time.monotonic(), idle=2 * free >= self._slots))

    def _request(self, lease: Lease, params: SamplingParams) -> GroupRequest:
        return GroupRequest(lease.position, lease.prompt_ids, self._group_size, lease.seed, params, lease.begun)

    def _count(self, lease: Lease) -> None:
        if lease.copy:
            self._metrics.add("rollout/hedged_groups", 1)
        if lease.begun:
            self._metrics.add("rollout/continued_samples", len(lease.begun))
            self._metrics.add("rollout/continued_tokens", sum(len(sample.token_ids) for sample in lease.begun))

    def _done(self) -> list[SampleOutput]:
        """Finished samples of groups that are not whole yet."""
        return [out for group in self._open.values() for out in group.done.values()]

    def _partials(self) -> list[SampleOutput]:
        """The state of all samples, if it is time to report it."""
        now = time.monotonic()
        if not self._keeps_partials or now < self._partials_due:
            return []
        self._partials_due = now + self._channel.core.report_s
        return [*self._engine.partials(), *self._done()]

    def _refreshable(self) -> bool:
        """Whether there are newer weights that the refresh policy takes now."""
        if not self._inbox.waiting:
            return False
        if self._inbox.loaded is None or self._policy == "eager":
            return True
        if self._policy == "when_idle":
            return not self._open
        return bool(self._queued) and not self._fresh_enough(self._queued[0])

    def _startable(self) -> list[Lease]:
        version, room = self._engine.version, self._engine.free_slots
        taken: list[Lease] = []
        while self._queued and version is not None and room >= self._group_size:
            if self._queued[0].min_version > version.number or self._queued[0].term > version.term:
                break
            taken.append(self._queued.popleft())
            room -= self._group_size
        return taken

    def _over(self) -> bool:
        core = self._channel.core
        if self._until is None:
            return self._draining or core.run_finished or self._over_in is not None
        return core.run_finished or core.closed(self._until) or self._board.stopping is not None

    def _something(self) -> bool | None:
        self._sync()
        startable = bool(self._queued) and self._fresh_enough(self._queued[0])
        return True if startable or self._cancelled or self._refreshable() or self._over() else None

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
