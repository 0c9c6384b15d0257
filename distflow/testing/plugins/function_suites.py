"""What losses and KL estimators promise besides working within the shipped update: no NaN, no row that sees another.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distflow.algorithms import TokenTerms
from distflow.errors import UserError
from distflow.flow.resolve import resolve
from distflow.testing.plugins.findings import SuiteReport
from distflow.testing.plugins.trial import Trial

ROWS, WIDTH = 6, 5
SIZES = {"near": 0.1, "far from": 30.0}
"""Largest difference of log-probs of two policies."""


def run_loss_suite(trial: Trial, report: SuiteReport, call: str) -> None:
    """The loss alone: its gradient at ratios near 1 and far from it, and that of a row without the others."""
    function = resolve(call)
    settings = {name: value for name, value in trial.plan.settings.items() if name in _own(trial)}
    for name, size in SIZES.items():
        report.begin(f"the loss with ratios {name} 1")
        try:
            given, loss_BT, gradient_BT = _loss(function, settings, size)
        except (UserError, RuntimeError) as error:
            report.add("wrong", str(error))
            return
        for what, values_BT in (("loss", loss_BT), ("gradient", gradient_BT)):
            if not bool(values_BT[given.mask].isfinite().all()):
                report.add("wrong", _not_finite(what, size))
                return
        if not bool(gradient_BT[given.mask].any()):
            report.add("note", f"no gradient reaches terms.logprobs with ratios {name} 1: nothing would be learnt")
    _test_rows(report, function, settings)


def _own(trial: Trial) -> list[str]:
    """The settings of the function, without those of the update around it."""
    shared = ("loss", "aggregate", "kl_coef", "kl", "tis", "correction")
    return [name for name in trial.plan.settings if name not in shared]


def _not_finite(what: str, size: float) -> str:
    cause = "log-probs of two policies may be far apart: clamp their difference before exp()" if size > 1 else ""
    return (
        f"its {what} is nan or infinite for log-probs that differ by up to {size:g}; {cause or 'is it divided by 0?'}"
    )


def _test_rows(report: SuiteReport, function: Any, settings: Mapping[str, Any]) -> None:
    report.begin("the loss of one row alone")
    _, whole_BT, _ = _loss(function, settings, SIZES["near"])
    for row in range(ROWS):
        _, alone_BT, _ = _loss(function, settings, SIZES["near"], slice(row, row + 1))
        if not torch.allclose(alone_BT[0], whole_BT[row], rtol=1e-4, atol=1e-6):
            report.add(
                "wrong",
                "the loss of a row depends on the rows beside it, and micro-batches are cut anywhere: compute nothing "
                "across rows (what is normalised over a batch belongs into the advantage)",
            )
            return
    report.add("ok", "its gradient is finite near ratio 1 and far from it, and no row changes that of another")


def _loss(
    function: Any, settings: Mapping[str, Any], size: float, rows: slice = slice(None)
) -> tuple[TokenTerms, Tensor, Tensor]:
    """The terms, the loss of each token, and the gradient of their sum to the log-probs."""
    drawn = torch.Generator().manual_seed(17)
    shape = (ROWS, WIDTH)
    mask_BT = torch.arange(WIDTH)[None] < torch.tensor([5, 1, 3, 2, 4, 5])[:, None]
    parts = {
        name: (-size * torch.rand(shape, generator=drawn) - 0.01) * mask_BT
        for name in ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs")
    }
    advantages_BT = torch.randn(ROWS, 1, generator=drawn).expand(shape) * mask_BT
    entropy_BT = torch.rand(shape, generator=drawn) * mask_BT
    further_BT = torch.rand(shape, generator=drawn) * mask_BT
    apart_K = torch.tensor([1.5, 2.5, 3.5])
    logprobs_BT = parts.pop("logprobs")[rows].clone().requires_grad_()
    others = {name: values_BT[rows] for name, values_BT in parts.items()}

    def further(name: str) -> Tensor:
        if name == "candidate_logprobs":
            return 0.01 * logprobs_BT[..., None] - apart_K
        return further_BT[rows] if "candidate" not in name else (-apart_K).expand(*further_BT[rows].shape, 3)

    terms = TokenTerms(
        mask_BT[rows],
        logprobs_BT,
        **others,
        entropy=entropy_BT[rows],
        advantages=advantages_BT[rows],
        further=further,
    )
    found = function(terms, **settings)
    added_BT = found[3] if len(found) > 3 and found[3] is not None else 0.0
    loss_BT = found[0] + added_BT
    if not loss_BT.requires_grad:
        raise UserError("the loss has no gradient: nothing in it depends on terms.logprobs (is it detached?)")
    loss_BT[terms.mask].sum().backward()
    gradient_BT = logprobs_BT.grad
    assert gradient_BT is not None, "the loss has one"
    return terms, loss_BT.detach(), gradient_BT
