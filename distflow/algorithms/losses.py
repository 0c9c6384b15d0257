"""Policy losses, one value per token; `aggregation` sums them, and the division comes once, at `apply`.

Shapes: B samples, T response tokens. Masks and weights are applied by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distflow.errors import UserError

LOG_RATIO_LIMIT = 20.0
"""|log π − log π_old| is clamped to this: beyond it exp() overflows, and 0 · inf would make the gradient NaN."""


class TokenLoss(NamedTuple):
    """Per-token loss [B, T], and where clipping changed it [B, T] bool."""

    loss_BT: Tensor
    clipped_BT: Tensor


def ppo(logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, *, clip: Sequence[float]) -> TokenLoss:
    """Clipped surrogate max(−A r, −A clip(r, 1 − lo, 1 + hi)) with r = π / π_old, arXiv 1707.06347.

    `clip` is (lo, hi), or (lo, hi, c): with c the dual clip of arXiv 1912.09729, min(that, −A c) where A < 0.
    Raises UserError for other lengths or values.
    """
    low, high, dual = read_clip(clip)
    ratio_BT = (logprobs_BT - old_logprobs_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain_BT = -advantages_BT * ratio_BT
    bounded_BT = -advantages_BT * ratio_BT.clamp(1.0 - low, 1.0 + high)
    loss_BT = torch.maximum(plain_BT, bounded_BT)
    clipped_BT = bounded_BT > plain_BT
    if dual is not None:
        ceiling_BT = -advantages_BT * dual
        cut_BT = (advantages_BT < 0) & (ceiling_BT < loss_BT)
        loss_BT = torch.where(cut_BT, ceiling_BT, loss_BT)
        clipped_BT = clipped_BT | cut_BT
    return TokenLoss(loss_BT, clipped_BT)


def read_clip(clip: Sequence[float]) -> tuple[float, float, float | None]:
    """(lo, hi, dual clip or None); raises UserError stating what is expected."""
    values = [float(value) for value in clip]
    if len(values) not in (2, 3) or not 0 <= values[0] < 1 or values[1] < 0:
        raise UserError(f"clip={list(clip)}: expected [lo, hi] or [lo, hi, dual] with 0 <= lo < 1 and hi >= 0")
    if len(values) == 3 and values[2] <= 1:
        raise UserError(f"clip={list(clip)}: the dual clip (third value) must be > 1, usually 3")
    return values[0], values[1], values[2] if len(values) == 3 else None
