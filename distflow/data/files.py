"""Rows of files: JSON lines, CSV, Parquet, data sets of Hugging Face, saved or on its hub. Imports no torch.

A row is a mapping of columns. Lines are indexed once, and read from the disk when they are needed (of compressed files,
from a temporary one); Parquet is held in memory in Arrow's form, and saved data sets are mapped.
"""

from __future__ import annotations

import json
import os
import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Protocol

import msgspec

from distflow.config.data_files import data_files, kind_of
from distflow.config.hub import not_found, settle_hub
from distflow.config.yamlfile import shown
from distflow.data.delimited import DELIMITERS, DelimitedLines
from distflow.data.messages import TableObject, TableRow
from distflow.data.packed import unpacked
from distflow.errors import UserError

Row = Mapping[str, Any]
Check = Callable[[Sequence[str]], None]
"""Raises UserError unless these columns of a row are enough."""
_MARK = b"\xef\xbb\xbf"
"""What some editors put at the beginning of a file."""
_BLANK = b" \t\r\n"
"""White space of JSON; `strip` alone takes more, such as form feeds, which no JSON parser passes over."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Surrogates: JSON can escape half of a pair alone, but no encoding can write it."""
_MOST_NESTED = 200
"""Lists and objects within each other; beyond some hundreds parsers give up, each elsewhere."""
_NARROW = {"halffloat": "float16", "float": "float32"}
"""Arrow's floats of fewer digits than JSON's."""
_TOO_DEEP = f"lists or objects are nested more than {_MOST_NESTED} deep — make it flatter, or a text"


def whole_lines(path: Path, offset: int = 0, most: int = -1) -> tuple[list[bytes], int]:
    """The lines of a growing file from byte `offset` on, and the offset behind them. One that is not finished waits.

    Only newlines end a line: text in JSON may contain other separators, such as U+2028. `most`: bytes to read; all.
    """
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(most)
    end = data.rfind(b"\n") + 1
    return data[:end].split(b"\n")[:-1], offset + end


class Table(Protocol):
    """Rows by number, and where each stands."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def __getitem__(self, index: int) -> Row:
        """Row `index`, 0 ≤ index < len."""
        ...

    def where(self, index: int) -> str:
        """The place of a row, for messages."""
        ...


def read(path: Path, check: Check, *, split: str | None = None) -> Table:
    """The rows of a file or folder. Raises UserError for what is broken, with the line, and for missing columns."""
    found = data_files(path, split)
    tables = [_open(file, check, saved=found.saved) for file in found.files]
    if not any(len(table) for table in tables):
        raise UserError(f"{shown(path)} is empty; expected at least one row")
    return tables[0] if len(tables) == 1 else Tables(tables)


def count_rows(path: Path) -> int | None:
    """Count the rows of a file or folder, of Parquet by what its end says; None where there is none to be read."""
    try:
        files = data_files(path).files
        if all(kind_of(file) == ".parquet" for file in files):
            parquet = _package("pyarrow.parquet", "parquet")
            return sum(int(parquet.read_metadata(file).num_rows) for file in files)
        return len(read(path, lambda columns: None))
    except (UserError, ValueError, OSError):
        return None


def first_row(path: Path, *, split: str | None = None) -> tuple[str, Row] | None:
    """Read the first row of JSON lines, and its place as `file:line`; None of other files, which take longer to open.

    Raises UserError for what is no row, and where there is none.
    """
    for file in data_files(path, split).files:
        if file.suffix not in (".jsonl", ".ndjson"):
            return None
        with file.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                text = line.removeprefix(_MARK) if number == 1 else line
                if text.strip(_BLANK):
                    where = f"{shown(file)}:{number}"
                    return where, checked_row(text, where)
    raise UserError(f"{shown(path)} has no rows — expected one prompt at least")


def _open(file: Path, check: Check, *, saved: bool) -> Table:
    kind = kind_of(file)
    if saved or kind == ".parquet":
        return ArrowTable(file, check, saved=saved)
    opened = unpacked(file)
    if kind in DELIMITERS:
        return DelimitedLines(file, opened, check, DELIMITERS[kind])
    if kind == ".json" and _is_list(opened):
        return JsonList(file, opened, check)
    return JsonLines(file, opened, check)


def _is_list(opened: IO[bytes]) -> bool:
    first = opened.read(1 << 12)
    opened.seek(0)
    return first.removeprefix(_MARK).lstrip(_BLANK)[:1] == b"["


class Tables:
    """Several tables, one behind the other."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._ends = list(accumulate(len(table) for table in tables))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        table, place = self._find(index)
        return table[place]

    def where(self, index: int) -> str:
        """The place in its own file."""
        table, place = self._find(index)
        return table.where(place)

    def _find(self, index: int) -> tuple[Table, int]:
        number = bisect_right(self._ends, index)
        return self._tables[number], index - (self._ends[number - 1] if number else 0)


