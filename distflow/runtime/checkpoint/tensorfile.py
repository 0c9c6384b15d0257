"""Writes safetensors files tensor by tensor: of any size in little memory, with the checksum computed on the way."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
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
"""The format's names."""
PIECE_BYTES = 8 << 20
_ALIGN = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.dtype.itemsize * math.prod(self.shape)


def write_tensors(
    path: Path,
    entries: Mapping[str, Entry],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
    note: Callable[[int], None] = lambda written: None,
) -> list[Any]:
    """Write a safetensors file through to the disk; returns its size in bytes and its xxh3.

    `read(name)` gives each tensor when its turn comes, once, on the CPU. `note` is told of bytes as they are written.
    Raises ValueError for a tensor that is not as its entry says, OSError when the disk refuses.
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
                note(len(piece))

        put(memoryview(len(text).to_bytes(8, "little") + text))
        for name in names:
            put(_bytes(name, entries[name], read(name)))
        handle.flush()
        os.fsync(handle.fileno())
        size = handle.tell()
    return [size, digest.hexdigest()]


def _bytes(name: str, entry: Entry, tensor: Tensor) -> memoryview:
    if tensor.dtype != entry.dtype or tensor.numel() * tensor.element_size() != entry.nbytes:
        raise ValueError(f"{name}: {tensor.dtype} of {tensor.numel()} elements, expected {entry}")
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data
