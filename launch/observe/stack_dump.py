"""Gets the stacks of a run's workers: from themselves, or by a signal from those that do not answer."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distflow.launch.observe.run_client import ask_all
from distflow.launch.run.exit_status import log_file
from distflow.launch.run.process_table import HALTED, catches, describe_state, running, state_of
from distflow.launch.run.record import RunRecord
from distflow.runtime.stacks import SIGNAL, render

ANSWER_S = 2.0
DUMP_S = 3.0
POLL_S = 0.05
QUIET_POLLS = 3
"""A dump is written in many small pieces: it is whole when nothing has come for so many looks."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """What could be found out about one worker. `text` is empty where there are no stacks, and `note` says why."""

    worker: str
    pid: int | None
    note: str
    text: str = ""


def stacks_of(record: RunRecord, workers: Sequence[str], *, everything: bool) -> list[Stacks]:
    """Of these workers, in their order. Those that run on this machine and do not answer are sent SIGUSR2.

    `everything`: threads too that are in nobody's code but ours.
    """
    alive = [name for name in workers if running(record.pids.get(name))]
    answers = ask_all(record, alive, "stacks", {}, ANSWER_S)
    found = []
    for name in workers:
        answer = answers.get(name)
        if answer is not None:
            found.append(_told(record, name, answer, everything=everything))
        elif name in alive:
            found.append(_by_signal(record, name))
        else:
            found.append(Stacks(name, None, "does not run"))
    return found


def dump_file(run_dir: Path, worker: str) -> Path:
    """Where a worker's signal handler writes."""
    return log_file(run_dir, worker).with_suffix(".stacks")


def _told(record: RunRecord, name: str, answer: dict[str, Any], *, everything: bool) -> Stacks:
    waits = [f"waits for {wait['description']}" for wait in answer["waits"]]
    text = render(answer["threads"], everything=everything)
    return Stacks(name, record.pids[name].pid, "; ".join(waits) or "waits for nobody", text)


def _by_signal(record: RunRecord, name: str) -> Stacks:
    pid = record.pids[name].pid
    if state_of(pid) in HALTED:
        cure = f" — `kill -CONT {pid}` lets it go on" if state_of(pid) == "T" else ""
        return Stacks(name, pid, f"does not answer: it is {describe_state(pid)}{cure}")
    if not catches(pid, SIGNAL):
        return Stacks(name, pid, f"does not answer, and is not ready for a signal yet: it is {describe_state(pid)}")
    path = dump_file(record.path, name)
    before = _size(path)
    try:
        os.kill(pid, SIGNAL)
    except ProcessLookupError:
        return Stacks(name, pid, "has just ended")
    text = _await_dump(path, before)
    if not text:
        return Stacks(name, pid, f"neither answers nor reacts to a signal: it is {describe_state(pid)}")
    return Stacks(name, pid, f"does not answer within {ANSWER_S:g} s; asked by a signal", text)


def _await_dump(path: Path, before: int) -> str:
    """What is appended behind `before` bytes, once it grows no more; at most what came within DUMP_S seconds."""
    deadline, size, quiet = time.monotonic() + DUMP_S, before, 0
    while time.monotonic() < deadline and quiet < QUIET_POLLS:
        time.sleep(POLL_S)
        now = _size(path)
        quiet = quiet + 1 if now == size and now > before else 0
        size = now
    if size == before:
        return ""
    with path.open("rb") as file:
        file.seek(before)
        return file.read().decode(errors="replace").strip()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
