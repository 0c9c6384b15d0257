"""Callers and servers in virtual time, over networks that lose, double and reorder messages, with whoever may die."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.sim.scenario import Crash
from tests.budget import within
from tests.search import call_faults
from tests.search.call_faults import calls_of, check_calls, judge_calls
from tests.search.call_network import CallNetwork
from tests.search.call_scenario import MIB, CallScenario, Cut, Withdrawal
from tests.search.lease_scenario import Leave, Pause

AT = st.floats(0.0, 20.0)


@st.composite
def scenarios(draw: st.DrawFn) -> CallScenario:
    clients, servers, shared = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.booleans())
    first = {0} if shared else {0, servers}
    """The first of each step: it may be away, but not for good."""
    number = st.integers(0, (servers if shared else 2 * servers) - 1)
    back = st.builds(Crash, number, AT, restart_s=AT, noticed=st.booleans())
    gone = st.builds(Crash, number, AT, restart_s=st.none(), noticed=st.booleans())
    crashes = draw(st.lists(back | gone, max_size=5))
    leaves = draw(st.lists(st.builds(Leave, number, AT), max_size=2))
    return CallScenario(
        clients=clients,
        servers=servers,
        shared=shared,
        steps=draw(st.integers(1, 4)),
        groups=draw(st.integers(1, 8)),
        ahead=draw(st.integers(0, 2)),
        largest_bytes=draw(st.sampled_from([1000, 8 * MIB, 40 * MIB])),
        ahead_bytes=draw(st.sampled_from([1, 4 * MIB, 100 * MIB])),
        spread=draw(st.sampled_from([0.0, 1.5])),
        budget=draw(st.sampled_from([0, 250, 1000])),
        token_s=draw(st.sampled_from([0.0, 0.001, 0.01])),
        generated=draw(st.booleans()),
        hasty=draw(st.booleans()),
        slowness=[draw(st.sampled_from([1.0, 1.0, 20.0])) for _ in range(servers)],
        crashes=[crash for crash in crashes if crash.restart_s is not None or crash.worker not in first],
        pauses=draw(st.lists(st.builds(Pause, number, AT, st.floats(1.0, 40.0)), max_size=3)),
        leaves=[leave for leave in leaves if leave.worker not in first],
        cuts=draw(st.lists(st.builds(Cut, st.integers(0, clients - 1), number, AT, st.floats(1.0, 60.0)), max_size=3)),
        joins=draw(st.lists(AT, max_size=2)),
        client_crashes=draw(st.lists(st.builds(Crash, st.integers(0, clients - 1), AT, AT, st.booleans()), max_size=2)),
        client_pauses=draw(st.lists(st.builds(Pause, st.integers(0, clients - 1), AT, AT), max_size=2)),
        cancels=draw(st.lists(st.builds(Withdrawal, st.integers(0, clients - 1), AT), max_size=4)),
        renewals=draw(st.lists(AT, max_size=2)),
        loss=draw(st.sampled_from([0.0, 0.05, 0.3])),
        duplicates=draw(st.sampled_from([0.0, 0.3])),
        delay_s=draw(st.sampled_from([0.001, 0.5, 5.0])),
        seed=draw(st.integers(0, 2**20)),
    ).patient()


@settings(max_examples=300, derandomize=True)
@given(scenarios())
@within(6, examples=300)
def test_every_call_is_answered_once_whatever_happens(scenario: CallScenario) -> None:
    check_calls(scenario, CallNetwork(scenario).run())


def test_a_slow_server_that_is_left_alone_on_a_bad_network_answers_everything() -> None:
    """It was taken for stuck once: every lost answer of twenty seconds' work is waited for, and computed again."""
    scenario = CallScenario(
        clients=3,
        steps=4,
        groups=6,
        shared=True,
        ahead=0,
        largest_bytes=1000,
        ahead_bytes=1,
        budget=1000,
        token_s=0.01,
        generated=True,
        slowness=[20.0, 1.0],
        pauses=[Pause(0, 9.380665795423269, 40.0)],
        leaves=[Leave(1, 19.82551485339336)],
        cuts=[Cut(0, 0, 2.0, 28.0)],
        renewals=[18.74493949681539, 0.0],
        loss=0.3,
        delay_s=0.001,
    ).patient()
    check_calls(scenario, CallNetwork(scenario).run())


def test_no_seed_of_the_search_for_faults_breaks_a_promise() -> None:
    assert [judge_calls(seed) for seed in range(60)] == [None] * 60


def test_a_late_beat_of_a_former_process_lets_requests_go_where_nobody_else_is_waited_for() -> None:
    """The time that it tells of makes another server silent, for which a request had waited."""
    assert judge_calls(5084) is None


def test_the_search_tells_of_a_run_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = replace(calls_of(0), loss=1.0, limit_s=100.0)
    monkeypatch.setattr(call_faults, "calls_of", lambda seed, layouts: deaf)
    found = judge_calls(0)
    assert found is not None
    assert found.what.startswith("no end by 100.0 s")
