"""Logs plain lines to standard error, which the launcher writes to the worker's log file."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

_FRAMES = 4
"""Frames that are noted of where a coroutine is made: what was called by a user may call others."""
_FORGOTTEN = re.compile(r"coroutine '.*?' was never awaited")
_MADE_AT = re.compile(r'File "(.+?)", line (\d+)')
_ROOT = Path(__file__).parent
_OURS = tuple(f"{folder}/" for folder in (_ROOT, _ROOT.with_name("workers"), _ROOT.with_name("launch")))


def configure(worker: str) -> None:
    """Send the `distflow` loggers of this process to standard error, each line with time, level and worker."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s [{worker}] %(message)s", "%H:%M:%S"))
    root = logging.getLogger("distflow")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False
    hear_forgotten(lambda text: logger(__name__).warning("%s", text))


def logger(name: str) -> logging.Logger:
    """The logger of one module, below `distflow`."""
    return logging.getLogger(name if name.startswith("distflow") else f"distflow.{name}")


def hear_forgotten(tell: Callable[[str], None]) -> None:
    """Have `tell` hear of each coroutine that users' code makes and never awaits: once for its line, by any thread."""
    told: set[str] = set()
    usual = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        found = _FORGOTTEN.match(str(message))
        if found is None:
            usual(message, category, filename, lineno, file, line)
            return
        made = _MADE_AT.findall(str(message))
        theirs = [f"{path}:{number}" for path, number in made if not path.startswith(_OURS)]
        text = f"{found[0]} ({theirs[-1] if theirs else f'{filename}:{lineno}'})"
        if text not in told:
            told.add(text)
            tell(f"{text}: what it does is not done, and its value is no result — write `await` before the call")

    warnings.filterwarnings("always", _FORGOTTEN.pattern, RuntimeWarning)
    warnings.showwarning = show
    note_origins()


def note_origins() -> None:
    """Have this thread note where coroutines are made, so that one that is never awaited is told with that line."""
    sys.set_coroutine_origin_tracking_depth(_FRAMES)
