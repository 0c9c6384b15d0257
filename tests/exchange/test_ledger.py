from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.difficulty import Difficulty, DifficultyRule, Visit
from distflow.errors import UserError
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.ledger import Ledger, RefillsExhausted
from distflow.types import Version
from tests.search.lease_scenario import SMALL, prompt_at

ONE = replace(SMALL, ledgers=1)


def new_ledger(settings: LeaseSettings = ONE, memory: int = 10_000) -> Ledger:
    return Ledger(0, settings, memory, prompt_at)


def lease_all(ledger: Ledger) -> list[int]:
    leased = []
    while ledger.leasable() is not None:
        leased.append(ledger.lease(0, 0.0).lease.k)
    return leased


def arrive(ledger: Ledger, *ks: int, nbytes: int = 10) -> None:
    for k in ks:
        ledger.arrive(k, nbytes, Version(0, 0), "rollout/0")


def test_the_gate_counts_leased_minus_dropped() -> None:
    ledger = new_ledger()
    assert lease_all(ledger) == [0, 1]
    ledger.drop(0, "zero variance")
    assert lease_all(ledger) == [2]
    arrive(ledger, 1, 2)
    assert ledger.leasable() is None
    ledger.take(1)
    ledger.take(2)
    ledger.advance()
    assert lease_all(ledger) == [3, 4]


@pytest.mark.parametrize("staleness, steps, leased", [(0, 3, 2), (1, 3, 4), (2, 3, 6), (5, 3, 6), (1, 1, 2)])
def test_the_gate_opens_by_staleness_and_ends_with_the_run(staleness: int, steps: int, leased: int) -> None:
    assert len(lease_all(new_ledger(replace(ONE, max_staleness=staleness, training_steps=steps)))) == leased


def test_the_minimum_version_follows_the_rank_at_issue_and_survives_a_new_lease() -> None:
    ledger = new_ledger(replace(ONE, max_staleness=1, training_steps=9))
    lease_all(ledger)
    assert [ledger.entries[k].lease.min_version for k in range(4)] == [0, 0, 0, 0]
    for _ in range(2):
        window = list(ledger.entries)[:2]
        arrive(ledger, *window)
        for k in window:
            ledger.take(k)
        ledger.advance()
        lease_all(ledger)
    assert {k: entry.lease.min_version for k, entry in ledger.entries.items()} == {4: 1, 5: 1, 6: 2, 7: 2}
    ledger.drop(4, "no")
    ledger.give_back(6)
    assert ledger.leasable() == 6
    again = ledger.lease(0, 0.0).lease
    assert (again.k, again.min_version, again.attempt) == (6, 2, 2)


def test_a_group_may_be_taken_as_soon_as_its_place_is_certain() -> None:
    ledger = new_ledger(replace(ONE, max_staleness=1))
    lease_all(ledger)
    arrive(ledger, 2, 1)
    assert ledger.ready == {1}
    ledger.drop(0, "no")
    assert ledger.ready == {1, 2}
    assert ledger.set_complete


def test_a_group_of_a_later_step_waits_for_it() -> None:
    ledger = new_ledger(replace(ONE, max_staleness=1))
    lease_all(ledger)
    arrive(ledger, 0, 1, 3)
    with pytest.raises(AssertionError, match="position 3 is not ready"):
        ledger.take(3)
    ledger.take(0)
    assert not ledger.complete
    ledger.take(1)
    assert ledger.complete
    ledger.advance()
    assert ledger.ready == {3}


def test_memory_is_reserved_shrunk_and_freed() -> None:
    # Prompts have 1, 2, 3, 4, 1, … tokens of 100 bytes each.
    ledger = new_ledger(replace(ONE, max_staleness=2), memory=800)
    assert lease_all(ledger) == [0, 1, 2]
    assert ledger.reserved == 600
    arrive(ledger, 2, nbytes=50)
    assert ledger.reserved == 350
    assert lease_all(ledger) == [3]
    assert ledger.reserved == 750
    arrive(ledger, 0)
    ledger.take(0)
    assert ledger.reserved == 650
    assert lease_all(ledger) == [4]


def test_the_open_window_never_waits_for_memory() -> None:
    ledger = new_ledger(memory=1)
    assert lease_all(ledger) == [0, 1]


def test_too_little_memory_is_refused_with_the_least_amount() -> None:
    with pytest.raises(
        UserError, match=r"sample_memory_mb: 3000 bytes over 4 ledgers are 750 bytes each.*at least 1 MiB"
    ):
        replace(SMALL, memory_bytes=3000).ledger_memory(4)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UserError, match=r"run\.training_steps is -1: expected at least 0"):
        replace(SMALL, training_steps=-1)


