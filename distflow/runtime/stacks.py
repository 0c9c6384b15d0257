"""Where the threads of this process are, told by itself, or, when it cannot answer any more, by a signal handler.

A worker answers `stacks` on its endpoint's thread. That needs the interpreter's lock; a main thread that holds it
inside C code keeps everybody else from answering. For then `arm` registers a handler in C for SIGUSR2, which writes
all stacks to a file without that lock.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SIGNAL = signal.SIGUSR2


def arm(path: Path) -> None:
    """From now on SIGUSR2 appends the stacks of all threads to this file; to be called in the worker's own process.

    The file is opened now: a process that is in trouble may not be able to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True, chain=False)


def thread_stacks() -> list[dict[str, Any]]:
    """Each thread's `name` and `frames` (outermost first, as in a traceback), the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return [
        {"name": names.get(ident, f"thread {ident}"), "frames": traceback.format_stack(frame)}
        for ident, frame in frames
    ]


def render(threads: Iterable[Mapping[str, Any]]) -> str:
    """As text, each thread's name above its frames."""
    lines = []
    for thread in threads:
        lines.append(f"{thread['name']} (most recent call last)")
        lines += [line.rstrip() for frame in thread["frames"] for line in frame.splitlines()]
    return "\n".join(lines)
