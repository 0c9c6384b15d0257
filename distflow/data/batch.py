"""A batch of samples as columns: dense tensors, or ragged ones (values + offsets). Never padded at rest.

A sample is a row, or a row for each of its sequences (`samples.py`). Whole groups travel as ranges of the rows of the
batches that they came in.

Shapes: B rows, N values of a ragged column over all rows, T longest row of a padded view.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distflow.types import is_logged, is_reward_part


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths: row i is `values[offsets[i]:offsets[i + 1]]`.

    `values` [N, …] of any dtype; `offsets` [B + 1] int64 on the CPU, from 0 to N. Text is stored as UTF-8 in uint8.
    """

    values: Tensor
    offsets: Tensor

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[float]] | Sequence[Tensor], dtype: torch.dtype) -> Ragged:
        """Build from one sequence (or tensor) per row."""
        lengths = torch.tensor([0, *[len(row) for row in rows]], dtype=torch.int64)
        if rows and isinstance(rows[0], Tensor):
            values = torch.cat([torch.as_tensor(row, dtype=dtype) for row in rows])
        else:
            values = torch.tensor([value for row in rows for value in row], dtype=dtype)
        return cls(values, lengths.cumsum(0))

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> Ragged:
        """Build a text column from strings."""
        # A text that people or their tools made may have half of a surrogate pair, as JSON can write one.
        encoded = [text.encode(errors="backslashreplace") for text in texts]
        lengths = torch.tensor([0, *[len(text) for text in encoded]], dtype=torch.int64)
        joined = bytearray(b"".join(encoded))
        values = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
        return cls(values, lengths.cumsum(0))

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """[B] int64."""
        return self.offsets.diff()

    def row(self, index: int) -> Tensor:
        """A view of one row."""
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def rows(self) -> Iterator[Tensor]:
        """Views of all rows, in order."""
        bounds = self.offsets.tolist()
        return (self.values[a:b] for a, b in pairwise(bounds))

    def texts(self) -> list[str]:
        """The rows of a text column as strings."""
        data = self.values.numpy().tobytes()
        bounds = self.offsets.tolist()
        return [data[a:b].decode() for a, b in pairwise(bounds)]

    def slice(self, start: int, stop: int) -> Ragged:
        """Rows `start` ≤ row < `stop`; the values stay a view."""
        low, high, offsets = self.bounds(start, stop)
        return Ragged(self.values[low:high], offsets)

    def bounds(self, start: int, stop: int) -> tuple[int, int, Tensor]:
        """Where the values of rows `start` ≤ row < `stop` begin and end, and their offsets from there."""
        offsets = self.offsets[start : stop + 1]
        low, high = int(offsets[0]), int(offsets[-1])
        return low, high, offsets - low if low else offsets

    def select(self, index: Tensor) -> Ragged:
        """Rows in the order of `index` [B'] int64 (copied)."""
        bounds = self.offsets.tolist()
        picked = [self.values[bounds[i] : bounds[i + 1]] for i in index.tolist()]
        lengths = torch.tensor([0, *[len(row) for row in picked]], dtype=torch.int64)
        values = torch.cat(picked) if picked else self.values[:0]
        return Ragged(values, lengths.cumsum(0))

    def padded(self, fill: float = 0, length: int | None = None) -> Tensor:
        """[B, T] view for computing: row i left-aligned, the rest `fill`. T is `length` or the longest row."""
        lengths = self.lengths
        width = int(lengths.max()) if length is None and len(self) else (length or 0)
        mask_BT = torch.arange(width)[None, :] < lengths[:, None]
        out_BT = torch.full((len(self), width, *self.values.shape[1:]), fill, dtype=self.values.dtype)
        out_BT[mask_BT] = self.values
        return out_BT

    def mask(self, length: int | None = None) -> Tensor:
        """[B, T] bool: which places of `padded(length=…)` hold values."""
        lengths = self.lengths
        width = int(lengths.max()) if length is None and len(self) else (length or 0)
        return torch.arange(width)[None, :] < lengths[:, None]

    def like(self, values: Tensor) -> Ragged:
        """Other values [N, …] with the same rows."""
        if values.shape[0] != self.values.shape[0]:
            raise ValueError(f"{values.shape[0]} values for rows that hold {self.values.shape[0]}")
        return Ragged(values, self.offsets)


