"""Whole runs in virtual time, over networks that lose, double and reorder messages, with workers that die.

Random ones of all kinds are in `tests/search/test_faults.py`.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.config.schema import Schedule
from distflow.errors import ProtocolError
from distflow.exchange.intake_core import IntakeCall
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.ledger import RefillsExhausted
from distflow.exchange.rollout_core import RolloutCore, Turn
from distflow.sim import worker
from distflow.sim.event_queue import StuckError
from distflow.sim.scenario import Crash
from distflow.types import Version
from tests.budget import within
from tests.search.lease_faults import check, check_steps
from tests.search.lease_network import FaultyNetwork
from tests.search.lease_scenario import SMALL, FaultScenario, Leave, Pause


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


PAUSES = st.lists(
    st.builds(Pause, worker=st.integers(0, 4), at=st.floats(0.0, 20.0), seconds=st.floats(1.0, 40.0)), max_size=3
)
SCHEDULES = get_args(Schedule)
HERE = IntakeCall("old_logprobs", in_window=True, here=True)
CALLS = [(), (IntakeCall("reference"),), (IntakeCall("values", in_window=True), IntakeCall("reference"), HERE), (HERE,)]
LEAVES = st.lists(st.builds(Leave, worker=st.integers(1, 4), at=st.floats(0.0, 20.0)), max_size=2)


@st.composite
def scenarios(draw: st.DrawFn) -> FaultScenario:
    seed = draw(st.integers(0, 2**20))
    owners = draw(st.integers(1, 4))
    b = draw(st.integers(1, 3))
    staleness = draw(st.integers(0, 3) | st.none())
    limits = replace(
        SMALL,
        groups_per_ledger=b,
        max_staleness=staleness,
        schedule="fifo" if staleness is None else draw(st.sampled_from(SCHEDULES)),
        training_steps=draw(st.integers(1, 5)),
        max_refills=10**6,
        hedging=draw(st.booleans()),
        silence_s=draw(st.sampled_from([1.5, 5.0])),
        partial_rollouts=draw(st.booleans()),
        memory_bytes=draw(st.sampled_from([1, 2, 100])) * 400 * b * 4,
        message_bytes=draw(st.sampled_from([1, 1000, 4 << 20])),
    )
    workers = draw(st.integers(1, 5))
    crashes = [crash for crash in draw(CRASHES) if crash.worker < workers]
    return FaultScenario(
        limits,
        owners=owners,
        workers=workers,
        slots=4 * draw(st.integers(1, 6)),
        seconds=long_tail(seed, draw(st.booleans())),
        slowness=lambda number: 20.0 if number == workers - 1 and seed % 3 == 0 else 1.0,
        dropped=doom(draw(st.sampled_from([0.0, 0.1, 0.3, 0.5])), seed),
        crashes=crashes,
        pauses=[pause for pause in draw(PAUSES) if pause.worker < workers],
        leaves=[leave for leave in draw(LEAVES) if leave.worker < workers],
        tokens=draw(st.sampled_from([1, 7, 40])),
        loss=draw(st.sampled_from([0.0, 0.05, 0.3])),
        duplicates=draw(st.sampled_from([0.0, 0.3])),
        delay_s=draw(st.sampled_from([0.001, 0.5, 5.0])),
        lazy_take=draw(st.booleans()),
        read_s=draw(st.sampled_from([0.0, 3.0])),
        stealing=draw(st.booleans()),
        dealing=draw(st.booleans()),
        budget=draw(st.sampled_from([1, 100, 10**6])),
        batch_s=draw(st.sampled_from([lambda number: 0.0, lambda number: 0.7, lambda number: 3.0 * (number == 0)])),
        calls=draw(st.sampled_from(CALLS)),
        answer_s=draw(st.sampled_from([0.0, 4.0])),
        seed=seed,
    )


@settings(max_examples=80, derandomize=True)
@given(scenarios(), st.integers(1, 4), st.integers(1, 4))
@within(4, examples=80)
def test_a_run_that_stops_and_resumes_trains_the_same_positions(
    scenario: FaultScenario, stop: int, owners: int
) -> None:
    """Also with another number of owners than before."""
    stop = min(stop, scenario.settings.training_steps)
    first = FaultyNetwork(replace(scenario, stop_at=stop)).run()
    kept = json.loads(json.dumps(first.snapshot))
    assert kept["version"] == stop
    assert sorted(first.trained) == list(range(stop)) or scenario.lazy_take is False
    before = {step: first.trained[step] for step in range(stop)}
    if stop == scenario.settings.training_steps:
        check_steps(scenario, before)
        return
    second = FaultyNetwork(replace(scenario, owners=owners, term=1, snapshot=kept, crashes=[])).run()
    check_steps(scenario, before | second.trained)
    old = {p for p in first.dropped if _terminal(kept, scenario.settings, p)}
    assert not old & second.dropped.keys(), "a recorded drop happened again"


def _terminal(kept: dict[str, object], limits: LeaseSettings, position: int) -> bool:
    part = kept["ledgers"][limits.ledger_of(position)]
    return limits.k_of(position) < part["frontier"] or limits.k_of(position) in {k for k, _ in part["dropped"]}


class Hasty(RolloutCore):
    """Starts groups on any weights of their term."""

    def turn(self, free_slots: int, running_on: Version | None, *state: Any) -> Turn:
        assert running_on is not None
        return super().turn(free_slots, running_on._replace(number=10**6), *state)


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_engine_that_disregards_the_minimum_version_breaks_the_bound_and_is_caught(
    monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    limits = replace(SMALL, max_staleness=staleness, training_steps=6)
    scenario = FaultScenario(limits, workers=3, slots=24, seconds=lambda position: 0.1)
    check(scenario, FaultyNetwork(scenario).run())
    monkeypatch.setattr(worker, "RolloutCore", Hasty)
    with pytest.raises(ProtocolError, match=r"rollout/\d started position \d+ on version \d .*training step \d with"):
        FaultyNetwork(scenario).run()


def test_endless_drops_stop_the_run() -> None:
    scenario = FaultScenario(replace(SMALL, max_refills=5), dropped=lambda position: "zero variance")
    with pytest.raises(
        RefillsExhausted, match=r"ledger \d: 6 groups were dropped \(zero variance: 6\) while 2 are wanted"
    ):
        FaultyNetwork(scenario).run()


def test_colocated_workers_that_do_not_hear_of_closed_steps_are_stuck() -> None:
    """The announcement is what lets them leave generation."""
    with pytest.raises(StuckError, match="no end by 100 s, version 0 of 3"):
        FaultyNetwork(FaultScenario(SMALL, colocated=True, limit_s=100)).run()


def test_a_dead_worker_that_nobody_reports_holds_the_run_up() -> None:
    """Leases live as long as their worker's membership, never a fixed time."""
    crash = Crash(worker=0, at=0.5, restart_s=None, noticed=False)
    with pytest.raises(StuckError, match="no end by 100 s"):
        FaultyNetwork(FaultScenario(SMALL, crashes=[crash], limit_s=100)).run()


