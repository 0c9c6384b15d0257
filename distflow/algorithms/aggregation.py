"""Aggregates per-token losses into a sum and a part of the denominator; the quotient is never taken here.

Sums and denominators are added over micro-batches and workers, and divided once, at `apply`, so the gradient is the
same for any split of the batch. Where samples have several rows (`distflow/data/samples.py`), `share_B` says how much
of its sample each row is. Shapes: B rows, T response tokens; masks are True on the tokens trained on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from distflow.errors import UserError

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_NORM = "seq-mean-token-sum-norm"


@dataclass(frozen=True, slots=True)
class Aggregation:
    """How token losses add up.

    `token-mean`: over all tokens of the global batch (arXiv 2503.14476); `token-sum`: not divided at all;
    `seq-mean-token-sum`: token sums, mean over the samples; `seq-mean-token-mean`: mean over each sample's tokens, then
    over the samples (arXiv 2402.03300); `seq-mean-token-sum-norm/C`: token sums over the constant C, mean over the
    samples (arXiv 2503.20783).
    """

    mode: str = "token-mean"
    constant: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Aggregation:
        """Read `token-mean`, …, or `seq-mean-token-sum-norm/1024`; raises UserError naming what is allowed."""
        mode, slash, constant = text.partition("/")
        if mode not in MODES:
            raise UserError(f"aggregate={text!r}: expected one of {', '.join(MODES)}")
        if mode != _NORM:
            if slash:
                raise UserError(f"aggregate={text!r}: only {_NORM} takes a constant")
            return cls(mode)
        if not re.fullmatch("[0-9]{1,15}", constant) or int(constant) == 0:
            shown = text if len(text) <= 60 else f"{text[:60]}…"
            raise UserError(f"aggregate={shown!r}: append the constant, for example {_NORM}/1024, of at most 15 digits")
        return cls(mode, float(constant))

    @property
    def additive(self) -> bool:
        """Whether denominators add up: not for token-sum, whose denominator is 1 for any number of micro-batches."""
        return self.mode != "token-sum"

    def weights(self, mask_BT: Tensor, like: Tensor, share_B: Tensor | None = None) -> Tensor:
        """[B, T] factors in the dtype of `like`, with which the loss sum is Σ loss · weight."""
        weights_BT = mask_BT.to(like.dtype)
        if self.mode == "seq-mean-token-mean":
            means_BT = weights_BT / weights_BT.sum(1, keepdim=True).clamp(min=1)
            return means_BT if share_B is None else means_BT * share_B.to(like)[:, None]
        return weights_BT / self.constant if self.mode == _NORM else weights_BT

    def denominator(self, mask_BT: Tensor, share_B: Tensor | None = None) -> float:
        """The contribution of these rows to the denominator: tokens, or samples with a token trained on."""
        if self.mode == "token-mean":
            return float(mask_BT.sum())
        if not self.additive:
            return 1.0
        trained_B = mask_BT.any(1)
        return float(trained_B.sum() if share_B is None else share_B[trained_B].sum())


def aggregate(loss_BT: Tensor, mask_BT: Tensor, how: Aggregation) -> tuple[Tensor, float]:
    """(Σ loss · weight as a scalar with gradient, contribution to the denominator)."""
    return weighted_sum(loss_BT, how.weights(mask_BT, loss_BT)), how.denominator(mask_BT)


def weighted_sum(loss_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Σ loss · weight as a scalar with gradient. Where the weight is 0 the loss may be anything, such as inf or NaN."""
    return torch.where(weights_BT == 0, 0.0, loss_BT * weights_BT).sum()
