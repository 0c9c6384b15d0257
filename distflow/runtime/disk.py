"""Writing to a disk that may be full: records may be lost, counted and reported; last words have room set aside.

Records are what a run leaves for people: metrics, rollout dumps, traces, logs. Training never ends for want of them.
Counts are metrics (`disk/refused`, `disk/dropped_dumps` …), which `status` and the live page show at once.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.log import logger

if TYPE_CHECKING:
    from distflow.exchange.listing import Listed

DISK = "disk/"
REFUSED = DISK + "refused"
"""Writes that the disk refused."""
DROPPED = DISK + "dropped_"
"""Followed by the kind of record that was dropped."""
FAILURE_ROOM, END_ROOM = ".room-for-failure", ".room-for-end"
"""Files of a run folder that are deleted to make room on a full disk for why, and how, a run ended."""
ROLLOUTS, VAL_ROLLOUTS = "rollouts", "rollouts/val"
"""Folders of a run for dumps: of what is trained on, and of validation."""
LAST_WORDS_BYTES = 128 << 10
CLOSE_S = 1.0
"""How long to wait at the end for a disk."""
Count = Callable[[str, float], None]
log = logger(__name__)


class Disk:
    """The disk of one worker, as its writers report on it. Safe to call from several threads."""

    def __init__(self, count: Count | None = None) -> None:
        self.count: Count = count or (lambda name, value: None)
        """Takes the name of a counter and what to add to it."""
        self._lock = threading.Lock()
        self._refusing: dict[str, int] = {}
        """Records dropped since writes began to fail, by kind."""

    def refused(self, what: str, error: OSError) -> None:
        """A write failed; the records may be kept and tried again."""
        self.count(REFUSED, 1)
        with self._lock:
            first = what not in self._refusing
            self._refusing.setdefault(what, 0)
        if first:
            log.error("could not write %s, training continues: %s", what, error)

    def dropped(self, what: str, number: int) -> None:
        """So many records are lost."""
        self.count(DROPPED + what, number)
        with self._lock:
            self._refusing[what] = self._refusing.get(what, 0) + number

    def taken(self, what: str) -> None:
        """A write succeeded."""
        with self._lock:
            lost = self._refusing.pop(what, None)
        if lost is not None:
            log.warning("writing %s works again; dropped meanwhile: %d", what, lost)


def finite(value: Any) -> Any:
    """A value for JSON, which has neither NaN nor infinity: null instead, in lists too."""
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file in one step, so that no reader sees half of it and a full disk does not cost the old contents.

    Raises OSError, with nothing left behind.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def set_aside(folder: Path) -> None:
    """Reserve some room for last words in a folder, as far as there is any."""
    for name in (FAILURE_ROOM, END_ROOM):
        try:
            with (folder / name).open("xb") as file:
                file.write(bytes(LAST_WORDS_BYTES))
        except FileExistsError:
            continue
        except OSError as error:
            log.warning("could not reserve disk space for recording how this run ends: %s", error)


def write_last(folder: Path, room: str, write: Callable[[], None]) -> None:
    """Write what must be recorded, in the room that was set aside if need be; raises OSError if even that fails."""
    try:
        write()
    except OSError:
        (folder / room).unlink(missing_ok=True)
        write()


class ConsumerList:
    """The file in which an owner lists its lossless consumers, for the owner that follows it.

    Written on a thread of its own, since disks are slow: the newest list, if there are several by then.

    `written` is called on that thread with the names in the file. If the disk refuses, too: the run goes on. `fault`
    gets an error of our own.
    """

    def __init__(
        self, file: Path, written: Callable[[Iterable[str]], None], fault: Callable[[Exception], None]
    ) -> None:
        self._file, self._written, self._fault = file, written, fault
        self._changed = threading.Condition()
        self._newest: Listed | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="consumers", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def write(self, listed: Listed) -> None:
        """Write this list soon; never blocks."""
        with self._changed:
            self._newest = dict(listed)
            self._changed.notify()

    def close(self) -> None:
        """Write what is left, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while (listed := self._next()) is not None:
                self._write(listed)
                self._written(listed)
        except Exception as error:  # clients of lossless consumers may not wait forever
            self._fault(error)

    def _next(self) -> Listed | None:
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None or self._closing)
            listed, self._newest = self._newest, None
        return listed

    def _write(self, listed: Listed) -> None:
        try:
            self._file.parent.mkdir(exist_ok=True)
            replace_file(self._file, json.dumps(listed))
        except OSError as error:
            log.error("could not write %s, so consumers may miss samples after a restart: %s", self._file, error)


class _Lossy(io.FileIO):
    """A descriptor on a disk that may be full: failed writes are ignored."""

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


def spare_output() -> None:
    """From now on, no `print` in this process fails because the log cannot grow."""
    sys.stdout = _lossy(1)
    sys.stderr = _lossy(2)


def _lossy(descriptor: int) -> io.TextIOWrapper:
    raw = _Lossy(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", errors="backslashreplace", line_buffering=True)
