"""What most systems do: each of N generating workers gets an equal part of every training step's prompts beforehand.

The same emulated engine as in the runs it is compared with, one thread a worker, with one step of prefetching
(staleness 1): a worker may be one training step ahead of the slowest one, as far as its own part goes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from distflow.runtime.protocols import EngineSpec
from distflow.testing.emulated import EmulatedEngine
from distflow.testing.engine_harness import WholeGroup, submit
from distflow.types import SamplingParams, Version

AHEAD = 1
WARMUP = 4
LIMIT_S = 600.0


class _Progress:
    """Which training step each worker has generated its part for."""

    def __init__(self, workers: int) -> None:
        self.condition = threading.Condition()
        self.done = [0] * workers

    def may_begin(self, step: int) -> bool:
        return step <= min(self.done) + AHEAD


def static_step_s(
    engine: Mapping[str, float | str], speeds: Sequence[float], *, prompts: int, samples: int, limit: int, steps: int
) -> float:
    """Mean seconds of a training step, the first ones excluded. `speeds`: how much slower each worker is."""
    progress = _Progress(len(speeds))
    ends: list[float] = []

    def work(worker: int, slow: float) -> None:
        spec = EngineSpec(model={}, device="cpu", slots=64, max_tokens=0, seed=0, options={**engine, "slow": slow})
        mine = EmulatedEngine(spec)
        mine.begin_update(Version(0, 0))
        mine.end_update()
        for step in range(steps):
            with progress.condition:
                assert progress.condition.wait_for(lambda step=step: progress.may_begin(step), LIMIT_S), "stuck"
            _generate(mine, range(step * prompts + worker, (step + 1) * prompts, len(speeds)), samples, limit)
            with progress.condition:
                progress.done[worker] = step + 1
                if min(progress.done) > len(ends):
                    ends.append(time.perf_counter())
                progress.condition.notify_all()

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(speeds)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return (ends[-3] - ends[WARMUP - 1]) / (len(ends) - WARMUP - 2)


def _generate(engine: EmulatedEngine, positions: range, samples: int, limit: int) -> None:
    params = SamplingParams(max_new_tokens=limit)
    waiting = [WholeGroup(position, (1, 2), samples, 0, params) for position in positions]
    while waiting or engine.progress():
        while waiting and engine.free_slots >= samples:
            submit(engine, [waiting.pop(0)])
        engine.poll()
