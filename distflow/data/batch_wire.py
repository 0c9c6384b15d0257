"""A batch as bytes: a small description for the message header, and one buffer that holds all columns.

The buffer begins with the offsets of the ragged columns, a row of `rows + 1` int64 for each distinct one; then come the
values of all columns of each type, the widest types first, so that all are aligned without gaps. A type's columns are
copied in one go, whatever their number. The description names the columns in the same bytes for every batch with the
same columns, and is read once. The receiver maps a column when it is asked for, without copying; groups that arrived in
many buffers are joined into one (`join` in `batch.py`) as bytes, and no column of each is ever made.

Example: {"rows": 2, "columns": [["group", "i64", [], -1], ["response_ids", "i64", [], 0]] packed} describes 3 + 2 + 5
int64: offsets [0, 2, 5], both values of `group`, and the five token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distflow.data.batch import Batch, BufferedColumns, Column, Ragged, RowRange
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
    """How a column lies in a buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    width: int
    """Numbers of one entry."""
    nbytes: int
    """Bytes of one entry."""
    offsets: int


class _Layout(NamedTuple):
    """How the columns lie in a buffer."""

    places: dict[str, _Place]
    """Of all columns, in the order of the batch."""
    order: tuple[tuple[str, _Place], ...]
    """The same in the order of the buffer."""
    offsets: int
    """How many distinct ones there are."""
    some_empty: bool
    """Whether an entry of a column has no numbers."""


class _Mapped(BufferedColumns):
    """The columns of a buffer, each made when it is first asked for; `offsets` are [distinct ones, rows + 1]."""

    __slots__ = (
        "_buffer",
        "_divided",
        "_layout",
        "_made",
        "_offsets",
        "_rows",
        "_starts",
        "_totals",
        "end",
        "some_empty",
    )

    def __init__(self, layout: _Layout, rows: int, buffer: memoryview, offsets: npt.NDArray[np.int64]) -> None:
        self._layout, self._rows, self._buffer, self._offsets = layout, rows, buffer, offsets
        self._totals: list[int] = offsets[:, -1].tolist()
        self._made: dict[str, Column] = {}
        self._divided: tuple[Tensor, ...] | None = None
        self._starts: dict[str, int] = {}
        entries = [*self._totals, rows]
        at = layout.offsets * (rows + 1) * _OFFSET_BYTES
        for name, (_, _, _, nbytes, number) in layout.order:
            # Dense columns have number −1: an entry a row.
            self._starts[name] = at
            at += entries[number] * nbytes
        self.end = at
        """Bytes that all of it takes."""
        self.some_empty = layout.some_empty or not rows or not all(self._totals)
        """Whether some columns have no numbers."""

    def __getitem__(self, name: str) -> Column:
        found = self._made.get(name)
        # Two threads may make the same column: one of them is kept.
        return self._made.setdefault(name, self._make(name)) if found is None else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.places)

    def __len__(self) -> int:
        return len(self._layout.places)

    def __contains__(self, name: object) -> bool:
        return name in self._layout.places

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.end

    def offsets(self, name: str) -> npt.NDArray[np.int64] | None:
        """[B + 1]: where the rows of a ragged column begin and end; None for a dense one."""
        number = self._layout.places[name].offsets
        return None if number < 0 else self._offsets[number]

    def integers(self, name: str) -> list[int] | None:
        """A column of one int64 a row as Python numbers; None for any other column."""
        dtype, shape, _, nbytes, number = self._layout.places[name]
        if dtype is not torch.int64 or shape or number >= 0:
            return None
        begin = self._starts[name]
        return self._buffer[begin : begin + self._rows * nbytes].cast("q").tolist()

    def join(self, ranges: Sequence[RowRange]) -> Batch | None:
        """The rows of all ranges in one buffer; None if their batches do not lie in buffers of the same layout."""
        parts = [(piece.batch.columns, piece.start, piece.stop) for piece in ranges]
        alike = [part for part in parts if isinstance(part[0], _Mapped) and part[0]._layout is self._layout]
        if len(alike) < len(parts):
            return None
        mapped = [(columns, start, stop) for columns, start, stop in alike if isinstance(columns, _Mapped)]
        rows = sum([stop - start for _, start, stop in mapped])
        offsets = np.zeros((self._layout.offsets, rows + 1), dtype=np.int64)
        lengths = [
            columns._offsets[:, start + 1 : stop + 1] - columns._offsets[:, start:stop]
            for columns, start, stop in mapped
        ]
        np.cumsum(np.concatenate(lengths, axis=1), axis=1, out=offsets[:, 1:])
        bounds = [
            (columns, [*columns._offsets[:, start].tolist(), start], [*columns._offsets[:, stop].tolist(), stop])
            for columns, start, stop in mapped
        ]
        frames: list[bytes | memoryview] = [offsets.tobytes()]
        for name, (_, _, _, nbytes, number) in self._layout.order:
            for columns, lows, highs in bounds:
                # Rows themselves are the last of the bounds: those of dense columns.
                begin = columns._starts[name]
                frames.append(columns._buffer[begin + lows[number] * nbytes : begin + highs[number] * nbytes])
        buffer = memoryview(bytearray().join(frames))
        return Batch.of_rows(_Mapped(self._layout, rows, buffer, offsets), rows)

    def _make(self, name: str) -> Column:
        dtype, shape, width, _, number = self._layout.places[name]
        entries = self._rows if number < 0 else self._totals[number]
        values = _EMPTY[dtype]
        if entries * width:
            values = torch.frombuffer(self._buffer, dtype=dtype, count=entries * width, offset=self._starts[name])
        if shape:
            values = values.view(entries, *shape)
        if number < 0:
            return values
        if self._divided is None:
            # Columns with a value for each token share them.
            self._divided = torch.from_numpy(self._offsets).unbind(0)
        return Ragged(values, self._divided[number])


