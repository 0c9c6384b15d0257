"""Samples that train nothing, or are left out: nothing that compares samples counts them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.algorithms import advantages
from distflow.data.batch import Batch, Ragged
from distflow.data.fields import with_fields
from distflow.data.samples import counts, group_scores, untrained_where_left_out
from distflow.runtime.steps import StepContext
from distflow.types import Uid
from distflow.workers.shaping import dynamic_sampling
from distflow.workers.trainer import advantage, baseline, batch_advantage, describe

NAN = math.nan


def batch(rewards: list[list[float]], out: set[int] = frozenset(), untrained: set[int] = frozenset()) -> Batch:  # type: ignore[assignment]
    """A group for each list; rows `out` are left out, rows `untrained` have no token trained on. Row r has 1 + r % 3
    tokens."""
    rows = sum(map(len, rewards))
    sizes = torch.tensor([len(group) for group in rewards])
    responses = Ragged.from_rows([[3] * (1 + row % 3) for row in range(rows)], torch.int64)
    trained = torch.tensor([row not in untrained for row in range(rows)]).repeat_interleave(responses.lengths)
    flat = torch.tensor([reward for group in rewards for reward in group])
    given = Batch(
        {
            "uid": torch.tensor([[0, group, group] for group in range(len(rewards)) for _ in rewards[group]]),
            "group": torch.arange(len(rewards)).repeat_interleave(sizes),
            "prompt_ids": Ragged.from_rows([[1]] * rows, torch.int64),
            "response_ids": responses,
            "response_mask": responses.like(trained),
            "reward": flat,
            "score": flat,
            "left_out": Ragged.from_texts(["reward error" if row in out else "" for row in range(rows)]),
        }
    )
    return untrained_where_left_out(given)


def found(given: Batch, step: Any = advantage, **settings: Any) -> list[float]:
    """The advantage of each sample, the same at all its tokens."""
    rows = [row.tolist() for row in step(given, StepContext("s"), **settings).ragged("advantage").rows()]
    assert all(value == row[0] for row in rows for value in row)
    return [row[0] for row in rows]


LEFT = [[1.0, 0.0, 1.0, 50.0], [NAN, 0.0, 1.0, 0.0], [0.25, 0.5, 0.75, 1.0]]
"""Rows 3 and 4 do not count."""
KEPT = torch.tensor([row for row in range(12) if row not in (3, 4)])
SETTINGS = [
    (advantage, {"function": "grpo"}),
    (advantage, {"function": "grpo", "normalize": "none"}),
    (advantage, {"function": "rloo"}),
    (advantage, {"function": "opo"}),
    (batch_advantage, {"function": "grpo", "normalize": "batch_std"}),
]


@pytest.mark.parametrize("step, settings", SETTINGS)
@pytest.mark.parametrize("how", ["out", "untrained"])
def test_advantages_are_those_of_the_batch_without_such_samples(step: Any, settings: dict[str, Any], how: str) -> None:
    given = batch(LEFT, **{how: {3, 4}})
    expected = torch.zeros(12)
    expected[KEPT] = torch.tensor(found(given.select(KEPT), step, **settings))
    assert found(given, step, **settings) == expected.tolist()
    assert expected.abs().max() > 0.3


def test_whitened_advantages_are_those_of_the_batch_without_such_samples() -> None:
    given = batch(LEFT, out={3}, untrained={4})
    alone = batch_advantage(given.select(KEPT), StepContext("s"), function="reinforce_plus_plus_baseline")
    whole = batch_advantage(given, StepContext("s"), function="reinforce_plus_plus_baseline").ragged("advantage")
    rows = [*whole.rows()]
    for row, expected in zip(KEPT.tolist(), alone.ragged("advantage").rows(), strict=True):
        torch.testing.assert_close(rows[row], expected)
    assert rows[3].tolist() == [0.0]
    assert rows[4].tolist() == [0.0, 0.0]


def test_a_sample_whose_others_are_left_out_is_compared_with_nothing() -> None:
    """Without that it would get its whole reward, as a group of one does by declaration."""
    assert found(batch([[1.0, 0.0, 0.0], [1.0, 0.0, 1.0]], out={1, 2}))[:3] == [0.0, 0.0, 0.0]
    assert found(batch([[1.0, 5.0]], untrained={1})) == [1.0, 0.0]
    assert found(batch([[1.0, 0.0], [2.0, 3.0]], out={0, 1, 2, 3})) == [0.0] * 4


def test_a_function_of_ones_own_gets_the_samples_that_count(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def rows(rewards_B, lengths_B):\n    return rewards_B - rewards_B.mean() + 0 * lengths_B\n"
        "def tokens(rewards_B, mask_BT):\n    return (rewards_B - rewards_B.mean())[:, None] * mask_BT\n"
    )
    given = batch([[1.0, 0.0, 9.0], [NAN, 2.0, 1.0]], out={3}, untrained={2})
    for name in ("rows", "tokens"):
        for step in (advantage, batch_advantage):
            assert found(given, step, function=f"{file}:{name}") == [0.0, -1.0, 0.0, 0.0, 1.0, 0.0]


def test_the_greedy_sample_stays_the_baseline_unless_it_is_left_out() -> None:
    given = batch([[1.0, 0.0, 0.25], [1.0, 0.0, 0.5]], out={1, 5}, untrained={2, 5})
    with_baseline = baseline(given, StepContext("s"))
    assert found(with_baseline, function="remax") == [0.75, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_two_samples_are_enough_where_one_is_the_baseline_of_the_other() -> None:
    """The second group has nothing to learn from; of the third the baseline is left out."""
    given = batch([[1.0, 0.0], [0.5, 0.5], [1.0, NAN]], out={5}, untrained={1, 3, 5})
    reasons = dynamic_sampling(given, StepContext("s", has_baseline=True), keep_every=0).texts("drop_reason")
    assert reasons == ["", "", *["equal rewards"] * 4]
    context = StepContext("s")
    describe(advantage(baseline(given, context), context, function="remax"), context.metrics)
    assert context.metrics.drain()["group/zero_std_frac"] == pytest.approx(2 / 3)


def test_filters_compare_the_samples_that_count() -> None:
    given = batch([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], out={2}, untrained={5})
    context = StepContext("s")
    reasons = dynamic_sampling(given, context, keep_every=0).texts("drop_reason")
    assert reasons == ["equal rewards"] * 6 + [""] * 3
    assert context.metrics.drain()["group/equal_rewards"] == pytest.approx(2 / 3)


def test_metrics_are_of_the_samples_that_count() -> None:
    given = advantage(batch([[1.0, 1.0, 7.0], [1.0, 0.0, NAN]], out={5}, untrained={2}), StepContext("s"))
    context = StepContext("s")
    describe(given, context.metrics)
    metrics = context.metrics.drain()
    assert metrics["critic/rewards/mean"] == metrics["critic/score/mean"] == 0.75
    assert metrics["critic/rewards/max"] == 1.0
    assert metrics["group/zero_std_frac"] == 0.5
    assert metrics["critic/advantages/min"] == pytest.approx(-math.sqrt(0.5), abs=1e-5)
    assert metrics["response_length/mean"] == 2.0


def test_of_a_sample_of_several_sequences_one_trained_token_is_enough() -> None:
    given = batch([[1.0, 1.0, 0.0, 0.0]], untrained={1, 3}).with_columns(sequence=torch.tensor([0, 1, 0, 1]))
    assert counts(given).tolist() == [True, True]
    reasons = dynamic_sampling(given, StepContext("s"), keep_every=0).texts("drop_reason")
    assert reasons == [""] * 4


def test_scores_of_left_out_samples_are_no_measure_of_a_prompt() -> None:
    assert group_scores(batch([[1.0, NAN], [0.0, 1.0], [2.0, 2.0]], out={1, 4, 5})) == {
        Uid(0, 0, 0): (1.0,),
        Uid(0, 1, 1): (0.0, 1.0),
    }


def test_masks_of_all_models_are_cleared_and_the_first_reason_stays() -> None:
    given = batch([[1.0, 0.0]])
    given = given.with_columns(**{"solver/response_mask": given.ragged("response_mask")})
    once = with_fields(given, {"left_out": Ragged.from_texts(["late", ""])})
    twice = untrained_where_left_out(with_fields(once, {"left_out": Ragged.from_texts(["", ""])}))
    assert twice.texts("left_out") == ["late", ""]
    for name in ("response_mask", "solver/response_mask"):
        assert twice.ragged(name).values.tolist() == [False, True, True]


def test_groups_of_nothing_that_counts_give_no_advantage() -> None:
    given = batch([[1.0, 0.0], [2.0, 3.0]], out={0, 1, 2, 3})
    for function in ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline"):
        zeros = batch_advantage(given, StepContext("s"), function=function).ragged("advantage").values
        assert not zeros.any()
    assert advantages.zero_std_fraction(torch.zeros(0), torch.zeros(0, dtype=torch.int64)) == (0.0, 0)
