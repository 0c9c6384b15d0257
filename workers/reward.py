"""The reward step: calls a reward function on each response, and counts and reports every failure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, repeat
from operator import add
from typing import Any

import torch

from distflow.data.batch import Batch, Ragged
from distflow.data.formats import DATA_SOURCE
from distflow.data.samples import failed, left_out
from distflow.errors import StepError, UserError
from distflow.flow.step import error_cure, error_limit, step
from distflow.log import logger
from distflow.runtime.steps import StepContext
from distflow.types import DROP_REASON, FINISH_REASONS, LEFT_OUT, LOGGED, REWARD_PARTS, UNJUDGED, UNREWARDED, Completion
from distflow.workers.reward_calls import TrainerState
from distflow.workers.reward_judging import (
    MOST_PARTS,
    SHOWN_VALUE,
    Verdict,
    components,
    judge_together,
    reward_function,
    shortened,
    shown,
    spec_of,
    takes_lists,
    time_limit,
)
from distflow.workers.reward_pool import Judged, RewardPool
from distflow.workers.reward_watch import LATE_S, RewardWatch

log = logger(__name__)

ON_ERROR = ("drop", "leave_out", "zero", "stop")
SOME = 64
"""Samples that are judged in this process between two checks for failures."""
LOGGED_FAILURES = 3
"""Failures per worker that are logged in full."""
SAMPLES = "reward/samples"
UNJUDGED_SAMPLES = "reward/unjudged"
HANGING = "reward/hanging"
_WATCH = RewardWatch()
_COUNTERS = {"error": "reward/errors", "timeout": "reward/timeouts"}
_NOT_ASKED = Verdict({"reward": 0.0, "score": 0.0})
_REASONS = {"drop": DROP_REASON, "leave_out": LEFT_OUT}


@step(
    role="score",
    reads=["prompt_text", "response_text", "response_ids", "task", "finish_reason"],
    reads_if_there=["left_out"],
    writes=["reward", "score"],
    may_write=["rewards/*", "extra/*", "drop_reason", "left_out"],
    scope="sample",
    plugins={"function": ["sample"]},
    choices={
        "function": [
            "distflow.workers.reward_functions:exact_match",
            "distflow.workers.reward_functions:regex",
            "distflow.workers.reward_functions:math",
            "distflow.workers.reward_functions:reasoning_gym",
            "distflow.workers.reward_functions:format",
            "distflow.workers.reward_functions:length_penalty",
            "distflow.workers.reward_functions:digits_copied",
        ],
        "on_error": ["drop", "leave_out", "zero", "stop"],
        "timeout_s": "> 0",
        "max_error_rate": ">= 0, <= 1",
        "processes": ">= 1",
    },
    only_with={"processes": "timeout_s"},
)
def verify(
    batch: Batch,
    ctx: StepContext,
    *,
    function: str | Mapping[str, Any] = "exact_match",
    timeout_s: float | None = None,
    on_error: str = "drop",
    max_error_rate: float | None = None,
    processes: int = 4,
) -> Batch:
    """Write `reward` [B], `score` [B], and `rewards/<name>` [B] for each further part that the function returns.

    `function`: exact_match, regex, math, reasoning_gym, format, length_penalty, digits_copied, or a plug-in
    `(Completion) -> float | mapping` with the keys reward, optionally score, and others, which may be asynchronous, or
    a function in the form of TRL (lists, by keyword) or verl (`compute_score`). Or several by name,
    `{correct: {function: math}, format: {weight: 0.1, pattern: …}}`, each with its own settings: the reward is their
    weighted sum, the score that of the first that judges the sample, and each is a part, `rewards/<name>`. A sample
    that none judges (TRL's None) is left out. With `timeout_s` it runs in child processes, at most `processes` calls
    at a time; a call that exceeds it is killed with its process. So does math, with 10 s by default. What functions
    tell besides (`log_extra`, texts) is written to `extra/<name>`. Scores are counted by the task's `data_source` too.
    A sample on which it fails is counted and treated by `on_error`: drop (its group is replaced, `drop_reason` says
    why), leave_out (it is not trained on and not compared with its group, `left_out` says why), zero (reward 0), or
    stop. A response that takes math too long gets reward 0 with drop and leave_out, too. What is left out already, or
    was not generated to its end, is not judged: its reward is 0. Raises StepError on stop, if the first 16 samples of
    this worker all failed, and if of the last 1,000 samples (100 at least) of all workers that run the step more than
    `max_error_rate` failed, by default 0.05, and 0.25 with leave_out; UserError for invalid settings.
    """
    if on_error not in ON_ERROR:
        raise UserError(f"on_error={on_error!r}: expected one of {', '.join(ON_ERROR)}")
    spec = spec_of(function)
    rows = (~(left_out(batch) | failed(batch))).nonzero().flatten()
    there = batch if len(rows) == batch.rows else batch.select(rows)
    rate = error_limit(on_error) if max_error_rate is None else max_error_rate
    tally = _Tally(there, ctx, shown(spec), rate, on_error)
    judge = _judge_of(spec, timeout_s, processes)
    with _WATCH.over(tally.late) if judge.here else nullcontext():
        for judged in judge.judge(completions(there), _state(there, ctx)):
            tally.note(judge.checked(judged))
            if tally.failed and on_error == "stop":
                raise StepError(tally.report(tally.failed[0]))
            tally.check()
    found = [tally.verdicts[row] for row in range(there.rows)]
    _count_by_source(there, found, ctx)
    by_row = dict(zip(rows.tolist(), found, strict=True))
    verdicts = [by_row.get(row, _NOT_ASKED) for row in range(batch.rows)]
    # What takes a shipped verifier too long is the response, and the policy should learn to write another one.
    failures = ("error",) if time_limit(spec) is not None else ("error", "timeout")
    return batch.with_columns(**_columns(judge, verdicts, _REASONS.get(on_error), failures, _without_reward(spec)))


def _state(batch: Batch, ctx: StepContext) -> TrainerState:
    passes = int(batch.dense("uid")[:, 0].max()) if "uid" in batch and batch.rows else 0
    return TrainerState(ctx.training_step, ctx.training_steps, float(passes))


def completions(batch: Batch) -> Iterator[Completion]:
    """The rows in the form that a reward function gets."""
    responses = batch.ragged("response_ids")
    ids, bounds = responses.values.tolist(), responses.offsets.tolist()
    # The samples of a prompt share one task: parsing its JSON once saves most of this step's time.
    read: Callable[[str], Any] = cache(json.loads)
    reasons = batch.dense("finish_reason").tolist()
    texts = zip(batch.texts("prompt_text"), batch.texts("response_text"), batch.texts("task"), reasons, strict=True)
    for row, (prompt, response, task, reason) in enumerate(texts):
        tokens = tuple(ids[bounds[row] : bounds[row + 1]])
        yield Completion(prompt, response, read(task), FINISH_REASONS[reason], tokens)


@dataclass(frozen=True, slots=True)
class _Judge:
    """A reward function at work in this process."""

    judge: Callable[[Iterable[Completion], TrainerState], Iterator[Judged]]
    here: bool = False
    """In this process, so that nothing ends a call that hangs."""
    parts: set[str] = field(default_factory=set)
    """Those that it has returned so far: written from then on, so that later batches have the same columns."""
    logged: set[str] = field(default_factory=set)
    """The same of what it has told besides."""

    def checked(self, judged: Judged) -> Judged:
        """Verdicts with failures in place of those that name ever further parts: every batch has a column of each."""
        return [(row, self._checked(verdict)) for row, verdict in judged]

    def _checked(self, verdict: Verdict) -> Verdict:
        new = verdict.values.keys() - self.parts - {"reward", "score"}
        if new and len(self.parts) + len(new) > MOST_PARTS:
            known = f"it has returned {len(self.parts)} others so far, and {MOST_PARTS} are possible in a run"
            return Verdict({}, "error", f"the reward function returned the further part {min(new)!r}: {known}")
        if len(self.logged | verdict.logged.keys()) > MOST_PARTS:
            known = f"it has told {len(self.logged)} so far, and {MOST_PARTS} are possible in a run"
            return Verdict({}, "error", f"the reward function tells ever further things of samples: {known}")
        self.parts.update(new)
        self.logged.update(verdict.logged)
        return verdict


@cache
def _judge_of(spec: str, timeout_s: float | None, processes: int) -> _Judge:
    """How samples are judged: one after another in this process, or by child processes."""
    if processes < 1:
        raise UserError(f"processes={processes}: expected at least 1")
    if timeout_s is not None and not timeout_s > 0:
        raise UserError(f"timeout_s={timeout_s}: expected seconds > 0, or null for the function's own limit")
    limit = time_limit(spec) if timeout_s is None else timeout_s
    if limit is not None:
        return _Judge(RewardPool(spec, processes, limit).judge)
    rewards = reward_function(spec)
    # What a function that takes lists gets by one call is at least a group: all samples that are here.
    at_once = None if takes_lists(spec) else SOME

    def here(samples: Iterable[Completion], state: TrainerState) -> Iterator[Judged]:
        numbered = enumerate(samples)
        while some := list(islice(numbered, at_once)):
            verdicts = judge_together(rewards, [sample for _, sample in some], _WATCH.begin, state)
            yield [(row, verdict) for (row, _), verdict in zip(some, verdicts, strict=True)]

    return _Judge(here, here=True)


def _count_by_source(batch: Batch, verdicts: Sequence[Verdict], ctx: StepContext) -> None:
    """The mean score of each data source, where tasks say which one they are from."""
    scores: dict[str, list[float]] = {}
    source_of = cache(_source_of)
    for task, verdict in zip(batch.texts("task"), verdicts, strict=True):
        source = source_of(task)
        if source and verdict.values:
            scores.setdefault(source, []).append(verdict.values["score"])
    for source, found in scores.items():
        ctx.metrics.mean(f"score/{source}/mean", sum(found) / len(found), len(found))


def _source_of(task: str) -> str:
    found = json.loads(task) if f'"{DATA_SOURCE}"' in task else {}
    return str(found[DATA_SOURCE]) if isinstance(found, dict) and DATA_SOURCE in found else ""


@dataclass(slots=True)
class _Tally:
    """The verdicts on one batch as they arrive."""

    batch: Batch
    ctx: StepContext
    function: str
    max_error_rate: float
    on_error: str
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    """Rows, in the order in which they failed."""

    def note(self, judged: Judged) -> None:
        """Count verdicts and log the first failures at once: a slow batch may take a long time."""
        metrics, before = self.ctx.metrics, self.ctx.tally.own.failed
        self.verdicts.update(judged)
        metrics.add(SAMPLES, len(judged))
        failed = [(row, verdict.failure) for row, verdict in judged if verdict.failure is not None]
        for kind, counter in _COUNTERS.items():
            metrics.add(counter, sum(failure == kind for _, failure in failed))
        rows = [row for row, _ in failed]
        for _, verdict in judged:
            for name, value in verdict.metrics:
                metrics.mean(name, value)
        self._note_unjudged([row for row, verdict in judged if verdict.unjudged])
        self.ctx.tally.add(len(judged), len(failed))
        self.failed += rows
        for row in rows[: max(0, LOGGED_FAILURES - before)]:
            log.warning("%s", self.report(row))

    def _note_unjudged(self, rows: Sequence[int]) -> None:
        """Count samples that no function judged, and tell of the first."""
        if not rows:
            return
        if UNJUDGED_SAMPLES not in self.ctx.metrics.counts():
            log.warning(
                "reward function %r judges a sample by None or NaN alone, so it is left out, as all such samples are; "
                "its task: %s",
                self.function,
                shortened(self.batch.texts("task")[rows[0]]),
            )
        self.ctx.metrics.add(UNJUDGED_SAMPLES, len(rows))

    def late(self, stack: str) -> None:
        """Report that the function has not come back for a long time; called by another thread."""
        self.ctx.metrics.add(HANGING, 1)
        log.warning(
            "reward function %r has not come back for %g s, and nothing else happens here until it does — "
            "`timeout_s` beside `function` would end such calls%s",
            self.function,
            LATE_S,
            f"\n{stack}" if stack else "",
        )

    def check(self) -> None:
        """Raises StepError if the function fails too often for training to make sense."""
        many = self.ctx.tally.too_many(self.max_error_rate)
        if many and self.failed:
            counters, every = " and ".join(_COUNTERS.values()), self.ctx.tally.all_failed
            cure = error_cure(self.ctx.step_name, self.on_error, counters, all_failed=every)
            raise StepError(
                f"{self.report(self.failed[-1])}: {many} failed, more than max_error_rate={self.max_error_rate:g} "
                f"allows; one failure is shown — {cure}"
            )

    def report(self, row: int) -> str:
        """The message for a failed row: what happened, then where."""
        batch, ctx = self.batch, self.ctx
        uid = f", uid (epoch, prompt, position) {tuple(batch.dense('uid')[row].tolist())}" if "uid" in batch else ""
        sample = f", sample {int(batch.dense('sample')[row])}" if "sample" in batch else ""
        return (
            f"{self.verdicts[row].message}\nreward function {self.function!r} in step {ctx.step_name!r} on "
            f"{ctx.worker}, training step {ctx.training_step + 1}{uid}{sample}"
        )


def _columns(
    judge: _Judge, verdicts: Sequence[Verdict], reasons_in: str | None, failures: Sequence[str], without: str
) -> dict[str, torch.Tensor | Ragged]:
    """Return what the step writes. `reasons_in`: the field that says which samples failed, if any; `failures`: those
    that count there; `without`: why samples are left out that no function judged."""

    def column(name: str, missing: float) -> torch.Tensor:
        return torch.tensor([verdict.values.get(name, missing) for verdict in verdicts], dtype=torch.float32)

    columns: dict[str, torch.Tensor | Ragged] = {"reward": column("reward", 0.0), "score": column("score", 0.0)}
    columns |= {f"{REWARD_PARTS}{name}": column(name, float("nan")) for name in sorted(judge.parts)}
    for name in sorted(judge.logged):
        columns[f"{LOGGED}{name}"] = Ragged.from_texts([verdict.logged.get(name, "") for verdict in verdicts])
    if any(verdict.failure for verdict in verdicts):
        columns[f"{LOGGED}reward_error"] = Ragged.from_texts([_error_of(verdict) for verdict in verdicts])
    reasons = {LEFT_OUT: [without if verdict.unjudged else "" for verdict in verdicts]}
    if reasons_in is not None:
        failed = [f"{UNJUDGED}{verdict.failure}" if verdict.failure in failures else "" for verdict in verdicts]
        reasons[reasons_in] = list(map(add, reasons.get(reasons_in, repeat("")), failed))
    return columns | {name: Ragged.from_texts(texts) for name, texts in reasons.items() if any(texts)}


def _without_reward(spec: str) -> str:
    """Say why a sample has no reward, by the names of the functions: none of them returned a number."""
    names = [one.name or one.function.rpartition(":")[2] for one in components(spec)]
    return f"{UNREWARDED} ({shortened(' and '.join(names), SHOWN_VALUE)} returned None or NaN)"


def _error_of(verdict: Verdict) -> str:
    """The last line of what a failed function said, as JSON text."""
    lines = verdict.message.strip().splitlines()
    return json.dumps(shortened(lines[-1] if lines else verdict.failure)) if verdict.failure else ""
