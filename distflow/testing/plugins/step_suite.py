"""The contract of steps, and of the functions that shipped steps call: advantages, losses, KL estimators."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from math import isclose, isfinite

from torch import Tensor

from distflow.data.batch import Batch, Ragged
from distflow.errors import DistflowError, UserError
from distflow.testing.plugins.batches import CASES, USUAL, Case, differing, make_batch, parts_of
from distflow.testing.plugins.findings import IMPORTING, Level, SuiteReport
from distflow.testing.plugins.trial import MODEL, StepOutcome, Trial, complaint_about_state, told
from distflow.types import DROP_REASON, is_reward_part

GATHER_S = 20.0
"""How long one of two workers waits for the other."""
_WIDER = {"sample": "group", "group": "batch"}


def run_step_suite(trial: Trial, report: SuiteReport, tasks: Sequence[tuple[str, str]]) -> Batch | None:
    """Run the suite; returns what the step wrote for the usual batch, None if it failed there."""
    report.begin(IMPORTING)
    try:
        _ = trial.imported
    except DistflowError as error:
        report.add("wrong", told(error))
        return None
    batches, outcomes = _call_all(trial, report, tasks, CASES)
    if outcomes[USUAL].refused and not _is_about_result(outcomes[USUAL].error):
        # It may want what only flow=remax has.
        others = _call_all(trial, report, tasks, [replace(case, baseline=True) for case in CASES])
        if not others[1][USUAL].error:
            batches, outcomes = others
    first = outcomes[USUAL]
    _tell_cases(trial, report, outcomes)
    if first.result is None:
        return None
    _tell_manners(report, list(outcomes.values()))
    _test_repeats(trial, report, batches[USUAL], first.result)
    if trial.plan.scope == "batch":
        _test_two_workers(trial, report, batches[USUAL], first.result)
    elif not trial.keeps_state:
        _test_scope(trial, report, batches[USUAL], first.result)
    if trial.plan.role == "train":
        _test_gradient(trial, report, batches[USUAL], outcomes)
    return first.result


def _call_all(
    trial: Trial, report: SuiteReport, tasks: Sequence[tuple[str, str]], cases: Sequence[Case]
) -> tuple[dict[Case, Batch], dict[Case, StepOutcome]]:
    """A call for each case; both by the case of the same name in CASES."""
    batches, outcomes = {}, {}
    for known, case in zip(CASES, cases, strict=True):
        batches[known] = make_batch(case, trial.plan, trial.source, tasks)
        report.begin(f"a call with {case.name}")
        outcomes[known] = trial.call(batches[known], trial.context(case.samples))
    return batches, outcomes


def _tell_cases(trial: Trial, report: SuiteReport, outcomes: dict[Case, StepOutcome]) -> None:
    passed, told_already = 0, set[str]()
    for case, outcome in outcomes.items():
        if not outcome.error:
            passed += 1
        elif outcome.refused and case is not USUAL and not _is_about_result(outcome.error):
            report.add("ok", f"refuses {case.name}: {outcome.error}")
        elif outcome.error not in told_already:
            level: Level = "wrong" if case.usual else "note"
            end = "" if case.usual else "; only generate steps with an environment make them"
            report.add(level, f"fails with {case.name}{end}:\n{outcome.error}")
            told_already.add(outcome.error)
        if case is USUAL and outcome.error:
            return
    if passed:
        fields = ", ".join(name for name in trial.plan.writes if name != DROP_REASON)
        report.add("ok", f"{f'writes {fields}' if fields else 'works'} as declared for {passed} kinds of batches")


def _is_about_result(error: str) -> bool:
    """Whether a refusal is the runtime's, of what the plug-in returned."""
    return " returned " in error or error.startswith("the loss ")


def _tell_manners(report: SuiteReport, outcomes: Sequence[StepOutcome]) -> None:
    """What it does besides: changes in place, undeclared fields, state, metrics."""
    in_place = sorted({name for outcome in outcomes for name in outcome.in_place})
    if in_place:
        report.add(
            "wrong",
            f"changes {', '.join(map(repr, in_place))} of its batch in place; other steps read the same tensors — "
            "compute new ones (x.clone(), x - y) and return batch.with_columns(…)",
        )
    else:
        report.add("ok", "leaves its batch as it was")
    for line in dict.fromkeys(line for outcome in outcomes for line in outcome.warnings):
        report.add("wrong", line)
    for outcome in outcomes[:1]:
        wrong = complaint_about_state(outcome.context.state)
        if wrong:
            report.add("wrong", f"ctx.state cannot be saved in a checkpoint: {wrong} — keep plain values that JSON has")
        bad = [name for name, value in outcome.context.metrics.drain().items() if not isfinite(value)]
        if bad:
            report.add("note", f"its metric {bad[0]!r} is not finite for {USUAL.name}")
        if outcome.result is not None:
            _tell_not_finite(report, outcome.result)


def _tell_not_finite(report: SuiteReport, result: Batch) -> None:
    for name, column in result.columns.items():
        values = column.values if isinstance(column, Ragged) else column
        if values.is_floating_point() and not is_reward_part(name) and not bool(values.isfinite().all()):
            report.add("note", f"{name!r} has values that are not finite for {USUAL.name}")


def _test_repeats(trial: Trial, report: SuiteReport, batch: Batch, first: Batch) -> None:
    """The same batch again, after others: what a call gives depends on its batch, the seed and ctx.state alone."""
    report.begin("a second call with the same batch")
    again = trial.call(batch)
    apart = again.error or (again.result is not None and differing(first, again.result, _written(trial)))
    if apart:
        report.add(
            "wrong",
            f"two calls with the same batch differ: {apart} — for chance take ctx.rng(uid, sample), and keep nothing "
            "in the module from call to call: samples are computed anywhere, and sometimes twice (ctx.state is kept "
            "for the worker that trains)",
        )
    else:
        report.add("ok", "gives the same twice, whatever it was called with in between")


