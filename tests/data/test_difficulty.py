"""Prompts drawn by pass rate: against a model that folds everything anew, and across snapshots."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.difficulty import Difficulty, DifficultyRule, PromptPool, Visit
from distflow.types import Uid

SEED, PROMPTS, OF = 3, 6, 4
POOLS = (PromptPool("hard", 0.25, 1.0), PromptPool("medium", 0.75, 0.5), PromptPool("easy", 1.0, 0.25))

weights = st.sampled_from([0.0, 0.25, 1.0, 2.0])
pools = (
    st.lists(weights, min_size=3, max_size=3)
    .filter(any)
    .map(lambda found: tuple(PromptPool(pool.name, pool.up_to, w) for pool, w in zip(POOLS, found, strict=True)))
)
times = st.none() | st.integers(1, 3)
rules = st.builds(DifficultyRule, st.just(()) | pools, times, times, st.just(1.0), st.sampled_from([0.0, 0.2, 0.6]))
outcomes = st.sampled_from([0, OF, OF, 1, 3])
steps = st.lists(st.lists(st.tuples(st.integers(0, PROMPTS - 1), outcomes), max_size=4), max_size=12)


def visits(found: Sequence[tuple[int, int]]) -> list[Visit]:
    return [Visit(position, prompt, solved, OF) for position, (prompt, solved) in enumerate(found)]


class Naive:
    """Everything that was trained before a version, folded from the beginning."""

    def __init__(self, rule: DifficultyRule, trained: Sequence[Sequence[tuple[int, int]]]) -> None:
        self.rule = rule
        self.last: dict[int, int] = {}
        self.streak: Counter[int] = Counter()
        for step in trained:
            for prompt, solved in step:
                sign = {OF: 1, 0: -1}.get(solved, 0)
                before = self.streak[prompt]
                self.streak[prompt] = sign * (abs(before) + 1 if before * sign > 0 else 1)
                self.last[prompt] = solved
            left = sum(self.weight(prompt) > 0 for prompt in range(PROMPTS))
            if left == 0 or left < rule.reopen_below * PROMPTS:
                self.last.clear()
                self.streak.clear()

    def weight(self, prompt: int) -> float:
        rule, streak = self.rule, self.streak[prompt]
        highest = max((pool.weight for pool in rule.pools), default=1.0)
        if prompt not in self.last:
            return highest
        if streak > 0 and rule.retire_solved is not None and streak >= rule.retire_solved:
            return 0.0
        if streak < 0 and rule.retire_unsolved is not None and -streak >= rule.retire_unsolved:
            return 0.0
        rate = self.last[prompt] / OF
        return next((pool.weight for pool in rule.pools if rate <= pool.up_to), highest)

    def share(self, prompt: int) -> float:
        return self.weight(prompt) / max(self.weight(other) for other in range(PROMPTS))


def share(difficulty: Difficulty, prompt: int, version: int, passes: int = 64) -> float:
    return sum(difficulty.draws(Uid(epoch, prompt, 0), version) for epoch in range(passes)) / passes


@given(rules, steps, st.integers(0, 3))
def test_each_version_draws_by_what_was_trained_before_it(
    rule: DifficultyRule, trained: Sequence[Sequence[tuple[int, int]]], lag: int
) -> None:
    difficulty = Difficulty(rule, SEED, PROMPTS, lag)
    for step, found in enumerate(trained):
        difficulty.record(step, visits(found)[::-1])
        difficulty.record(step, visits(found))  # a step of several updates tells it again
        for version in range(max(0, step + 1 - lag), step + 2):
            naive = Naive(rule, trained[:version])
            for prompt in range(PROMPTS):
                expected = naive.share(prompt)
                drawn = share(difficulty, prompt, version)
                assert (drawn == expected) if expected in (0.0, 1.0) else 0.0 < drawn < 1.0


@given(rules, steps, st.integers(0, 3), st.data())
def test_a_snapshot_goes_on_like_what_it_was_taken_of(
    rule: DifficultyRule, trained: Sequence[Sequence[tuple[int, int]]], lag: int, data: st.DataObject
) -> None:
    whole = Difficulty(rule, SEED, PROMPTS, lag)
    cut = data.draw(st.integers(0, len(trained)))
    for step, found in enumerate(trained[:cut]):
        whole.record(step, visits(found))
    saved = json.loads(json.dumps(whole.snapshot(cut)))
    resumed = Difficulty(rule, SEED, PROMPTS, lag, cut, saved)
    for step in range(cut, len(trained) + 1):
        for version in range(max(0, step - lag), step + 1):
            for uid in (Uid(epoch, prompt, 0) for epoch in range(8) for prompt in range(PROMPTS)):
                assert resumed.draws(uid, version) == whole.draws(uid, version)
        assert resumed.counts() == whole.counts()
        assert resumed.snapshot(step) == whole.snapshot(step)
        if step < len(trained):
            for one in (whole, resumed):
                one.record(step, visits(trained[step]))


@given(steps, st.integers(0, 3))
@settings(max_examples=50)
def test_what_is_kept_is_bounded_by_prompts_and_lag(trained: Sequence[Sequence[tuple[int, int]]], lag: int) -> None:
    difficulty = Difficulty(DifficultyRule(POOLS), SEED, PROMPTS, lag)
    for step, found in enumerate(trained * 5):
        difficulty.record(step, visits(found))
        seen = difficulty.snapshot(step + 1)["seen"]
        assert isinstance(seen, list)
        assert len(seen) <= PROMPTS * (lag + 1)


def test_weights_are_shares_of_the_passes() -> None:
    difficulty = Difficulty(DifficultyRule(POOLS), SEED, PROMPTS, 0)
    difficulty.record(0, [Visit(0, 0, 1, OF), Visit(1, 1, 2, OF), Visit(2, 2, OF, OF)])
    shares = [share(difficulty, prompt, 1, passes=4000) for prompt in range(4)]
    assert shares[0] == shares[3] == 1.0, "of the largest weight, and unseen"
    assert abs(shares[1] - 0.5) < 0.03
    assert abs(shares[2] - 0.25) < 0.03
    assert difficulty.counts() == {
        "pool/hard": 1,
        "pool/medium": 1,
        "pool/easy": 1,
        "retired_solved": 0,
        "retired_unsolved": 0,
        "unseen": 3,
        "reopened": 0,
    }


def test_a_mixed_visit_interrupts_a_row_and_retirement_ends_with_reopening() -> None:
    difficulty = Difficulty(DifficultyRule(retire_solved=2, retire_unsolved=1), SEED, 2, 0)
    for step, solved in enumerate([OF, 2, OF]):
        difficulty.record(step, [Visit(step, 0, solved, OF)])
        assert difficulty.draws(Uid(9, 0, 0), step + 1)
    difficulty.record(3, [Visit(3, 0, OF, OF)])
    assert not difficulty.draws(Uid(9, 0, 0), 4)
    assert difficulty.draws(Uid(9, 1, 0), 4)
    difficulty.record(4, [Visit(4, 1, 0, OF)])
    assert difficulty.counts() | {"reopened": 1, "unseen": 2, "retired_solved": 0} == difficulty.counts()
    assert all(difficulty.draws(Uid(9, prompt, 0), 5) for prompt in range(2))
