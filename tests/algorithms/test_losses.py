"""Policy losses, the value loss and corrections, each against its formula written out token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.algorithms import TokenTerms, corrections, losses
from distflow.errors import UserError

ROWS, TOKENS = 5, 4
MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0]], dtype=torch.bool)
PLACES = [(row, token) for row in range(ROWS) for token in range(TOKENS)]


def drawn(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(ROWS, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def terms(new: Tensor, **changes: Tensor) -> TokenTerms:
    given = {
        "old_logprobs": drawn(2),
        "rollout_logprobs": drawn(3),
        "advantages": drawn(4),
        "entropy": drawn(5).abs(),
    }
    return TokenTerms(MASK, new, **{**given, **changes})


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))


def by_hand(name: str, new: Tensor, at: tuple[int, int], weight: Tensor | None = None) -> float:
    """The loss of one token; `weight`: its log-prob where it stands without gradient."""
    given = terms(new)
    row, _ = at
    fixed = float((new if weight is None else weight)[at])
    old, rollout, advantage = (float(t[at]) for t in (given.old_logprobs, given.rollout_logprobs, given.advantages))
    log_new = float(new[at])
    if name == "gspo":
        length = int(MASK[row].sum())
        here = new if weight is None else weight
        total = sum(float(here[row, t] - given.old_logprobs[row, t]) for t in range(TOKENS) if MASK[row, t])
        sequence = math.exp(total / max(length, 1)) * math.exp(log_new - fixed)
        return clipped(sequence, advantage, 0.1, 0.2)
    return {
        "cispo": lambda: -min(math.exp(fixed - old), 1.3) * advantage * log_new,
        "aipo": lambda: -min(math.exp(fixed - rollout), 1.5) * advantage * log_new,
        "decoupled_ppo": lambda: (
            min(math.exp(old - rollout), 1.5) * clipped(math.exp(log_new - old), advantage, 0.2, 0.3)
        ),
    }[name]()


SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": {"clip": (0.1, 0.2)},
    "cispo": {"clip": (1.0, 0.3)},
    "aipo": {"cap": 1.5},
    "decoupled_ppo": {"clip": (0.2, 0.3), "cap": 1.5},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_values(name: str) -> None:
    new = drawn(1)
    found = getattr(losses, name)(terms(new), **SETTINGS[name])
    for at in PLACES:
        if MASK[at]:
            assert float(found.loss_BT[at]) == pytest.approx(by_hand(name, new, at), rel=1e-12), at
    assert found.clipped_BT.dtype == torch.bool
    assert 0 < found.clipped_BT[MASK].sum() < MASK.sum()
    assert found.metrics == {}


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients(name: str) -> None:
    """Only what has a gradient in the formula has one: ratios and weights under sg[] are held at their values."""
    new = drawn(1).requires_grad_()
    loss = getattr(losses, name)(terms(new), **SETTINGS[name])
    (loss.loss_BT * MASK).sum().backward()
    assert new.grad is not None
    step = 1e-6
    for at in PLACES:
        if not MASK[at]:
            assert new.grad[at] == 0
            continue
        moved = []
        for sign in (1, -1):
            other = new.detach().clone()
            other[at] += sign * step
            moved.append(by_hand(name, other, at, weight=new.detach()))
        assert float(new.grad[at]) == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-6, abs=1e-9), at


@pytest.mark.parametrize("name", ["ppo", *SETTINGS])
def test_the_entropy_bonus(name: str) -> None:
    loss = getattr(losses, name)
    entropy = drawn(5).abs().requires_grad_()
    given = terms(drawn(1), entropy=entropy)
    assert loss(given).added_BT is None
    found = loss(given, entropy_coef=0.25)
    torch.testing.assert_close(found.added_BT, -0.25 * entropy)
    torch.testing.assert_close(found.loss_BT, loss(given).loss_BT)
    with pytest.raises(UserError, match="entropy_coef=-1"):
        loss(given, entropy_coef=-1)


@pytest.mark.parametrize("clip", [0.3, None])
def test_value(clip: float | None) -> None:
    values, old, returns = drawn(1).requires_grad_(), drawn(2), drawn(3)
    found = losses.value(values, old, returns, clip=clip)
    for at in PLACES:
        v, o, r = float(values[at]), float(old[at]), float(returns[at])
        plain, bounded = (v - r) ** 2, (v - r) ** 2
        if clip is not None:
            bounded = (min(max(v, o - clip), o + clip) - r) ** 2
        assert float(found.loss_BT[at]) == pytest.approx(max(plain, bounded) / 2, rel=1e-12)
        assert bool(found.clipped_BT[at]) == (bounded > plain)
    assert bool(found.clipped_BT.any()) == (clip is not None)
    assert torch.autograd.gradcheck(lambda x: losses.value(x, old, returns, clip=clip).loss_BT, (values,))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda given: losses.cispo(given, clip=(0.2, 0.2, 3.0)), r"clip=\[0.2, 0.2, 3.0\]: cispo expects \[lo, hi\]"),
        (lambda given: losses.cispo(given, clip=(1.1, 0.2)), "0 <= lo <= 1"),
        (lambda given: losses.aipo(given, cap=0.0), "cap=0.0: the bound of the importance weight"),
        (lambda given: losses.aipo(given, cap=math.nan), "cap=nan"),
        (lambda given: losses.decoupled_ppo(given, cap=-1.0), "cap=-1"),
        (lambda given: losses.gspo(given, clip=(0.1,)), r"expected \[lo, hi\]"),
        (
            lambda given: losses.value(*[given.logprobs] * 3, clip=0.0),
            "clip=0.0: the bound of a value",
        ),
    ],
)
def test_bad_settings(call: Callable[[TokenTerms], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(terms(drawn(1)))


FAR = {"old_logprobs": torch.zeros(ROWS, TOKENS, dtype=torch.float64), "rollout_logprobs": drawn(3, 100.0)}


@pytest.mark.parametrize("name", ["ppo", *SETTINGS])
def test_far_off_policy_gradients_are_finite(name: str) -> None:
    new = drawn(1, 100.0).requires_grad_()
    getattr(losses, name)(terms(new, **FAR)).loss_BT.sum().backward()
    assert new.grad is not None
    assert bool(new.grad.isfinite().all())


def test_a_term_that_is_not_there_says_which_step_supplies_it() -> None:
    bare = TokenTerms(MASK, drawn(1))
    assert bare.has("logprobs")
    assert not bare.has("ref_logprobs")
    assert bare.lengths.tolist() == [2, 4, 0, 2, 1]
    with pytest.raises(UserError, match=r"terms\.ref_logprobs, which is not there .*reference:ref_logprobs"):
        _ = bare.ref_logprobs
    with pytest.raises(UserError, match=r"terms\.old_logprobs.*distflow\.workers\.reference:old_logprobs"):
        losses.ppo(TokenTerms(MASK, drawn(1), advantages=drawn(4)))
    with pytest.raises(UserError, match=r"terms\['teacher'\], but no step writes 'teacher'"):
        _ = bare["teacher"]
    with pytest.raises(AttributeError, match=r"terms has no 'advantage' — did you mean 'advantages'"):
        _ = bare.advantage
    further = TokenTerms(MASK, drawn(1), further={"teacher": drawn(7)}.get)
    assert further.has("teacher")
    assert further["teacher"].equal(drawn(7))


def weights_by_hand(name: str, old: Tensor, rollout: Tensor, at: tuple[int, int]) -> float:
    ratio = math.exp(float(old[at] - rollout[at]))
    if name == "geometric_mask":
        trained = [t for t in range(TOKENS) if MASK[at[0], t]]
        mean = sum(float(old[at[0], t] - rollout[at[0], t]) for t in trained) / max(len(trained), 1)
        return float(0.5 <= math.exp(mean) <= 1.5)
    return {"tis": min(ratio, 1.5), "icepop": ratio * (0.5 <= ratio <= 1.5), "mis": ratio * (ratio <= 1.5)}[name]


@pytest.mark.parametrize(
    "name, settings",
    [
        ("tis", {"cap": 1.5}),
        ("icepop", {"lo": 0.5, "hi": 1.5}),
        ("mis", {"hi": 1.5}),
        ("geometric_mask", {"lo": 0.5, "hi": 1.5}),
    ],
)
def test_corrections(name: str, settings: dict[str, float]) -> None:
    old, rollout = drawn(1).requires_grad_(), drawn(2)
    weights = getattr(corrections, name)(old, rollout, MASK, **settings)
    assert weights.shape == old.shape
    assert not weights.requires_grad
    found = [float(weights[at]) for at in PLACES]
    assert found == pytest.approx([weights_by_hand(name, old, rollout, at) for at in PLACES], rel=1e-12)
    assert len(set(found)) > 1


@pytest.mark.parametrize("name", ["icepop", "mis", "geometric_mask"])
@pytest.mark.parametrize("bounds", [(2.0, 1.0), (-1.0, 1.0), (0.5, math.nan)])
def test_bounds_of_corrections(name: str, bounds: tuple[float, float]) -> None:
    with pytest.raises(UserError, match=rf"{name}=\[.*expected the bounds"):
        getattr(corrections, name)(drawn(1), drawn(2), MASK, lo=bounds[0], hi=bounds[1])
