"""The state of a model as shards of named tensors: what each replica saves, and the whole that is put together again.

A shard is a run of elements of the flattened tensor, so that any way to divide a model can be saved and any other can
go on from it: replicas that share out whole tensors, FSDP (rows), ZeRO (runs of one long vector).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements of a named tensor, from the one with number `start` on."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    data: Tensor
    """Of any shape, contiguous. It may be a view of the state, which only the next `apply` changes."""

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.data.numel() == math.prod(self.shape)


def whole(name: str, tensor: Tensor) -> Shard:
    """A tensor in one piece."""
    return Shard(name, tuple(tensor.shape), 0, tensor)


def share_of(tensors: Mapping[str, Tensor], rank: int, size: int) -> Iterator[Shard]:
    """What replica `rank` of `size` saves of a state that all of them have: about as many bytes as the others."""
    loads = [0] * size
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        least = loads.index(min(loads))
        loads[least] += tensors[name].nbytes
        if least == rank:
            yield whole(name, tensors[name])


def assemble(name: str, shape: tuple[int, ...], pieces: Iterable[tuple[int, Tensor]]) -> Tensor:
    """The tensor of which (start, elements) are all pieces; raises ValueError when they leave a gap or overlap."""
    ordered = sorted(pieces, key=lambda piece: piece[0])
    if len(ordered) == 1 and tuple(ordered[0][1].shape) == shape:
        return ordered[0][1]
    at = 0
    for start, elements in ordered:
        if start != at:
            raise ValueError(f"{name}: element {min(start, at)} is saved {'twice' if start < at else 'by nobody'}")
        at += elements.numel()
    if at != math.prod(shape):
        raise ValueError(f"{name}: {at} elements are saved, its shape {list(shape)} has {math.prod(shape)}")
    return torch.cat([elements.reshape(-1) for _, elements in ordered]).reshape(shape)


def put_together(shards: Iterable[Shard]) -> dict[str, Tensor]:
    """All tensors, from the shards of all replicas."""
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        pieces.setdefault(shard.name, []).append((shard.start, shard.data))
        shapes[shard.name] = shard.shape
    return {name: assemble(name, shapes[name], found) for name, found in pieces.items()}
