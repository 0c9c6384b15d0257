"""The edge of a user's code: what it raised, told with its own frames first; and whether what it wrote has the right
shape.

A wrong shape of a standard field is told where it was written and not where it was read.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from types import TracebackType

import torch

from distflow.data.batch import Batch, Column, Ragged
from distflow.errors import StepError
from distflow.types import REWARD_PARTS

TOKENS = "response_ids"
A_TOKEN = (
    "response_mask",
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "advantage",
    "return",
    "token_rewards",
)
"""Fields with one value a response token: rows as long as those of `response_ids`."""
A_SAMPLE = ("reward", "score", "group", "sample", "finish_reason")
"""Fields with one value a sample."""
A_TEXT = ("drop_reason", "prompt_text", "response_text", "task")


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


def wrong_shape(batch: Batch, written: Sequence[str]) -> str | None:
    """What a step should have written, and what it wrote, for the first of these fields that has a wrong shape.

    Other fields may have any.
    """
    for name in written:
        column = batch.columns.get(name)
        if column is None:
            continue
        if name in A_TOKEN and TOKENS in batch:
            complaint = _a_token(name, column, batch.ragged(TOKENS))
        elif name in A_SAMPLE or name.startswith(REWARD_PARTS):
            complaint = _a_sample(name, column, batch.rows)
        elif name in A_TEXT:
            complaint = _a_text(name, column)
        else:
            complaint = None
        if complaint is not None:
            return complaint
    return None


def _a_token(name: str, column: Column, responses: Ragged) -> str | None:
    if isinstance(column, Ragged):
        # Most steps write `responses.like(…)`, which shares the offsets.
        same = column.offsets is responses.offsets or torch.equal(column.offsets, responses.offsets)
        if same and column.values.dim() == 1:
            return None
    return (
        f"must write one value a response token into {name!r}, {responses.values.numel()} for this batch; it wrote "
        f"{_shown(column)} — {name}=responses.like(values) with responses = batch.ragged({TOKENS!r}), and for one "
        "value a sample values = values_B.repeat_interleave(responses.lengths)"
    )


def _a_sample(name: str, column: Column, rows: int) -> str | None:
    if not isinstance(column, Ragged) and tuple(column.shape) == (rows,):
        return None
    return f"must write one value a sample into {name!r}, a tensor of shape [{rows}]; it wrote {_shown(column)}"


def _a_text(name: str, column: Column) -> str | None:
    if isinstance(column, Ragged) and column.values.dtype == torch.uint8:
        return None
    return f"must write one text a sample into {name!r}; it wrote {_shown(column)} — {name}=Ragged.from_texts(texts)"


def _shown(column: Column) -> str:
    if isinstance(column, Ragged):
        return f"rows of {_counted(column.values.numel())} in all"
    return f"a tensor of shape {list(column.shape)}"


def _counted(count: int) -> str:
    return "1 value" if count == 1 else f"{count} values"
