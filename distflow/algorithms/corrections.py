"""Corrections for samples from a behaviour policy π_b (another engine, older weights) other than the trainer's π_old.

Each gives weights for the loss, from w = π_old / π_b, without gradient. Denominators stay those without weights.
Shapes: B samples, T response tokens; [B, T] in, [B, T] out; the mask is True on the tokens trained on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distflow.algorithms.losses import LOG_RATIO_LIMIT
from distflow.errors import UserError


@torch.no_grad()
def behaviour_ratio(old_BT: Tensor, rollout_BT: Tensor) -> Tensor:
    """w = exp(log π_old − log π_b) of each token, [B, T], without gradient."""
    return (old_BT - rollout_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def tis(old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, *, cap: float = 2.0) -> Tensor:
    """Truncated importance weights min(w, cap) (the truncation of IMPALA, arXiv 1802.01561).

    Raises UserError unless cap > 0.
    """
    if not cap > 0:
        raise UserError(f"tis={cap}: the cap of π_old/π_b must be > 0; null turns the correction off")
    return behaviour_ratio(old_BT, rollout_BT).clamp(max=cap)


def icepop(old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, *, lo: float = 0.5, hi: float = 5.0) -> Tensor:
    """Importance weights w where lo ≤ w ≤ hi, and 0 for tokens outside, arXiv 2510.18855.

    Raises UserError unless 0 ≤ lo < hi.
    """
    return _inside(behaviour_ratio(old_BT, rollout_BT), "icepop", lo, hi)


def mis(old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, *, lo: float = 0.0, hi: float = 2.0) -> Tensor:
    """Masked importance sampling: `icepop` with a bound from above only, unless `lo` is given."""
    return _inside(behaviour_ratio(old_BT, rollout_BT), "mis", lo, hi)


@torch.no_grad()
def sequence_ratio(old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """w of whole sequences, the product over their tokens trained on, at each token, [B, T], without gradient."""
    log_B = (old_BT - rollout_BT).where(mask_BT.bool(), 0.0).sum(1)
    return log_B.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[:, None].expand_as(old_BT)


def sequence_tis(old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, *, lo: float = 0.0, hi: float = 2.0) -> Tensor:
    """Importance weights of whole sequences, held within [lo, hi]: `tis` with one weight a sequence.

    Raises UserError unless 0 ≤ lo < hi.
    """
    _check("sequence_tis", lo, hi)
    return sequence_ratio(old_BT, rollout_BT, mask_BT).clamp(lo, hi)


def sequence_mis(old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, *, lo: float = 0.0, hi: float = 2.0) -> Tensor:
    """Importance weights of whole sequences, and 0 for all tokens of one outside [lo, hi]: `mis` with one a sequence.

    Raises UserError unless 0 ≤ lo < hi.
    """
    return _inside(sequence_ratio(old_BT, rollout_BT, mask_BT), "sequence_mis", lo, hi)


@torch.no_grad()
def geometric_mask(
    old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, *, lo: float = 0.99, hi: float = 1.01
) -> Tensor:
    """1 for the tokens of sequences whose geometric mean of w lies in [lo, hi], 0 for those of all others.

    The mean is over the tokens trained on; a mask of whole sequences keeps what their tokens were drawn with together.
    Raises UserError unless 0 ≤ lo < hi.
    """
    mean_B = (old_BT - rollout_BT).where(mask_BT.bool(), 0.0).sum(1) / mask_BT.sum(1).clamp(min=1)
    return _inside(mean_B.exp(), "geometric_mask", lo, hi).sign()[:, None].expand_as(old_BT)


def _inside(ratio: Tensor, name: str, lo: float, hi: float) -> Tensor:
    _check(name, lo, hi)
    return torch.where((ratio >= lo) & (ratio <= hi), ratio, 0.0)


def _check(name: str, lo: float, hi: float) -> None:
    if not 0 <= lo < hi:
        raise UserError(f"{name}=[{lo}, {hi}]: expected the bounds [lo, hi] of π_old/π_b with 0 <= lo < hi")
