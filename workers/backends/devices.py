"""Which device a backend that divides models may use."""

from __future__ import annotations

import torch
import torch.distributed as dist

from distflow.errors import UserError


def check_own_gpu(backend: str, device: torch.device) -> None:
    """Raises UserError where the replicas, which have met, have to share a GPU: their library cannot do that."""
    if device.type == "cuda" and "nccl" not in dist.get_backend_config():
        raise UserError(f"backend {backend}: every training worker needs a GPU of its own; lower the pool's count")
