"""The edge of a user's code: what it raised, told with its own frames first."""

from __future__ import annotations

import traceback
from types import TracebackType

from distflow.errors import StepError


def step_error(error: BaseException, what: str) -> StepError:
    """`error` came out of a user's function; `what` says in one line which, where, and with what in hand."""
    return StepError(f"{_own_frames(error)}{what}")


def split(error: StepError) -> tuple[str, str]:
    """The user's frames with the error they ended in (empty where a function only returned something wrong), and
    the line that says where it happened.
    """
    frames, _, what = str(error).rpartition("\n")
    return frames, what


def _own_frames(error: BaseException) -> str:
    """The traceback from the first frame that is not ours (the whole one if all are), ending with the error itself."""
    theirs = error.__traceback__
    while theirs is not None and _is_ours(theirs):
        theirs = theirs.tb_next
    frames = traceback.extract_tb(theirs or error.__traceback__)
    return "".join(traceback.format_list(frames)) + "".join(traceback.format_exception_only(error))


def _is_ours(frame: TracebackType) -> bool:
    scope = frame.tb_frame.f_globals
    return "__name__" in scope and str(scope["__name__"]).startswith("distflow.")
