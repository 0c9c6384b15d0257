"""How well one more generating worker, or one fewer, is predicted: by the formula, beside simulations of both.

    python -m benchmarks.rollout_count            # 126 pairs of simulations: some minutes of a core

Of 32 groups of 8 samples on 2 training workers, with the latency model of a 7B model. What the formula knows is what a
run measures.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from distflow.data.rollout_count import GenerationLoad
from distflow.flow.recipe_check import plan_recipe
from distflow.sim.latency import load
from distflow.sim.lengths import Lognormal
from distflow.sim.predict import Load, Prediction, SimulateOptions, load_of, simulate

DEVICE = load("h100-qwen2.5-7b")
COUNTS = (1, 2, 3, 4, 6, 8, 9)
LENGTHS = ((400, 0.3), (300, 0.8), (400, 1.1))
"""Median in tokens, and standard deviation of the logarithm."""


@cache
def load_with(staleness: int, slots: int) -> Load:
    """What the recipe asks of its devices."""
    words = (
        "layout=async",
        f"layout.max_staleness={staleness}",
        f"layout.pools.rollout.slots={slots}",
        "layout.pools.trainer.count=2",
        "models.policy.init.max_position_embeddings=32768",
        "flow.steps.sample.with.max_new_tokens=2048",
    )
    _, plan = plan_recipe("quickstart", words, need_files=False)
    return load_of(plan)


@cache
def simulated(staleness: int, slots: int, median: float, sigma: float, rollouts: int) -> Prediction:
    """One simulation."""
    run = replace(load_with(staleness, slots), rollouts=rollouts)
    return simulate(run, DEVICE, Lognormal(median, sigma, 0.5), SimulateOptions())


def measured(found: Prediction, *, stale: bool) -> GenerationLoad:
    """What a run would measure."""
    making, training = found.pools
    decodes = making.shares["decode"]
    assert making.slots_used is not None, "a generating pool has slots"
    slots = making.slots_used / max(1e-9, decodes + making.shares["stalled"])
    waits = training.shares["first"] + training.shares["later"]
    return GenerationLoad(waits, 1.0 - decodes, decodes, 0.0, slots, stale)


def errors() -> Iterator[tuple[float, float]]:
    """Of one more and of one fewer: predicted minus simulated change of the step time."""
    for staleness, (median, sigma), slots, count in product((0, 1, 2), LENGTHS, (16, 64), COUNTS):
        few, more = (simulated(staleness, slots, median, sigma, n) for n in (count, count + 1))
        up = measured(few, stale=staleness > 0).change(count, count + 1) - (more.step_s / few.step_s - 1)
        down = measured(more, stale=staleness > 0).change(count + 1, count) - (few.step_s / more.step_s - 1)
        yield up, down


def main() -> None:
    """Print the errors."""
    for name, found in zip(("one more", "one fewer"), zip(*errors(), strict=True), strict=True):
        sizes = [abs(one) for one in found]
        print(
            f"{name:10s} {len(found)} pairs: mean error {statistics.mean(sizes):.3f} of a step, "
            f"mean {statistics.mean(found):+.3f}, largest {max(sizes):.3f}"
        )


if __name__ == "__main__":
    main()