Column = Tensor | Ragged


def _rows_of(column: Column) -> int:
    return len(column) if isinstance(column, Ragged) else column.shape[0]


class BufferedColumns(Mapping[str, Column]):
    """Columns that lie in one buffer and are made when they are asked for."""

    __slots__ = ()

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the buffer."""

    @abstractmethod
    def offsets(self, name: str) -> npt.NDArray[np.int64] | None:
        """[B + 1]: where the rows of a ragged column begin and end; None for a dense one."""

    @abstractmethod
    def integers(self, name: str) -> list[int] | None:
        """A column of one int64 a row as Python numbers; None for any other column."""

    @abstractmethod
    def join(self, ranges: Sequence[RowRange]) -> Batch | None:
        """The rows of all ranges, the first of which is of these columns; None if they have to be joined by column."""


class Batch:
    """Columns of equal row count. Immutable by convention: steps return a new batch from `with_columns`.

    Rows of one group (the samples of one prompt) always lie side by side.
    """

    __slots__ = ("columns", "rows")

    def __init__(self, columns: Mapping[str, Column]) -> None:
        counts = {name: _rows_of(column) for name, column in columns.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"columns of one batch must have the same number of rows, got {counts}")
        self.columns: Mapping[str, Column] = dict(columns)
        self.rows = next(iter(counts.values()), 0)

    @classmethod
    def of_rows(cls, columns: Mapping[str, Column], rows: int) -> Batch:
        """Columns that are known to have so many rows, which are not counted again."""
        batch = cls.__new__(cls)
        batch.columns, batch.rows = columns, rows
        return batch

    def __len__(self) -> int:
        return self.rows

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Column:
        try:
            return self.columns[name]
        except KeyError:
            found = sorted(self.columns)
            text = f"field {name!r} is not in this batch; it has {found} — a step declares what it reads"
            raise KeyError(text) from None

    def __repr__(self) -> str:
        return f"Batch({self.rows} rows: {', '.join(self.columns)})"

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        if isinstance(self.columns, BufferedColumns):
            return self.columns.nbytes
        total = 0
        for column in self.columns.values():
            total += column.values.nbytes + column.offsets.nbytes if isinstance(column, Ragged) else column.nbytes
        return total

    def dense(self, name: str) -> Tensor:
        """A column with one entry a row; raises TypeError when it is ragged."""
        column = self[name]
        if isinstance(column, Ragged):
            raise TypeError(f"field {name!r} is ragged; use batch.ragged({name!r}) or batch.padded({name!r})")
        return column

    def ragged(self, name: str) -> Ragged:
        """A column of rows of different lengths; raises TypeError when it is dense."""
        column = self[name]
        if not isinstance(column, Ragged):
            raise TypeError(f"field {name!r} is dense, one entry a row; use batch.dense({name!r})")
        return column

    def offsets(self, name: str) -> npt.NDArray[np.int64] | None:
        """[B + 1]: where the rows of a ragged column begin and end; None for a dense one."""
        if isinstance(self.columns, BufferedColumns):
            return self.columns.offsets(name)
        column = self[name]
        return column.offsets.numpy() if isinstance(column, Ragged) else None

    def integers(self, name: str) -> list[int] | None:
        """A column of one int64 a row as Python numbers; None for any other column."""
        if isinstance(self.columns, BufferedColumns):
            return self.columns.integers(name)
        column = self[name]
        if isinstance(column, Ragged) or column.dtype != torch.int64 or column.dim() != 1:
            return None
        found: list[int] = column.tolist()
        return found

    def of_all_models(self, name: str) -> list[Ragged]:
        """The ragged columns of this name that are there, with and without a prefix."""
        # Most names are told apart by their ends, which is cheaper.
        fields = [field for field in self.columns if field.endswith(name) and field.rpartition("/")[2] == name]
        columns = [self.columns[field] for field in fields]
        return [column for column in columns if isinstance(column, Ragged)]

    def texts(self, name: str) -> list[str]:
        """A text column as strings."""
        return self.ragged(name).texts()

    def padded(self, name: str, fill: float = 0, length: int | None = None) -> Tensor:
        """[B, T] padded copy of a ragged column."""
        return self.ragged(name).padded(fill, length)

    def with_columns(self, **columns: Column) -> Batch:
        """A new batch with these columns added or replaced."""
        return Batch({**self.columns, **columns})

    def only(self, names: Sequence[str]) -> Batch:
        """A new batch with just these columns; raises KeyError if one is missing."""
        return Batch({name: self[name] for name in names})

    def slice(self, start: int, stop: int) -> Batch:
        """Rows `start` ≤ row < `stop`, as views."""
        cut: dict[int, tuple[int, int, Tensor]] = {}
        columns: dict[str, Column] = {}
        for name, column in self.columns.items():
            if not isinstance(column, Ragged):
                columns[name] = column[start:stop]
                continue
            # Columns with a value for each token have the very same offsets: they are cut once, and stay the same.
            key = id(column.offsets)
            if key not in cut:
                cut[key] = column.bounds(start, stop)
            low, high, offsets = cut[key]
            columns[name] = Ragged(column.values[low:high], offsets)
        return Batch(columns)

    def select(self, index: Sequence[int] | Tensor) -> Batch:
        """Rows in the order of `index`, copied."""
        wanted = torch.as_tensor(index, dtype=torch.int64)
        return Batch({n: c.select(wanted) if isinstance(c, Ragged) else c[wanted] for n, c in self.columns.items()})

    def group_bounds(self) -> list[int]:
        """Row numbers at which groups begin, and the number of rows as the last entry: [0, 8, 16] for 2 groups of 8."""
        if not self.rows:
            return [0]
        group = self.dense("group")
        changes = (group[1:] != group[:-1]).nonzero().flatten() + 1
        return [0, *changes.tolist(), self.rows]

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Stack rows; all must have the same columns."""
        if len(batches) == 1:
            return batches[0]
        if not batches:
            return Batch({})
        names = batches[0].columns.keys()
        for batch in batches:
            if batch.columns.keys() != names:
                raise ValueError(f"cannot stack batches with fields {sorted(names)} and {sorted(batch.columns)}")
        joined: dict[tuple[int, ...], Tensor] = {}
        return Batch({name: _concat([batch.columns[name] for batch in batches], joined) for name in names})


