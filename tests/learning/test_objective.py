"""The whole objective of an update: any loss under any correction, with entropy and KL, against loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distflow.algorithms import TokenTerms, kl, losses
from distflow.algorithms.aggregation import Aggregation
from distflow.errors import UserError
from distflow.workers.objective import Correction, Objective
from tests.algorithms import loops
from tests.algorithms.loops import LOSSES, Case, draw, number

CORRECTIONS: dict[str, tuple[float, float]] = {
    "none": (0.0, 0.0),
    "tis": (0.0, 1.3),
    "icepop": (0.5, 2.0),
    "mis": (0.0, 2.0),
    "sequence_tis": (0.1, 2.0),
    "sequence_mis": (0.2, 4.0),
    "geometric_mask": (0.6, 1.6),
}
OWN = ("aipo", "decoupled_ppo")
"""They correct by themselves."""


def objective(loss: str, correction: str) -> Objective:
    formula, settings = LOSSES[loss]
    lo, hi = CORRECTIONS[correction]
    within = {} if correction in ("none", "tis") else {correction: [lo, hi]}
    return Objective(
        loss=getattr(losses, formula.__name__),
        loss_settings={**settings, "entropy_coef": 0.01},
        aggregation=Aggregation.parse("seq-mean-token-mean"),
        divergence=kl.k3,
        kl_coef=0.1,
        correction=Correction(hi if correction == "tis" else None, within),
    )


def by_loops(case: Case, loss: str, correction: str) -> torch.Tensor:
    formula, settings = LOSSES[loss]
    found = {}
    for b, t in case.places:
        weight = 1.0 if correction == "none" else loops.weight(case, b, t, correction, *CORRECTIONS[correction])
        found[b, t] = weight * formula(case, b, t, **settings) - 0.01 * case.entropy[b, t]
        found[b, t] = found[b, t] + 0.1 * loops.k3(case.new[b, t], case.ref[b, t])
    return loops.aggregate(case, found, "seq-mean-token-mean")


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", [1, 2])
def test_any_loss_under_any_correction(loss: str, correction: str, seed: int) -> None:
    case = draw(seed, 0.5)
    case.new.requires_grad_()
    if loss in OWN and correction not in ("none", "geometric_mask"):
        with pytest.raises(UserError, match=f"the loss itself corrects .* with {correction} that would be done twice"):
            objective(loss, correction).evaluate(TokenTerms(**case.terms))
        return
    total, _ = objective(loss, correction).evaluate(TokenTerms(**case.terms))
    found = total / objective(loss, correction).aggregation.denominator(case.mask)
    expected = by_loops(case, loss, correction)
    assert number(found) == pytest.approx(number(expected), rel=1e-10)
    slopes = [torch.autograd.grad(one, case.new)[0].flatten().tolist() for one in (found, expected)]
    assert slopes[0] == pytest.approx(slopes[1], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("within", [{}, {"icepop": [0.5, 2.0]}, {"sequence_mis": [0.0, 2.0]}])
def test_without_a_choice_tokens_are_truncated_at_two_unless_others_weight_them(within: dict[str, Any]) -> None:
    case = draw(3, 1.0)
    found = Correction("auto", within).weights(TokenTerms(**case.terms), in_loss=False)
    assert found is not None
    name, (lo, hi) = next(iter(within.items()), ("tis", (0.0, 2.0)))
    expected = [loops.weight(case, b, t, name, lo, hi) for b, t in case.places]
    assert found[case.mask].tolist() == pytest.approx(expected, rel=1e-10)
