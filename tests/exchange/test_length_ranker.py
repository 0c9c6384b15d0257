"""Predictions of how long responses are: their order counts."""

from __future__ import annotations

import math
import random

import pytest

from distflow.exchange import length_ranker
from distflow.exchange.length_ranker import LengthRanker, recall


def prompt(task: int, number: int) -> tuple[int, ...]:
    """Five tokens that tell the task, and six of its own."""
    rng = random.Random(f"{task}/{number}")
    return (*range(1000 + 10 * task, 1005 + 10 * task), *(rng.randrange(900) for _ in range(6)))


def taught(tasks: int = 8, each: int = 30) -> LengthRanker:
    ranker = LengthRanker()
    for number in range(each):
        for task in range(tasks):
            ranker.learn(1000 * task + number, prompt(task, number), 50.0 * 2**task)
    return ranker


def test_prompts_that_were_never_seen_are_ranked_by_what_they_have_in_common_with_others() -> None:
    ranker = taught()
    cases = [(task, ranker.predict(10**6 + task, prompt(task, 10**6))) for task in range(8) for _ in range(3)]
    order = [task for task, _ in sorted(cases, key=lambda case: case[1])]
    assert order == sorted(order)
    assert recall([length for _, length in cases], [float(task) for task, _ in cases]) == 1.0


def test_a_prompt_that_came_before_is_predicted_by_its_own_lengths() -> None:
    ranker = taught()
    ranker.learn(77, prompt(0, 77), 5000.0)
    assert ranker.predict(77, prompt(0, 77)) > 3 * ranker.predict(78, prompt(0, 78))
    for _ in range(4):
        ranker.learn(77, prompt(0, 77), 10.0)
    assert ranker.predict(77, prompt(0, 77)) < ranker.predict(78, prompt(0, 78))


def told(of_prompts: float, of_samples: float) -> float:
    """By how much the prediction of a prompt (its logarithm) rises with a length that is e times the usual, where
    prompts read alike and only their own lengths tell them apart."""
    rng, ranker = random.Random(0), LengthRanker()
    own = [rng.gauss(5.0, of_prompts) for _ in range(60)]
    for _ in range(4):
        for number, mean in enumerate(own):
            assert ranker.predict(number, (1, 2, 3)) > 0
            ranker.learn(number, (1, 2, 3), math.exp(rng.gauss(mean, of_samples)))
    before = ranker.predict(1000, (1, 2, 3))
    ranker.learn(1000, (1, 2, 3), math.exp(1.0) * before)
    return math.log(ranker.predict(1000, (1, 2, 3)) / before)


def test_the_own_lengths_of_a_prompt_count_for_as_much_as_they_have_told_so_far() -> None:
    assert told(of_prompts=0.05, of_samples=1.0) < 0.3
    assert told(of_prompts=1.0, of_samples=0.05) > 0.9


def test_longer_prompts_are_told_from_shorter_ones_by_their_length_alone() -> None:
    ranker = LengthRanker()
    rng = random.Random(0)
    for number in range(200):
        size = rng.randrange(1, 200)
        ranker.learn(number, [rng.randrange(10**6) for _ in range(size)], 10.0 * size)
    few, many = ([rng.randrange(10**6) for _ in range(size)] for size in (5, 150))
    assert ranker.predict(10**6, many) > 3 * ranker.predict(10**6 + 1, few)


def test_it_follows_a_policy_that_changes() -> None:
    ranker = taught(tasks=2, each=200)
    for number in range(1000, 1600):
        for task in range(2):
            ranker.learn(10_000 * task + number, prompt(task, number), 50.0 * 2 ** (1 - task))
    assert ranker.predict(10**6, prompt(0, 10**6)) > ranker.predict(10**6 + 1, prompt(1, 10**6))


def test_equal_results_in_equal_order_give_equal_predictions() -> None:
    first, second = (taught().predict(10**6, prompt(3, 10**6)) for _ in range(2))
    assert first == second


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_ranker, "PAST", 10)
    ranker = LengthRanker()
    for number in range(40):
        ranker.learn(number, (number, 5), 100.0)
    assert len(ranker._past) == 10


def test_one_prompt_over_and_over_leaves_the_solution_finite() -> None:
    ranker = LengthRanker()
    for _ in range(5_000):
        ranker.learn(0, (1, 2, 3), 100.0)
        assert 10 < ranker.predict(1, (1, 2, 3)) < 200
    assert ranker.predict(0, (1, 2, 3)) == pytest.approx(100, rel=0.1)


def test_prompts_without_tokens_and_very_long_ones_are_predicted() -> None:
    ranker = taught()
    assert ranker.predict(10**6, ()) > 0
    assert ranker.predict(10**6, range(1 << 17)) > 0
    ranker.learn(5, (), 0.0)


def test_recall_counts_the_longest_fifth() -> None:
    true = [float(length) for length in range(10)]
    assert recall(true, true) == 1.0
    assert recall([-length for length in true], true) == 0.0
    assert recall([0, 0, 0, 0, 0, 8, 9, 1, 1, 1], true) == 0.0
    assert recall([0, 0, 0, 0, 0, 0, 0, 9, 1, 8], true) == 0.5
    assert recall([1.0], [5.0]) == 1.0
    assert recall([], []) == 0.0
