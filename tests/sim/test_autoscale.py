"""How many generating workers a running run should have: decisions, step by step, and against simulated runs."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from distflow.data.rollout_count import GenerationLoad
from distflow.flow.recipe_check import plan_recipe
from distflow.sim.autoscale import Autoscaler, AutoscaleRule, StepSeen
from distflow.sim.latency import load
from distflow.sim.lengths import Lognormal
from distflow.sim.predict import Load, Prediction, SimulateOptions, load_of, simulate

DEVICE = load("h100-qwen2.5-7b")
MOST = 16


@cache
def plan_load(staleness: int, slots: int) -> Load:
    words = [
        "layout=async",
        f"layout.max_staleness={staleness}",
        f"layout.pools.rollout.slots={slots}",
        "models.policy.init.max_position_embeddings=4096",
        "flow.steps.sample.with.max_new_tokens=1024",
        "batch={prompts: 16, samples_per_prompt: 8, ledgers: 8}",
    ]
    _, plan = plan_recipe("quickstart", words, need_files=False)
    return load_of(plan)


@cache
def simulated(staleness: int, slots: int, sigma: float, rollouts: int) -> Prediction:
    run = replace(plan_load(staleness, slots), rollouts=rollouts)
    return simulate(run, DEVICE, Lognormal(300, sigma, 0.5), SimulateOptions(steps=4))


def seen(found: Prediction, stale: bool, rng: random.Random, noise: float) -> StepSeen:
    """A step of a simulated run as its metrics would tell it, with what differs from step to step."""
    making, training = found.pools

    def shaken(share: float) -> float:
        return min(1.0, max(0.0, share * rng.gauss(1.0, noise)))

    decodes = making.shares["decode"]
    assert making.slots_used is not None
    slots = making.slots_used / max(1e-9, decodes + making.shares["stalled"])
    waits = shaken(training.shares["first"] + training.shares["later"])
    run = GenerationLoad(waits, shaken(1.0 - decodes), shaken(decodes), 0.0, shaken(slots), stale)
    return StepSeen(run, found.tokens_s * rng.gauss(1.0, noise))


def follow(
    begin: int, case: tuple[int, int, float], *, steps: int = 200, noise: float = 0.0, seed: int = 0
) -> list[int]:
    """The numbers of workers that a run with the autoscaler goes through."""
    scaler, rng = Autoscaler(AutoscaleRule(most=MOST), begin), random.Random(seed)
    decided = (scaler.see(seen(simulated(*case, scaler.count), case[0] > 0, rng, noise)) for _ in range(steps))
    return [begin, *(decision.count for decision in decided if decision is not None)]


CASES = [(1, 16, 0.8), (0, 16, 0.8), (2, 16, 0.3), (1, 64, 0.8), (1, 16, 1.2)]


def wanted(case: tuple[int, int, float]) -> tuple[int, int]:
    """The fewest workers with which a step takes at most 20% more than with the best number, and those with 1%."""
    times = {n: simulated(*case, n).step_s for n in range(1, MOST + 1)}
    quickest = min(times.values())
    return tuple(min(n for n, time in times.items() if time <= more * quickest) for more in (1.2, 1.01))  # type: ignore[return-value]


@pytest.mark.parametrize("begin", [1, 3, MOST])
@pytest.mark.parametrize("case", CASES)
def test_it_comes_to_a_good_number_from_below_and_from_above(case: tuple[int, int, float], begin: int) -> None:
    counts = follow(begin, case)
    low, high = wanted(case)
    assert low <= counts[-1] <= high + 3, (counts, low, high)
    assert len(counts) <= 12, counts
