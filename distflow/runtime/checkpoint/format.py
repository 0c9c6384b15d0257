"""The state of a model as shards of named tensors: what each replica saves, and how the whole is put together again.

A shard is a run of elements of the flattened tensor, so that a model divided in any way can be saved and be resumed
divided in any other: by whole tensors, FSDP (rows), ZeRO (runs of one long vector).

Shards are stored in safetensors files, written tensor by tensor: of any size in little memory, with the checksum
computed on the way.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types in safetensors."""
PIECE_BYTES = 8 << 20
SYNC_BYTES = 1 << 30
"""A file goes through to the disk in steps of so many bytes: all at once could take minutes without a sign of progress.
"""
_ALIGN = 8


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements of a named tensor, from element `start` on."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    data: Tensor
    """The elements, contiguous, in any shape. May be a view of the state, which only the next `apply` changes."""

    @property
    def is_whole(self) -> bool:
        """Whether it holds the whole tensor."""
        return self.data.numel() == math.prod(self.shape)


def whole(name: str, tensor: Tensor) -> Shard:
    """A tensor in one piece."""
    return Shard(name, tuple(tensor.shape), 0, tensor)


def share_of(tensors: Mapping[str, Tensor], rank: int, size: int) -> Iterator[Shard]:
    """The tensors that replica `rank` of `size` saves of a state that all have: about as many bytes each."""
    loads = [0] * size
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        least = loads.index(min(loads))
        loads[least] += tensors[name].nbytes
        if least == rank:
            yield whole(name, tensors[name])


def assemble(name: str, shape: tuple[int, ...], pieces: Iterable[tuple[int, Tensor]]) -> Tensor:
    """Assemble a tensor from all its pieces (start, elements); raises ValueError if they leave a gap or overlap."""
    ordered = sorted(pieces, key=lambda piece: piece[0])
    if len(ordered) == 1 and tuple(ordered[0][1].shape) == shape:
        return ordered[0][1]
    at = 0
    for start, elements in ordered:
        if start != at:
            raise ValueError(f"{name}: element {min(start, at)} is {'saved twice' if start < at else 'missing'}")
        at += elements.numel()
    if at != math.prod(shape):
        raise ValueError(f"{name}: {at} elements are saved, its shape {list(shape)} has {math.prod(shape)}")
    return torch.cat([elements.reshape(-1) for _, elements in ordered]).reshape(shape)


def put_together(shards: Iterable[Shard]) -> dict[str, Tensor]:
    """Assemble all tensors from the shards of all replicas."""
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        pieces.setdefault(shard.name, []).append((shard.start, shard.data))
        shapes[shard.name] = shard.shape
    return {name: assemble(name, shapes[name], found) for name, found in pieces.items()}


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Type and shape of one tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.dtype.itemsize * math.prod(self.shape)


def write_tensors(
    path: Path,
    entries: Mapping[str, SavedTensor],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
    note: Callable[[int], None] = lambda written: None,
) -> tuple[int, str]:
    """Write a safetensors file through to the disk; returns its size in bytes and its xxh3.

    `read(name)` returns each tensor when its turn comes, once, on the CPU. `note` gets the bytes as they are written.
    Raises ValueError for a tensor that differs from its entry, OSError when the disk refuses.
    """
    # The widest types first, so that every tensor is aligned to its type.
    names = sorted(entries, key=lambda name: (-entries[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in names:
        entry = entries[name]
        span = [at, at + entry.nbytes]
        header[name] = {"dtype": DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": span}
        at = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    digest = xxhash.xxh3_64()
    with path.open("wb") as handle:

        def put(data: memoryview) -> None:
            for start in range(0, len(data), PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                handle.write(piece)
                digest.update(piece)
                after = handle.tell()
                if after // SYNC_BYTES > (after - len(piece)) // SYNC_BYTES:
                    os.fdatasync(handle.fileno())
                note(len(piece))

        put(memoryview(len(text).to_bytes(8, "little") + text))
        for name in names:
            put(_bytes(name, entries[name], read(name)))
        handle.flush()
        os.fsync(handle.fileno())
        size = handle.tell()
    return size, digest.hexdigest()


def _bytes(name: str, entry: SavedTensor, tensor: Tensor) -> memoryview:
    if tensor.dtype != entry.dtype or tensor.numel() * tensor.element_size() != entry.nbytes:
        raise ValueError(f"{name}: {tensor.dtype} of {tensor.numel()} elements, expected {entry}")
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data
