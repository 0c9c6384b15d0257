"""Advantages and whitening at their edges: no tokens, equal values, several replicas, types."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distflow.algorithms import advantages
from distflow.algorithms.advantages import Moments, token_sums

MASK = torch.tensor(
    [[1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 0]], dtype=torch.bool
)


def drawn(seed: int) -> Tensor:
    return torch.randn(len(MASK), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_opo_of_empty_responses() -> None:
    assert advantages.opo(torch.ones(2), torch.zeros(2), torch.zeros(2)).tolist() == [1.0, 1.0]


def test_remax() -> None:
    assert advantages.remax(torch.tensor([1.0, 0.25]), torch.tensor([0.5, 1.0])).tolist() == [0.5, -0.75]


@pytest.mark.parametrize("tokens", [0, 1])
def test_fewer_than_two_tokens_are_not_whitened(tokens: int) -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mask[0, :tokens] = True
    assert advantages.whiten(torch.full((2, 3), 5.0), mask).abs().max() == 0
    assert advantages.whiten(torch.full((2, 3), 5.0), mask, moments=Moments(1, 2.0, 0.0)).abs().max() == 0


def test_equal_values_are_whitened_to_zero() -> None:
    found = advantages.whiten(torch.full((7, 4), 0.1, dtype=torch.float64), MASK)
    assert float(found.abs().max()) < 1e-8


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_moments_of_all_replicas_give_the_same_as_whitening_together(parts: int) -> None:
    x = drawn(2)
    sums = sum(token_sums(a, b) for a, b in zip(x.chunk(parts), MASK.chunk(parts), strict=True))
    moments = Moments.of_sums(*torch.as_tensor(sums).tolist())
    together = advantages.whiten(x, MASK)
    pieces = [advantages.whiten(a, b, moments=moments) for a, b in zip(x.chunk(parts), MASK.chunk(parts), strict=True)]
    torch.testing.assert_close(torch.cat(pieces), together, rtol=1e-12, atol=1e-14)


def test_with_gamma_and_lambda_one_returns_are_the_sum_of_rewards() -> None:
    rewards, values = drawn(6), drawn(7)
    _, returns = advantages.gae(rewards, values, torch.ones_like(MASK), gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, rewards.flip(1).cumsum(1).flip(1))


def test_results_have_the_type_of_what_is_given() -> None:
    half = torch.zeros(7, 4)
    assert advantages.gae(half, half, MASK)[0].dtype == torch.float32
    assert advantages.whiten(half, MASK).dtype == torch.float32
    assert advantages.rloo(half[:, 0], torch.arange(7)).dtype == torch.float32


NOISE = [3e-8, -5e-8, 8e-8, 0.0]
"""What rounding leaves of equal numbers of about 1 in float32."""


@pytest.mark.parametrize("size", [1.0, 1000.0, -40.0])
@pytest.mark.parametrize("normalize", ["group_std", "batch_std"])
def test_what_rounding_leaves_of_equal_rewards_is_not_blown_up(size: float, normalize: str) -> None:
    """As a deviation of its own, it would be trained on as if half of the samples had failed."""
    rewards = torch.tensor([size * (1.0 + noise) for noise in NOISE], dtype=torch.float64)
    found = advantages.grpo(rewards, torch.zeros(4), normalize=normalize, eps=0.0)
    assert 0 < float(found.abs().max()) < 1e-3
    mask = torch.ones(4, 2, dtype=torch.bool)
    for whitened in (
        advantages.reinforce_plus_plus(rewards[:, None] * torch.tensor([0.0, 1.0]), mask),
        advantages.reinforce_plus_plus_baseline(rewards, torch.zeros(4), mask),
    ):
        assert float(whitened.abs().max()) < 1e-3


@pytest.mark.parametrize("apart", [1.0, 1e-2, 1e-3])
def test_above_the_floor_the_formulas_are_exact(apart: float) -> None:
    rewards = torch.tensor([1.0, 1.0 + apart, 1.0, 1.0 - apart], dtype=torch.float64)
    offset = rewards - rewards.min()
    centred = offset - offset.sum() / 4
    expected = centred / ((centred.square().sum() / 3).sqrt() + 1e-6)
    assert advantages.grpo(rewards, torch.zeros(4)).equal(expected)


def moments(mean: float, deviation: float) -> Moments:
    return Moments(100.0, mean, deviation**2)


def test_a_critics_error_is_not_whitened_as_if_it_was_the_reward() -> None:
    least = advantages.least_by_rewards
    # It explains something, or its error is no more than what the rewards tell: the deviation stands as it is.
    for spread in (0.01, 0.3, 0.6):
        assert least(moments(0.0, spread), moments(0.8, 0.3)) <= spread
    # An error of ten times the rewards' deviation: their share of it is what is kept.
    assert least(moments(0.0, 0.1), moments(1.0, 0.01)) == pytest.approx(0.1 * 0.1 / 0.02)
    for equal in (moments(1.0, 0.0), moments(0.0, 0.0), moments(1000.0, 1e-4)):
        assert least(moments(0.01, 0.005), equal) == float("inf")
        x = torch.tensor([[0.004, -0.006]])
        assert not advantages.whiten(x, x != 0, least=least(moments(0.01, 0.005), equal)).any()
