"""Copies of a model's state in host memory, into the same buffers every time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from distflow.runtime.checkpoint.format import Shard


class HostCopies:
    """One copy at a time. The first one allocates; from then on nothing is allocated as long as shapes stay."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str, int], Tensor] = {}

    def take(self, model: str, shards: Iterable[Shard]) -> list[Shard]:
        """Copies of shards, which the next `take` of the same model overwrites."""
        copies: list[Shard] = []
        for shard in shards:
            key = (model, shard.name, shard.start)
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != shard.data.shape or buffer.dtype != shard.data.dtype:
                # Pinned: a copy from a GPU then runs at the full speed of the bus.
                pinned = shard.data.is_cuda
                buffer = torch.empty(shard.data.shape, dtype=shard.data.dtype, pin_memory=pinned)
                self._buffers[key] = buffer
            buffer.copy_(shard.data.detach())
            copies.append(replace(shard, data=buffer))
        return copies
