"""What becomes of rewards: groups without spread are replaced, penalties are added, and advantages see both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distflow.algorithms import advantages
from distflow.data.batch import Batch, Ragged
from distflow.errors import UserError
from distflow.runtime.steps import StepContext
from distflow.workers.shaping import dynamic_sampling, token_rewards
from distflow.workers.trainer import advantage, batch_advantage

STOP, LENGTH = 0, 1


def groups(rewards: list[list[float]], first: int = 0) -> Batch:
    """A group for each list, at consecutive prompt positions."""
    sizes = torch.tensor([len(group) for group in rewards])
    positions = torch.arange(first, first + len(rewards)).repeat_interleave(sizes)
    return Batch({"reward": torch.tensor([r for group in rewards for r in group]), "group": positions})


def ctx(**changes: Any) -> StepContext:
    return StepContext("step", **changes)


def test_groups_of_equal_rewards_are_replaced() -> None:
    context = ctx(ledgers=2)
    given = groups([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.3, 0.3, 0.3]], first=20)
    found = dynamic_sampling(given, context, keep_every=0)
    assert found.texts("drop_reason") == [""] * 3 + ["equal rewards"] * 6
    assert context.metrics.drain()["group/equal_rewards"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("ledgers", [1, 3, 8])
@pytest.mark.parametrize("keep_every", [1, 4, 10])
def test_of_each_ledger_every_so_many_th_is_kept(ledgers: int, keep_every: int) -> None:
    """Consecutive prompts of one ledger are `ledgers` apart: whatever the two numbers, it never waits for longer."""
    given = groups([[1.0, 1.0]] * (ledgers * keep_every * 3))
    reasons = dynamic_sampling(given, ctx(ledgers=ledgers), keep_every=keep_every).texts("drop_reason")[::2]
    for ledger in range(ledgers):
        kept = [k for k, reason in enumerate(reasons[ledger::ledgers]) if not reason]
        assert kept == list(range(0, keep_every * 3, keep_every))


def test_a_group_of_one_has_nothing_to_differ_from() -> None:
    with pytest.raises(UserError, match=r"batch\.samples_per_prompt is 1: .* 2 or more"):
        dynamic_sampling(groups([[1.0]]), ctx())


def samples() -> Batch:
    """Two groups of samples with 3 and 4, 4 and 2 tokens; the first ends by itself, the last is not trained on."""
    responses = Ragged.from_rows([[5] * n for n in (3, 4, 4, 2)], torch.int64)
    mask = torch.tensor([1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0], dtype=torch.bool)
    return groups([[1.0, 0.5], [0.25, 2.0]]).with_columns(
        response_ids=responses,
        response_mask=responses.like(mask),
        rollout_logprobs=responses.like(-torch.arange(13.0)),
        ref_logprobs=responses.like(-torch.arange(13.0) - 2.0),
        finish_reason=torch.tensor([STOP, LENGTH, LENGTH, STOP]),
    )


def test_the_reward_falls_over_the_last_share_of_the_longest_response() -> None:
    context = ctx()
    found = token_rewards(samples(), context, overlong_share=0.5, overlong_factor=0.8, max_new_tokens=4)
    # Tokens written, the one that ends a response apart: 2, 3, 4 and none; two of four are free.
    sums = [float(row.sum()) for row in found.ragged("token_rewards").rows()]
    assert sums == pytest.approx([1.0, 0.5 - 0.4, 0.25 - 0.8, 0.0])
    assert found.ragged("token_rewards").row(1).tolist() == pytest.approx([0.0, 0.0, 0.0, 0.1])
    assert context.metrics.drain()["reward/overlong"] == pytest.approx(-(0.4 + 0.8) / 4)


def test_an_overlong_share_needs_the_longest_response() -> None:
    with pytest.raises(UserError, match=r"needs max_new_tokens: .*\$\{flow\.steps\.sample\.with\.max_new_tokens\}"):
        token_rewards(samples(), ctx(), overlong_share=0.2)


@pytest.mark.parametrize("step", [advantage, batch_advantage])
def test_advantages_of_samples_take_the_sums_of_what_their_tokens_get(step: Any) -> None:
    """A sample without a token trained on gets none, and its siblings are not compared with it."""
    given = token_rewards(samples(), ctx(), kl_coef=0.1)
    shaped = torch.tensor([1.0 - 0.6, 0.5 - 0.6, 0.25 - 0.8])
    expected = advantages.rloo(shaped, given.dense("group")[:3])
    found = step(given, ctx(), function="rloo", token_rewards=True).ragged("advantage")
    torch.testing.assert_close(torch.stack([row[0] for row in found.rows()]), torch.tensor([*expected, 0.0]))
    plain = step(given, ctx(), function="rloo").ragged("advantage")
    expected = advantages.rloo(given.dense("reward")[:3], given.dense("group")[:3])
    torch.testing.assert_close(torch.stack([row[0] for row in plain.rows()]), torch.tensor([*expected, 0.0]))


def test_functions_of_token_rewards_refuse_their_sums() -> None:
    given = token_rewards(samples(), ctx())
    with pytest.raises(UserError, match="for functions that take rewards_B, and 'reinforce_plus_plus' does not"):
        batch_advantage(given, ctx(), function="reinforce_plus_plus", token_rewards=True)
