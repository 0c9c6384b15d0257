"""A batch as bytes: a small description for the message header, and one buffer that holds all columns.

Columns are laid out one after another, each at a multiple of 8 bytes, so that the receiver maps them without copying.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distflow.data.batch import Batch, Column, Ragged
from distflow.errors import ProtocolError

_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ALIGN = 8


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _describe(name: str, kind: str, tensor: Tensor) -> list[Any]:
    if tensor.dtype not in _NAMES:
        raise ProtocolError(f"field {name!r} has dtype {tensor.dtype}; expected one of {sorted(_DTYPES)}")
    return [name, kind, _NAMES[tensor.dtype], list(tensor.shape)]


def encode_batch(batch: Batch) -> tuple[dict[str, Any], bytearray]:
    """Description (plain values) and buffer. Raises ProtocolError for a dtype that has no wire name."""
    parts: list[tuple[list[Any], memoryview]] = []
    for name, column in batch.columns.items():
        if isinstance(column, Ragged):
            parts.append((_describe(name, "values", column.values), _bytes_of(column.values)))
            parts.append((_describe(name, "offsets", column.offsets), _bytes_of(column.offsets)))
        else:
            parts.append((_describe(name, "dense", column), _bytes_of(column)))
    buffer = bytearray()
    for _, data in parts:
        buffer += data
        buffer += bytes(-len(buffer) % _ALIGN)
    return {"rows": batch.rows, "columns": [described for described, _ in parts]}, buffer


def decode_batch(description: Mapping[str, Any], buffer: memoryview) -> Batch:
    """The inverse; the columns are views into `buffer`, which is copied first if it is read-only: steps may write.

    Raises ProtocolError when the two do not belong together.
    """
    if buffer.readonly:
        buffer = memoryview(bytearray(buffer))
    columns: dict[str, Column] = {}
    values: dict[str, Tensor] = {}
    at = 0
    for name, kind, dtype, shape in _checked(description):
        tensor, at = _take(buffer, at, name, _DTYPES[dtype], shape)
        if kind == "values":
            values[name] = tensor
        elif kind == "offsets":
            columns[name] = _ragged(name, values, tensor)
        else:
            columns[name] = tensor
    if at != len(buffer):
        raise ProtocolError(f"a batch of {len(buffer)} bytes whose columns take {at}")
    try:
        batch = Batch(columns)
    except ValueError as error:
        raise ProtocolError(str(error)) from error
    if batch.rows != description["rows"]:
        raise ProtocolError(f"a batch that announces {description['rows']} rows and holds {batch.rows}")
    return batch


def _checked(description: Mapping[str, Any]) -> list[tuple[str, str, str, list[int]]]:
    columns = description["columns"] if "columns" in description and "rows" in description else None
    if not isinstance(columns, list):
        raise ProtocolError("a batch description without rows and columns")
    for entry in columns:
        good = isinstance(entry, list) and len(entry) == 4 and isinstance(entry[0], str) and entry[2] in _NAMES.values()
        if not good or entry[1] not in ("dense", "values", "offsets") or not _is_shape(entry[3]):
            raise ProtocolError(f"a column description that is none: {entry!r}")
    return [tuple(entry) for entry in columns]


def _is_shape(shape: object) -> bool:
    return isinstance(shape, list) and bool(shape) and all(isinstance(n, int) and n >= 0 for n in shape)


def _take(buffer: memoryview, at: int, name: str, dtype: torch.dtype, shape: list[int]) -> tuple[Tensor, int]:
    count = 1
    for size in shape:
        count *= size
    end = at + count * dtype.itemsize
    if end > len(buffer):
        raise ProtocolError(f"field {name!r} of shape {shape} runs past the end of a batch of {len(buffer)} bytes")
    if not count:
        return torch.empty(shape, dtype=dtype), at
    tensor = torch.frombuffer(buffer, dtype=dtype, count=count, offset=at).view(shape)
    return tensor, min(len(buffer), end + (-end % _ALIGN))


def _ragged(name: str, values: Mapping[str, Tensor], offsets: Tensor) -> Ragged:
    if name not in values or offsets.dtype != torch.int64 or offsets.dim() != 1 or not offsets.numel():
        raise ProtocolError(f"field {name!r}: offsets without values, or not a list of int64")
    ordered = bool((offsets.diff() >= 0).all()) and int(offsets[0]) == 0
    if not ordered or int(offsets[-1]) != values[name].shape[0]:
        raise ProtocolError(f"field {name!r}: offsets do not divide its {values[name].shape[0]} values into rows")
    return Ragged(values[name], offsets)
