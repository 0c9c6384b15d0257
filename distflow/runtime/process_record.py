"""What the process of a worker says of itself on disk: its number, and its exit code once it has come to its end.

    workers/rollout-0.process    {"incarnation": 1, "pid": 4711, "started": 93.21, "code": null, "term": null}

So an agent that did not see a worker start or end still learns of it; and a worker that `os._exit(0)` ended in the
midst of its work is told from one that was done. The file has its full size from the start: a disk that is full by the
time of the end does not prevent that from being noted.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from distflow.comm.processes import process_alive, started_at

SIZE = 256


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One process of a worker."""

    incarnation: int
    pid: int
    started: float
    """In seconds since the machine's start, which tells the process from a later one of the same number."""
    code: int | None = None
    """Exit code; None while it runs, and for good if something else ended it."""
    term: int | None = None
    """Of the training workers, as a generating worker knew it when it found that they want no more samples."""

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return process_alive(self.pid, self.started)


def process_file(document: Path) -> Path:
    """Where the process of a worker with this document leaves its record."""
    return document.with_suffix(".process")


def note_start(document: Path, incarnation: int) -> None:
    """Of this process, as its first deed. A disk that refuses does not stop it."""
    pid = os.getpid()
    started = started_at(pid)
    assert started is not None, "a process that runs has been started"
    _write(process_file(document), ProcessRecord(incarnation, pid, started), os.O_CREAT | os.O_TRUNC)


def note_end(document: Path, code: int) -> None:
    """Of this process, when all is done."""
    _note(document, code=code)


def note_term(document: Path, term: int) -> None:
    """Of this process, when it has generated all that was wanted in this term."""
    _note(document, term=term)


def read_process(document: Path) -> ProcessRecord | None:
    """The record of the worker's last process; None if there is none that can be read."""
    try:
        return ProcessRecord(**json.loads(process_file(document).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _note(document: Path, **what: int) -> None:
    found = read_process(document)
    if found is not None and found.pid == os.getpid():
        _write(process_file(document), replace(found, **what), 0)


def _write(path: Path, record: ProcessRecord, flags: int) -> None:
    text = json.dumps(asdict(record)).ljust(SIZE).encode()
    try:
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o644)
        try:
            os.pwrite(file, text, 0)
        finally:
            os.close(file)
    except OSError as error:
        with suppress(OSError):
            print(f"{path} cannot be written: {error.strerror}", flush=True)