def test_endless_drops_end_with_their_reasons() -> None:
    ledger = new_ledger(replace(ONE, max_refills=3))
    for turn in range(3):
        k = ledger.lease(0, 0.0).lease.k
        ledger.drop(k, "zero variance" if turn else "reward error")
        assert ledger.exhausted() is None
    ledger.drop(ledger.lease(0, 0.0).lease.k, "zero variance")
    error = ledger.exhausted()
    assert isinstance(error, RefillsExhausted)
    assert "training step 1, ledger 0: 4 groups were dropped (zero variance: 3, reward error: 1)" in str(error)


@pytest.mark.parametrize(
    ("reasons", "cure"),
    [
        (["samples left out, reward missing (f returned None or NaN)"], "No step failed: the reward functions named"),
        (["samples left out, reward missing (f and g returned None or NaN)", "dull"], "Return a number for each"),
        (["samples left out, ConnectionError"], "The logs of the workers"),
        (["samples left out, reward missing (f returned None or NaN)", "samples left out, cut"], "The logs of the"),
        (["dull"], "Look at the rewards of the samples"),
    ],
)
def test_the_cure_is_that_of_what_dropped_the_groups(reasons: list[str], cure: str) -> None:
    ledger = new_ledger(replace(ONE, max_refills=0))
    for reason in reasons:
        ledger.drop(ledger.lease(0, 0.0).lease.k, reason)
    assert cure in str(ledger.exhausted())


def test_drops_count_anew_in_every_step() -> None:
    ledger = new_ledger(replace(ONE, max_refills=2))
    for _ in range(3):
        for _ in range(2):
            ledger.drop(ledger.lease(0, 0.0).lease.k, "no")
        for k in lease_all(ledger):
            arrive(ledger, k)
            ledger.take(k)
        assert ledger.exhausted() is None
        ledger.advance()


def test_a_snapshot_keeps_the_frontier_and_drops_ahead_of_it() -> None:
    ledger = new_ledger(replace(ONE, max_staleness=1))
    lease_all(ledger)
    ledger.drop(0, "no")
    ledger.drop(3, "never")
    lease_all(ledger)
    arrive(ledger, 1, 2, 5)
    ledger.take(1)
    ledger.take(2)
    ledger.advance()
    kept = json.loads(json.dumps(ledger.snapshot()))
    assert kept == {"ledger": 0, "frontier": 4, "dropped": [], "trained": []}
    ledger.drop(4, "late")
    lease_all(ledger)
    ledger.drop(6, "later")
    assert ledger.snapshot() == {"ledger": 0, "frontier": 5, "dropped": [[6, "later"]], "trained": []}

    again = new_ledger(replace(ONE, max_staleness=1))
    again.restore(1, 5, [(6, "later")])
    assert again.snapshot() == ledger.snapshot()
    assert again.knows(6)
    assert lease_all(again) == [5, 7, 8, 9]


@settings(max_examples=300, derandomize=True)
@given(b=st.integers(1, 4), s=st.integers(0, 3), drop_rate=st.floats(0, 0.6), seed=st.integers(0, 2**32))
def test_streamed_consumption_equals_the_first_b_accepted(b: int, s: int, drop_rate: float, seed: int) -> None:
    """Whatever the order of arrivals, drops, losses and takes, each step trains the same positions."""
    steps = 4
    limits = replace(ONE, groups_per_ledger=b, max_staleness=s, training_steps=steps, max_refills=10**6)
    rng = random.Random(seed)
    doomed = {k for k in range(60) if rng.random() < drop_rate}
    accepted = [k for k in range(60 + steps * b) if k not in doomed]
    ledger = new_ledger(limits)
    open_ks: set[int] = set()
    for step in range(steps):
        taken = set()
        while not ledger.complete:
            open_ks.update(lease_all(ledger))
            kind, k = rng.choice([("take", k) for k in sorted(ledger.ready)] + [("end", k) for k in sorted(open_ks)])
            if kind == "take":
                ledger.take(k)
                taken.add(k)
            elif rng.random() < 0.2:
                ledger.give_back(k)
            else:
                open_ks.remove(k)
                ledger.drop(k, "no") if k in doomed else arrive(ledger, k)
            assert ledger.reserved >= 0
        assert taken == set(accepted[step * b : (step + 1) * b])
        ledger.advance()
    assert ledger.leasable() is None
    assert ledger.frontier - len([k for k in doomed if k < ledger.frontier]) == steps * b


FREE = replace(ONE, max_staleness=None)


def test_without_a_bound_the_gate_opens_to_the_end_of_the_run_and_memory() -> None:
    assert lease_all(new_ledger(FREE)) == [0, 1, 2, 3, 4, 5]
    # Prompts have 1, 2, 3, 4, 1, … tokens of 100 bytes each.
    assert lease_all(new_ledger(FREE, memory=800)) == [0, 1, 2]
    ledger = new_ledger(FREE)
    lease_all(ledger)
    ledger.drop(3, "no")
    assert lease_all(ledger) == [6]
    assert {entry.lease.min_version for entry in ledger.entries.values()} == {0}


