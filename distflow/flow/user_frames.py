"""The frames of users' own code: in tracebacks, which are shown without ours, and in the stacks of threads."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from pathlib import Path

import distflow
from distflow import log

_PACKAGE = Path(distflow.__file__).parent
_OURS = tuple(f"{folder}{os.sep}" for folder in (_PACKAGE, *(_PACKAGE.parent / name for name in ("workers", "launch"))))
_PYTHON = f"{os.path.dirname(os.__file__)}{os.sep}"
_INSTALLED = ("/site-packages/", "/dist-packages/")
_told: set[tuple[str, str]] = set()
"""What has been logged: the type of an error, and its place."""


def is_yours(file: str) -> bool:
    """Tell whether a file is the user's: not distflow's, a library's or Python's own."""
    return _is_others(file) and not any(part in file for part in _INSTALLED)


def user_frames(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the user's frames; where none is, those of installed packages, of which one may be the user's."""
    others = [frame for frame in frames if _is_others(frame.filename)]
    return [frame for frame in others if is_yours(frame.filename)] or others


def frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the user's frames of an error's traceback, the innermost last."""
    return user_frames(traceback.extract_tb(error.__traceback__))


def log_whole(error: BaseException) -> None:
    """Write an error's whole traceback into the log of this worker, once for each place of the user's code.

    For errors that do not end the worker, whose traceback is logged at the end: there may be one for every sample.
    """
    own = frames_of(error)
    place = type(error).__qualname__, f"{own[-1].filename}:{own[-1].lineno}" if own else ""
    if place not in _told:
        _told.add(place)
        whole = "".join(traceback.format_exception(error)).rstrip()
        log.logger(__name__).info("what was raised, with all frames; it is not logged again:\n%s", whole)


def _is_others(file: str) -> bool:
    python = file.startswith(_PYTHON) and not any(part in file for part in _INSTALLED)
    return not (python or file.startswith(_OURS) or file.startswith("<"))