def _test_scope(trial: Trial, report: SuiteReport, batch: Batch, first: Batch) -> None:
    scope = trial.plan.scope
    report.begin(f"calls with one {scope} each")
    apart = _apart_in_parts(trial, batch, first, parts_of(batch, scope))
    if not apart:
        report.add("ok", f"gives each {scope} the same alone as among others (scope={scope!r})")
        return
    report.add(
        "wrong",
        f"its scope is {scope!r}, but what a {scope} gets depends on the others of its batch, which is cut anywhere: "
        f"{apart} — compute nothing across {scope}s, or declare scope={_WIDER[scope]!r}",
    )


def _apart_in_parts(trial: Trial, batch: Batch, first: Batch, parts: Sequence[list[int]]) -> str:
    for rows in reversed(parts):
        part = trial.call(batch.select(rows))
        if part.result is None:
            return f"alone it fails:\n{part.error}"
        apart = differing(first.select(rows), part.result, _written(trial))
        if apart:
            return f"{apart.replace(' and ', ' among them and ', 1)} alone (row {rows[0]})"
    return ""


def _test_two_workers(trial: Trial, report: SuiteReport, batch: Batch, first: Batch) -> None:
    """Two training workers with half of the groups each write what one writes that has all."""
    half = batch.rows // 2 - (batch.rows // 2) % USUAL.samples
    parts = [batch.slice(0, half), batch.slice(half, batch.rows)]
    report.begin("calls on two training workers side by side")
    exchange = Exchange(len(parts))
    with ThreadPoolExecutor(len(parts)) as pool:

        def work(number: int) -> StepOutcome:
            context = trial.context(gather=exchange.of(number))
            context.replica = number
            try:
                return trial.call(parts[number], context)
            finally:
                exchange.leave()

        both = list(pool.map(work, range(len(parts))))
    failed = [outcome.error for outcome in both if outcome.error]
    results = [outcome.result for outcome in both if outcome.result is not None]
    apart = failed[0] if failed else differing(first, Batch.concat(results), _written(trial))
    if apart:
        report.add(
            "note",
            f"with two training workers, which have half of the groups each, it writes something else than with one: "
            f"{apart} — what is computed over the whole batch needs ctx.all_reduce or ctx.all_gather",
        )
    else:
        report.add("ok", "writes the same on one training worker and on two")


class Exchange:
    """`ctx.all_gather` of several threads, of which each gives as many tensors as the others."""

    def __init__(self, members: int) -> None:
        self._members = members
        self._condition = threading.Condition()
        self._rounds: dict[int, dict[int, Tensor]] = {}
        self._left = 0

    def of(self, number: int) -> Callable[[Tensor], list[Tensor]]:
        """The function of one member."""
        rounds = count()

        def gather(tensor: Tensor) -> list[Tensor]:
            with self._condition:
                given = self._rounds.setdefault(next(rounds), {})
                given[number] = tensor
                self._condition.notify_all()
                self._condition.wait_for(lambda: len(given) == self._members or self._left > 0, GATHER_S)
            if len(given) < self._members:
                raise UserError("one of two workers gathers more often than the other, for which it would wait forever")
            return [given[member] for member in range(self._members)]

        return gather

    def leave(self) -> None:
        """A member is done: nobody waits for it any more."""
        with self._condition:
            self._left += 1
            self._condition.notify_all()


def _test_gradient(trial: Trial, report: SuiteReport, batch: Batch, outcomes: dict[Case, StepOutcome]) -> None:
    """Of steps that train: the gradient is finite, has a denominator, and is the same in micro-batches."""
    norms: dict[Case, float] = {}
    for case, outcome in outcomes.items():
        backend = outcome.backend
        if backend is None or not backend.accumulated or outcome.error:
            continue
        if not outcome.denominator > 0:
            report.add(
                "wrong",
                f"it gives gradients to ctx.backend.accumulate, but adds nothing to ctx.denominators[{MODEL!r}], by "
                "which the runtime divides them: add the number of tokens or samples of the loss",
            )
            return
        try:
            norms[case] = backend.apply(outcome.denominator)
        except DistflowError:
            report.add("wrong", f"its gradient is not finite for {case.name}: the run would end")
            return
    if not norms:
        return
    if not norms[USUAL]:
        report.add("note", "its gradient is 0 for all parameters")
    if trial.plan.scope == "batch":
        return
    report.begin("a training step in micro-batches")
    norm = _norm_in_parts(trial, batch)
    if isclose(norm, norms[USUAL], rel_tol=1e-3, abs_tol=1e-9):
        report.add("ok", f"its gradient is finite ({len(norms)} kinds of batches), and the same in micro-batches")
        return
    report.add(
        "wrong",
        f"its gradient depends on how the batch is cut: norm {norms[USUAL]:g} in one call and {norm:g} in parts — "
        "sum the loss over tokens (no means), and add what it is to be divided by to ctx.denominators",
    )


def _norm_in_parts(trial: Trial, batch: Batch) -> float:
    """The norm of the gradient after a call for each sample or group."""
    context = trial.context()
    outcomes = [trial.call(batch.select(rows), context) for rows in parts_of(batch, trial.plan.scope)]
    last = outcomes[-1]
    return last.backend.apply(last.denominator) if last.backend is not None and last.denominator > 0 else 0.0


def _written(trial: Trial) -> list[str]:
    return [*trial.plan.writes, *trial.plan.may_write]