def test_without_a_bound_the_first_to_arrive_are_trained() -> None:
    ledger = new_ledger(FREE)
    lease_all(ledger)
    arrive(ledger, 5, 2, 0)
    assert ledger.ready == {5, 2}
    assert ledger.set_complete
    ledger.take(5)
    ledger.take(2)
    assert ledger.ready == set()
    arrive(ledger, 4)
    ledger.advance()
    assert ledger.ready == {0, 4}
    assert ledger.frontier == 0


def test_a_snapshot_without_a_bound_lists_what_was_trained_ahead() -> None:
    ledger = new_ledger(FREE)
    lease_all(ledger)
    ledger.drop(4, "no")
    arrive(ledger, 5, 2, 0)
    for k in (5, 2):
        ledger.take(k)
    assert ledger.snapshot() == {"ledger": 0, "frontier": 0, "dropped": [[4, "no"]], "trained": []}, "not a whole step"
    ledger.advance()
    ledger.take(0)
    kept = json.loads(json.dumps(ledger.snapshot()))
    assert kept == {"ledger": 0, "frontier": 0, "dropped": [[4, "no"]], "trained": [2, 5]}
    again = new_ledger(FREE)
    again.restore(1, kept["frontier"], [(4, "no")], kept["trained"])
    assert again.snapshot() == kept
    assert again.knows(5)
    assert lease_all(again) == [0, 1, 3, 6], "T · b = 6 in all, 2 of them trained"


def test_without_a_bound_drops_count_anew_with_every_arrival() -> None:
    ledger = new_ledger(replace(FREE, max_refills=2))
    for _ in range(4):
        for _ in range(2):
            ledger.drop(ledger.lease(0, 0.0).lease.k, "no")
        assert ledger.exhausted() is None
        arrive(ledger, ledger.lease(0, 0.0).lease.k)
    for _ in range(3):
        ledger.drop(ledger.lease(0, 0.0).lease.k, "no")
    assert isinstance(ledger.exhausted(), RefillsExhausted)


def solved(*prompts: int, lag: int = 0) -> Difficulty:
    """These prompts of 100 were solved in training step 0, and are retired."""
    difficulty = Difficulty(DifficultyRule(retire_solved=1), 0, 100, lag)
    difficulty.record(0, [Visit(prompt, prompt, 2, 2) for prompt in prompts])
    return difficulty


def test_retired_prompts_are_passed_over_by_what_their_lowest_version_knew() -> None:
    settings = replace(ONE, max_staleness=1, training_steps=9, difficulty=solved(2, 4, 6, 7, lag=1))
    ledger = new_ledger(settings)
    assert lease_all(ledger) == [0, 1, 2, 3], "nothing was known at version 0"
    arrive(ledger, 0, 1)
    ledger.take(0)
    ledger.take(1)
    ledger.advance()
    assert lease_all(ledger) == [5, 8]
    assert [ledger.entries[k].lease.min_version for k in (5, 8)] == [1, 1]
    assert ledger.passed_over == 3
    assert ledger.refills.total() == 0
    saved = json.loads(json.dumps(ledger.snapshot()))
    again = new_ledger(settings)
    again.restore(1, saved["frontier"], [])
    assert lease_all(again) == [2, 3, 5, 8], "decided again by the same"


def test_dropped_groups_of_the_open_window_tell_their_scores_once() -> None:
    settings = replace(ONE, max_staleness=1, training_steps=9, difficulty=solved(lag=1))
    ledger = new_ledger(settings)
    lease_all(ledger)
    ledger.drop(3, "equal rewards", (1.0, 1.0))
    assert ledger.judged() == [], "of the step after"
    ledger.drop(0, "equal rewards", (0.0, 0.0))
    lease_all(ledger)
    assert [(one.uid.position, one.scores) for one in ledger.judged()] == [(0, (0.0, 0.0))]
    ledger.drop(1, "reward error")
    arrive(ledger, 2, 4)
    lease_all(ledger)
    assert sorted(one.uid.position for one in ledger.judged()) == [0, 3]
    saved = json.loads(json.dumps(ledger.snapshot()))
    again = new_ledger(settings)
    again.restore(0, saved["frontier"], map(tuple, saved["dropped"]), (), saved["judged"])
    lease_all(again)
    assert sorted(again.judged()) == sorted(ledger.judged())
    ledger.take(2)
    ledger.take(4)
    ledger.advance()
    assert ledger.judged() == []
    assert "judged" not in ledger.snapshot()
