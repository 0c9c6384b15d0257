"""What losses and corrections are given: terms that are not there, the entropy bonus, settings that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from distflow.algorithms import TokenTerms, corrections, losses
from distflow.algorithms.aggregation import Aggregation, aggregate
from distflow.algorithms.logprobs import token_scores
from distflow.errors import UserError

ROWS, TOKENS = 5, 4
MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0]], dtype=torch.bool)


def drawn(seed: int) -> Tensor:
    return torch.randn(ROWS, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def terms(new: Tensor, **changes: Tensor) -> TokenTerms:
    given = {
        "old_logprobs": drawn(2),
        "rollout_logprobs": drawn(3),
        "advantages": drawn(4),
        "entropy": drawn(5).abs(),
    }
    return TokenTerms(MASK, new, **{**given, **changes})


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "aipo", "decoupled_ppo"])
@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_what_stands_outside_the_mask_counts_for_nothing(name: str, strange: float) -> None:
    def total(outside: float) -> tuple[Tensor, Tensor]:
        new = drawn(1).requires_grad_()
        others = {key: drawn(n).masked_fill(~MASK, outside) for n, key in enumerate(("old_logprobs", "advantages"))}
        loss = getattr(losses, name)(terms(new, **others))
        found, _ = aggregate(loss.loss_BT, MASK, Aggregation())
        return found.detach(), torch.autograd.grad(found, new)[0][MASK]

    for found, expected in zip(total(strange), total(0.0), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["cispo", "aipo"])
@pytest.mark.parametrize("before", [-1.0, -math.inf])
def test_the_gradient_is_finite_where_the_policy_excludes_a_token(name: str, before: float) -> None:
    logits = torch.zeros(1, 4, dtype=torch.float64)
    logits[0, 2] = -torch.inf
    logits.requires_grad_()
    logprobs, _ = token_scores(logits, torch.tensor([2]))
    one = torch.ones(1, 1, dtype=torch.float64)
    given = TokenTerms(one.bool(), logprobs[:, None], before * one, before * one, advantages=one)
    (gradient,) = torch.autograd.grad(getattr(losses, name)(given).loss_BT.sum(), logits)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "aipo", "decoupled_ppo"])
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


@pytest.mark.parametrize("name", ["icepop", "mis", "sequence_tis", "sequence_mis", "geometric_mask"])
@pytest.mark.parametrize("bounds", [(2.0, 1.0), (-1.0, 1.0), (0.5, math.nan)])
def test_bounds_of_corrections(name: str, bounds: tuple[float, float]) -> None:
    with pytest.raises(UserError, match=rf"{name}=\[.*expected the bounds"):
        getattr(corrections, name)(drawn(1), drawn(2), MASK, lo=bounds[0], hi=bounds[1])
