from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from distflow.algorithms import TokenTerms, advantages, kl
from distflow.algorithms.advantages import NORMALIZE, grpo, zero_std_fraction
from distflow.algorithms.aggregation import MODES, Aggregation, aggregate
from distflow.algorithms.logprobs import token_scores
from distflow.algorithms.losses import TokenLoss, ppo
from distflow.errors import UserError

ROWS, TOKENS = 5, 4


def _drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_grpo_of_a_group_of_one_is_the_reward(normalize: str) -> None:
    found = grpo(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 1, 1]), normalize=normalize)
    assert found[0] == 3.0
    assert found[1] == -found[2] < 0


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_equal_rewards_give_exactly_zero(normalize: str) -> None:
    rewards = torch.tensor([0.1] * 7 + [0.7] * 3)
    found = grpo(rewards, torch.tensor([0] * 7 + [1] * 3), normalize=normalize)
    assert found.abs().max() == 0
    assert found.dtype == torch.float32


@pytest.mark.parametrize("reward", [1e8 + 0.1, -0.1, 1e-30])
def test_equal_rewards_of_any_size_give_exactly_zero(reward: float) -> None:
    rewards, group = torch.full((6,), reward, dtype=torch.float64), torch.tensor([0, 0, 0, 4, 4, 4])
    mask = torch.ones(6, 2, dtype=torch.bool)
    for normalize in advantages.NORMALIZE:
        assert advantages.grpo(rewards, group, normalize=normalize).tolist() == [0.0] * 6
    assert advantages.rloo(rewards, group).tolist() == [0.0] * 6
    assert advantages.opo(rewards, group, torch.tensor([1, 2, 3, 7, 7, 7])).tolist() == [0.0] * 6
    assert advantages.reinforce_plus_plus_baseline(rewards, group, mask).abs().max() == 0


def test_grpo_refuses_unknown_names() -> None:
    with pytest.raises(UserError, match="normalize='std': expected one of group_std, batch_std, none"):
        grpo(torch.zeros(2), torch.zeros(2), normalize="std")


def test_zero_std_fraction() -> None:
    rewards_B = torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0])
    assert zero_std_fraction(rewards_B.long(), torch.zeros(5)) == (0.0, 1), "a reward may be an integer"
    share, groups = zero_std_fraction(rewards_B, torch.tensor([0, 0, 1, 1, 2]))
    assert share == pytest.approx(2 / 3)
    assert groups == 3


def _ppo(new: Tensor, old: Tensor, advantages: Tensor, clip: Sequence[float]) -> TokenLoss:
    return ppo(TokenTerms(torch.ones_like(new, dtype=torch.bool), new, old, advantages=advantages), clip=clip)


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        ((0.2,), r"clip=\[0.2\]: expected \[lo, hi\]"),
        ((1.0, 0.2), "0 <= lo < 1"),
        ((0.2, -0.1), "hi >= 0"),
        ((0.2, 0.2, 0.5), "dual clip .* must be > 1"),
    ],
)
def test_ppo_refuses_bad_clips(clip: tuple[float, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _ppo(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), clip)


def test_k3_estimates_the_divergence() -> None:
    logits = _drawn(2, 6)
    new, ref = logits.log_softmax(-1)
    exact = (new.exp() * (new - ref)).sum()
    for function in (kl.k1, kl.k3):
        torch.testing.assert_close((new.exp() * function(new, ref)).sum(), exact)


MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "token-sum"])
def test_aggregation_adds_up_over_micro_batches(mode: str) -> None:
    how = Aggregation.parse(f"{mode}/50" if mode.endswith("norm") else mode)
    loss_BT = _drawn(ROWS, TOKENS)
    parts = [aggregate(loss_BT[row : row + 1], MASK[row : row + 1], how) for row in range(ROWS)]
    total, denominator = aggregate(loss_BT, MASK, how)
    assert sum(float(part) for part, _ in parts) == pytest.approx(float(total), rel=1e-12)
    assert sum(count for _, count in parts) == denominator


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mean", "aggregate='mean': expected one of token-mean, token-sum"),
        ("token-mean/5", "only seq-mean-token-sum-norm takes a constant"),
        ("seq-mean-token-sum-norm", "append the constant"),
        ("seq-mean-token-sum-norm/0", "append the constant"),
        *((f"seq-mean-token-sum-norm/{'9' * count}", "append the constant") for count in (16, 400, 5000)),
        ("seq-mean-token-sum-norm/٣", "append the constant"),
    ],
)
def test_aggregation_refuses(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Aggregation.parse(text)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_token_scores(temperature: float) -> None:
    logits, targets = _drawn(6, 5).requires_grad_(), torch.tensor([0, 4, 2, 2, 1, 3])
    logprobs, entropy = token_scores(logits, targets, temperature=temperature, entropy=True)
    assert entropy is not None
    for row, target in enumerate(targets.tolist()):
        weights = [math.exp(z / temperature) for z in logits[row].tolist()]
        probs = [weight / sum(weights) for weight in weights]
        assert logprobs[row].item() == pytest.approx(math.log(probs[target]), rel=1e-12)
        assert entropy[row].item() == pytest.approx(-sum(p * math.log(p) for p in probs), rel=1e-12)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = token_scores(x, targets, temperature=temperature, entropy=True)
        assert entropy is not None
        return logprobs, entropy

    assert torch.autograd.gradcheck(both, (logits,))
    assert torch.autograd.gradcheck(lambda x: both(x)[0], (logits,))
    assert torch.autograd.gradcheck(lambda x: both(x)[1], (logits,))


def test_tokens_that_are_excluded_add_nothing_to_the_entropy() -> None:
    logits = torch.tensor([[0.5, -torch.inf, 2.0], [1.0, 1.0, -torch.inf]], dtype=torch.float64).requires_grad_()
    kept = logits.detach()[[[0], [1]], [[0, 2], [0, 1]]].requires_grad_()
    _, entropy = token_scores(logits, torch.tensor([0, 0]), entropy=True)
    _, expected = token_scores(kept, torch.tensor([0, 0]), entropy=True)
    assert entropy is not None
    assert expected is not None
    torch.testing.assert_close(entropy, expected)
    entropy.sum().backward()
    expected.sum().backward()
    assert logits.grad is not None
    assert logits.grad[[0, 1], [1, 2]].tolist() == [0.0, 0.0]
    torch.testing.assert_close(logits.grad[[[0], [1]], [[0, 2], [0, 1]]], kept.grad)


def test_token_scores_widen_half_precision() -> None:
    logits = _drawn(3, 5).bfloat16().requires_grad_()
    logprobs, entropy = token_scores(logits, torch.tensor([0, 1, 2]))
    assert entropy is None
    assert logprobs.dtype == torch.float32
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