def _concat(columns: Sequence[Column], joined: dict[tuple[int, ...], Tensor]) -> Column:
    """`joined`: offsets by those that they were made of, since columns of the same rows have the very same."""
    if not isinstance(columns[0], Ragged):
        return torch.cat([column for column in columns if isinstance(column, Tensor)])
    ragged = [column for column in columns if isinstance(column, Ragged)]
    key = tuple([id(column.offsets) for column in ragged])
    if key not in joined:
        ends = [0, *accumulate([int(column.offsets[-1]) for column in ragged])]
        parts = [column.offsets[1:] + end for column, end in zip(ragged, ends, strict=False)]
        joined[key] = torch.cat([torch.zeros(1, dtype=torch.int64), *parts])
    return Ragged(torch.cat([column.values for column in ragged]), joined[key])


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `start` ≤ row < `stop` of a batch that is not cut yet: groups are kept so until they are joined."""

    batch: Batch
    start: int
    stop: int

    @property
    def rows(self) -> Batch:
        """The rows as a batch of their own (views)."""
        return self.batch.slice(self.start, self.stop)


def whole(batch: Batch) -> RowRange:
    """All rows of a batch."""
    return RowRange(batch, 0, batch.rows)


def join(ranges: Sequence[RowRange]) -> Batch:
    """The rows of all ranges in this order. Adjacent ranges of one batch are taken in one piece."""
    pieces: list[RowRange] = []
    for piece in ranges:
        last = pieces[-1] if pieces else None
        if last is not None and last.batch is piece.batch and last.stop == piece.start:
            pieces[-1] = RowRange(piece.batch, last.start, piece.stop)
        else:
            pieces.append(piece)
    columns = pieces[0].batch.columns if len(pieces) > 1 else None
    if isinstance(columns, BufferedColumns) and (joined := columns.join(pieces)) is not None:
        return joined
    whole = [piece.batch if piece.stop - piece.start == piece.batch.rows else piece.rows for piece in pieces]
    return Batch.concat(whole)


def group_ranges(batch: Batch) -> dict[int, RowRange]:
    """The rows of each group, by the group's prompt position."""
    if not batch.rows:
        return {}
    groups = batch.integers("group") or batch.dense("group").tolist()
    begins = [0, *[row for row in range(1, batch.rows) if groups[row] != groups[row - 1]], batch.rows]
    return {groups[a]: RowRange(batch, a, b) for a, b in pairwise(begins)}


