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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import distflow

SIGNAL = signal.SIGUSR2
_PACKAGE = Path(distflow.__file__).parent
OURS = tuple(f"{folder}{os.sep}" for folder in (_PACKAGE, *(_PACKAGE.parent / name for name in ("workers", "launch"))))
LIBRARIES = ("/site-packages/", "/dist-packages/", f"{os.path.dirname(os.__file__)}{os.sep}")
"""What the files of installed packages, and of Python's own, have in their paths."""


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
