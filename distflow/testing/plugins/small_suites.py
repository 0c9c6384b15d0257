"""The contracts of read steps and of trackers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distflow.data.responses import DataRow, Reading, RowResponse
from distflow.errors import DistflowError, UserError
from distflow.flow.resolve import check_call, resolve
from distflow.flow.step import READ
from distflow.flow.step_declaration import read_declaration
from distflow.flow.step_settings import merged
from distflow.flow.structure import lacking_settings
from distflow.flow.trackers import TrackedRun, Tracker
from distflow.runtime.steps import user_code
from distflow.testing.plugins.findings import IMPORTING, SuiteReport, cut
from distflow.testing.plugins.subjects import Subject


def run_read_suite(subject: Subject, report: SuiteReport, tasks: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    """A read step on rows; returns what it made of them, None where it cannot be used at all."""
    report.begin(IMPORTING)
    try:
        declaration = read_declaration(subject.call)
        spec = declaration.spec
        for message, hint in lacking_settings(spec, merged(subject.settings, declaration.parameters)):
            report.add("wrong", f"{message} — {hint}")
            return None
        function = resolve(subject.call)
        check_call(subject.call, function, ("row",), tuple(subject.settings))
        own = [name for name in spec.writes if name not in READ]
        reading = Reading(partial(function, **subject.settings), "mine", spec.samples, 1 << 16, own)
        with user_code("the read step"):
            made, again = list(_made(reading, report, tasks)), list(_made(reading, report, tasks))
    except DistflowError as error:
        report.add("wrong", f"{error}{_made_up(subject, tasks)}")
        return None
    empty = [row for row, responses in enumerate(made) if not all(one.text for one in responses)]
    if empty:
        report.add("wrong", f"a response made of row {empty[0]} is empty")
    if made == again:
        report.add("ok", f"makes responses of {len(tasks)} rows as declared, and the same twice")
    else:
        report.add("wrong", "makes other responses of the same row the second time: every restart reads it again")
    return [[(one.text, dict(one.fields), one.trains) for one in responses] for responses in made]


def _made(reading: Reading, report: SuiteReport, tasks: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[RowResponse]]:
    for number, task in enumerate(tasks):
        report.begin(f"reading the row {cut(dict(task))}")
        following = DataRow(tasks[(number + 1) % len(tasks)], _no_row)
        yield reading.of(DataRow(task, partial(_same, following)))


def _same(row: DataRow) -> DataRow:
    return row


def _no_row() -> DataRow:
    raise UserError("asks for more than one following row, which this test has not")


def _made_up(subject: Subject, tasks: Sequence[Mapping[str, Any]]) -> str:
    if subject.data is not None:
        return ""
    return f"\nIts rows were made up, {cut(dict(tasks[0]))}: --data FILE gives it real ones"


VALUES = {"critic/score/mean": 0.5, "critic/rewards/mean": 0.25, "timing_s/step": 1.5, "actor/entropy": float("nan")}
ROWS = [{"prompt": "1+1=", "response": "2", "reward": 1.0, "score": 1.0, "uid": [0, 0, number]} for number in range(3)]


def run_tracker_suite(subject: Subject, report: SuiteReport) -> None:
    """A tracker as its process calls it: made, given metrics and samples, closed; and again, as after a resume."""
    report.begin(IMPORTING)
    try:
        made = resolve(subject.call)
        check_call(subject.call, made, ("run",), tuple(subject.settings))
        with tempfile.TemporaryDirectory(prefix="distflow-test-plugin-") as folder:
            notes: dict[str, str] = {}
            for life in range(2):
                run = TrackedRun("mine", "mine-1", {"run": {"name": "mine"}}, Path(folder), notes)
                with user_code("the tracker"):
                    _show(partial(made, run, **subject.settings), report, life)
    except DistflowError as error:
        report.add("wrong", str(error))
    else:
        report.add("ok", "takes metrics (a nan among them) and samples, is closed, and goes on after a resume")


def _show(make: Any, report: SuiteReport, life: int) -> None:
    report.begin("making it" if not life else "making it again, as after a resume")
    tracker: Tracker = make()
    for name in ("log", "samples", "close"):
        if not callable(getattr(tracker, name, None)):
            raise UserError(f"lacks the method {name}: expected log(step, values), samples(step, rows) and close()")
    for step in (1, 2):
        report.begin(f"log({step}, …)")
        tracker.log(step + 2 * life, dict(VALUES))
        report.begin(f"samples({step}, …)")
        tracker.samples(step + 2 * life, [dict(row) for row in ROWS])
    report.begin("close()")
    tracker.close()
