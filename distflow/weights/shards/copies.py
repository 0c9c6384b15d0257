"""A trainer's copies of its part of the last versions, in memory that is kept: a version costs no new pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from distflow.flow.sizes import PARTS_KEPT
from distflow.types import Version
from distflow.weights.shards.plan import boxes_of
from distflow.weights.shards.transfer import HeldPart

_NONE = Version(-1, -1)
Parts = dict[str, list[HeldPart]]


class HeldShard(Protocol):
    """Elements of a tensor that this trainer holds."""

    @property
    def name(self) -> str:
        """Of the tensor."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        ...

    @property
    def start(self) -> int:
        """The first element."""
        ...

    @property
    def data(self) -> Tensor:
        """The elements."""
        ...


@dataclass(slots=True)
class PartCopy:
    """One version's, or memory for it."""

    version: Version | None = None
    sending: bool = False
    memory: dict[str, Tensor] = field(default_factory=dict)
    parts: Parts = field(default_factory=dict)

    def fill(self, shards: Iterable[HeldShard]) -> None:
        """Copy the shards, over those of an older version if they are as large."""
        self.parts = {shard.name: self._copied(shard) for shard in shards}

    def _copied(self, shard: HeldShard) -> list[HeldPart]:
        data = shard.data.detach().reshape(-1)
        if shard.name not in self.memory or self.memory[shard.name].shape != data.shape:
            self.memory[shard.name] = torch.empty(data.shape, dtype=data.dtype)
        flat = self.memory[shard.name].copy_(data)
        boxes = boxes_of(shard.shape, shard.start, flat.numel())
        pieces = torch.split_with_sizes(flat, [box.elements for box in boxes])
        return [HeldPart(box, piece.view(box.sizes)) for box, piece in zip(boxes, pieces, strict=True)]


class PartCopies:
    """PARTS_KEPT of them: the one that is sent and the one after it. Its user sees to it that one thread calls it."""

    def __init__(self) -> None:
        self._copies = [PartCopy() for _ in range(PARTS_KEPT)]

    @property
    def versions(self) -> Sequence[Version]:
        """Those that can be sent."""
        return sorted(copy.version for copy in self._copies if copy.version is not None)

    def next(self) -> PartCopy:
        """The one to write a version to: the oldest that is not being sent, whose version is forgotten."""
        idle = [copy for copy in self._copies if not copy.sending]
        found = min(idle, key=lambda copy: copy.version or _NONE)
        found.version = None
        return found

    def send(self, version: Version) -> PartCopy | None:
        """The copy of a version, which nobody writes to until `sending` is false again; None if there is none."""
        found = next((copy for copy in self._copies if copy.version == version), None)
        if found is not None:
            found.sending = True
        return found

    def forget(self) -> None:
        """Nothing of these versions is sent any more; their memory stays."""
        for copy in self._copies:
            copy.version = None
