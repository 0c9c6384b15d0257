"""Training steps that teach nothing: what is concluded from the sums of all replicas, and when."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from distflow.metrics.learning_signal import (
    EQUAL,
    EQUAL_FROM_START,
    EQUAL_STEPS,
    KEPT,
    MOST_LEFT_OUT,
    LearningSignal,
)


def judged(signal: LearningSignal, step: int, kept: float = 1.0, equal: Sequence[int] = (0, 0), epoch: int = 0):
    """Two replicas with two groups each; `equal`: how many of each have equal rewards."""
    replicas = []
    for of_one in equal:
        means = {KEPT: (kept * 100.0, 100.0), EQUAL: (float(of_one), 2.0)}
        replicas.append(signal.sums(lambda name, means=means: means[name], epoch))
    return signal.judge(replicas, step, {})


def test_corrections_that_leave_nothing_three_times_in_a_row_end_the_run() -> None:
    signal = LearningSignal([""], [""], 3, from_start=True)
    for step, kept in enumerate([0.0, 0.009, 0.02, 0.0, 0.004], 1):
        judged(signal, step, kept)
        assert not signal.reason
    judged(signal, 6, 0.0)
    assert re.search(r"for 3 training steps in a row, up to step 6, .* leave 0.00% .*correction", signal.reason)
    assert MOST_LEFT_OUT == 3


def test_steps_without_anything_to_weight_say_nothing() -> None:
    """All rewards may be equal, or nothing corrects: the sums are 0."""
    signal = LearningSignal([""], [], 3, from_start=True)
    for step in range(1, 9):
        signal.judge([[[0.0, 0.0, 0.0, 0.0, 0.0]]] * 2, step, {})
        assert not signal.reason
    signal.judge([], 9, {})
    assert not signal.reason


def test_what_one_replica_has_left_is_enough() -> None:
    signal = LearningSignal([""], [""], 3, from_start=True)
    for step in range(1, 6):
        signal.judge([[[0.0, 100.0, 0.0, 2.0, 0.0]], [[40.0, 100.0, 0.0, 2.0, 0.0]]], step, {})
        assert not signal.reason


@pytest.mark.parametrize("epochs", [lambda step: step // 40, lambda step: step // 70])
def test_rewards_that_never_differ_end_the_run(epochs) -> None:
    """After 50 training steps and a pass over the data."""
    signal = LearningSignal([""], [""], 3, from_start=True)
    due = next(step for step in range(EQUAL_FROM_START, 200) if epochs(step) >= 1)
    for step in range(1, due):
        assert judged(signal, step, equal=(2, 2), epoch=epochs(step)) == {EQUAL_STEPS: step}
        assert not signal.reason
    judged(signal, due, equal=(2, 2), epoch=epochs(due))
    assert re.search(f"none of the {due} training steps since the run began.*distflow rollouts", signal.reason)


def test_rewards_that_differed_once_end_nothing() -> None:
    """A task that has been learnt gives equal rewards for as long as one likes."""
    signal = LearningSignal([""], [""], 3, from_start=True)
    assert judged(signal, 1, equal=(2, 1)) == {}
    for step in range(2, 200):
        assert judged(signal, step, equal=(2, 2), epoch=9) == {EQUAL_STEPS: step - 1}
        assert not signal.reason
    assert judged(signal, 200, equal=(0, 2), epoch=9) == {}


@pytest.mark.parametrize(("compares", "from_start"), [([], True), ([""], False)])
def test_nothing_ends_where_nothing_is_compared_or_not_all_is_known(compares: list[str], from_start: bool) -> None:
    signal = LearningSignal([""], compares, 3, from_start=from_start)
    for step in range(1, 120):
        told = judged(signal, step, equal=(2, 2), epoch=3)
        assert bool(told) == bool(compares)
        assert not signal.reason


def test_each_model_is_judged_by_its_own_samples() -> None:
    signal = LearningSignal(["", "solver"], ["", "solver"], 3, from_start=True)
    for step in range(1, 4):
        told = signal.judge([[[9.0, 9.0, 1.0, 2.0, 0.0], [0.0, 9.0, 2.0, 2.0, 0.0]]], step, {})
    assert told == {f"solver/{EQUAL_STEPS}": 3.0}
    assert re.search("solver/rollout_corr/kept", signal.reason)


@pytest.mark.parametrize(
    ("unmoved", "ends"),
    [
        (["bad", "bad", "bad"], [False, False, True]),
        (["bad", "bad", "", "bad"], [False] * 4),
        (["", "bad", "worse", "bad"], [False, False, False, True]),
    ],
)
def test_a_model_that_stays_as_it_is_ends_the_run_after_so_many_steps_in_a_row(
    unmoved: list[str], ends: list[bool]
) -> None:
    signal, found = LearningSignal([""], [""], 3, from_start=True), []
    for step, why in enumerate(unmoved, 1):
        signal.judge([], step, {"policy": why, "critic": ""})
        found.append(bool(signal.reason))
    assert found == ends
    if ends[-1]:
        told = f"model 'policy' has stayed as it was for 3 training steps in a row, up to step {len(ends)} .*: bad$"
        assert re.match(told, signal.reason)
