"""The optimizer of a model whose parameters are divided: each replica steps the elements that it holds."""

from __future__ import annotations

import math

import torch

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
        graded = {name: m.grad for name, m in self.masters.items() if m.grad is not None}
        # By parameter, so that every replica can name those that are not finite anywhere.
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in graded.values()]
        count = torch.tensor(float(self.accumulated), dtype=torch.float64)
        sums = torch.stack([count.to(norm.device) for norm in norms[:1] or [count]] + [norm * norm for norm in norms])
        self._replicas.sum_([sums])
        total, *squares = sums.tolist()
        check_apply(int(total), denominator)
        norm = math.sqrt(math.fsum(squares)) / denominator if all(map(math.isfinite, squares)) else sum(squares)
        if not math.isfinite(norm):
            bad = [name for name, square in zip(graded, squares, strict=True) if not math.isfinite(square)]
            raise WorkerFailed(explain(self.steps, bad, norm, denominator))
        self.step(list(graded.values()), norm, denominator)
        self.accumulated = 0
        return norm
