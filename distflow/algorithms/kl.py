"""Estimates of the Kullback–Leibler divergence to a reference policy from sampled tokens, with d = log π − log π_ref.

Shapes: B samples, T response tokens; [B, T] in, [B, T] out. k1 to k3: J. Schulman, "Approximating KL divergence"
(2020); k3 is the penalty of GRPO, arXiv 2402.03300.
"""

from __future__ import annotations

from torch import Tensor

from distflow.algorithms.losses import LOG_RATIO_LIMIT


def k1(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """The difference d: unbiased, noisy, may be negative. Its gradient is zero in expectation: only for measuring."""
    return logprobs_BT - ref_logprobs_BT


def k2(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """The square d² / 2: biased, never negative; its gradient is that of the true divergence."""
    return (logprobs_BT - ref_logprobs_BT).square() / 2


def k3(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """The form exp(−d) + d − 1: unbiased, never negative, low variance. d is clamped to ±20 against overflow."""
    d_BT = (logprobs_BT - ref_logprobs_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (-d_BT).exp() + d_BT - 1
