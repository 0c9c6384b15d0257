"""Advantages: how much better than expected a sample did.

Shapes: B samples, T response tokens. Everything is computed in float64 and returned in the rewards' dtype, so that a
group of equal rewards gives exactly 0 and not rounding noise divided by a tiny deviation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distflow.errors import UserError

NORMALIZE = ("group_std", "batch_std", "none")


def grpo(rewards_B: Tensor, group_B: Tensor, *, normalize: str = "group_std", eps: float = 1e-6) -> Tensor:
    """Group-relative advantage (R − mean of the group) / (std + eps), arXiv 2402.03300.

    `rewards_B` [B] float, `group_B` [B] int: rows with the same number form a group. `normalize`: divide by the
    (unbiased) standard deviation of the group, of all given rows, or not at all. A group of one gets A = R. Returns
    [B]. Raises UserError for another `normalize`.
    """
    if normalize not in NORMALIZE:
        raise UserError(f"normalize={normalize!r}: expected one of {', '.join(NORMALIZE)}")
    rewards = rewards_B.double()
    _, segment, counts = torch.unique(group_B, return_inverse=True, return_counts=True)
    centred = rewards - _segment_sum(rewards, segment, counts)[segment] / counts[segment]
    scaled = centred
    if normalize == "group_std":
        variance = _segment_sum(centred.square(), segment, counts) / (counts - 1).clamp(min=1)
        scaled = centred / (variance.sqrt() + eps)[segment]
    elif normalize == "batch_std" and len(rewards) > 1:
        scaled = centred / (rewards.std() + eps)
    return torch.where(counts[segment] == 1, rewards, scaled).to(rewards_B.dtype)


def zero_std_fraction(rewards_B: Tensor, group_B: Tensor) -> tuple[float, int]:
    """Fraction of the groups whose rewards are all equal (they give no gradient), and the number of groups."""
    _, segment, counts = torch.unique(group_B, return_inverse=True, return_counts=True)
    shape = counts.shape
    low = rewards_B.new_full(shape, torch.inf).scatter_reduce(0, segment, rewards_B, "amin")
    high = rewards_B.new_full(shape, -torch.inf).scatter_reduce(0, segment, rewards_B, "amax")
    groups = counts.numel()
    return (float((low == high).double().mean()) if groups else 0.0), groups


def _segment_sum(values: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    return values.new_zeros(counts.shape).index_add(0, segment, values)
