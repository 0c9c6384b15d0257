"""The schedule model beside its own formulas and simulations, and the theory of asynchrony beside a search."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product

import pytest

from distflow.flow.recipe_check import plan_recipe
from distflow.sim.fluid_engine import ONE_TURN, SampleTurns
from distflow.sim.latency import DecodeLatency, DeviceLatency, TrainLatency, WeightLatency, load
from distflow.sim.lengths import Lognormal, Trace
from distflow.sim.predict import SimulateOptions, load_of, simulate
from distflow.sim.schedule_of import schedule_of
from distflow.sim.theory import LengthMoments, Schedule, Side, TheoryFleet, ideal_s, schedule, speed_up

DEVICE = DeviceLatency(
    "device", "model", (), DecodeLatency(0.008, 0.00025), TrainLatency(1 / 5700, apply_s=1.0), WeightLatency(1e9)
)
PLAN = Schedule(20, 12, 64, 288, 8, 200, 1, transfer_s=1.5, update_s=1.0)
HEAVY = LengthMoments.of(Lognormal(900, 1.1, 0.6), 16_384)


def instance(rng: random.Random) -> tuple[TheoryFleet, Side, Side]:
    """Times fall from 2 s or less towards a floor as batches grow."""

    def side() -> Side:
        floor, extra = rng.uniform(0.01, 1.0), rng.uniform(0.0, 1.0)
        return Side(rng.uniform(1, 400), rng.uniform(0.01, 5.0), lambda batch: floor + extra / batch)

    return TheoryFleet(2 ** rng.randint(0, 8), rng.uniform(20, 200), rng.randint(1, 512)), side(), side()


def test_asynchrony_is_never_slower_in_theory() -> None:
    rng, fits = random.Random(0), 0
    for _ in range(10_000):
        fleet, train, generate = instance(rng)
        found = speed_up(fleet, train, generate)
        if found is not None:
            fits += 1
            assert found.async_s <= found.sync_s * (1 + 1e-12)
            assert 0 < found.training_share < 1
    assert fits > 5_000


def test_the_best_choice_is_that_of_a_search_over_all() -> None:
    rng, fits = random.Random(1), 0
    for _ in range(60):
        fleet, train, generate = instance(rng)
        fleet = replace(fleet, samples=rng.randint(1, 12))
        widths, batches = [2**i for i in range(9) if 2**i <= fleet.devices], range(1, fleet.samples + 1)
        both = [
            m * (train.seconds(a) + generate.seconds(b))
            for m, a, b in product(widths, batches, batches)
            if train.weights + generate.weights + max(a * train.sample, b * generate.sample) <= m * fleet.memory
        ]
        found = speed_up(fleet, train, generate)
        assert (found is None) == (not both)
        if found is None:
            continue
        fits += 1
        each = [
            min(
                m * side.seconds(b)
                for m, b in product(widths, batches)
                if side.weights + b * side.sample <= m * fleet.memory
            )
            for side in (train, generate)
        ]
        scale = fleet.samples / fleet.devices
        assert found.sync_s == pytest.approx(scale * min(both))
        # Shares of all devices that take equally long: neither waits for the other.
        shares = [found.training_share, 1 - found.training_share]
        times = [scale * one / share for one, share in zip(each, shares, strict=True)]
        assert found.async_s == pytest.approx(times[0]) == pytest.approx(times[1])
    assert fits > 20


def test_moments_of_a_distribution() -> None:
    known = LengthMoments.of(Lognormal(1000, 0.5, 0.36), 10**6)
    assert known.mean == pytest.approx(1000 * math.exp(0.125), rel=0.01)
    assert known.cv == pytest.approx(math.sqrt(math.exp(0.25) - 1), rel=0.05)
    assert known.prompt_share == pytest.approx(0.36, abs=0.02)
    assert known.quantile(0.5) == pytest.approx(1000, rel=0.01)
    alike = LengthMoments.of(Trace([[7, 7], [7, 7]]), 100)
    assert (alike.mean, alike.cv, alike.prompt_share, alike.above(7), alike.above(8)) == (7, 0, 0, 1, 0)


def test_more_staleness_never_makes_a_step_longer_and_none_is_faster_than_ideal() -> None:
    times = [schedule(replace(PLAN, staleness=s), DEVICE, HEAVY).step_s for s in (0, 1, 2, 4)]
    assert times == sorted(times, reverse=True)
    assert times[-1] >= ideal_s(PLAN, DEVICE, HEAVY)
    assert times[0] > 1.5 * times[1]


def test_a_step_is_at_least_what_bounds_it() -> None:
    for replicas, engines, staleness in product((2, 12, 64), (4, 20, 200), (0, 2)):
        plan = replace(PLAN, replicas=replicas, engines=engines, staleness=staleness, prompts=576)
        found = schedule(plan, DEVICE, HEAVY)
        bounds = (found.train_s, found.rate_s, found.critical_s)
        assert max(bounds) <= found.step_s * 1.001 <= 1.2 * max(bounds)


def test_replicas_that_keep_their_own_groups_wait_for_the_unluckiest() -> None:
    apart = schedule(replace(PLAN, balanced=False, staleness=4), DEVICE, HEAVY)
    assert apart.train_s > 1.1 * schedule(replace(PLAN, staleness=4), DEVICE, HEAVY).train_s


MODELS = {
    "shipped": load("h100-qwen2.5-1.5b"),
    "slow batches": replace(DEVICE, train=TrainLatency(1e-5, latency_s=20.0)),
    "slow engine": replace(DEVICE, decode=DecodeLatency(0.02, 0.001, 1e-6)),
    "slow training": replace(DEVICE, train=TrainLatency(1e-3, 1e-7, latency_s=0.003, apply_s=0.1)),
    "small": DeviceLatency(
        "CPU", "tiny", (), DecodeLatency(5e-4, 9e-6), TrainLatency(1.5e-5, latency_s=0.0034), WeightLatency(5e5)
    ),
}
LAYOUTS = {
    "split": ("layout=split",),
    "async": ("layout=async", "layout.pools.rollout.count=1", "layout.max_staleness=2"),
    "several trainers": ("layout=async", "layout.pools.trainer.count=4", "layout.pools.rollout.count=3"),
    "colocated": ("layout=colocated",),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("turns", [ONE_TURN, SampleTurns(100, 0.05)], ids=["one turn", "turns"])
def test_no_simulated_step_is_shorter_than_ideal(layout: str, model: str, turns: SampleTurns) -> None:
    """And the schedule model is near it, be it bounded by the latency of batches, by environments, or by neither."""
    words = (*LAYOUTS[layout], "flow.steps.sample.with.max_new_tokens=400", "batch.prompts=16")
    _, plan = plan_recipe("quickstart", words, need_files=False)
    work, device, lengths = load_of(plan), MODELS[model], Lognormal(300, 0.3)
    work = replace(work, job=replace(work.job, turns=turns))
    step_s = simulate(work, device, lengths, SimulateOptions(steps=3)).step_s
    step, moments = schedule_of(work, device), LengthMoments.of(lengths, work.job.response_tokens)
    assert ideal_s(step, device, moments) <= step_s
    assert 0.55 <= schedule(step, device, moments).step_s / step_s <= 1.3


def test_a_training_worker_has_at_least_one_batch_a_step() -> None:
    """Of 256 rows of 12 tokens, which fill 38% of one."""
    _, plan = plan_recipe("quickstart", ["layout=async"], need_files=False)
    work, device, lengths = load_of(plan), MODELS["slow batches"], Lognormal(900, 0.0)
    step_s = simulate(work, device, lengths, SimulateOptions(steps=3)).step_s
    step, moments = schedule_of(work, device), LengthMoments.of(lengths, work.job.response_tokens)
    assert schedule(step, device, moments).step_s == pytest.approx(step_s, rel=0.15)


def test_environments_are_work_between_the_turns_of_a_sample() -> None:
    """250 tokens in turns of 100: two environments, and none after the last turn."""
    alike = LengthMoments.of(Trace([[250]]), 1000)
    with_turns = replace(PLAN, turns=SampleTurns(100, 0.5))
    more_s = ideal_s(with_turns, DEVICE, alike) - ideal_s(PLAN, DEVICE, alike)
    assert more_s == pytest.approx(288 * 8 * 2 * 0.5 / (20 + 12))
    assert schedule(with_turns, DEVICE, alike).rate_s > 288 * 8 * 2 * 0.5 / 20
