"""What the process of a worker says of itself: its number and exit code, on disk, and where its threads are.

    workers/rollout-0.process    {"incarnation": 1, "pid": 4711, "started": 93.21, "code": null, "term": null}

So an agent that did not see a worker start or end still learns of it; and a worker that `os._exit(0)` ended in the
midst of its work is told from one that was done. The file has its full size from the start: a disk that is full by the
time of the end does not prevent that from being noted.

A worker answers `stacks` on its endpoint's thread. That needs the interpreter's lock; a main thread that holds it
inside C code keeps everybody else from answering. For then `arm` registers a handler in C for SIGUSR2, which writes all
stacks to a file without that lock.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import distflow
from distflow.comm.processes import process_alive, started_at

SIZE = 256
SIGNAL = signal.SIGUSR2
_PACKAGE = Path(distflow.__file__).parent
OURS = tuple(f"{folder}{os.sep}" for folder in (_PACKAGE, *(_PACKAGE.parent / name for name in ("workers", "launch"))))
LIBRARIES = ("/site-packages/", "/dist-packages/", f"{os.path.dirname(os.__file__)}{os.sep}")
"""What the files of installed packages, and of Python's own, have in their paths."""


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


def arm(path: Path) -> None:
    """From now on SIGUSR2 appends the stacks of all threads to this file; to be called in the worker's own process.

    The file is opened now: a process that is in trouble may not be able to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True, chain=False)


def thread_stacks() -> list[dict[str, Any]]:
    """Each thread's `name` and `frames` (outermost first, as in a traceback), the main thread first.

    `yours`: for each frame, whether it is of the user's code or of the worker's script.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return [
        {"name": names.get(ident, f"thread {ident}"), **_frames(traceback.extract_stack(frame))}
        for ident, frame in frames
    ]


def _frames(stack: traceback.StackSummary) -> dict[str, Any]:
    return {"frames": stack.format(), "yours": [_is_yours(frame.filename) for frame in stack]}


def _is_yours(file: str) -> bool:
    """Neither ours nor of a library, nor of Python itself."""
    return not (file.startswith(OURS) or file.startswith("<") or any(part in file for part in LIBRARIES))


def render(threads: Sequence[Mapping[str, Any]], *, everything: bool = False) -> str:
    """As text: of the threads that are in the user's code or in the script, and of the main thread, those frames first.

    Without `everything` the other threads are only named.
    """
    lines: list[str] = []
    told = [thread for place, thread in enumerate(threads) if everything or place == 0 or any(thread["yours"])]
    for thread in told:
        yours = [frame for frame, own in zip(thread["frames"], thread["yours"], strict=True) if own]
        if yours:
            lines += [f"{thread['name']}, your code and the script (most recent call last)", *_text(yours)]
        lines += [f"{thread['name']}{', all of it' if yours else ''} (most recent call last)", *_text(thread["frames"])]
    others = [str(thread["name"]) for thread in threads if thread not in told]
    if others:
        lines.append(f"{len(others)} further threads, shown with --all: {', '.join(others)}")
    return "\n".join(lines)


def _text(frames: Iterable[str]) -> list[str]:
    return [line.rstrip() for frame in frames for line in frame.splitlines()]