class JsonLines:
    """One JSON object a line; empty lines are passed over. Every line is read once at the start, to be checked."""

    def __init__(self, path: Path, opened: IO[bytes], check: Check) -> None:
        self._path = path
        self._starts = array("q")
        self._empty = array("q")
        """For each empty line, how many rows stand before it: the number of a row's line follows without reading."""
        self._file = opened
        known: frozenset[str] | None = None
        end = 0
        for number, line in enumerate(self._file, 1):
            text = line.removeprefix(_MARK) if number == 1 else line
            if text.strip(_BLANK):
                columns = frozenset(checked_row(text, f"{shown(path)}:{number}"))
                if columns != known:
                    _checked(check, sorted(columns), f"{shown(path)}:{number}")
                    known = columns
                self._starts.append(end + len(line) - len(text))
            else:
                self._empty.append(len(self._starts))
            end += len(line)
        self._starts.append(end)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> Row:
        start, end = self._starts[index], self._starts[index + 1]
        try:
            # Not msgspec, which refuses the NaN that Python and pandas write.
            found: Row = json.loads(os.pread(self._file.fileno(), end - start, start))
        except ValueError as error:
            place = self.where(index)
            raise UserError(f"{place}: this line was whole when the run began, and is not now: {error}") from error
        return found

    def where(self, index: int) -> str:
        """`file:line`; nothing is read for it."""
        return f"{shown(self._path)}:{index + 1 + bisect_right(self._empty, index)}"


class JsonList:
    """One list of JSON objects, which is held in memory."""

    def __init__(self, path: Path, opened: IO[bytes], check: Check) -> None:
        self._path = path
        try:
            with opened:
                self._rows: list[Row] = _parsed(opened.read(), shown(path))
        except json.JSONDecodeError as error:
            raise UserError(f"{shown(path)}:{error.lineno}: broken JSON: {error.msg.removesuffix(' at')}") from error
        for index, row in enumerate(self._rows):
            if not isinstance(row, Mapping):
                raise UserError(f"{self.where(index)}: expected an object with columns, got {str(row)[:60]!r}")
            _refuse_faults(row, self.where(index))
            _checked(check, sorted(row), self.where(index))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]

    def where(self, index: int) -> str:
        """The file and the number in the list."""
        return f"{shown(self._path)}, entry {index + 1}"


class ArrowTable:
    """A Parquet file, or an Arrow file that Hugging Face datasets has saved, which is mapped."""

    def __init__(self, path: Path, check: Check, *, saved: bool) -> None:
        self._path = path
        try:
            self._table = _arrow_file(path) if saved else _package("pyarrow.parquet", "parquet").read_table(path)
        except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
            if isinstance(error, UserError):
                raise
            kind = "an Arrow file" if saved else "a Parquet file"
            raise UserError(f"{shown(path)} cannot be read as {kind}: {str(error).splitlines()[0]}") from error
        _checked(check, self._table.column_names, shown(path))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        schema = self._table.schema
        row = self._table.slice(index, 1).to_pylist()[0]
        return TableRow({name: _plain(value, schema.field(name).type) for name, value in row.items()})

    def where(self, index: int) -> str:
        """The file and the number of the row."""
        return f"{shown(self._path)}, row {index + 1}"


def _arrow_file(path: Path) -> Any:
    arrow = _package("pyarrow", "parquet")
    return arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all()


@dataclass(frozen=True, slots=True)
class HubTable:
    """A data set of the Hugging Face hub."""

    name: str
    rows: Any

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        types = {field.name: field.type for field in self.rows.features.arrow_schema}
        return TableRow({name: _plain(value, types.get(name)) for name, value in dict(self.rows[index]).items()})

    def where(self, index: int) -> str:
        """The data set and the number of the row."""
        return f"{self.name}, row {index + 1}"


def read_hub(name: str, check: Check, *, split: str = "train", config: str | None = None) -> HubTable:
    """A split of a data set of the hub, or of what `load_dataset` takes instead. Raises UserError."""
    load = _package("datasets", "datasets").load_dataset
    settle_hub()
    try:
        rows = load(name, config, split=split)
    except Exception as error:  # of that package, of every kind: no network, no such data set, its own code
        absent = isinstance(error, OSError) or "cache" in str(error)
        if absent and (why := not_found(name, data=True)):
            raise UserError(f"the data set hub:{name} cannot be loaded: {why}") from error
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"the data set hub:{name} cannot be loaded: {type(error).__name__}: {reason}") from error
    _checked(check, rows.column_names, f"hub:{name}")
    return HubTable(f"hub:{name}", rows)


