"""Advantages: how much better than expected a sample, or each of its tokens, did.

Shapes: B samples, T response tokens; the mask is True on the tokens trained on. Everything is computed in float64 and
returned in the rewards' dtype, and relative to one reward of each group, so that a group of equal rewards gives exactly
0 and not rounding noise divided by a tiny deviation.

No deviation is divided by that is below `LEAST_SPREAD` times the size of the rewards: rewards that differ by less are
equal but for rounding, and dividing by what tells them apart would train on that with full weight. Above this floor the
formulas are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from distflow.errors import UserError

NORMALIZE = ("group_std", "batch_std", "none")
_SMALLEST_VARIANCE = 1e-8
LEAST_SPREAD = 1e-4
"""Of deviations, relative to the root mean square of the rewards. TRL's GRPOTrainer adds as much to every deviation, of
rewards of about 1."""


class Moments(NamedTuple):
    """Number of tokens trained on, mean and unbiased variance of their values; see `whiten`."""

    tokens: float
    mean: float
    variance: float

    @property
    def least(self) -> float:
        """The deviation below which the values are equal but for rounding, by their root mean square."""
        return LEAST_SPREAD * math.hypot(self.mean, math.sqrt(self.variance))

    @classmethod
    def of_sums(cls, tokens: float, total: float, squares: float) -> Moments:
        """From the sums that `token_sums` gives."""
        if tokens < 2:
            return cls(tokens, total, 0.0)
        mean = total / tokens
        return cls(tokens, mean, max(squares - tokens * mean * mean, 0.0) / (tokens - 1))


MomentsOf = Callable[[Tensor, Tensor], Moments]
"""Finds the moments of x_BT under mask_BT, for example over the rows of all training replicas."""


def grpo(rewards_B: Tensor, group_B: Tensor, *, normalize: str = "group_std", eps: float = 1e-6) -> Tensor:
    """Group-relative advantage (R − mean of the group) / (std + eps), arXiv 2402.03300.

    `rewards_B` [B] float, `group_B` [B] int: rows with the same number form a group. `normalize`: divide by the
    (unbiased) standard deviation of the group, of all given rows, or not at all; the least that is divided by is
    `LEAST_SPREAD` times the root mean square of the rewards there. A group of one gets A = R. Returns [B]. Raises
    UserError for another `normalize`.
    """
    if normalize not in NORMALIZE:
        raise UserError(f"normalize={normalize!r}: expected one of {', '.join(NORMALIZE)}")
    rewards = rewards_B.double()
    segment, counts = _segments(group_B)
    offset = _offsets(rewards, segment, counts)
    centred = offset - _segment_sum(offset, segment, counts)[segment] / counts[segment]
    scaled = centred
    if normalize == "group_std":
        variance = _segment_sum(centred.square(), segment, counts) / (counts - 1).clamp(min=1)
        size = (_segment_sum(rewards.square(), segment, counts) / counts).sqrt()
        scaled = centred / (torch.maximum(variance.sqrt(), LEAST_SPREAD * size) + eps)[segment]
    elif normalize == "batch_std" and len(rewards) > 1:
        scaled = centred / (torch.maximum(rewards.std(), LEAST_SPREAD * rewards.square().mean().sqrt()) + eps)
    return torch.where(counts[segment] == 1, rewards, scaled).to(rewards_B.dtype)


def rloo(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """Leave-one-out: R − mean of the group's others, arXiv 2402.14740. A group of one gets A = R. Returns [B]."""
    rewards = rewards_B.double()
    segment, counts = _segments(group_B)
    offset = _offsets(rewards, segment, counts)
    others = _segment_sum(offset, segment, counts)[segment] - offset
    scaled = offset - others / (counts[segment] - 1).clamp(min=1)
    return torch.where(counts[segment] == 1, rewards, scaled).to(rewards_B.dtype)


