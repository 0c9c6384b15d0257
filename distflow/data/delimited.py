"""Rows of CSV and TSV files. Imports no torch.

Every column is text, as it stands there: a reader that guesses makes 7 of 007, and 1.5 of version 1.50. The first line
names the columns; texts with the delimiter, quotes or line ends stand in double quotes (RFC 4180).
"""

from __future__ import annotations

import csv
import io
import os
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from distflow.config.yamlfile import shown
from distflow.errors import UserError

DELIMITERS = {".csv": ",", ".tsv": "\t"}
_NAMES = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
_MARK = b"\xef\xbb\xbf"

# The package takes a field of more than 128 KiB for a mistake.
csv.field_size_limit(sys.maxsize)


class DelimitedLines:
    """Rows that are read from the disk when they are needed. Each is read once at the start, to be checked."""

    def __init__(self, path: Path, opened: IO[bytes], check: Callable[[Sequence[str]], None], delimiter: str) -> None:
        """Raises UserError, with the line, for rows that differ from the first line, and what `check` raises."""
        self._path, self._file, self._delimiter = path, opened, delimiter
        self._starts = array("q")
        self._lines = array("q")
        """The line in which each row begins."""
        self._columns: list[str] = []
        for start, line, fields in self._read():
            if self._columns:
                self._check_row(line, fields)
                self._starts.append(start)
                self._lines.append(line)
                continue
            self._columns = [name.strip() for name in fields]
            self._check_header(f"{shown(path)}:{line}", check)
        self._starts.append(self._end)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        start, end = self._starts[index], self._starts[index + 1]
        data = os.pread(self._file.fileno(), end - start, start)
        try:
            (fields,) = (found for found in self._parsed(io.StringIO(data.decode(), newline="")) if found)
            return self._row(fields)
        except (ValueError, csv.Error) as error:
            raise UserError(f"{self.where(index)}: this row was whole when the run began, and is not now") from error

    def where(self, index: int) -> str:
        """`file:line` of the row's first line; nothing is read for it."""
        return f"{shown(self._path)}:{self._lines[index]}"

    # -- details

    def _row(self, fields: Sequence[str]) -> dict[str, str]:
        # A column without a name is an index, as pandas writes it.
        return {name: text for name, text in zip(self._columns, fields, strict=True) if name}

    def _parsed(self, lines: Iterable[str]) -> Iterator[list[str]]:
        return csv.reader(lines, delimiter=self._delimiter, strict=True)

    def _read(self) -> Iterator[tuple[int, int, list[str]]]:
        """Each row with the byte and the line at which it begins."""
        self._end = line = 0

        def lines() -> Iterator[str]:
            nonlocal line
            for line, data in enumerate(self._file, 1):
                text = data.removeprefix(_MARK) if line == 1 else data
                self._end += len(data)
                try:
                    yield text.decode()
                except UnicodeDecodeError as error:
                    raise UserError(f"{shown(self._path)}:{line}: not UTF-8: {error}") from error

        rows, start, first = self._parsed(lines()), 0, 1
        while True:
            try:
                fields = next(rows, None)
            except csv.Error as error:
                raise UserError(f"{shown(self._path)}:{first}: {_told(error)}") from error
            if fields is None:
                return
            if fields:
                yield start, first, fields
            start, first = self._end, line + 1

    def _check_row(self, line: int, fields: Sequence[str]) -> None:
        if len(fields) != len(self._columns):
            raise UserError(
                f"{shown(self._path)}:{line}: {len(fields)} fields, but the first line names {len(self._columns)} "
                "columns — put a text that has the delimiter in it in double quotes"
            )

    def _check_header(self, where: str, check: Callable[[Sequence[str]], None]) -> None:
        named = [name for name in self._columns if name]
        twice = next((name for name, count in Counter(named).items() if count > 1), None)
        if twice is not None:
            raise UserError(f"{where}: there are two columns {twice!r}: rename one")
        other = next((sign for sign in _NAMES if sign != self._delimiter and sign in "".join(named)), None)
        if len(self._columns) == 1 and other is not None:
            raise UserError(
                f"{where}: the columns are separated by {_NAMES[other]}, expected {_NAMES[self._delimiter]} — .csv "
                "files have commas, .tsv files tabs"
            )
        try:
            check(sorted(named))
        except UserError as error:
            raise UserError(f"{where}: {error}") from error


def _told(error: csv.Error) -> str:
    if "unexpected end of data" in str(error):
        return "a double quote in the row that begins here is never closed — double the quotes within a text"
    return f"broken CSV: {error} — put the text in double quotes, and double those within it"