def with_same_parts(ranges: Sequence[RowRange]) -> list[RowRange]:
    """Fill missing parts of the reward with NaN, and what was told of other samples with "", so that the ranges can be
    joined: not every sample has all of them."""
    batches = {id(piece.batch): piece.batch for piece in ranges}
    parts = {name for batch in batches.values() for name in batch.columns if is_reward_part(name) or is_logged(name)}
    for key, batch in batches.items():
        lacking = {name: _lacking(name, batch.rows) for name in sorted(parts - batch.columns.keys())}
        batches[key] = batch.with_columns(**lacking) if lacking else batch
    return [RowRange(batches[id(piece.batch)], piece.start, piece.stop) for piece in ranges]


def _lacking(name: str, rows: int) -> Column:
    return Ragged.from_texts([""] * rows) if is_logged(name) else torch.full((rows,), torch.nan)


_TOKENS = ("prompt_ids", "response_ids")


def row_lengths(batch: Batch) -> Tensor:
    """[B] int64: tokens of each row, prompt and response; with those of further models, as far as they are there."""
    return torch.from_numpy(_tokens_of_rows(batch, _TOKENS))


def part_lengths(batch: Batch) -> list[tuple[int, int]]:
    """The same as `distflow.parts` tells them: of prompt and response, with prompts that rows of a group share."""
    prompts_B = _tokens_of_rows(batch, _TOKENS[:1]).tolist()
    lengths_B = _tokens_of_rows(batch, _TOKENS).tolist()
    shares_B = _same_prompts(batch, prompts_B)
    rows = zip(prompts_B, lengths_B, shares_B, strict=True)
    # A row of no prompt is told as one of no response: a prompt of 0 is that of the row before.
    return [(0 if shares else prompt, n - prompt) if prompt else (n, 0) for prompt, n, shares in rows]


def _same_prompts(batch: Batch, prompts_B: Sequence[int]) -> list[bool]:
    """Tell whether each row has the prompts of the row before, and is of its group, where there are groups."""
    groups_B = (batch.integers("group") if "group" in batch else None) or [0] * batch.rows
    same = [False, *map(operator.eq, groups_B[1:], groups_B)][: batch.rows]
    same = [s and prompts_B[row] == prompts_B[row - 1] for row, s in enumerate(same)]
    for prompts in batch.of_all_models("prompt_ids") if any(same) else ():
        data, width = prompts.values.numpy().tobytes(), prompts.values.element_size()
        ends = (prompts.offsets * width).tolist()
        texts = [data[a:b] for a, b in pairwise(ends)]
        same = [s and texts[row] == texts[row - 1] for row, s in enumerate(same)]
    return same


def _tokens_of_rows(batch: Batch, kinds: Sequence[str]) -> npt.NDArray[np.int64]:
    names = [name for name in batch.columns if name.endswith("_ids") and name.rpartition("/")[2] in kinds]
    found = [offsets for name in names if (offsets := batch.offsets(name)) is not None]
    ends_B = sum(found[1:], found[0]) if found else np.zeros(batch.rows + 1, dtype=np.int64)
    lengths_B: npt.NDArray[np.int64] = ends_B[1:] - ends_B[:-1]
    return lengths_B
