"""The process in which a plug-in is tested: the suite of its kind, and a line of JSON for each thing that it tells."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from distflow.comm.users_code import end_copy
from distflow.errors import DistflowError
from distflow.flow.resolve import find_named
from distflow.flow.reward_form import find_signature, needed_columns
from distflow.log import hear_forgotten
from distflow.testing.plugins.findings import IMPORTING, Level, SuiteReport
from distflow.testing.plugins.mentions import made_up_tasks, needed_keys
from distflow.testing.plugins.subjects import Subject
from distflow.workers.reward_process import die_with_writer

TASKS = 16
MADE_UP: tuple[Callable[[int], Any], ...] = (str, int, lambda n: [n], lambda n: {"answer": str(n), "value": n})
"""What an answer may be; the first with which a reward function works is taken."""
Tasks = Sequence[tuple[str, str]]


class MadeUp:
    """A report of a plug-in that gets made-up tasks, which says so where it misses a key."""

    def __init__(self, report: SuiteReport, task: str) -> None:
        self._report = report
        self._task = task

    def begin(self, what: str) -> None:
        """The plug-in is called next."""
        self._report.begin(what)

    def add(self, level: Level, text: str) -> None:
        """A finding."""
        more = f"\nIts tasks were made up, {self._task}: --data FILE gives it real ones, a recipe those of its data"
        self._report.add(level, f"{text}{more}" if level == "wrong" and "KeyError" in text else text)


class Lines:
    """A report as lines of JSON."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._process = os.getpid()

    def begin(self, what: str) -> None:
        """The plug-in is called next."""
        self._say({"begin": what})

    def add(self, level: Level, text: str) -> None:
        """A finding."""
        self._say({"level": level, "text": text})

    def done(self, gave: object) -> None:
        """The suite is over; what the plug-in gave, to be compared with that of another process."""
        self._say({"done": gave})

    def _say(self, what: object) -> None:
        end_copy(self._process)
        sys.stdout.flush()
        self._file.write(json.dumps(what, default=str) + "\n")
        self._file.flush()


def serve(subject: str, lines: str, lifeline: str) -> None:
    """Test the plug-in of a subject as JSON; `lines`, `lifeline`: pipes to the parent, with which this process ends."""
    _fork_behind(int(lines))
    if not die_with_writer(int(lifeline)):
        return
    with os.fdopen(int(lines), "w", encoding="utf-8") as file:
        report, forgotten = Lines(file), list[str]()
        hear_forgotten(forgotten.append)
        gave: object = None
        try:
            gave = plain(run_suite(Subject(**json.loads(subject)), report))
        except DistflowError as error:
            report.add("wrong", str(error))
        gc.collect()
        for text in forgotten:
            report.add("wrong", text)
        report.done(gave)


def _fork_behind(lines: int) -> None:
    """Go on in a child, and leave this process between it and the command: a plug-in may end its parent process."""
    child = os.fork()
    if child == 0:
        return
    _, status = os.waitpid(child, 0)
    os.write(lines, json.dumps({"ended": os.waitstatus_to_exitcode(status)}).join("\n\n").encode())
    os._exit(0)


def run_suite(subject: Subject, report: SuiteReport) -> object:
    """The suite of a plug-in's kind; returns what the plug-in gave. Raises DistflowError if it cannot begin.

    Each imports what it needs: those of rewards do without torch, as the processes that judge samples do.
    """
    if subject.kind in ("engine", "backend"):
        from distflow.testing.plugins.class_suites import run_class_suite

        run_class_suite(subject, report)
        return None
    if subject.kind == "source":
        from distflow.testing.plugins.source_suite import run_source_suite

        return run_source_suite(subject, report)
    if subject.kind == "tracker":
        from distflow.testing.plugins.small_suites import run_tracker_suite

        run_tracker_suite(subject, report)
        return None
    tasks = _tasks(subject, report)
    if subject.kind == "read":
        from distflow.testing.plugins.small_suites import run_read_suite

        return run_read_suite(subject, report, [json.loads(task) for _, task in tasks])
    if subject.kind == "reward":
        from distflow.testing.plugins.reward_suite import run_reward_suite

        return run_reward_suite(subject, report, tasks)
    return _run_step(subject, report, tasks)


def _run_step(subject: Subject, report: SuiteReport, tasks: Tasks) -> object:
    from distflow.testing.plugins.function_suites import run_loss_suite
    from distflow.testing.plugins.generate_suite import run_generate_suite
    from distflow.testing.plugins.step_suite import run_step_suite
    from distflow.testing.plugins.trial import Trial

    trial = Trial(subject)
    report = report if subject.data is not None else MadeUp(report, tasks[0][1])
    if subject.kind == "generate":
        return run_generate_suite(trial, report, tasks)
    result = run_step_suite(trial, report, tasks)
    if subject.kind == "loss" and result is not None:
        run_loss_suite(trial, report, subject.call)
    return result


def _tasks(subject: Subject, report: SuiteReport) -> Tasks:
    if subject.data is not None:
        from distflow.testing.plugins.source_suite import tasks_of

        return tasks_of(subject, TASKS)
    if subject.kind == "read":
        texts = dict.fromkeys(("response", "answer", "chosen"), "some text")
        rows = [{**texts, "rejected": f"other text {n}", "label": n % 2 == 0} for n in range(4)]
        return [("some prompt", json.dumps(row)) for row in rows]
    keys = needed_keys(find_named(subject.call).node)
    if subject.kind != "reward":
        return made_up_tasks(keys)
    found = find_signature(subject.call) if subject.data_prompts else None
    columns = [] if found is None else needed_columns(found, [*subject.settings])
    # Which of the two data have, texts or conversations, is not known: a function of lists may be for either.
    chats = (False, True) if subject.data_prompts else (False,)
    made = [made_up_tasks([*keys, *columns], value, chat=chat) for chat in chats for value in MADE_UP]
    from distflow.testing.plugins.reward_suite import works_on

    report.begin(IMPORTING)
    return next((tasks for tasks in made if works_on(subject, report, tasks)), made[0])


def plain(gave: object) -> object:
    """The same in plain values: of batches their columns, of ragged ones offsets and values."""
    if hasattr(gave, "columns"):
        return {name: plain(column) for name, column in gave.columns.items()}
    if hasattr(gave, "offsets") and hasattr(gave, "values"):
        return [plain(gave.offsets), plain(gave.values)]
    return gave.tolist() if hasattr(gave, "tolist") else gave
