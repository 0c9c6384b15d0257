"""What the workers of a simulation spend their time on.

A generating worker *decodes*, or its engine is empty: nothing may be leased to it, or its leases wait for newer
*weights*; a colocated one *trains* meanwhile. A replica *trains*, or waits: for the *first* samples of a training step,
for *later* ones, or for *others* once the last sample of the step has arrived anywhere; or all *update*: the optimizer
step, and publishing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from distflow.metrics.batch_cost import BatchCost
from distflow.sim.fluid_engine import FluidEngine

DECODE, LEASES, WEIGHTS, COLOCATED = "decode", "leases", "weights", "trains"
STALLED, LOADS = "stalled", "loads"
"""Of the time with samples in the engine: computing prompts or environments, and changing weights."""
TRAIN, FIRST, LATER, OTHERS, UPDATE = "train", "first", "later", "others", "update"


class SimulatedSpan(NamedTuple):
    """What a worker did from `begin` to `end`, in seconds."""

    state: str
    begin: float
    end: float


@dataclass(slots=True)
class StateTime:
    """Seconds in each state; all spans, too, if they are recorded."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[SimulatedSpan] | None = None
    state: str = ""
    """The present one; empty: the worker is not there."""
    since: float = 0.0

    def enter(self, state: str, now: float) -> None:
        """From here on it is in this state."""
        if state == self.state:
            return
        self.settle(now)
        self.state = state

    def settle(self, now: float) -> None:
        """Count what has passed."""
        if self.state and now > self.since:
            self.seconds[self.state] += now - self.since
            if self.spans is not None:
                self.spans.append(SimulatedSpan(self.state, self.since, now))
        self.since = now


@dataclass(slots=True)
class WorkerTime(StateTime):
    """Of a generating worker, over all its incarnations."""

    slot_s: float = 0.0
    """Seconds of decoding, times the samples that ran, of former incarnations."""
    stalled_s: float = 0.0
    """Seconds for prompts and environments."""
    loading_s: float = 0.0
    """Seconds for new weights."""
    batch: BatchCost = field(default_factory=BatchCost)
    """Of former incarnations."""

    def look(self, now: float, engine: FluidEngine, idle_for: Callable[[], str]) -> None:
        """Note what the engine does from now on."""
        if engine.running:
            self.enter(COLOCATED if engine.paused else DECODE, now)
        else:
            self.enter(COLOCATED if engine.paused else idle_for(), now)

    def close(self, now: float, engine: FluidEngine) -> None:
        """The worker ends."""
        self.enter("", now)
        self.slot_s += engine.slot_s
        self.stalled_s += engine.stalled_s
        self.loading_s += engine.loading_s
        self.batch = BatchCost.of([self.batch, engine.batch])
        engine.slot_s = engine.stalled_s = engine.loading_s = 0.0
        engine.batch = BatchCost()


@dataclass(slots=True)
class ReplicaTime(StateTime):
    """Of a training replica."""

    def wait_for_others(self, last_arrival: float, now: float) -> None:
        """The step is trained: what it waited since the last sample arrived anywhere, it waited for other replicas."""
        if self.state in (FIRST, LATER):
            if last_arrival > self.since:
                self.settle(min(last_arrival, now))
            self.state = OTHERS
        self.settle(now)


@dataclass(frozen=True, slots=True)
class Totals:
    """Up to the end of one training step, of all workers together."""

    at: float
    generating: Mapping[str, float]
    training: Mapping[str, float]
    slot_s: float
    stalled_s: float
    loading_s: float
    batch: BatchCost
    messages: int
    sent_bytes: int
    produced: int
    lags: Counter[int]


@dataclass(slots=True)
class SimulatedTraffic:
    """Messages and bytes by sender and receiver."""

    messages: Counter[str] = field(default_factory=Counter)
    """Sent or received, by worker."""
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes by pool of sender and receiver."""
    by_worker: Counter[str] = field(default_factory=Counter)
    """Bytes sent or received, by worker."""
    count: int = 0
    total: int = 0

    def note(self, sender: str, to: str, nbytes: int) -> None:
        """A message."""
        self.count += 1
        self.total += nbytes
        self.messages[sender] += 1
        self.messages[to] += 1
        self.by_worker[sender] += nbytes
        self.by_worker[to] += nbytes
        self.sent[sender.partition("/")[0], to.partition("/")[0]] += nbytes
