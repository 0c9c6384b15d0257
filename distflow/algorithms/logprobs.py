"""Log-probability and entropy of given tokens, directly from logits, with as little memory as possible.

Shapes: N tokens, K candidates for the token at each place, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _TokenScores(torch.autograd.Function):
    """Saves the logits and two numbers per token; autograd through log_softmax would save up to four [N, V] tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        targets_N: Tensor,
        candidates_NK: Tensor | None,
        temperature: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        scaled_NV = _scaled(logits_NV, temperature)
        norm_N = scaled_NV.logsumexp(-1)
        logprobs_N = scaled_NV.gather(-1, targets_N[:, None]).squeeze(-1) - norm_N
        logprobs_NK = None if candidates_NK is None else scaled_NV.gather(-1, candidates_NK) - norm_N[:, None]
        # E[-log p] = norm - E[z]
        entropy_N = (
            norm_N - _zero_if_excluded(_probs(scaled_NV, norm_N).mul_(scaled_NV), scaled_NV).sum(-1)
            if entropy
            else None
        )
        ctx.save_for_backward(logits_NV, targets_N, candidates_NK, norm_N, entropy_N)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N, logprobs_NK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        grad_logprobs_N, grad_entropy_N, grad_logprobs_NK = grads
        logits_NV, targets_N, candidates_NK, norm_N, entropy_N = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return None, None, None, None, None
        scaled_NV = _scaled(logits_NV, ctx.temperature)
        probs_NV = _probs(scaled_NV, norm_N)
        out_NV = torch.zeros_like(probs_NV)
        if grad_entropy_N is not None:
            # dH/dz_j = -p_j (log p_j + H)
            out_NV = (-grad_entropy_N[:, None] * probs_NV).mul_(scaled_NV - (norm_N - entropy_N)[:, None])
            out_NV = _zero_if_excluded(out_NV, scaled_NV)
        # dlog p_i/dz_j = [i = j] - p_j. Each call adds to distinct places, so the order of the sums is always the same.
        if grad_logprobs_N is not None:
            out_NV = out_NV.addcmul_(probs_NV, grad_logprobs_N[:, None], value=-1)
            out_NV.scatter_add_(-1, targets_N[:, None], grad_logprobs_N[:, None])
        if grad_logprobs_NK is not None:
            out_NV = out_NV.addcmul_(probs_NV, grad_logprobs_NK.sum(-1, keepdim=True), value=-1)
            out_NV.scatter_add_(-1, candidates_NK, grad_logprobs_NK)
        return (out_NV / ctx.temperature).to(logits_NV.dtype), None, None, None, None


def _scaled(logits_NV: Tensor, temperature: float) -> Tensor:
    wide = logits_NV if logits_NV.dtype in (torch.float32, torch.float64) else logits_NV.float()
    return wide if temperature == 1.0 else wide / temperature


def _zero_if_excluded(terms_NV: Tensor, scaled_NV: Tensor) -> Tensor:
    """In place: tokens with a logit of -inf, whose probability is 0, add nothing; 0 · -inf is NaN."""
    return terms_NV.masked_fill_(scaled_NV == -torch.inf, 0.0)


def _probs(scaled_NV: Tensor, norm_N: Tensor) -> Tensor:
    return (scaled_NV - norm_N[:, None]).exp_()


def token_scores(
    logits_NV: Tensor, targets_N: Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [N] of `targets_N` under softmax(logits / temperature), and that distribution's entropy [N] in nats.

    Both carry gradients. Half-precision logits are widened to float32. Raises ValueError for a temperature ≤ 0.
    """
    logprobs_N, entropy_N, _ = candidate_scores(logits_NV, targets_N, None, temperature=temperature, entropy=entropy)
    return logprobs_N, entropy_N


def candidate_scores(
    logits_NV: Tensor,
    targets_N: Tensor,
    candidates_NK: Tensor | None,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As `token_scores`, and the log-probs [N, K] of further tokens, different ones at each place, with gradients."""
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: log-probs need a temperature > 0 (0 is greedy and has none)")
    apply: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] = _TokenScores.apply
    return apply(logits_NV, targets_N, candidates_NK, temperature, entropy)
