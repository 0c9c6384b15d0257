"""The reward step: a verifiable reward by a function of each response, with nothing that fails passing unseen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch

from distflow.data.batch import Batch, Ragged
from distflow.errors import StepError, UserError
from distflow.flow.step import step
from distflow.log import logger
from distflow.runtime.context import StepContext
from distflow.types import FINISH_REASONS, REWARD_PARTS, Completion
from distflow.workers.judge import Verdict, judge, reward_function
from distflow.workers.reward_process import RewardProcess

log = logger(__name__)

ON_ERROR = ("drop", "zero", "stop")
JUDGED_BEFORE_RATE = 100
"""Samples judged before `max_error_rate` is looked at."""
TOLD_FAILURES = 3
"""Failures of each worker that are written to its log in full."""
_COUNTERS = {"error": "reward/errors", "timeout": "reward/timeouts"}


@step(
    role="score",
    reads=["prompt_text", "response_text", "response_ids", "task", "finish_reason"],
    writes=["reward", "score"],
    scope="sample",
    plugins={"function": ["sample"]},
    choices={
        "function": ["exact_match", "digits_copied", "reasoning_gym", "math"],
        "on_error": ["drop", "zero", "stop"],
    },
)
def verify(
    batch: Batch,
    ctx: StepContext,
    *,
    function: str = "exact_match",
    timeout_s: float | None = None,
    on_error: str = "drop",
    max_error_rate: float = 0.05,
) -> Batch:
    """Write `reward` [B], `score` [B], and `rewards/<name>` [B] for further parts the function returns.

    `function`: exact_match, digits_copied, reasoning_gym, math, or a plug-in `(Completion) -> float | mapping` with the
    keys reward, optionally score, and others. With `timeout_s` it runs in a child process that is killed on time-out.
    A sample on which it fails is counted and follows `on_error`: drop (its group is replaced: `drop_reason` says why),
    zero (reward 0), or stop. Raises StepError on stop, and when more than `max_error_rate` of at least 100 samples
    failed; UserError for settings that make no sense.
    """
    if on_error not in ON_ERROR:
        raise UserError(f"on_error={on_error!r}: expected one of {', '.join(ON_ERROR)}")
    call = _caller(function, timeout_s)
    verdicts = [call(sample) for sample in completions(batch)]
    failed = [row for row, verdict in enumerate(verdicts) if verdict.failure]
    for kind, counter in _COUNTERS.items():
        ctx.metrics.add(counter, sum(verdicts[row].failure == kind for row in failed))
    if failed and on_error == "stop":
        raise StepError(_report(batch, ctx, function, failed[0], verdicts[failed[0]].message))
    _tell(batch, ctx, function, failed, verdicts)
    _check_rate(batch, ctx, function, verdicts, max_error_rate)
    return batch.with_columns(**_columns(ctx, verdicts, drop=on_error == "drop"))


def completions(batch: Batch) -> Iterator[Completion]:
    """The rows as a reward function sees them."""
    responses = batch.ragged("response_ids")
    ids, bounds = responses.values.tolist(), responses.offsets.tolist()
    # The samples of a prompt share one task: reading its JSON once saves most of this step's time.
    read: Callable[[str], Any] = cache(json.loads)
    reasons = batch.dense("finish_reason").tolist()
    texts = zip(batch.texts("prompt_text"), batch.texts("response_text"), batch.texts("task"), reasons, strict=True)
    for row, (prompt, response, task, reason) in enumerate(texts):
        tokens = tuple(ids[bounds[row] : bounds[row + 1]])
        yield Completion(prompt, response, read(task), FINISH_REASONS[reason], tokens)


@cache
def _caller(function: str, timeout_s: float | None) -> Callable[[Completion], Verdict]:
    if timeout_s is None:
        return partial(judge, reward_function(function))
    if not timeout_s > 0:
        raise UserError(f"timeout_s={timeout_s}: expected seconds > 0, or null for no limit")
    return partial(RewardProcess(function).judge, timeout_s=timeout_s)


def _tell(batch: Batch, ctx: StepContext, function: str, failed: Sequence[int], verdicts: Sequence[Verdict]) -> None:
    """The first failures of this worker go to its log: a count alone does not show what is wrong."""
    left = max(0, TOLD_FAILURES - ctx.state.get("failed", 0))
    for row in failed[:left]:
        log.warning("%s", _report(batch, ctx, function, row, verdicts[row].message))


def _check_rate(
    batch: Batch, ctx: StepContext, function: str, verdicts: Sequence[Verdict], max_error_rate: float
) -> None:
    state = ctx.state
    failed = [row for row, verdict in enumerate(verdicts) if verdict.failure]
    state["judged"] = state.get("judged", 0) + len(verdicts)
    state["failed"] = state.get("failed", 0) + len(failed)
    if failed and state["judged"] >= JUDGED_BEFORE_RATE and state["failed"] > max_error_rate * state["judged"]:
        row = failed[-1]
        rate = (
            f"{state['failed']} of {state['judged']} samples failed, more than max_error_rate={max_error_rate} allows; "
            "the latest failure is shown"
        )
        raise StepError(f"{_report(batch, ctx, function, row, verdicts[row].message)}: {rate}")


def _report(batch: Batch, ctx: StepContext, function: str, row: int, message: str) -> str:
    uid = f", uid (epoch, prompt, position) {tuple(batch.dense('uid')[row].tolist())}" if "uid" in batch else ""
    sample = f", sample {int(batch.dense('sample')[row])}" if "sample" in batch else ""
    return (
        f"{message}\nreward function {function!r} in step {ctx.step_name!r} on {ctx.worker}, "
        f"training step {ctx.training_step}{uid}{sample}"
    )


def _columns(ctx: StepContext, verdicts: Sequence[Verdict], *, drop: bool) -> dict[str, torch.Tensor | Ragged]:
    def column(name: str, missing: float) -> torch.Tensor:
        return torch.tensor([verdict.values.get(name, missing) for verdict in verdicts], dtype=torch.float32)

    # Parts seen once are written ever after: all batches of a run have the same columns.
    parts = {name for verdict in verdicts for name in verdict.values} - {"reward", "score"}
    ctx.state["parts"] = sorted(parts.union(ctx.state.get("parts", [])))
    columns: dict[str, torch.Tensor | Ragged] = {"reward": column("reward", 0.0), "score": column("score", 0.0)}
    columns |= {f"{REWARD_PARTS}{name}": column(name, float("nan")) for name in ctx.state["parts"]}
    if drop and any(verdict.failure for verdict in verdicts):
        reasons = [f"reward {verdict.failure}" if verdict.failure else "" for verdict in verdicts]
        columns["drop_reason"] = Ragged.from_texts(reasons)
    return columns
