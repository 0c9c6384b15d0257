"""What a worker does about a disk that refuses its records: counts what is lost, says so once, and goes on.

Records are what a run leaves to be looked at: metrics, rollout dumps, traces, logs. Training never ends for want of
them. Counts are metrics (`disk/refused`, `disk/dropped_dumps` …), which `status` and the live page show at once.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distflow.log import logger

DISK = "disk/"
REFUSED = DISK + "refused"
"""Writes that the disk refused."""
DROPPED = DISK + "dropped_"
"""Followed by what it is that was dropped."""
FAILURE_ROOM, END_ROOM = ".room-for-failure", ".room-for-end"
"""Files of a run folder that are removed when the disk is full and it must be said why, and how, a run ended."""
LAST_WORDS_BYTES = 128 << 10
Count = Callable[[str, float], None]
log = logger(__name__)


class Disk:
    """Of one worker: every writer tells it what the disk refused. Safe to call from several threads."""

    def __init__(self, count: Count | None = None) -> None:
        self.count: Count = count or (lambda name, value: None)
        """Takes the name of a sum and what to add to it."""
        self._lock = threading.Lock()
        self._refusing: dict[str, int] = {}
        """Dropped since the disk began to refuse, by kind of record."""

    def refused(self, what: str, error: OSError) -> None:
        """A write failed. What was to be written may still be kept, to be tried again."""
        self.count(REFUSED, 1)
        with self._lock:
            first = what not in self._refusing
            self._refusing.setdefault(what, 0)
        if first:
            log.error("%s cannot be written, training goes on: %s", what, error)

    def dropped(self, what: str, number: int) -> None:
        """So much of it is lost."""
        self.count(DROPPED + what, number)
        with self._lock:
            self._refusing[what] = self._refusing.get(what, 0) + number

    def taken(self, what: str) -> None:
        """A write was done."""
        with self._lock:
            lost = self._refusing.pop(what, None)
        if lost is not None:
            log.warning("%s can be written again; dropped meanwhile: %d", what, lost)


def set_aside(folder: Path) -> None:
    """Keep some room for last words in a folder, as far as there is any."""
    for name in (FAILURE_ROOM, END_ROOM):
        try:
            with (folder / name).open("xb") as file:
                file.write(bytes(LAST_WORDS_BYTES))
        except FileExistsError:
            continue
        except OSError as error:
            log.warning("no room can be kept for the last words of this run: %s", error)


def write_last(folder: Path, room: str, write: Callable[[], None]) -> None:
    """Write what must be said, in the room that was set aside for it if need be; raises OSError if not even there."""
    try:
        write()
    except OSError:
        (folder / room).unlink(missing_ok=True)
        write()


class _Lossy(io.FileIO):
    """A descriptor whose disk may be full: what it refuses is lost."""

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


def spare_output() -> None:
    """From now on no `print` in this process fails because the log cannot grow."""
    sys.stdout = _lossy(1)
    sys.stderr = _lossy(2)


def _lossy(descriptor: int) -> io.TextIOWrapper:
    raw = _Lossy(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", errors="backslashreplace", line_buffering=True)
