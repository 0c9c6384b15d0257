"""Summaries of validation against figures worked out by hand."""

from __future__ import annotations

import math
import random

import pytest

from distflow.algorithms.evaluation import Graded, best, interval, majority, summary


def test_what_k_samples_of_a_prompt_are_worth() -> None:
    graded = Graded([0.0, 1.0, 0.0, 0.0], ["7", "8", "7", "9"])
    assert best(graded) == 1.0
    assert majority(graded) == 0.0
    assert majority(Graded([1.0, 1.0, 0.0], ["8", "8", "9"])) == 1.0


def test_answers_that_are_as_frequent_share() -> None:
    assert majority(Graded([1.0, 0.0], ["8", "9"])) == 0.5
    assert majority(Graded([1.0, 1.0, 0.0, 0.0, 1.0], ["8", "8", "9", "9", "7"])) == 0.5
    # A length penalty may score the same answer differently.
    assert majority(Graded([1.0, 0.5, 0.0], ["8", "8", "9"])) == 0.75


def test_the_interval_of_a_mean() -> None:
    # Of n zeros and ones with mean p, the variance is p(1 − p)·n/(n − 1).
    values = [1.0] * 30 + [0.0] * 70
    assert interval(values) == pytest.approx(1.959964 * math.sqrt(0.21 / 99), rel=1e-6)
    assert interval([0.5] * 9) == 0.0
    assert math.isnan(interval([1.0]))


def test_all_prompts_and_those_of_each_source() -> None:
    prompts = [
        Graded([1.0, 0.0], ["8", "9"], "easy"),
        Graded([1.0, 1.0], ["8", "8"], "easy"),
        Graded([0.0, 0.0], ["1", "2"], "hard"),
    ]
    found = summary(prompts)
    assert found["avg@2"] == pytest.approx(0.5)
    assert found["pass@2"] == pytest.approx(2 / 3)
    assert found["maj@2"] == pytest.approx(0.5)
    assert (found["easy/avg@2"], found["easy/pass@2"], found["hard/avg@2"]) == (0.75, 1.0, 0.0)
    assert found["avg@2/ci95"] == pytest.approx(interval([0.5, 1.0, 0.0]))


def test_one_sample_has_neither_a_best_nor_a_majority() -> None:
    assert set(summary([Graded([1.0], ["8"]), Graded([0.0], ["9"])])) == {"avg@1", "avg@1/ci95"}


def test_the_order_of_samples_and_prompts_does_not_matter() -> None:
    rng = random.Random(0)
    prompts = [
        Graded([float(rng.random() < 0.5) for _ in range(5)], list("aabbc"), rng.choice("xy")) for _ in range(40)
    ]
    shuffled = []
    for graded in rng.sample(prompts, len(prompts)):
        order = rng.sample(range(5), 5)
        scores, answers = [graded.scores[i] for i in order], [graded.answers[i] for i in order]
        shuffled.append(Graded(scores, answers, graded.source))
    assert summary(shuffled) == pytest.approx(summary(prompts))