def encode_batch(batch: Batch) -> tuple[dict[str, object], bytearray]:
    """Description (plain values) and buffer. Raises ProtocolError for a dtype without a wire name."""
    numbers: dict[int, int] = {}
    offsets: list[Any] = []
    blocks: list[Any] = []
    columns: list[tuple[str, torch.dtype, tuple[int, ...], int]] = []
    for name, column in batch.columns.items():
        values, number = column, -1
        if isinstance(column, Ragged):
            values = column.values
            # Columns with a value for each token have the very same offsets: they travel once.
            number = numbers.setdefault(id(column.offsets), len(offsets))
            if number == len(offsets):
                offsets.append(_raw(column.offsets))
        assert isinstance(values, Tensor), "a column is dense or ragged"
        raw = _raw(values)
        columns.append((name, values.dtype, raw.shape[1:], number))
        blocks.append(raw)
    described, order = _described(tuple(columns))
    return {"rows": batch.rows, "columns": described}, bytearray().join([*offsets, *[blocks[at] for at in order]])


@decoder
def decode_batch(description: object, buffer: memoryview) -> Batch:
    """The inverse; the columns are views into `buffer`, which is copied first if it is read-only: steps may write.

    Raises ProtocolError if the two do not match.
    """
    found = read(description, _Description, "batch description")
    layout, rows = _layout(found.columns), found.rows
    if buffer.readonly:
        buffer = memoryview(bytearray(buffer))
    mapped = _Mapped(layout, rows, buffer, _offsets(layout, rows, buffer))
    if mapped.end != len(buffer) or (rows and not mapped):
        raise ProtocolError(f"a batch of {rows} rows in {len(buffer)} bytes whose columns take {mapped.end}")
    # Only a column without numbers can have a shape that no tensor has: it is made at once, to be refused here.
    return Batch.of_rows(dict(mapped) if mapped.some_empty else mapped, rows)


_EMPTY = {dtype: torch.empty(0, dtype=dtype) for dtype in _NAMES}


def _raw(values: Tensor) -> npt.NDArray[Any]:
    """The numbers of a tensor, side by side; where they are already, they are not copied."""
    if values.dtype is torch.bfloat16:
        values = values.view(torch.int16)
    found = values.numpy() if values.is_cpu and not values.requires_grad else values.numpy(force=True)
    return found if found.flags.c_contiguous else np.ascontiguousarray(found)


@lru_cache(_REMEMBERED)
def _described(columns: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]) -> tuple[bytes, tuple[int, ...]]:
    """Name, type, shape of an entry and number of the offsets of each column, for the wire; their order in a buffer."""
    for name, dtype, _, _ in columns:
        if dtype not in _NAMES:
            raise ProtocolError(f"field {name!r} has dtype {dtype}; expected one of {sorted(_DTYPES)}")
    rows = [_Described(name, _NAMES[dtype], shape, number) for name, dtype, shape, number in columns]
    order = [at for dtype in _NAMES for at, column in enumerate(columns) if column[1] is dtype]
    return msgspec.msgpack.encode(rows), tuple(order)


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
    places = {
        c.name: _Place(_DTYPES[c.dtype], c.shape, prod(c.shape), prod(c.shape) * _DTYPES[c.dtype].itemsize, c.offsets)
        for c in columns
    }
    order = [(name, place) for dtype in _NAMES for name, place in places.items() if place.dtype is dtype]
    return _Layout(places, tuple(order), len(numbers), any(not place.width for place in places.values()))


def _offsets(layout: _Layout, rows: int, buffer: memoryview) -> npt.NDArray[np.int64]:
    """The offsets of ragged columns, [distinct ones, rows + 1]."""
    count = layout.offsets * (rows + 1)
    if count * _OFFSET_BYTES > len(buffer):
        raise ProtocolError(f"a batch of {rows} rows in {len(buffer)} bytes whose offsets take {count * _OFFSET_BYTES}")
    if not count:
        return np.zeros((0, rows + 1), dtype=np.int64)
    found = np.frombuffer(buffer, dtype=np.int64, count=count).reshape(layout.offsets, rows + 1)
    if any(found[:, 0].tolist()) or (found[:, 1:] < found[:, :-1]).any():
        raise ProtocolError("the offsets of a batch do not divide its values into rows: expected 0 ≤ … ≤ their number")
    return found