def opo(rewards_B: Tensor, group_B: Tensor, lengths_B: Tensor) -> Tensor:
    """R − Σ length · R / Σ length over the group, the baseline of least variance of arXiv 2505.23585. Returns [B].

    `lengths_B` [B]: tokens of each response.
    """
    rewards, lengths = rewards_B.double(), lengths_B.double()
    segment, counts = _segments(group_B)
    total = _segment_sum(lengths, segment, counts)
    offset = _offsets(rewards, segment, counts)
    baseline = (_segment_sum(lengths * offset, segment, counts) / total.clamp(min=1))[segment]
    # A group without a token has the baseline 0.
    return torch.where(total[segment] > 0, offset - baseline, rewards).to(rewards_B.dtype)


def remax(rewards_B: Tensor, baselines_B: Tensor) -> Tensor:
    """R − reward of the greedy response to the same prompt, arXiv 2310.10505. Returns [B]."""
    return (rewards_B.double() - baselines_B.double()).to(rewards_B.dtype)


def reinforce_plus_plus(
    token_rewards_BT: Tensor, mask_BT: Tensor, *, gamma: float = 1.0, moments: Moments | MomentsOf | None = None
) -> Tensor:
    """Discounted sum of the rewards from each token on, whitened over all tokens, arXiv 2501.03262. Returns [B, T].

    `moments`: see `whiten`.
    """
    returns_BT = _discounted(token_rewards_BT.double(), mask_BT, gamma)
    found = _found(returns_BT, mask_BT, moments)
    return whiten(returns_BT, mask_BT, moments=found, least=found.least).to(token_rewards_BT.dtype)


def reinforce_plus_plus_baseline(
    rewards_B: Tensor, group_B: Tensor, mask_BT: Tensor, *, moments: Moments | MomentsOf | None = None
) -> Tensor:
    """R − mean of the group, whitened over all tokens, arXiv 2501.03262. Returns [B, T]; `moments`: see `whiten`."""
    segment, counts = _segments(group_B)
    rewards = rewards_B.double()
    offset = _offsets(rewards, segment, counts)
    centred = offset - (_segment_sum(offset, segment, counts) / counts)[segment]
    # Means of groups are about 0, so the size of what was rounded is told by the rewards.
    least = 0.0 if isinstance(moments, tuple) else _found(rewards[:, None] * mask_BT, mask_BT, moments).least
    return whiten(centred[:, None] * mask_BT, mask_BT, moments=moments, least=least).to(rewards_B.dtype)


