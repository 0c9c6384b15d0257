"""Prompts that programs outside the run put while it goes on: rows in the order in which they came, on the disk.

The recipe says how many rows there will be, so that which row a position has is known beforehand: row i is that of
position i, and passes over all of them follow. A row that has not come is waited for. Imports no torch.
"""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from distflow.config.data_schema import MOST_FED_ROWS
from distflow.data.files import checked_row
from distflow.errors import UserError

PROMPTS = "prompts"
"""Folder of a run for the rows that clients have put: each owner's own copy."""
_NONE = b"null"


class FedRows:
    """A data source whose rows come from clients; bound to the log of an owner when a run begins."""

    def __init__(self, rows: int, ahead: int) -> None:
        self.rows, self.ahead = rows, ahead
        self.log: RowLog | None = None

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if self.log is None:
            raise UserError(f"data: {AWAITED}: there is none before it")
        return self.log[index]


AWAITED = "prompts come from clients while the run goes on (Client.put_prompts)"


def by_clients(*, rows: int, ahead: int = 1024) -> FedRows:
    """`rows` prompts from `Client.put_prompts` (docs/feeding.md), of which at most `ahead` wait to be begun.

    Raises UserError for numbers below 1, or too many rows.
    """
    for name, value in (("rows", rows), ("ahead", ahead)):
        if not 1 <= value <= MOST_FED_ROWS:
            raise UserError(f"data.with.{name}={value}: expected 1 to {MOST_FED_ROWS}")
    return FedRows(rows, ahead)


class LoggedRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the log: a row with the call of a client that has brought it; null: no row follows."""

    client: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    call: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    row: msgspec.Raw

    @property
    def ends(self) -> bool:
        """Whether no row follows."""
        return bytes(self.row) == _NONE


class RowLog:
    """An append-only file of rows. Only whole lines count: what a kill has cut off is removed when it is opened.

    One thread appends, any may read. Raises OSError when the disk refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ended = False
        """Whether no row follows."""
        self.taken: dict[str, tuple[int, int]] = {}
        """The newest call of each client that has brought rows, and how many of these were taken."""
        self._starts = array("q", [0])
        self._checks = array("L", [0])
        path.parent.mkdir(exist_ok=True)
        new = not path.exists()
        self._file = path.open("a+b", buffering=0)
        for number, line in enumerate(self._whole_lines(), 1):
            self._note(line, _parsed(line, f"{path}:{number}"))
        self._file.truncate(self._starts[-1])
        if new:
            _sync_folder(path.parent)

    @property
    def lines(self) -> int:
        """Lines, the end among them."""
        return len(self._starts) - 1

    def __len__(self) -> int:
        return self.lines - self.ended

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        logged = msgspec.json.decode(self._read(index, index + 1), type=LoggedRow)
        return checked_row(bytes(logged.row), f"row {index + 1} that clients have put")

    def check(self, lines: int) -> int:
        """The checksum of so many first lines, by which owners see whether they have the same."""
        return self._checks[lines]

    def some(self, first: int, most_bytes: int) -> bytes:
        """Lines from `first` on: one, or as many as take no more bytes."""
        last = first + 1
        while last < self.lines and self._starts[last + 1] - self._starts[first] <= most_bytes:
            last += 1
        return self._read(first, last)

    def append(self, lines: Sequence[bytes]) -> None:
        """Append whole lines; they are on the disk when it returns. Raises UserError for what is no line of a log."""
        parsed = [_parsed(line, f"line {self.lines + number}") for number, line in enumerate(lines, 1)]
        try:
            _write(self._file.fileno(), b"".join(lines))
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(self._starts[-1])
            raise
        for line, logged in zip(lines, parsed, strict=True):
            self._note(line, logged)

    def clear(self) -> None:
        """Forget all lines."""
        self._file.truncate(0)
        os.fsync(self._file.fileno())
        del self._starts[1:], self._checks[1:]
        self.taken.clear()
        self.ended = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _whole_lines(self) -> Iterator[bytes]:
        self._file.seek(0)
        with open(self._file.fileno(), "rb", closefd=False) as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line

    def _note(self, line: bytes, logged: LoggedRow) -> None:
        call, count = self.taken.get(logged.client, (-1, 0))
        self.taken[logged.client] = (logged.call, count + 1 if logged.call == call else 1)
        self._checks.append(zlib.crc32(line, self._checks[-1]))
        self.ended = logged.ends
        self._starts.append(self._starts[-1] + len(line))

    def _read(self, first: int, last: int) -> bytes:
        start, end = self._starts[first], self._starts[last]
        return os.pread(self._file.fileno(), end - start, start)


def logged_line(client: str, call: int, row: bytes | None) -> bytes:
    """The line of a row in JSON, or of the end."""
    return msgspec.json.encode(LoggedRow(client, call, msgspec.Raw(_NONE if row is None else row))) + b"\n"


def check_line(line: bytes) -> None:
    """Raise UserError for what is no line of a log, or not that of a row or of the end."""
    logged = _parsed(line, "a line of another owner")
    if not logged.ends:
        checked_row(bytes(logged.row), "a row of another owner")


def _parsed(line: bytes, where: str) -> LoggedRow:
    try:
        return msgspec.json.decode(line, type=LoggedRow)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: this is no row that a client has put: {error}") from error


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
