"""A batch as bytes: a small description for the message header, and one buffer that holds all columns.

Columns are laid out one after another, each at a multiple of 8 bytes, so that the receiver maps them without copying.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import Tensor

from distflow.data.batch import Batch, Column, Ragged
from distflow.data.decoding import Form, Whole, decoder, read, shown
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
SENDABLE = frozenset(_NAMES)
"""Types that the values of a column may have."""
_ALIGN = 8
_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
_Shape = Annotated[list[_Size], msgspec.Meta(min_length=1, max_length=8)]
_Column = tuple[str, Literal["dense", "values", "offsets"], str, _Shape]
"""Name, kind, type and shape."""


class _Description(Form, frozen=True):
    rows: Whole
    columns: Annotated[list[_Column], msgspec.Meta(max_length=1 << 12)]


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _describe(name: str, kind: str, tensor: Tensor) -> list[Any]:
    if tensor.dtype not in _NAMES:
        raise ProtocolError(f"field {name!r} has dtype {tensor.dtype}; expected one of {sorted(_DTYPES)}")
    return [name, kind, _NAMES[tensor.dtype], list(tensor.shape)]


def encode_batch(batch: Batch) -> tuple[dict[str, Any], bytearray]:
    """Description (plain values) and buffer. Raises ProtocolError for a dtype without a wire name."""
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


@decoder
def decode_batch(description: object, buffer: memoryview) -> Batch:
    """The inverse; the columns are views into `buffer`, which is copied first if it is read-only: steps may write.

    Raises ProtocolError if the two do not match.
    """
    rows, described = _checked(description)
    if buffer.readonly:
        buffer = memoryview(bytearray(buffer))
    columns: dict[str, Column] = {}
    values: dict[str, Tensor] = {}
    at = 0
    for name, kind, dtype, shape in described:
        tensor, at = _take(buffer, at, name, _DTYPES[dtype], shape)
        if kind == "values":
            values[name] = tensor
        elif kind == "offsets":
            columns[name] = _ragged(name, values.pop(name, None), tensor)
        else:
            columns[name] = tensor
    if at != len(buffer) or values:
        raise ProtocolError(f"a batch of {len(buffer)} bytes whose columns take {at}, or with values without offsets")
    try:
        batch = Batch(columns)
    except ValueError as error:
        raise ProtocolError(str(error)) from error
    if batch.rows != rows:
        raise ProtocolError(f"a batch that announces {rows} rows but has {batch.rows}")
    return batch


def _checked(description: object) -> tuple[int, list[_Column]]:
    found = read(description, _Description, "batch description")
    for name, _, dtype, _ in found.columns:
        if dtype not in _DTYPES:
            raise ProtocolError(f"field {shown(name)} has dtype {shown(dtype)}; expected one of {sorted(_DTYPES)}")
    places = {(name, kind == "offsets") for name, kind, _, _ in found.columns}
    if len(places) < len(found.columns):
        raise ProtocolError("a batch description with a duplicate column")
    return found.rows, found.columns


def _take(buffer: memoryview, at: int, name: str, dtype: torch.dtype, shape: list[int]) -> tuple[Tensor, int]:
    count = prod(shape)
    end = at + count * dtype.itemsize
    if end > len(buffer):
        raise ProtocolError(f"field {name!r} of shape {shape} runs past the end of a batch of {len(buffer)} bytes")
    if not count:
        return torch.empty(shape, dtype=dtype), at
    tensor = torch.frombuffer(buffer, dtype=dtype, count=count, offset=at).view(shape)
    return tensor, min(len(buffer), end + (-end % _ALIGN))


def _ragged(name: str, values: Tensor | None, offsets: Tensor) -> Ragged:
    if values is None or offsets.dtype != torch.int64 or offsets.dim() != 1 or not offsets.numel():
        raise ProtocolError(f"field {name!r}: offsets without values, or not one-dimensional int64")
    ordered = bool((offsets.diff() >= 0).all()) and int(offsets[0]) == 0
    if not ordered or int(offsets[-1]) != values.shape[0]:
        raise ProtocolError(f"field {name!r}: offsets do not divide its {values.shape[0]} values into rows")
    return Ragged(values, offsets)
