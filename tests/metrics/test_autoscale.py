"""How many generating workers a running run should have: decisions, step by step, and against simulated runs."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from distflow.errors import UserError
from distflow.flow.recipe_check import plan_recipe
from distflow.metrics.autoscale import Autoscaler, AutoscaleRule, StepSeen, check_pool
from distflow.metrics.rollout_count import GenerationLoad
from distflow.sim.latency import load
from distflow.sim.lengths import Lognormal
from distflow.sim.predict import Load, Prediction, SimulateOptions, load_of, simulate

_SHIPPED = load("h100-qwen2.5-7b")
DEVICE = replace(_SHIPPED, weights=replace(_SHIPPED.weights, swap_s=0.3, host_bytes_s=5e9))
"""With weights that load as quickly as the steps here are short, which would wait for little else."""
MOST = 10


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
    return simulate(run, DEVICE, Lognormal(300, sigma, 0.5), SimulateOptions(steps=3))


def seen(found: Prediction, stale: bool, rng: random.Random, noise: float) -> StepSeen:
    """A step of a simulated run as its metrics would tell it, with what differs from step to step."""
    making, training = found.pools

    def shaken(share: float) -> float:
        return min(1.0, max(0.0, share * rng.gauss(1.0, noise)))

    decodes, idle = (
        making.shares["decode"] + making.shares["stalled"],
        making.shares["leases"] + making.shares["weights"],
    )
    assert making.slots_used is not None
    assert making.batch_share is not None
    slots = making.slots_used / max(1e-9, decodes)
    waits = shaken(training.shares["first"] + training.shares["later"])
    run = GenerationLoad(waits, shaken(idle), shaken(decodes), 0.0, shaken(slots), making.batch_share, stale)
    return StepSeen(run, found.tokens_s * rng.gauss(1.0, noise))


def follow(
    begin: int, case: tuple[int, int, float], *, steps: int = 200, noise: float = 0.0, seed: int = 0
) -> list[int]:
    """The numbers of workers that a run with the autoscaler goes through."""
    scaler, rng = Autoscaler(AutoscaleRule(most=MOST), begin), random.Random(seed)
    decided = (scaler.see(seen(simulated(*case, scaler.count), case[0] > 0, rng, noise)) for _ in range(steps))
    return [begin, *(decision.count for decision in decided if decision is not None)]


CASES = [(1, 16, 0.8), (0, 16, 0.8), (1, 64, 0.8)]


def wanted(case: tuple[int, int, float]) -> tuple[int, int]:
    """The fewest workers with which a step takes at most 20% more than with the best number, and those with 1%."""
    times = {n: simulated(*case, n).step_s for n in range(1, MOST + 1)}
    low, high = (min(n for n, time in times.items() if time <= more * min(times.values())) for more in (1.2, 1.01))
    # Without staleness what fewer would cost is predicted rather too large, so some stay.
    return low, high if case[0] else MOST


@pytest.mark.parametrize("begin", [1, 3, MOST])
@pytest.mark.parametrize("case", CASES)
def test_it_comes_to_a_good_number_from_below_and_from_above(case: tuple[int, int, float], begin: int) -> None:
    counts = follow(begin, case)
    low, high = wanted(case)
    assert low <= counts[-1] <= high + 3, (counts, low, high)
    assert len(counts) <= 12, counts


@pytest.mark.parametrize("begin", [1, 8])
@pytest.mark.parametrize("case", CASES)
def test_noise_does_not_make_it_go_to_and_fro(case: tuple[int, int, float], begin: int) -> None:
    for seed in range(6):
        counts = follow(begin, case, steps=600, noise=0.08, seed=seed)
        assert len(counts) <= 14, counts
        turns = sum((b - a) * (c - b) < 0 for a, b, c in zip(counts, counts[1:], counts[2:], strict=False))
        assert turns <= 3, counts
        low, high = wanted(case)
        assert low - 1 <= counts[-1] <= high + 3, (counts, low, high)


FULL = GenerationLoad(training_waits=0.6, idle=0.0, generates=1.0, scores=0.0, slots=0.9, batch=0.0, stale=True)
AHEAD = GenerationLoad(training_waits=0.0, idle=0.6, generates=0.4, scores=0.0, slots=0.5, batch=0.0, stale=True)
FIT = GenerationLoad(training_waits=0.0, idle=0.02, generates=0.98, scores=0.0, slots=0.8, batch=0.0, stale=True)


def feed(scaler: Autoscaler, load: GenerationLoad, speed: float, steps: int) -> list[int]:
    """Decisions, as numbers of workers."""
    decided = (scaler.see(StepSeen(load, speed)) for _ in range(steps))
    return [decision.count for decision in decided if decision is not None]


def test_it_waits_for_several_steps_in_a_row_that_say_the_same() -> None:
    scaler = Autoscaler(AutoscaleRule(most=8), 2)
    for _ in range(10):
        assert feed(scaler, FULL, 100.0, 2) == []
        assert feed(scaler, FIT, 100.0, 1) == []
    assert feed(scaler, FULL, 100.0, 3) == [4], "as many again at most"


def test_the_steps_after_a_change_are_not_looked_at() -> None:
    scaler = Autoscaler(AutoscaleRule(most=8), 2)
    assert feed(scaler, FULL, 100.0, 3) == [4]
    assert not scaler.settled
    # Those before the change take effect, then those that show what it brought.
    assert feed(scaler, FULL, 1.0, 3) == []
    assert feed(scaler, FIT, 190.0, 5) == []
    assert scaler.kept == "steps became 47% shorter; 50% shorter was predicted, and half of that is enough"
    assert scaler.settled
    assert feed(scaler, FIT, 190.0, 50) == []
    assert scaler.kept == ""


def test_an_addition_that_brings_nothing_is_taken_back_and_not_tried_again() -> None:
    scaler = Autoscaler(AutoscaleRule(most=8), 4)
    assert feed(scaler, FULL, 100.0, 3) == [8]
    decision = [scaler.see(StepSeen(FULL, 100.0)) for _ in range(8)][-1]
    assert decision is not None
    assert (decision.count, decision.why) == (
        4,
        "taken back: with 8, steps took as long as before; 50% shorter was predicted, and half of that is asked for",
    )
    # It learns by one at a time what is possible, and then stays.
    assert feed(scaler, FULL, 100.0, 11) == [5]
    assert feed(scaler, FULL, 100.0, 5) == [4]
    assert feed(scaler, FULL, 100.0, 100) == []


def test_a_bound_is_forgotten_when_the_promise_has_doubled() -> None:
    little = replace(FULL, training_waits=0.06)
    scaler = Autoscaler(AutoscaleRule(most=5), 4)
    assert feed(scaler, little, 100.0, 11) == [5, 4]
    assert feed(scaler, little, 100.0, 50) == []
    assert feed(scaler, FULL, 100.0, 3) == [5]


def test_a_removal_that_costs_is_taken_back() -> None:
    scaler = Autoscaler(AutoscaleRule(), 4)
    assert feed(scaler, AHEAD, 100.0, 3) == [2]
    assert feed(scaler, AHEAD, 50.0, 8) == [4]
    assert feed(scaler, AHEAD, 100.0, 50) == [3], "one at a time, and not below what has cost"
    assert feed(scaler, AHEAD, 100.0, 100) == []


def shown(load: GenerationLoad, speeds: list[float], begin: int) -> list[str]:
    """What is said of steps with such speeds."""
    scaler, said = Autoscaler(AutoscaleRule(most=8), begin), []
    for speed in speeds:
        decision = scaler.see(StepSeen(load, speed))
        said += [text for text in (scaler.kept, "" if decision is None else decision.why) if text]
    return said


def test_a_line_says_by_which_rule_a_change_stays() -> None:
    wild = [60.0, 100.0, 140.0] * 8
    assert shown(AHEAD, [100.0, 100.0, 100.0, *[99.0] * 8], 4) == [
        "workers wait 60% of the time and use 50% of their slots while they decode; with 2, steps should take as long "
        "as now",
        "steps became 1% longer; up to 5% longer is accepted",
    ]
    # Steps that vary much are looked at for longer; what is not clear then stays.
    removed = shown(AHEAD, [60.0, 100.0, 140.0, *(0.9 * speed for speed in wild[:23])], 4)
    told = "up to 5% longer is accepted, and this is not clearly more"
    assert removed[1] == f"steps became 11% longer, give or take 26%; {told}"
    added = shown(FULL, [60.0, 100.0, 140.0, *wild[:23]], 4)
    told = "50% shorter was predicted, and this is not clearly less than half of it"
    assert added[1] == f"steps took as long as before, give or take 26%; {told}"
    costly = shown(AHEAD, [100.0, 100.0, 100.0, *[50.0] * 8], 4)
    assert costly[1] == "taken back: with 2, steps became 100% longer; up to 5% longer is accepted"


def test_what_one_worker_promises_and_two_do_not_need_does_not_go_to_and_fro() -> None:
    """With one, the next promises much; with two, one could be done without: predictions alone would never end."""
    for seed in range(20):
        rng, scaler, counts = random.Random(seed), Autoscaler(AutoscaleRule(most=4), 2), [2]
        for _ in range(400):
            load = replace(FULL, training_waits=0.35) if scaler.count == 1 else AHEAD
            decision = scaler.see(StepSeen(load, 100.0 * rng.lognormvariate(0.0, 0.4)))
            counts += [] if decision is None else [decision.count]
        assert counts in ([2, 1], [2, 1, 2]), counts


def test_it_stays_within_its_bounds() -> None:
    scaler = Autoscaler(AutoscaleRule(least=3, most=3), 2)
    decision = scaler.begin()
    assert decision is not None
    assert (decision.count, decision.why) == (3, "--min 3")
    assert feed(scaler, FULL, 100.0, 50) == []
    assert feed(scaler, AHEAD, 100.0, 50) == []
    assert Autoscaler(AutoscaleRule(), 2).begin() is None


def test_what_a_run_refuses_is_not_asked_for_again() -> None:
    scaler = Autoscaler(AutoscaleRule(most=8), 2)
    assert feed(scaler, FULL, 100.0, 3) == [4]
    scaler.refused(2)
    assert scaler.count == 2
    assert feed(scaler, FULL, 100.0, 100) == []


def test_a_number_that_somebody_else_has_set_is_where_it_goes_on() -> None:
    scaler = Autoscaler(AutoscaleRule(most=8), 2)
    scaler.found(5)
    assert feed(scaler, FIT, 100.0, 20) == []
    assert feed(scaler, FULL, 100.0, 3) == [8]


def test_only_the_pool_that_generates_for_training_goes_by_itself() -> None:
    _, plan = plan_recipe("quickstart", ["layout=services", "flow=grpo_kl"], need_files=False)
    check_pool(plan, "rollout")
    with pytest.raises(
        UserError, match=r"scale reward=auto: only for a pool that alone generates .* \(here: rollout\)"
    ):
        check_pool(plan, "reward")
