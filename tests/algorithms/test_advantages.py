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
