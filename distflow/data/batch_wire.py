"""A batch as bytes: a small description for the message header, and one buffer that holds all columns.

The buffer begins with the offsets of the ragged columns, a row of `rows + 1` int64 for each distinct one; then come the
values of all columns of each type, the widest types first, so that all are aligned without gaps. A type's columns are
copied, mapped and divided in one go, whatever their number, and the receiver maps them without copying. The description
names the columns in the same bytes for every batch with the same columns, and is read once.

Example: {"rows": 2, "columns": [["group", "i64", [], -1], ["response_ids", "i64", [], 0]] packed} describes 3 + 2 + 5
int64: offsets [0, 2, 5], both values of `group`, and the five token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from distflow.data.batch import Batch, Column, Ragged
from distflow.data.decoding import Form, Row, decoder, read, shown
from distflow.errors import ProtocolError

_DTYPES = {
    "f64": torch.float64,
    "i64": torch.int64,
    "f32": torch.float32,
    "i32": torch.int32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "u8": torch.uint8,
    "bool": torch.bool,
}
"""In the order of the buffer: no type is wider than the one before it."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
SENDABLE = frozenset(_NAMES)
"""Types that the values of a column may have."""
_OFFSET_BYTES = 8
_MAX_COLUMNS = 1 << 12
_MAX_DESCRIBED = 1 << 18
"""Most bytes of the names and types of the columns."""
_REMEMBERED = 64
"""How many different sets of columns are kept as they were read or described last."""
_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class _Description(Form, frozen=True):
    rows: _Size
    columns: Annotated[bytes, msgspec.Meta(max_length=_MAX_DESCRIBED)]


class _Described(Row, frozen=True):
    name: str
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=7)]
    """Of one entry: empty for a number."""
    offsets: Annotated[int, msgspec.Meta(ge=-1, lt=_MAX_COLUMNS)]
    """Which offsets divide the values into rows; −1: the column is dense."""


class _Place(NamedTuple):
    """One column among those of its type."""

    name: str
    shape: tuple[int, ...]
    width: int
    """Numbers of one entry."""
    offsets: int


class _Layout(NamedTuple):
    """How the columns lie in a buffer."""

    names: tuple[str, ...]
    offsets: int
    """How many distinct ones there are."""
    types: tuple[tuple[torch.dtype, tuple[_Place, ...]], ...]


def encode_batch(batch: Batch) -> tuple[dict[str, object], bytearray]:
    """Description (plain values) and buffer. Raises ProtocolError for a dtype without a wire name."""
    numbers: dict[int, int] = {}
    offsets: list[Tensor] = []
    parts: dict[torch.dtype, list[Tensor]] = {}
    columns: list[tuple[str, torch.dtype, torch.Size, int]] = []
    for name, column in batch.columns.items():
        values, number = column, -1
        if isinstance(column, Ragged):
            values = column.values
            # Columns with a value for each token have the very same offsets: they travel once.
            number = numbers.setdefault(id(column.offsets), len(offsets))
            if number == len(offsets):
                offsets.append(column.offsets)
        assert isinstance(values, Tensor), "a column is dense or ragged"
        columns.append((name, values.dtype, values.shape[1:], number))
        parts.setdefault(values.dtype, []).append(_flat(values))
    described = _described(tuple(columns))
    blocks = [(torch.int64, offsets), *((dtype, parts[dtype]) for dtype in _NAMES if dtype in parts)]
    counts = [sum([part.numel() for part in block]) for _, block in blocks]
    buffer = bytearray(sum([count * dtype.itemsize for count, (dtype, _) in zip(counts, blocks, strict=True)]))
    at = 0
    for count, (dtype, block) in zip(counts, blocks, strict=True):
        if count:
            torch.cat(block, out=torch.frombuffer(buffer, dtype=dtype, count=count, offset=at))
            at += count * dtype.itemsize
    return {"rows": batch.rows, "columns": described}, buffer


