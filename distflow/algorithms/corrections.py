"""Corrections for samples from a behaviour policy π_b (another engine, older weights) other than the trainer's π_old.

Shapes: B samples, T response tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distflow.algorithms.losses import LOG_RATIO_LIMIT
from distflow.errors import UserError


def behaviour_ratio(old_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor) -> Tensor:
    """w = exp(log π_old − log π_b) per token, [B, T], detached."""
    with torch.no_grad():
        return (old_logprobs_BT - rollout_logprobs_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def tis(ratio_BT: Tensor, *, cap: float) -> Tensor:
    """Truncated importance weight min(w, cap) (the truncation of IMPALA, arXiv 1802.01561), [B, T], without gradient.

    Raises UserError unless cap > 0.
    """
    if not cap > 0:
        raise UserError(f"tis={cap}: the cap of π_old/π_b must be > 0; null turns the correction off")
    return ratio_BT.detach().clamp(max=cap)