def _package(module: str, extra: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(
            f"this data source needs the package {package}, which is missing: pip install 'distflow-rl[{extra}]'"
        ) from error


def checked_row(line: bytes, where: str) -> Row:
    """The row in a line of JSON. Raises UserError for what is no object, or cannot be sent on."""
    doubtful = line.count(b"[") + line.count(b"{") > _MOST_NESTED
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        doubtful = True
        try:
            found = _parsed(
                line.rstrip(_BLANK), where
            )  # which takes NaN, and says where in the line something is wrong
        except json.JSONDecodeError as error:
            at = f"at column {error.colno}" if error.pos < len(error.doc) else "at the end of the line"
            raise UserError(f"{where}: broken JSON: {error.msg.removesuffix(' at')} {at}") from error
    if not isinstance(found, dict):
        start = line.strip(_BLANK).decode()[:60]
        raise UserError(f"{where}: expected a JSON object with columns, got {start!r}")
    if doubtful:
        _refuse_faults(found, where)
    return found


def _parsed(data: bytes, where: str) -> Any:
    """The value that a text is in JSON; raises JSONDecodeError for what is none, and UserError for all else."""
    try:
        return json.loads(data.decode("utf-8-sig"))
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8: {error}") from error
    except RecursionError as error:
        raise UserError(f"{where}: {_TOO_DEEP}") from error
    except ValueError as error:
        most = sys.get_int_max_str_digits()
        raise UserError(f"{where}: a number of more than {most} digits — write it as text") from error


def _refuse_faults(row: Row, where: str) -> None:
    """Raise UserError for what JSON can say but nobody can send."""
    for column, value in row.items():
        for depth, text in _texts({column: value}):
            if depth > _MOST_NESTED:
                raise UserError(f"{where}: column {column!r}: {_TOO_DEEP}")
            if (lone := _SURROGATE.search(text)) is not None:
                raise UserError(
                    f"{where}: column {column!r} has a lone surrogate \\u{ord(lone[0]):04x}, half of a character "
                    "such as an emoji that was cut off — leave it out, or write \\ufffd for it"
                )


def _texts(value: object) -> Iterator[tuple[int, str]]:
    """All texts within a value, keys too, with their depth; empty ones for lists and objects."""
    waiting = [(0, value)]
    while waiting:
        depth, one = waiting.pop()
        if isinstance(one, str):
            yield depth, one
        elif isinstance(one, (list, dict)):
            yield depth, ""
            waiting += [(depth + 1, inner) for inner in one]
            waiting += [(depth + 1, inner) for inner in one.values()] if isinstance(one, dict) else []


def _checked(check: Check, columns: Sequence[str], where: str) -> None:
    try:
        check(columns)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _plain(value: Any, kind: Any) -> Any:
    """The value of a column of this type of Arrow's, with values that JSON has: decimals as numbers, if these say the
    same, dates as text, maps as objects, and of narrow floats the digits that their width has: 0.1, not
    0.10000000149011612.

    Raises UserError for a map that has a key twice.
    """
    kind = _stored(kind)
    name = str(kind)
    if isinstance(value, dict):
        fields = {field.name: field.type for field in kind} if name.startswith("struct<") else {}
        return {key: _plain(inner, fields.get(key)) for key, inner in value.items()}
    if isinstance(value, list) and name.startswith("map<"):
        return _object([(_plain(key, kind.key_type), _plain(inner, kind.item_type)) for key, inner in value])
    if isinstance(value, list):
        items = kind.value_type if "list" in name.partition("<")[0] else None
        return [_plain(inner, items) for inner in value]
    if isinstance(value, Decimal):
        return _number(value)
    if name in _NARROW and value is not None:
        import numpy as np  # commands that only read recipes do without

        return float(str(np.dtype(_NARROW[name]).type(value)))
    return str(value) if isinstance(value, (date, time, timedelta)) else value


def _stored(kind: Any) -> Any:
    """The type of the values themselves, of one of Arrow's that names a meaning or writes repeated values once."""
    name = str(kind).partition("<")[0]
    if name == "extension":
        return _stored(kind.storage_type)
    return _stored(kind.value_type) if name in ("dictionary", "run_end_encoded") else kind


def _object(pairs: Sequence[tuple[Any, Any]]) -> TableObject:
    found = TableObject(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise UserError(f"a map of the table has the key {twice!r} twice; expected each key once")
    return found


def _number(value: Decimal) -> int | float | str:
    whole = value.is_finite() and value == value.to_integral_value()
    if whole:
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)
