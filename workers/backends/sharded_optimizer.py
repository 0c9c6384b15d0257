"""The optimizer of a model whose parameters are divided: each replica steps the elements that it holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from distflow.errors import WorkerFailed
from distflow.workers.backends.optimizer import PolicyOptimizer, check_apply, explain


class ShardedOptimizer(PolicyOptimizer):
    """AdamW on this replica's elements of each parameter, in float32 at least; gradients are sums over all replicas."""

    accumulated = 0
    """Losses accumulated here since the last step: other replicas may have had some where this one had none."""

    def apply(self, denominator: float) -> float:
        """Divide, clip by the norm over all replicas, step, clear; returns the norm before clipping.

        Raises ValueError and WorkerFailed as PolicyOptimizer does, on all replicas alike.
        """
        grads = {name: master.grad for name, master in self.masters.items()}
        # By parameter, so that every replica can name those that are not finite anywhere.
        squares, accumulated = self._over_all_replicas(list(grads.values()))
        check_apply(accumulated, denominator)
        norm = math.sqrt(math.fsum(squares)) / denominator if all(map(math.isfinite, squares)) else sum(squares)
        if not math.isfinite(norm):
            bad = [name for name, square in zip(grads, squares, strict=True) if not math.isfinite(square)]
            raise WorkerFailed(explain(self.steps, bad, norm, denominator))
        self.step([grad for grad in grads.values() if grad is not None], norm, denominator)
        self.accumulated = 0
        return norm

    def _over_all_replicas(self, grads: Sequence[Tensor | None]) -> tuple[list[float], int]:
        """The squared norm of each gradient (0 where there is none), and the number of losses accumulated."""
        device = next(iter(self.masters.values())).device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        norms = [zero if grad is None else torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
        sums = torch.stack([norm * norm for norm in norms] + [zero + self.accumulated])
        self._replicas.sum_([sums])
        *squares, accumulated = sums.tolist()
        return squares, round(accumulated)