@decoder
def decode_batch(description: object, buffer: memoryview) -> Batch:
    """The inverse; the columns are views into `buffer`, which is copied first if it is read-only: steps may write.

    Raises ProtocolError if the two do not match.
    """
    found = read(description, _Description, "batch description")
    layout, rows = _layout(found.columns), found.rows
    if buffer.readonly:
        buffer = memoryview(bytearray(buffer))
    offsets, totals = _offsets(layout, rows, buffer)
    blocks = [
        (dtype, places, [(rows if one.offsets < 0 else totals[one.offsets]) * one.width for one in places])
        for dtype, places in layout.types
    ]
    at = layout.offsets * (rows + 1) * _OFFSET_BYTES
    expected = at + sum([sum(sizes) * dtype.itemsize for dtype, _, sizes in blocks])
    if expected != len(buffer) or (rows and not layout.names):
        raise ProtocolError(f"a batch of {rows} rows in {len(buffer)} bytes whose columns take {expected}")
    columns: dict[str, Column] = dict.fromkeys(layout.names, _NOTHING)
    for dtype, places, sizes in blocks:
        count = sum(sizes)
        flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=at) if count else _EMPTY[dtype]
        at += count * dtype.itemsize
        for place, values in zip(places, torch.split(flat, sizes), strict=True):
            name, shape, _, number = place
            if shape:
                values = values.view(rows if number < 0 else totals[number], *shape)
            columns[name] = values if number < 0 else Ragged(values, offsets[number])
    return Batch.of_rows(columns, rows)


_NOTHING = torch.empty(0)
_EMPTY = {dtype: torch.empty(0, dtype=dtype) for dtype in _NAMES}


def _flat(values: Tensor) -> Tensor:
    if values.requires_grad:
        values = values.detach()
    if not values.is_cpu:
        values = values.cpu()
    return values if values.dim() == 1 else values.reshape(-1)


@lru_cache(_REMEMBERED)
def _described(columns: tuple[tuple[str, torch.dtype, torch.Size, int], ...]) -> bytes:
    """Name, type, shape of an entry and number of the offsets of each column, for the wire."""
    for name, dtype, _, _ in columns:
        if dtype not in _NAMES:
            raise ProtocolError(f"field {name!r} has dtype {dtype}; expected one of {sorted(_DTYPES)}")
    rows = [_Described(name, _NAMES[dtype], tuple(shape), number) for name, dtype, shape, number in columns]
    return msgspec.msgpack.encode(rows)


@lru_cache(_REMEMBERED)
def _layout(described: bytes) -> _Layout:
    """The inverse; raises ProtocolError if it is malformed."""
    try:
        columns = msgspec.msgpack.decode(
            described, type=Annotated[list[_Described], msgspec.Meta(max_length=_MAX_COLUMNS)]
        )
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"malformed batch description: columns: {shown(str(error))}") from error
    for column in columns:
        if column.dtype not in _DTYPES:
            raise ProtocolError(
                f"field {shown(column.name)} has dtype {shown(column.dtype)}; expected one of {sorted(_DTYPES)}"
            )
    if len({column.name for column in columns}) < len(columns):
        raise ProtocolError("a batch description with a duplicate column")
    numbers = {column.offsets for column in columns} - {-1}
    if numbers != set(range(len(numbers))):
        raise ProtocolError(f"a batch description with offsets numbered {shown(sorted(numbers))}; expected 0, 1, …")
    types = []
    for name, dtype in _DTYPES.items():
        places = [_Place(c.name, c.shape, prod(c.shape), c.offsets) for c in columns if c.dtype == name]
        if places:
            types.append((dtype, tuple(places)))
    return _Layout(tuple([column.name for column in columns]), len(numbers), tuple(types))


def _offsets(layout: _Layout, rows: int, buffer: memoryview) -> tuple[Sequence[Tensor], list[int]]:
    """The offsets of ragged columns, and how many entries each has."""
    if not layout.offsets:
        return (), []
    count = layout.offsets * (rows + 1)
    if count * _OFFSET_BYTES > len(buffer):
        raise ProtocolError(f"a batch of {rows} rows in {len(buffer)} bytes whose offsets take {count * _OFFSET_BYTES}")
    found = np.frombuffer(buffer, dtype=np.int64, count=count).reshape(layout.offsets, rows + 1)
    if found[:, 0].any() or (found[:, 1:] < found[:, :-1]).any():
        raise ProtocolError("the offsets of a batch do not divide its values into rows: expected 0 ≤ … ≤ their number")
    return torch.from_numpy(found).unbind(0), found[:, -1].tolist()