def test_parked_asks_are_quiet() -> None:
    """A long group keeps the others idle for 100 s: they do not poll."""
    seconds = long_tail(3, head_of_line=True)
    record = FaultyNetwork(FaultScenario(replace(SMALL, training_steps=1), workers=4, owners=2, seconds=seconds)).run()
    assert record.seconds > 100
    assert record.messages["ask"] < 120


def test_few_messages_a_group() -> None:
    limits = replace(SMALL, ledgers=8, groups_per_ledger=4, memory_bytes=10**6, training_steps=10)
    record = FaultyNetwork(FaultScenario(limits, owners=4, workers=8, slots=16, seconds=long_tail(1, False))).run()
    groups = 10 * 32
    assert sum(record.messages.values()) - record.messages["progress"] < 6 * groups


@pytest.mark.parametrize("owners", [4, 8])
@pytest.mark.parametrize("workers", [1, 2])
def test_idle_workers_find_the_owners_that_have_work(workers: int, owners: int) -> None:
    """Many owners with few workers take as long as one owner of the same work, with dropped groups and without."""
    limits = replace(SMALL, ledgers=8, groups_per_ledger=4, memory_bytes=10**6, training_steps=4, max_refills=10**6)
    for rate in (0.0, 0.3):
        scenario = FaultScenario(limits, workers=workers, slots=32, seconds=long_tail(5, False), dropped=doom(rate, 5))
        one = FaultyNetwork(scenario).run().seconds
        assert FaultyNetwork(replace(scenario, owners=owners)).run().seconds < 1.4 * one


HEDGING = replace(
    SMALL,
    hedging=True,
    partial_rollouts=True,
    training_steps=4,
    group_bytes=lambda prompt_tokens: 40_000,
    memory_bytes=10**6,
)
PARTIAL = replace(HEDGING, hedging=False)


def slow_last(factor: float) -> object:
    return lambda number: factor if number == 2 else 1.0


def test_a_slow_worker_is_hedged_and_its_tokens_are_not_made_again() -> None:
    """One worker 10 times slower: idle ones finish its groups, from where it stands."""
    again = 0
    for seed in range(3):
        scenario = FaultScenario(
            HEDGING, workers=3, seconds=lambda position: 4.0, slowness=slow_last(10.0), tokens=40, seed=seed
        )
        plain = FaultyNetwork(replace(scenario, settings=replace(HEDGING, hedging=False, partial_rollouts=False))).run()
        hedged = FaultyNetwork(replace(scenario, settings=replace(HEDGING, partial_rollouts=False))).run()
        continued = FaultyNetwork(scenario).run()
        for record in (plain, hedged, continued):
            check(scenario, record)
        assert plain.seconds > 4 * 40
        assert hedged.seconds < plain.seconds / 2
        assert hedged.copies > 0
        assert continued.continued > 0
        again += hedged.produced - continued.produced
    # Which copies are made depends on when messages arrive.
    assert again > 3 * 100


