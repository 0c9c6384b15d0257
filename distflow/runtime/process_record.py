"""What a worker process reports about itself: its number and exit code, on disk, and the stacks of its threads.

    workers/rollout-0.process    {"incarnation": 1, "pid": 4711, "started": 93.21, "code": null, "term": null}

So an agent that did not see a worker start or end still learns of it, and a worker that called `os._exit(0)` in the
middle of its work is not taken for one that was done. The file has its full size from the start, so that the end can be
recorded on a full disk too.

A worker answers `stacks` on its endpoint's thread. That needs the interpreter's lock, which a main thread may hold
inside C code. For that case `arm` registers a C handler for SIGUSR2 that writes all stacks to a file without the lock.
"""

from __future__ import annotations

import faulthandler
import gc
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
from types import FrameType
from typing import Any

import msgspec

from distflow.comm.processes import process_alive, started_at
from distflow.flow.user_frames import is_yours

SIZE = 256
SIGNAL = signal.SIGUSR2
TROUBLES, LONGEST_TROUBLE = ".troubles.txt", 500
_collecting = threading.Lock()


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One process of a worker."""

    incarnation: int
    pid: int
    started: float
    """Seconds since the machine's start, to tell the process from a later one with the same number."""
    code: int | None = None
    """Exit code; None while it runs, and afterwards if it was killed."""
    term: int | None = None
    """Term of the training workers when a generating worker found that they need no more samples."""

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return process_alive(self.pid, self.started)


def process_file(document: Path) -> Path:
    """The file for the process record of a worker with this document."""
    return document.with_suffix(".process")


def note_start(document: Path, incarnation: int) -> None:
    """Record that this process has started, before anything else. A full disk does not stop it."""
    pid = os.getpid()
    started = started_at(pid)
    assert started is not None, "a process that runs has been started"
    _write(process_file(document), ProcessRecord(incarnation, pid, started), os.O_CREAT | os.O_TRUNC)


def note_end(document: Path, code: int) -> None:
    """Record the exit code of this process, at its end."""
    _note(document, code=code)


def note_term(document: Path, term: int) -> None:
    """Record that this process has generated all samples of this term."""
    _note(document, term=term)


def read_process(document: Path) -> ProcessRecord | None:
    """The record of the worker's last process; None if it cannot be read."""
    try:
        return msgspec.json.decode(process_file(document).read_bytes(), type=ProcessRecord)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError):
        return None


def trouble_file(run_dir: Path, stem: str) -> Path:
    """What did not work at the end of a worker although the run went on, a line each."""
    return run_dir / "workers" / f"{stem}{TROUBLES}"


def note_trouble(run_dir: Path, stem: str, text: str) -> None:
    """Record such a thing for the last lines of the launching command."""
    line = " ".join(text.split())[:LONGEST_TROUBLE]
    try:
        with trouble_file(run_dir, stem).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{line}\n")
    except OSError as error:
        with suppress(OSError):
            print(f"could not record {line!r}: {error.strerror}", flush=True)


def read_troubles(run_dir: Path) -> list[str]:
    """What all workers have recorded."""
    files = sorted((run_dir / "workers").glob(f"*{TROUBLES}"))
    return [line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]


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
            print(f"could not write {path}: {error.strerror}", flush=True)


def arm(path: Path) -> None:
    """Make SIGUSR2 append the stacks of all threads to this file; call this in the worker's own process.

    The file is opened now, because a process in trouble may not be able to open it.
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
    frames = sorted(current_frames().items(), key=lambda item: item[0] != main)
    return [
        {"name": names.get(ident, f"thread {ident}"), **_frames(traceback.extract_stack(frame))}
        for ident, frame in frames
    ]


def current_frames() -> dict[int, FrameType]:
    """The frame of every thread, without a garbage collection meanwhile.

    Python 3.11 collects while it holds the lock of its list of threads. A finalizer that waits then for a thread that
    starts or ends, which waits for that lock, is a deadlock of the whole process (python/cpython issue 106883).
    """
    with _collecting:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def _frames(stack: traceback.StackSummary) -> dict[str, Any]:
    return {"frames": stack.format(), "yours": [is_yours(frame.filename) for frame in stack]}


def render(threads: Sequence[Mapping[str, Any]], *, everything: bool = False) -> str:
    """The stacks as text: the main thread and threads in the user's code or the script, with those frames first.

    Other threads are only named, unless `everything` is asked for.
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
