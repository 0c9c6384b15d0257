"""Prediction of one more or one fewer generating worker: the formula beside simulations.

    python -m benchmarks rollout_count            # 168 pairs of simulations: some minutes of a core

Of 32 groups of 8 samples on 2 training workers, with the latency model of a 7B model, all on one host; and of longer
samples on 4 training workers, with more slots than there are samples. What the formula knows is what a run measures.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

from distflow.flow.recipe_check import plan_recipe
from distflow.metrics.rollout_count import GenerationLoad
from distflow.sim.latency import load
from distflow.sim.lengths import Lognormal
from distflow.sim.predict import Load, Prediction, SimulateOptions, load_of, simulate

DEVICE = load("h100-qwen2.5-7b")
COUNTS = (1, 2, 3, 4, 6, 8, 9)
LENGTHS = ((400, 0.3), (300, 0.8), (400, 1.1))
"""Median in tokens, and standard deviation of the logarithm."""
LONG = ((2_000, 0.3), (1_500, 0.9))
"""The same of samples whose contexts make a decode step with all of them two to three times as long."""
MANY = 512
"""Slots: twice the samples of a training step."""


@cache
def load_with(staleness: int, slots: int) -> Load:
    """What the recipe asks of its devices."""
    tokens, trainers = (8_192, 4) if slots == MANY else (2_048, 2)
    words = (
        "layout=async",
        f"layout.max_staleness={staleness}",
        f"layout.pools.rollout.slots={slots}",
        f"layout.pools.trainer.count={trainers}",
        "models.policy.init.max_position_embeddings=32768",
        f"flow.steps.sample.with.max_new_tokens={tokens}",
    )
    _, plan = plan_recipe("quickstart", words, need_files=False)
    return replace(load_of(plan), one_host=True)


@cache
def simulated(staleness: int, slots: int, median: float, sigma: float, rollouts: int) -> Prediction:
    """One simulation."""
    run = replace(load_with(staleness, slots), rollouts=rollouts)
    return simulate(run, DEVICE, Lognormal(median, sigma, 0.5), SimulateOptions())


def measured(found: Prediction, *, stale: bool) -> GenerationLoad:
    """What a run would measure."""
    making, training = found.pools
    decodes, idle = (
        making.shares["decode"] + making.shares["stalled"],
        making.shares["leases"] + making.shares["weights"],
    )
    assert making.slots_used is not None, "a generating pool has slots"
    assert making.batch_share is not None, "a generating pool has batches"
    waits = training.shares["first"] + training.shares["later"]
    slots = making.slots_used / max(1e-9, decodes)
    return GenerationLoad(waits, idle, decodes, 0.0, slots, making.batch_share, stale)


def errors(lengths: Sequence[tuple[float, float]], all_slots: Sequence[int]) -> Iterator[tuple[float, float]]:
    """Of one more and of one fewer: predicted minus simulated change of the step time."""
    for staleness, (median, sigma), slots, count in product((0, 1, 2), lengths, all_slots, COUNTS):
        few, more = (simulated(staleness, slots, median, sigma, n) for n in (count, count + 1))
        up = measured(few, stale=staleness > 0).change(count, count + 1) - (more.step_s / few.step_s - 1)
        down = measured(more, stale=staleness > 0).change(count + 1, count) - (few.step_s / more.step_s - 1)
        yield up, down


def main() -> None:
    """Print the errors."""
    for lengths, slots in ((LENGTHS, (16, 64)), (LONG, (MANY,))):
        both = zip(*errors(lengths, slots), strict=True)
        for name, found in zip(("one more", "one fewer"), both, strict=True):
            sizes = [abs(one) for one in found]
            print(
                f"{'or '.join(f'{n} ' for n in slots)}slots, {name:10s} {len(found)} pairs: mean error "
                f"{statistics.mean(sizes):.3f} of a step, mean {statistics.mean(found):+.3f}, largest {max(sizes):.3f}"
            )
