"""Holders that are not heard of any more, and of which nobody says that they are lost: their host has no power."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from msgspec import structs

from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.messages import Ack, Cancel
from distflow.exchange.owner import OwnerCore
from distflow.sim.scenario import Crash
from distflow.types import Version
from tests.exchange.lease_asker import Asker, granted, leases, new_owner
from tests.exchange.test_lease_properties import doom, long_tail
from tests.search.lease_faults import check
from tests.search.lease_network import FaultyNetwork
from tests.search.lease_scenario import SMALL, FaultScenario, Pause

SILENCE_S = 10.0
PLAIN = replace(SMALL, hedging=False, host_silence_s=SILENCE_S)
BUDGET_S = 3.0
SEEDS_AT_LEAST = 15


def pass_time(owner: OwnerCore, begin: float, end: float) -> list[object]:
    """Ticks as they come; returns what they sent."""
    out: list[object] = []
    for quarter in range(int(4 * begin) + 1, int(4 * end) + 1):
        out += owner.tick(quarter / 4)
    return out


def test_without_hedging_too_a_silent_host_loses_its_leases_and_late_results_are_welcome() -> None:
    owner = new_owner(PLAIN)
    silent, other = Asker(owner, "rollout/0"), Asker(owner, "rollout/1")
    assert leases(silent.ask(8)) == {"rollout/0": list(range(8))}
    other.ask(3)
    assert granted(pass_time(owner, 0.0, SILENCE_S - 0.25)) != [], "an unconfirmed grant is sent again"
    assert owner.lapsed == []
    again = [item for item in pass_time(owner, SILENCE_S - 0.25, SILENCE_S) if item.to == "rollout/1"]
    assert [(lease.position, lease.attempt) for lease in granted(again)] == [(0, 2), (1, 2), (2, 2)]
    assert owner.lapsed == [("rollout/0", 8)]

    late = owner.handle(silent.result(0), 30.0)
    assert [(item.to, type(item.message)) for item in late] == [("rollout/0", Ack), ("rollout/1", Cancel)]
    assert owner.open_leases()[0].position == 1
    assert owner.keeps(silent.result(5))
    silent.progress([], now=31.0)
    back = owner.handle(structs.replace(silent.result(1), oldest=Version(0, 0)), 31.0)
    assert back[0].message == Ack("trainer/0", 0, 0, (1,))


def test_who_comes_back_goes_on_with_what_nobody_has_finished() -> None:
    owner = new_owner(PLAIN)
    silent = Asker(owner, "rollout/0")
    silent.ask(2)
    pass_time(owner, 0.0, 20.0)
    assert [lease.workers for lease in owner.open_leases()] == [(), ()]
    silent.ask(1, held=(0, 1), seen=1, now=21.0)
    assert [lease.workers for lease in owner.open_leases()][:2] == [("rollout/0",)] * 2


def test_a_holder_that_is_heard_keeps_its_leases_however_long_they_take() -> None:
    owner = new_owner(PLAIN)
    slow = Asker(owner, "rollout/0")
    slow.ask(2)
    for second in range(1, 60, 9):
        slow.ask(0, held=(0, 1), seen=1, now=float(second))
        pass_time(owner, second, second + 8.75)
    assert [lease.workers for lease in owner.open_leases()] == [("rollout/0",)] * 2
    assert owner.lapsed == []


def test_an_owner_that_stood_still_itself_does_not_take_that_for_silence() -> None:
    owner = new_owner(PLAIN)
    Asker(owner, "rollout/0").ask(2)
    pass_time(owner, 0.0, 1.0)
    owner.tick(500.0)
    assert [lease.workers for lease in owner.open_leases()] == [("rollout/0",)] * 2
    owner.tick(501.0)
    assert owner.lapsed == []
    pass_time(owner, 501.0, 520.0)
    assert owner.lapsed == [("rollout/0", 2)]


def scenario(seed: int, limits: LeaseSettings) -> FaultScenario:
    """Workers that die without a word or stand still for long, on a network that loses and doubles messages."""
    rng = random.Random(seed)
    workers = rng.randint(2, 5)
    b = rng.randint(1, 3)
    return FaultScenario(
        replace(
            limits,
            groups_per_ledger=b,
            max_staleness=rng.choice([0, 1, None]),
            training_steps=rng.randint(1, 5),
            max_refills=10**6,
            partial_rollouts=rng.random() < 0.5,
            hedging=rng.random() < 0.3,
            memory_bytes=rng.choice([1, 100]) * 400 * b * 4,
        ),
        owners=rng.randint(1, 4),
        workers=workers,
        slots=4 * rng.randint(1, 6),
        seconds=long_tail(seed, head_of_line=rng.random() < 0.3),
        dropped=doom(rng.choice([0.0, 0.3]), seed),
        crashes=[
            Crash(worker, rng.uniform(0.0, 20.0), restart_s=None, noticed=False)
            for worker in range(1, workers)
            if rng.random() < 0.5
        ],
        pauses=[Pause(0, rng.uniform(0.0, 20.0), rng.uniform(5.0, 40.0))],
        tokens=rng.choice([1, 40]),
        loss=rng.choice([0.0, 0.3]),
        duplicates=rng.choice([0.0, 0.3]),
        delay_s=rng.choice([0.01, 5.0]),
        seed=seed,
    )


def test_every_position_is_trained_once_when_hosts_fall_silent() -> None:
    began, seed = time.perf_counter(), 0
    while seed < SEEDS_AT_LEAST or time.perf_counter() - began < BUDGET_S:
        one = scenario(seed, PLAIN)
        check(one, FaultyNetwork(one).run())
        seed += 1


@pytest.mark.long
def test_every_position_is_trained_once_when_hosts_fall_silent_for_many_seeds() -> None:
    for seed in range(1_000):
        one = scenario(seed, PLAIN)
        check(one, FaultyNetwork(one).run())
