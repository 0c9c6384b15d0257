"""Whole runs in virtual time, over networks that lose, double and reorder messages, with workers that die."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.errors import ProtocolError
from distflow.exchange.ledger import RefillsExhausted
from distflow.exchange.settings import LeaseSettings
from distflow.testing.lease_network import SMALL, Crash, LeaseNetwork, Record, Scenario, StuckError


def doom(rate: float, seed: int) -> object:
    def dropped(position: int) -> str:
        return "zero variance" if random.Random(seed * 100_003 + position).random() < rate else ""

    return dropped


def long_tail(seed: int, head_of_line: bool) -> object:
    def seconds(position: int) -> float:
        if head_of_line and position == 0:
            return 100.0
        return random.Random(seed * 7919 + position).lognormvariate(0.0, 0.8)

    return seconds


CRASHES = st.lists(
    st.builds(
        Crash,
        worker=st.integers(1, 4),
        at=st.floats(0.0, 20.0),
        restart_s=st.none() | st.floats(0.0, 20.0),
        noticed=st.just(True),
    )
    | st.builds(
        Crash,
        worker=st.integers(0, 4),
        at=st.floats(0.0, 20.0),
        restart_s=st.floats(0.0, 20.0),
        noticed=st.booleans(),
    ),
    max_size=6,
)


@st.composite
def scenarios(draw: st.DrawFn, *, colocated: bool = False) -> Scenario:
    seed = draw(st.integers(0, 2**20))
    owners = draw(st.integers(1, 4))
    b = draw(st.integers(1, 3))
    limits = replace(
        SMALL,
        groups_per_ledger=b,
        max_staleness=draw(st.integers(0, 3)),
        training_steps=draw(st.integers(1, 5)),
        max_refills=10**6,
        memory_bytes=draw(st.sampled_from([1, 2, 100])) * 400 * b * 4,
        announce_closed=colocated,
    )
    workers = draw(st.integers(1, 5))
    crashes = [crash for crash in draw(CRASHES) if crash.worker < workers] if not colocated else []
    return Scenario(
        limits,
        owners=owners,
        workers=workers,
        groups_at_once=draw(st.integers(1, 6)),
        seconds=long_tail(seed, draw(st.booleans())),
        slowness=lambda number: 20.0 if number == workers - 1 and seed % 3 == 0 else 1.0,
        dropped=doom(draw(st.sampled_from([0.0, 0.1, 0.3, 0.5])), seed),
        crashes=crashes,
        loss=draw(st.sampled_from([0.0, 0.05, 0.3])),
        duplicates=draw(st.sampled_from([0.0, 0.3])),
        delay_s=draw(st.sampled_from([0.001, 0.5, 5.0])),
        colocated=colocated,
        lazy_take=draw(st.booleans()),
        seed=seed,
    )


def expected_steps(limits: LeaseSettings, dropped: object) -> dict[int, set[int]]:
    """The first b positions of each ledger that are not dropped, and the next b, and so on: rule 2, spelt out."""
    steps: dict[int, set[int]] = {step: set() for step in range(limits.training_steps)}
    for ledger in range(limits.ledgers):
        accepted = (p for p in range(ledger, 10**9, limits.ledgers) if not dropped(p))
        for step in steps.values():
            step.update(next(accepted) for _ in range(limits.groups_per_ledger))
    return steps


def check(scenario: Scenario, record: Record) -> None:
    limits = scenario.settings
    assert record.trained == expected_steps(limits, scenario.dropped)
    assert max(record.lags) <= limits.max_staleness
    assert min(record.lags) >= 0
    trained = set().union(*record.trained.values())
    assert not trained & record.dropped.keys()
    terminal = trained | record.dropped.keys()
    for part in record.snapshot["ledgers"]:
        below = {limits.position_of(part["ledger"], k) for k in range(part["frontier"])}
        ahead = {limits.position_of(part["ledger"], k) for k, _ in part["dropped"]}
        assert below | ahead == {p for p in terminal if limits.ledger_of(p) == part["ledger"]}
    assert record.peak_bytes <= limits.memory_bytes


@settings(max_examples=250, derandomize=True, deadline=None)
@given(scenarios())
def test_every_position_ends_once_in_the_same_step_whatever_happens(scenario: Scenario) -> None:
    check(scenario, LeaseNetwork(scenario).run())


@settings(max_examples=120, derandomize=True, deadline=None)
@given(scenarios(colocated=True))
def test_colocated_workers_switch_together_and_never_deadlock(scenario: Scenario) -> None:
    check(scenario, LeaseNetwork(scenario).run())


@settings(max_examples=80, derandomize=True, deadline=None)
@given(scenarios(), st.integers(1, 4), st.integers(1, 4))
def test_a_run_that_stops_and_resumes_trains_the_same_positions(scenario: Scenario, stop: int, owners: int) -> None:
    """Also with another number of owners than before."""
    stop = min(stop, scenario.settings.training_steps)
    first = LeaseNetwork(replace(scenario, stop_at=stop)).run()
    kept = json.loads(json.dumps(first.snapshot))
    assert kept["version"] == stop
    assert sorted(first.trained) == list(range(stop)) or scenario.lazy_take is False
    before = {step: first.trained[step] for step in range(stop)}
    if stop == scenario.settings.training_steps:
        assert before == expected_steps(scenario.settings, scenario.dropped)
        return
    second = LeaseNetwork(replace(scenario, owners=owners, term=1, snapshot=kept, crashes=[])).run()
    assert before | second.trained == expected_steps(scenario.settings, scenario.dropped)
    old = {p for p in first.dropped if _terminal(kept, scenario.settings, p)}
    assert not old & second.dropped.keys(), "a recorded drop happened again"


def _terminal(kept: dict[str, object], limits: LeaseSettings, position: int) -> bool:
    part = kept["ledgers"][limits.ledger_of(position)]
    return limits.k_of(position) < part["frontier"] or limits.k_of(position) in {k for k, _ in part["dropped"]}


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_engine_that_disregards_the_minimum_version_breaks_the_bound_and_is_caught(staleness: int) -> None:
    limits = replace(SMALL, max_staleness=staleness, training_steps=6)
    scenario = Scenario(limits, workers=3, groups_at_once=6, seconds=lambda position: 0.1)
    check(scenario, LeaseNetwork(scenario).run())
    with pytest.raises(ProtocolError, match=r"rollout/\d started position \d+ on version \d .*training step \d with"):
        LeaseNetwork(replace(scenario, obeys_min_version=False)).run()


def test_endless_drops_stop_the_run() -> None:
    scenario = Scenario(replace(SMALL, max_refills=5), dropped=lambda position: "zero variance")
    with pytest.raises(
        RefillsExhausted, match=r"ledger \d: 6 groups were dropped \(zero variance: 6\) while 2 are wanted"
    ):
        LeaseNetwork(scenario).run()


def test_colocated_workers_that_do_not_hear_of_closed_steps_are_stuck() -> None:
    """The announcement is what lets them leave generation."""
    with pytest.raises(StuckError, match="no end by 100 s, version 0 of 3"):
        LeaseNetwork(Scenario(SMALL, colocated=True, limit_s=100)).run()


def test_a_dead_worker_that_nobody_reports_holds_the_run_up() -> None:
    """Leases live as long as their worker's membership, never a fixed time."""
    crash = Crash(worker=0, at=0.5, restart_s=None, noticed=False)
    with pytest.raises(StuckError, match="no end by 100 s"):
        LeaseNetwork(Scenario(SMALL, crashes=[crash], limit_s=100)).run()


def test_parked_asks_are_quiet() -> None:
    """A long group keeps the others idle for 100 s: they do not poll."""
    seconds = long_tail(3, head_of_line=True)
    record = LeaseNetwork(Scenario(replace(SMALL, training_steps=1), workers=4, owners=2, seconds=seconds)).run()
    assert record.seconds > 100
    assert record.messages["ask"] < 120


def test_few_messages_a_group() -> None:
    limits = replace(SMALL, ledgers=8, groups_per_ledger=4, memory_bytes=10**6, training_steps=10)
    record = LeaseNetwork(Scenario(limits, owners=4, workers=8, groups_at_once=4, seconds=long_tail(1, False))).run()
    groups = 10 * 32
    assert sum(record.messages.values()) - record.messages["progress"] < 6 * groups
