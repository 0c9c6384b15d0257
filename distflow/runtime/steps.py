"""Runs step functions: resolves them inside this worker, hands them their context, and checks what comes back.

This is the edge of a user's code. What it raised is told with its own frames first; a standard field of the wrong shape
is told where it was written and not where it was read.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from distflow.data.batch import Batch, Column, Ragged
from distflow.errors import DistflowError, StepError, UserError
from distflow.flow.graph import written
from distflow.flow.plan import StepPlan
from distflow.flow.resolve import check_step, resolve
from distflow.runtime.context import StepContext
from distflow.types import REWARD_PARTS

SHOWN_UIDS = 4
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


class StepRunner:
    """The steps of one worker, by name. Raises PluginError at once for one that cannot be imported or does not fit."""

    def __init__(self, worker: str, steps: Sequence[StepPlan], contexts: Mapping[str, StepContext]) -> None:
        self._worker = worker
        self._plans = {step.name: step for step in steps}
        self._contexts = contexts
        self._functions: dict[str, Callable[..., Any]] = {}
        for step in steps:
            function = resolve(step.call)
            check_step(function, step)
            self._functions[step.name] = function

    def call(self, name: str, batch: Batch) -> Batch:
        """Run a step over a batch; raises StepError with the user's frames first, UserError for wrong settings."""
        plan, context = self._plans[name], self._contexts[name]
        try:
            with context.metrics.timed(f"timing_s/{name}", plan.role):
                result = self._functions[name](batch, context, **plan.settings)
        except UserError as error:
            raise UserError(f"step {name!r} ({plan.call}) on {self._worker}: {error}") from error
        except DistflowError:
            raise
        except Exception as error:
            raise self._failure(name, error, batch) from error
        return self._checked(plan, batch, result)

    def generate(self, name: str, leases: object) -> Iterator[Batch]:
        """Run a generate step, which turns leases into batches of whole groups."""
        plan, context = self._plans[name], self._contexts[name]
        stream = self._functions[name](leases, context, **plan.settings)
        while True:
            try:
                groups = next(stream)
            except StopIteration:
                return
            except DistflowError:
                raise
            except Exception as error:
                raise self._failure(name, error, None) from error
            yield groups

    def _checked(self, plan: StepPlan, batch: Batch, result: object) -> Batch:
        where = f"step {plan.name!r} ({plan.call}) on {self._worker}"
        if not isinstance(result, Batch):
            raise StepError(
                f"{where} returned {type(result).__name__}; expected a Batch, for example batch.with_columns(…)"
            )
        missing = [field for field in plan.writes if field not in result and "*" not in field]
        if missing:
            raise StepError(
                f"{where} declares that it writes {missing}, but its batch has only {sorted(result.columns)}"
            )
        if result.rows != batch.rows:
            raise StepError(f"{where} turned {batch.rows} rows into {result.rows}; a step keeps every row")
        complaint = wrong_shape(result, [field for field in result.columns if written(field, plan.writes)])
        if complaint is not None:
            raise StepError(f"{where} {complaint}")
        return result

    def _failure(self, name: str, error: Exception, batch: Batch | None) -> StepError:
        step = self._contexts[name].training_step
        uids = "" if batch is None or "uid" not in batch else f", {_some_uids(batch)}"
        what = f"step {name!r} ({self._plans[name].call}) raised {type(error).__name__} on {self._worker}"
        return step_error(error, f"{what}, training step {step}{uids}")


def _some_uids(batch: Batch) -> str:
    uids = sorted({tuple(uid) for uid in batch.dense("uid").tolist()}, key=lambda uid: uid[2])
    more = f" and {len(uids) - SHOWN_UIDS} more" if len(uids) > SHOWN_UIDS else ""
    return f"with uids (epoch, prompt, position) {', '.join(map(str, uids[:SHOWN_UIDS]))}{more} in hand"


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