def test_equal_workers_are_not_hedged() -> None:
    """All groups take as long as usual: nothing is done twice, however idle somebody is."""
    scenario = FaultScenario(HEDGING, workers=3, slots=36, seconds=lambda position: 3.0, tokens=40)
    record = FaultyNetwork(scenario).run()
    assert record.copies == 0
    assert record.started == 4 * 8


@pytest.mark.parametrize("slots", [16, 1000])
def test_who_has_as_much_to_do_as_ever_is_not_idle_however_many_slots_it_has(slots: int) -> None:
    """Every fourth group takes four times as long as the others; all workers have some of each until the end."""
    limits = replace(HEDGING, max_staleness=2, training_steps=12, groups_per_ledger=4)
    long = FaultScenario(limits, workers=2, slots=slots, seconds=lambda position: 8.0 if position % 4 == 3 else 2.0)
    record = FaultyNetwork(long).run()
    check(long, record)
    assert record.copies <= 0.1 * record.started


def test_where_copies_have_other_tokens_only_groups_of_silent_workers_are_copied() -> None:
    limits = replace(HEDGING, copies_slow=False)
    slow = FaultScenario(limits, workers=3, seconds=lambda position: 4.0, slowness=slow_last(10.0), tokens=40)
    assert FaultyNetwork(slow).run().copies == 0
    still = FaultScenario(limits, workers=2, seconds=lambda position: 2.0, pauses=[Pause(1, 1.0, 1000.0)], limit_s=2000)
    network = FaultyNetwork(still)
    assert network.run().copies > 0
    assert network.ended_at < 100


def test_a_group_that_waits_for_its_turn_is_run_by_an_idle_worker() -> None:
    """8 groups for 3 workers with 4 places: the first has fetched one ahead, the third has nothing to do."""
    limits = replace(HEDGING, training_steps=1)
    scenario = FaultScenario(limits, workers=3, slots=16, seconds=lambda position: 30.0, tokens=40)
    record = FaultyNetwork(scenario).run()
    check(scenario, record)
    assert record.copies == 1
    assert record.seconds < 36
    assert FaultyNetwork(replace(scenario, settings=replace(limits, hedging=False))).run().seconds > 60


@pytest.mark.parametrize("staleness", [0, 1, None])
def test_a_worker_that_stands_still_does_not_hold_the_run_up(staleness: int | None) -> None:
    limits = replace(HEDGING, max_staleness=staleness)
    pause = Pause(worker=1, at=1.0, seconds=1000.0)
    scenario = FaultScenario(limits, workers=2, seconds=lambda position: 2.0, tokens=40, pauses=[pause], limit_s=2000)
    network = FaultyNetwork(scenario)
    record = network.run()
    check(scenario, record)
    ended = network.ended_at
    assert ended < 100
    # Those who would wait for it without copies: see the figure for the same run.
    alone = FaultyNetwork(replace(scenario, settings=replace(limits, hedging=False)))
    check(scenario, alone.run())
    assert alone.ended_at > 1000


def test_a_killed_worker_loses_what_it_made_since_its_last_report_at_most() -> None:
    crash = Crash(worker=1, at=30.0, restart_s=None)
    scenario = FaultScenario(PARTIAL, workers=2, seconds=lambda position: 50.0, tokens=500, crashes=[crash])
    record = FaultyNetwork(scenario).run()
    check(scenario, record)
    samples = SMALL.samples_per_prompt
    needed = 4 * 8 * samples * 500
    # Two groups at once, 10 tokens a second and sample, a report each second, seen by the owner every 0.25 s.
    assert record.produced - needed <= 2 * samples * 10 * 1.5
    assert record.continued >= 2 * samples * 10 * 28


def test_a_drained_worker_loses_no_token() -> None:
    scenario = FaultScenario(
        PARTIAL, workers=3, seconds=lambda position: 50.0, tokens=500, leaves=[Leave(1, 30.0), Leave(2, 90.3)]
    )
    record = FaultyNetwork(scenario).run()
    check(scenario, record)
    assert record.produced == 4 * 8 * SMALL.samples_per_prompt * 500
    assert record.continued > 0
    assert record.messages["handback"] == 2


def test_a_drained_worker_loses_little_on_a_bad_network() -> None:
    scenario = FaultScenario(
        PARTIAL,
        workers=3,
        seconds=lambda position: 50.0,
        tokens=500,
        leaves=[Leave(1, 30.0), Leave(2, 90.3)],
        loss=0.3,
        duplicates=0.3,
        delay_s=0.5,
    )
    record = FaultyNetwork(scenario).run()
    check(scenario, record)
    # A resent hand-back fills all gaps; what is produced twice is due to leases that were lost on the way.
    assert record.produced < 1.1 * 4 * 8 * SMALL.samples_per_prompt * 500
    assert record.messages["again"] > 0


def test_without_a_bound_a_straggler_holds_nothing_up() -> None:
    """Position 0 takes 100 s: other groups are trained meanwhile, and it is trained last."""
    limits = replace(SMALL, max_staleness=None, training_steps=6, memory_bytes=10**6)
    scenario = FaultScenario(limits, workers=3, seconds=long_tail(3, True))
    record = FaultyNetwork(scenario).run()
    check(scenario, record)
    assert 0 in record.trained[5]