def gae(
    token_rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    ends_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantages A_t = Σ_l (γ λ)^l δ_{t+l} with δ_t = r_t + γ V_{t+1} − V_t, arXiv 1506.02438.

    Over the tokens trained on: V_{t+1} is the value at the next of them, 0 behind the last. `ends_BT`: the last tokens
    of sequences; behind one, V_{t+1} is the discounted sum of the rewards that follow, and the sum over l ends. Returns
    advantages [B, T], not whitened, and returns A + V [B, T]; both are 0 elsewhere.
    """
    # One row a token: what the loop reads and writes lies side by side.
    rewards, values = (x_BT.double().t().contiguous() for x_BT in (token_rewards_BT, values_BT))
    trained = mask_BT.bool().t().contiguous()
    ends = None if ends_BT is None else ends_BT.t().contiguous()
    found = torch.zeros_like(values)
    next_value, running, total = values.new_zeros(3, values.shape[1])
    for t in reversed(range(len(values))):
        if ends is not None:
            next_value = torch.where(ends[t], total, next_value)
            running = torch.where(ends[t], 0.0, running)
            total = torch.where(trained[t], rewards[t] + gamma * total, total)
        delta = rewards[t] + gamma * next_value - values[t]
        running = torch.where(trained[t], delta + gamma * lam * running, running)
        next_value = torch.where(trained[t], values[t], next_value)
        found[t] = running * trained[t]
    advantages_BT = found.t()
    returns_BT = torch.where(mask_BT.bool(), advantages_BT + values.t(), 0.0)
    return advantages_BT.to(values_BT.dtype), returns_BT.to(values_BT.dtype)


def whiten(x_BT: Tensor, mask_BT: Tensor, *, moments: Moments | MomentsOf | None = None, least: float = 0.0) -> Tensor:
    """(x − mean) / √(variance + 1e-8) under the mask, 0 elsewhere; with fewer than two tokens all 0. Returns [B, T].

    `moments`: of other rows too, or a function that finds them; by default those of the given rows. `least`: the least
    that is divided by; infinite where x holds nothing but noise, which gives 0.
    """
    tokens, mean, variance = _found(x_BT, mask_BT, moments)
    if tokens < 2:
        return torch.zeros_like(x_BT)
    scaled_BT = (x_BT.double() - mean) / max((variance + _SMALLEST_VARIANCE) ** 0.5, least)
    return torch.where(mask_BT.bool(), scaled_BT, 0.0).to(x_BT.dtype)


def least_by_rewards(advantages: Moments, rewards: Moments) -> float:
    """The least that advantages of a critic are divided by when they are whitened; both moments over the same tokens,
    `rewards` of what each token's sample was rewarded in all.

    A − mean has the rewards' deviation σ_R, less what the critic explains, plus its own error. While that exceeds σ_R
    clearly (σ_A > 2 σ_R), what would be whitened is the error: dividing by σ_A² / (2 σ_R) keeps the rewards' share of
    it. Where all rewards are equal, nothing can be learned from A, whatever the critic says, and the result is
    infinite. Without this floor a solved task is unlearned: an error of 0.5% of the value is trained on as if it was
    the reward.
    """
    spread, told = advantages.variance**0.5, rewards.variance**0.5
    if told <= rewards.least:
        return math.inf
    return max(spread * spread / (2 * told) if spread > 2 * told else 0.0, rewards.least)


def token_sums(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[3] float64: Σ 1, Σ x and Σ x² over the tokens trained on, which add up over replicas; see `Moments.of_sums`."""
    kept = x_BT.double()[mask_BT.bool()]
    return torch.stack([kept.new_tensor(float(kept.numel())), kept.sum(), kept.square().sum()])


def zero_std_fraction(rewards_B: Tensor, group_B: Tensor) -> tuple[float, int]:
    """Fraction of the groups whose rewards are all equal (they give no gradient), and the number of groups."""
    segment, counts = _segments(group_B)
    rewards_B, shape = rewards_B.double(), counts.shape
    low = rewards_B.new_full(shape, torch.inf).scatter_reduce(0, segment, rewards_B, "amin")
    high = rewards_B.new_full(shape, -torch.inf).scatter_reduce(0, segment, rewards_B, "amax")
    groups = counts.numel()
    return (float((low == high).double().mean()) if groups else 0.0), groups


def _segments(group_B: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the number of its group, counted from 0, and how many rows each group has."""
    _, segment, counts = torch.unique(group_B, return_inverse=True, return_counts=True)
    return segment, counts


def _offsets(rewards: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    """The rewards less the smallest one of each group, whose size no longer rounds what tells them apart."""
    return (
        rewards
        - rewards.new_zeros(counts.shape).scatter_reduce(0, segment, rewards, "amin", include_self=False)[segment]
    )


def _segment_sum(values: Tensor, segment: Tensor, counts: Tensor) -> Tensor:
    return values.new_zeros(counts.shape).index_add(0, segment, values)


def _found(x_BT: Tensor, mask_BT: Tensor, moments: Moments | MomentsOf | None) -> Moments:
    if isinstance(moments, tuple):
        return moments
    return (moments or _moments)(x_BT, mask_BT)


def _moments(x_BT: Tensor, mask_BT: Tensor) -> Moments:
    kept = x_BT.double()[mask_BT.bool()]
    if kept.numel() < 2:
        return Moments(kept.numel(), 0.0, 0.0)
    return Moments(kept.numel(), float(kept.mean()), float(kept.var()))


def _discounted(rewards_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """[B, T]: Σ γ^l r_{t+l} over the tokens trained on; 0 elsewhere."""
    returns_BT = torch.zeros_like(rewards_BT)
    running = rewards_BT.new_zeros(len(rewards_BT))
    for t in reversed(range(rewards_BT.shape[1])):
        running = torch.where(mask_BT[:, t].bool(), rewards_BT[:, t] + gamma * running, running)
        returns_BT[:, t] = running * mask_BT[:, t]
    return returns_BT
