"""The loss of supervised training: one value per token; `aggregation` sums them, and the division comes at `apply`.

Shapes: B samples, T response tokens.
"""

from __future__ import annotations

from torch import Tensor


def nll(logprobs_BT: Tensor) -> Tensor:
    """[B, T]: negative log-likelihood in nats of each token of a demonstration (arXiv 2203.02155, supervised
    fine-tuning). Masks are applied by the caller.
    """
    return -logprobs_BT
