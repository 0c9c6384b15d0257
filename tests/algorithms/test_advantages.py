"""Advantages of samples and tokens, each against its formula written out, and whitening."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from distflow.algorithms import advantages
from distflow.algorithms.advantages import Moments, token_sums

REWARDS = [0.3, 1.0, -2.0, 0.5, 0.5, 4.0, 1.0]
GROUPS = [7, 7, 7, 2, 2, 2, 11]
LENGTHS = [4, 1, 2, 0, 3, 4, 2]
MASK = torch.tensor(
    [[1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 0]], dtype=torch.bool
)


def as_tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def members(of: int) -> list[int]:
    return [row for row, group in enumerate(GROUPS) if group == GROUPS[of]]


def drawn(seed: int) -> Tensor:
    return torch.randn(len(REWARDS), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_rloo() -> None:
    found = advantages.rloo(as_tensor(REWARDS), torch.tensor(GROUPS)).tolist()
    for row, reward in enumerate(REWARDS):
        others = [REWARDS[other] for other in members(row) if other != row]
        assert found[row] == pytest.approx(reward - (sum(others) / len(others) if others else 0.0), rel=1e-12)


def test_opo() -> None:
    found = advantages.opo(as_tensor(REWARDS), torch.tensor(GROUPS), torch.tensor(LENGTHS)).tolist()
    for row, reward in enumerate(REWARDS):
        group = members(row)
        base = sum(LENGTHS[i] * REWARDS[i] for i in group) / sum(LENGTHS[i] for i in group)
        assert found[row] == pytest.approx(reward - base, rel=1e-12, abs=1e-15)


def test_opo_of_empty_responses() -> None:
    assert advantages.opo(torch.ones(2), torch.zeros(2), torch.zeros(2)).tolist() == [1.0, 1.0]


def test_remax() -> None:
    assert advantages.remax(torch.tensor([1.0, 0.25]), torch.tensor([0.5, 1.0])).tolist() == [0.5, -0.75]


def whitened_by_hand(values: list[list[float]]) -> list[list[float]]:
    flat = [values[r][t] for r in range(len(values)) for t in range(4) if MASK[r, t]]
    mean = sum(flat) / len(flat)
    variance = sum((x - mean) ** 2 for x in flat) / (len(flat) - 1)
    return [
        [(values[r][t] - mean) / math.sqrt(variance + 1e-8) if MASK[r, t] else 0.0 for t in range(4)]
        for r in range(len(values))
    ]


def flat(values: list[list[float]]) -> list[float]:
    return [value for row in values for value in row]


def test_whiten() -> None:
    x = drawn(1)
    found = advantages.whiten(x, MASK)
    assert flat(found.tolist()) == pytest.approx(flat(whitened_by_hand(x.tolist())), rel=1e-12)
    assert float(found[MASK].mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(found[MASK].var()) == pytest.approx(1.0, rel=1e-6)


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


def test_reinforce_plus_plus() -> None:
    rewards = drawn(3)
    returns = [[0.0] * 4 for _ in REWARDS]
    for row in range(len(REWARDS)):
        running = 0.0
        for t in reversed(range(4)):
            if MASK[row, t]:
                running = float(rewards[row, t]) + 0.9 * running
                returns[row][t] = running
    found = advantages.reinforce_plus_plus(rewards, MASK, gamma=0.9)
    assert flat(found.tolist()) == pytest.approx(flat(whitened_by_hand(returns)), rel=1e-12, abs=1e-14)


def test_reinforce_plus_plus_baseline() -> None:
    centred = [REWARDS[row] - sum(REWARDS[i] for i in members(row)) / len(members(row)) for row in range(len(REWARDS))]
    found = advantages.reinforce_plus_plus_baseline(as_tensor(REWARDS), torch.tensor(GROUPS), MASK)
    expected = whitened_by_hand([[value] * 4 for value in centred])
    assert flat(found.tolist()) == pytest.approx(flat(expected), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.5, 1.0)])
def test_gae(gamma: float, lam: float) -> None:
    rewards, values = drawn(4), drawn(5)
    found, returns = advantages.gae(rewards, values, MASK, gamma=gamma, lam=lam)
    for row in range(len(REWARDS)):
        tokens = [t for t in range(4) if MASK[row, t]]
        for place, t in enumerate(tokens):
            expected = 0.0
            for ahead, u in enumerate(tokens[place:]):
                after = tokens[place + ahead + 1 :]
                value_after = float(values[row, after[0]]) if after else 0.0
                delta = float(rewards[row, u]) + gamma * value_after - float(values[row, u])
                expected += (gamma * lam) ** ahead * delta
            assert float(found[row, t]) == pytest.approx(expected, rel=1e-12, abs=1e-14)
            assert float(returns[row, t]) == pytest.approx(expected + float(values[row, t]), rel=1e-12, abs=1e-14)
    assert found[~MASK].abs().max() == 0
    assert returns[~MASK].abs().max() == 0


def test_with_gamma_and_lambda_one_returns_are_the_sum_of_rewards() -> None:
    rewards, values = drawn(6), drawn(7)
    _, returns = advantages.gae(rewards, values, torch.ones_like(MASK), gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, rewards.flip(1).cumsum(1).flip(1))


def test_results_have_the_type_of_what_is_given() -> None:
    half = torch.zeros(7, 4)
    assert advantages.gae(half, half, MASK)[0].dtype == torch.float32
    assert advantages.whiten(half, MASK).dtype == torch.float32
    assert advantages.rloo(half[:, 0], torch.tensor(GROUPS)).dtype == torch.float32
