"""Every function of `distflow/algorithms` against its formula in loops: values and gradients, on random batches.

They have rows without a token trained on, groups of one and of equal rewards, and log-probs that are up to hundreds
apart. In float32 nothing may be NaN or infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from distflow.algorithms import (
    TokenTerms,
    advantages,
    aggregation,
    corrections,
    kl,
    losses,
    penalties,
    preference,
    supervised,
)
from distflow.algorithms.aggregation import MODES, Aggregation
from tests.algorithms import loops
from tests.algorithms.loops import LOSSES, Case, constant, draw, number

SEEDS = range(6)
APART = (0.1, 1.0, 50.0, 400.0)
DRAWS = [pytest.param(seed, apart, id=f"{seed}-{apart}") for seed in SEEDS for apart in APART]
BOUNDS = {
    "tis": (0.0, 1.3),
    "icepop": (0.5, 2.0),
    "mis": (0.0, 2.0),
    "sequence_tis": (0.1, 2.0),
    "sequence_mis": (0.2, 4.0),
    "geometric_mask": (0.9, 1.1),
}


def close(found: Iterable[float], expected: Iterable[float]) -> None:
    assert list(found) == pytest.approx(list(expected), rel=1e-10, abs=1e-10)


def gradient(total: Tensor, of: Tensor) -> list[float]:
    """Zeros where the total does not depend on it."""
    if not total.requires_grad:
        return [0.0] * of.numel()
    (found,) = torch.autograd.grad(total, of, allow_unused=True)
    return [0.0] * of.numel() if found is None else found.flatten().tolist()


def masked(per_token: Tensor, case: Case) -> Tensor:
    return per_token[case.mask].sum()


def summed(parts: Iterable[Tensor]) -> Tensor:
    return sum(parts, constant(0.0))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("seed", "apart"), DRAWS)
def test_losses(name: str, seed: int, apart: float) -> None:
    case = draw(seed, apart)
    case.new.requires_grad_()
    formula, settings = LOSSES[name]
    loss = getattr(losses, formula.__name__)(TokenTerms(**case.terms), **settings)
    expected = [formula(case, *at, **settings) for at in case.places]
    close(loss.loss_BT.detach()[case.mask].tolist(), map(number, expected))
    close(gradient(masked(loss.loss_BT, case), case.new), gradient(summed(expected), case.new))
    free = {"cap": math.inf} if name == "aipo" else {**settings, "clip": (math.inf, math.inf)}
    unclipped = [number(formula(case, *at, **free)) for at in case.places]
    assert loss.clipped_BT[case.mask].tolist() == [
        number(one) != other for one, other in zip(expected, unclipped, strict=True)
    ]


@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize(("seed", "apart"), DRAWS)
def test_the_value_loss(clip: float | None, seed: int, apart: float) -> None:
    case = draw(seed, apart)
    case.new.requires_grad_()
    found, clipped_BT, *_ = losses.value(case.new, case.old, case.values, clip=clip)
    expected = [loops.value(case.new[at], case.old[at], case.values[at], clip) for at in case.places]
    plain = [number(loops.value(case.new[at], case.old[at], case.values[at], None)) for at in case.places]
    assert clipped_BT[case.mask].tolist() == [number(a) > b for a, b in zip(expected, plain, strict=True)]
    close(found.detach()[case.mask].tolist(), map(number, expected))
    close(gradient(masked(found, case), case.new), gradient(summed(expected), case.new))


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@pytest.mark.parametrize(("seed", "apart"), DRAWS)
def test_divergences(name: str, seed: int, apart: float) -> None:
    case = draw(seed, apart)
    case.new.requires_grad_()
    found = getattr(kl, name)(case.new, case.ref)
    expected = [getattr(loops, name)(case.new[at], case.ref[at]) for at in case.places]
    close(found.detach()[case.mask].tolist(), map(number, expected))
    close(gradient(masked(found, case), case.new), gradient(summed(expected), case.new))


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize(("seed", "apart"), DRAWS)
def test_corrections(name: str, seed: int, apart: float) -> None:
    case, (lo, hi) = draw(seed, apart), BOUNDS[name]
    case.old.requires_grad_()
    settings = {"cap": hi} if name == "tis" else {"lo": lo, "hi": hi}
    found = getattr(corrections, name)(case.old, case.rollout, case.mask, **settings)
    assert not found.requires_grad
    expected = [loops.weight(case, b, t, name, lo, hi) for b, t in case.places]
    close(found.detach()[case.mask].tolist(), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(12))
def test_aggregation(mode: str, seed: int) -> None:
    case = draw(seed, 1.0)
    case.new.requires_grad_()
    norm = 50.0 if mode.endswith("norm") else 1.0
    how = Aggregation.parse(f"{mode}/50" if mode.endswith("norm") else mode)
    total, denominator = aggregation.aggregate(case.new.square(), case.mask, how)
    found = total / max(denominator, 1.0)
    expected = loops.aggregate(case, {at: case.new[at] ** 2 for at in case.places}, mode, norm)
    close([number(found)], [number(expected)])
    close(gradient(found, case.new), gradient(expected, case.new))


@pytest.mark.parametrize("seed", range(12))
def test_advantages_of_samples(seed: int) -> None:
    case = draw(seed, 1.0)
    rewards, groups, lengths = case.rewards, case.groups, case.mask.sum(1)
    for normalize in advantages.NORMALIZE:
        close(advantages.grpo(rewards, groups, normalize=normalize).tolist(), loops.grpo(case, normalize))
    close(advantages.rloo(rewards, groups).tolist(), loops.rloo(case))
    close(advantages.opo(rewards, groups, lengths).tolist(), loops.opo(case, lengths.tolist()))
    baselines = case.values[:, 0]
    close(
        advantages.remax(rewards, baselines).tolist(),
        [a - b for a, b in zip(rewards.tolist(), baselines.tolist(), strict=True)],
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_advantages_of_tokens(seed: int, gamma: float, lam: float) -> None:
    case = draw(seed, 1.0)
    rewards, mask = case.advantages, case.mask

    def same(found: Tensor, expected: loops.Rows) -> None:
        close(found.flatten().tolist(), [x for row in expected for x in row])

    same(advantages.whiten(rewards, mask), loops.whitened(case, rewards.tolist()))
    found = advantages.reinforce_plus_plus(rewards, mask, gamma=gamma)
    same(found, loops.reinforce_plus_plus(case, rewards.tolist(), gamma))
    found = advantages.reinforce_plus_plus_baseline(case.rewards, case.groups, mask)
    same(found, loops.reinforce_plus_plus_baseline(case))
    expected = loops.gae(case, rewards.tolist(), gamma, lam)
    found, returns = advantages.gae(rewards, case.values, mask, gamma=gamma, lam=lam)
    same(found, expected)
    trained = [
        [a + float(case.values[b, t]) * bool(mask[b, t]) for t, a in enumerate(r)] for b, r in enumerate(expected)
    ]
    same(returns, trained)


@pytest.mark.parametrize("limit, buffer", [(20, 5), (7, 7), (4, 0.8)])
def test_the_penalty_of_overlong_responses(limit: int, buffer: float) -> None:
    lengths = torch.arange(40)
    expected = []
    for length in range(40):
        over = length - (limit - buffer)
        expected.append(0.0 if over <= 0 else -1.0 if length > limit else -over / buffer)
    close(penalties.overlong(lengths, limit=limit, buffer=buffer).tolist(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("seed", "apart"), DRAWS)
def test_nothing_is_ever_infinite(seed: int, apart: float, dtype: torch.dtype) -> None:
    case = draw(seed, apart, dtype)
    new = case.new.requires_grad_()
    terms = TokenTerms(**case.terms)
    weights = [torch.ones_like(new)]
    weights += [corrections.tis(case.old, case.rollout, case.mask)]
    weights += [getattr(corrections, name)(case.old, case.rollout, case.mask) for name in BOUNDS if name != "tis"]
    found = [getattr(losses, f.__name__)(terms, **settings).loss_BT for f, settings in LOSSES.values()]
    found += [losses.value(new, case.old, case.values, clip=clip).loss_BT for clip in (0.5, None)]
    found += [getattr(kl, name)(new, case.ref) for name in ("k1", "k2", "k3")]
    modes = [Aggregation.parse(f"{mode}/50" if mode.endswith("norm") else mode) for mode in MODES]
    for loss_BT in found:
        for weight_BT in weights:
            assert bool((loss_BT * weight_BT).isfinite().all())
        for how in modes:
            total, _ = aggregation.aggregate(loss_BT, case.mask, how)
            (slope,) = torch.autograd.grad(total, new, retain_graph=True)
            assert bool(total.isfinite())
            assert bool(slope.isfinite().all())


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def log_sigmoid(x: float) -> float:
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


@pytest.mark.parametrize(("seed", "apart"), DRAWS)
def test_losses_on_responses_of_the_data(seed: int, apart: float) -> None:
    """Of each pair or response by its formula, with the derivative of that; some are equal, some far apart."""
    generator = torch.Generator().manual_seed(seed)
    chosen, rejected = (apart * torch.randn(2, 7, generator=generator, dtype=torch.float64)).unbind()
    rejected[0] = chosen[0]
    good, beta, eps, point = torch.rand(7, generator=generator) < 0.5, 0.3, 0.1, 0.4
    margins = [beta * (c - r) for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True)]
    gains = [(beta if g else -beta) * (c - point) for c, g in zip(chosen.tolist(), good.tolist(), strict=True)]
    weights = [1.5 if g else 0.7 for g in good.tolist()]
    apart_by = [c - r for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True)]
    cases: list[tuple[Callable[[Tensor], Tensor], list[float], list[float]]] = [
        (
            lambda c: preference.dpo(c, rejected.to(c), beta=beta, label_smoothing=eps),
            [-(1 - eps) * log_sigmoid(m) - eps * log_sigmoid(-m) for m in margins],
            [beta * (sigmoid(m) - (1 - eps)) for m in margins],
        ),
        (
            lambda c: preference.ipo(c, rejected.to(c), beta=beta),
            [(m - 1 / (2 * beta)) ** 2 for m in apart_by],
            [2 * (m - 1 / (2 * beta)) for m in apart_by],
        ),
        (
            lambda c: preference.kto(
                c, good, torch.tensor(point, dtype=c.dtype), beta=beta, desirable_weight=1.5, undesirable_weight=0.7
            ),
            [w * sigmoid(-x) for w, x in zip(weights, gains, strict=True)],
            [
                -w * (beta if g else -beta) * sigmoid(x) * sigmoid(-x)
                for w, x, g in zip(weights, gains, good.tolist(), strict=True)
            ],
        ),
        (
            lambda c: preference.bradley_terry(c, rejected.to(c)),
            [-log_sigmoid(m) for m in apart_by],
            [sigmoid(m) - 1 for m in apart_by],
        ),
        (supervised.nll, (-chosen).tolist(), [-1.0] * 7),
    ]
    for loss, values, derivatives in cases:
        given = chosen.clone().requires_grad_()
        found = loss(given)
        close(found.tolist(), values)
        close(gradient(found.sum(), given), derivatives)
        single = chosen.float().requires_grad_()
        narrow = loss(single)
        assert bool(narrow.isfinite().all())
        assert all(map(math.isfinite, gradient(narrow.sum(), single)))
