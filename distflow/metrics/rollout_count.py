"""What more or fewer generating workers would make of the step time, by what the present ones do with their time.

Let a training step take 1; of it, training workers wait w for samples; of the time of N generating workers, g is
decoding with the share s of their slots in use, r is rewards, i is waiting, and the rest is loading weights. e is the
share of a decode step that its samples add to that of none (`BatchCost`): with fewer of them it takes less, whatever
slots there are. What other workers could take over is

    u    = s·g/(1 - i - r)                         slots in use, of the time in which there are samples in them
    f(u) = min(1, max(0, (u - 0.4) / 0.3))         of the decoding: with few slots in use, it is the longest samples
    a    = g·(f(u) + (1 - f(u))·e) + r

With M workers a step is changed by

    M > N:  -min(w, a·(1 - N/M))                    no more than training workers wait
    M < N:  max(0, a'·(N/M - 1) - ahead)            a' with the mean of f(u) and f(u·N/M)
            ahead = max(0, i - w) if samples may be stale, else 0: what generation can be late before training waits

f was fitted to simulations of one to ten generating workers, at max_staleness 0, 1 and 2, with lognormal lengths of
sigma 0.3 to 1.1, and 16 or 64 slots; in others there are 512, more than samples (`python -m benchmarks rollout_count`).
Of one more worker the mean error is 2% of a step, and 14% at most; of one fewer 3%, and 19% at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

from distflow.metrics.sums import WEIGHT_SUFFIX

TRAINER_IDLE, ROLLOUT_IDLE = "perf/trainer_idle_share", "perf/rollout_idle_share"
GENERATE, SCORE, SLOTS = "perf/generate_share", "perf/score_share", "perf/slots_share"
BATCH = "perf/batch_share"
PHASE = "perf/generation_share"
"""Only colocated workers have it."""
STALENESS = "staleness/max"
ONE_MORE = "perf/one_more_rollout"
WORTH, LITTLE = 0.1, 0.02
"""Shares of the step time that are worth a worker although predictions err, and that are not."""
ERROR = "in simulations, such predictions are 2% off on average, and 14% at most"
FEW, FULL = 0.4, 0.7
"""Shares of slots in use from which others could take over some of the decoding, and all. A slot stays empty while the
others of its group go on, so all are hardly ever in use."""


@dataclass(frozen=True, slots=True)
class GenerationLoad:
    """Shares of time in a training step, or in several."""

    training_waits: float
    """Training workers for samples."""
    idle: float
    """Generating workers for anything."""
    generates: float
    scores: float
    slots: float
    """Slots in use while decoding."""
    batch: float
    """Of a decode step, what its samples add to that of none."""
    stale: bool
    """Whether generation may be ahead of training."""

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> Self | None:
        """From merged metrics; None where generation has no workers of its own, or too little is known."""
        names = (TRAINER_IDLE, ROLLOUT_IDLE, GENERATE, SCORE, SLOTS, BATCH)
        if PHASE in metrics or not all(name in metrics for name in names):
            return None
        waits, idle, generates, scores, slots, batch = (metrics[name] for name in names)
        return cls(waits, idle, generates, scores, slots, batch, STALENESS in metrics and metrics[STALENESS] > 0)

    def change(self, now: float, then: float) -> float:
        """The relative change of the step time with `then` generating workers in place of `now`; negative: shorter."""
        ratio = now / then
        if then >= now:
            shared = self.generates * self._part(1.0) + self.scores
            return -min(self.training_waits, shared * (1.0 - ratio))
        part = (self._part(1.0) + self._part(ratio)) / 2.0
        ahead = max(0.0, self.idle - self.training_waits) if self.stale else 0.0
        return max(0.0, (self.generates * part + self.scores) * (ratio - 1.0) - ahead)

    def _part(self, fuller: float) -> float:
        """Of the decoding, what other workers could take over if so many times as many slots were in use."""
        taken = max(self.generates, 1.0 - self.idle - self.scores)
        queued = divisible(fuller * self.slots * self.generates / taken) if taken else 0.0
        return queued + (1.0 - queued) * self.batch


def other_count(steps: Sequence[Mapping[str, float]], pool: str, now: int, run: str) -> Iterator[str]:
    """For people: what one worker more or fewer of a pool with `now` would bring, by the last training steps of a run.

    Nothing if too little was measured.
    """
    loads = [load for load in map(GenerationLoad.of, steps) if load is not None]
    if not loads:
        return
    verb = "is predicted to make training steps"
    more = -median(load.change(now, now + 1) for load in loads)
    if more >= WORTH:
        command = f"distflow scale {run} {pool}={now + 1}"
        yield f"one more {pool} {verb} {more:.0%} shorter ({ERROR}): {command}"
    elif more >= LITTLE:
        yield f"one more {pool} {verb} {more:.0%} shorter, less than predictions may be off"
    elif now > 1 and (fewer := median(load.change(now, now - 1) for load in loads)) < LITTLE:
        yield f"one {pool} fewer {verb} hardly longer ({fewer:.0%}), one more hardly shorter"
    else:
        yield f"one more {pool} {verb} hardly shorter ({more:.0%})"


def divisible(slots: float) -> float:
    """f: the share of the decoding that other workers could take over, by the share of slots in use."""
    return min(1.0, max(0.0, (slots - FEW) / (FULL - FEW)))


def one_more_rollout(merged: Mapping[str, float], lines: Sequence[Mapping[str, float]]) -> float | None:
    """What one more generating worker would change, of one training step: its merged metrics, and those of each worker.

    How many there are is told by how many steps' time they have spent together.
    """
    load = GenerationLoad.of(merged)
    steps_s = [line[TRAINER_IDLE + WEIGHT_SUFFIX] for line in lines if TRAINER_IDLE + WEIGHT_SUFFIX in line]
    spent_s = sum(line[GENERATE + WEIGHT_SUFFIX] for line in lines if GENERATE + WEIGHT_SUFFIX in line)
    if load is None or not sum(steps_s):
        return None
    now = max(1.0, spent_s / (sum(steps_s) / len(steps_s)))
    return load.change(now, now + 1.0)
