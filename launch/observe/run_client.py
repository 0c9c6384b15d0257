"""Asks several workers the same question at once, or any agent one that all of them can answer.

Stacks, too, come from the workers themselves, or by a signal from those that do not answer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from distflow.cluster.processes import agent_name, nursery_name
from distflow.comm.client import ask
from distflow.comm.keys import Keys, key_file, read_keys
from distflow.errors import ProtocolError, UserError
from distflow.launch.run.exit_status import log_file
from distflow.launch.run.folder import run_options, run_word
from distflow.launch.run.process_table import HALTED, catches, describe_state, elsewhere, running, state_of
from distflow.launch.run.record import RunRecord
from distflow.runtime.process_record import SIGNAL, render

AT_ONCE = 64
Row = dict[str, Any]
ANSWER_S = 2.0
DUMP_S = 3.0
POLL_S = 0.05
QUIET_POLLS = 3
"""A dump is written in many small pieces: it is complete when it has not grown for so many polls."""


def keys_of(record: RunRecord) -> Keys | None:
    """The keys of a run on many hosts; None on one host, where connections are not encrypted."""
    return read_keys(key_file(record.path)) if record.hosts else None


def ask_all(
    record: RunRecord, names: Sequence[str], kind: str, body: Mapping[str, Any], timeout_s: float
) -> dict[str, Row | None]:
    """The answers by name; None for those that did not answer within `timeout_s` seconds."""
    if not names:
        return {}
    keys = keys_of(record)

    def one(name: str) -> Row | None:
        address = record.roster.get(name)
        try:
            return ask(address, kind, body, timeout_s, keys) if address else None
        except ProtocolError:
            # Another process listens there by now, so the worker is gone.
            return None

    with ThreadPoolExecutor(max_workers=min(AT_ONCE, len(names))) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def ask_any_agent(record: RunRecord, kind: str, body: Mapping[str, Any], timeout_s: float) -> Row | None:
    """The answer of the first agent that gives one, agents known to be silent last; None if none does."""
    for host in sorted(record.numbers, key=lambda number: (number in record.silent, number)):
        name = agent_name(host)
        mark = record.pids.get(name)
        if mark is not None and not elsewhere(mark) and not running(mark):
            continue
        answer = ask_all(record, [name], kind, body, timeout_s)[name]
        if answer is not None:
            return answer
    return None


def without_agents(record: RunRecord) -> str:
    """What it means that nothing is left that could start workers, and what to do; empty if something is left."""
    names = [name for number in record.numbers for name in (agent_name(number), nursery_name(number))]
    marks = [record.pids[name] for name in names if name in record.pids]
    if record.over or not marks or any(map(running, marks)):
        return ""
    if any(map(elsewhere, marks)) and ask_any_agent(record, "status", {}, ANSWER_S) is not None:
        return ""
    return (
        f"no host agent of {record.name} answers: nothing restarts its workers — end it with `distflow stop "
        f"{run_word(record.path)}`, then continue with `distflow launch --resume {run_options(record.path)}`"
    )


def answer_of_an_agent(record: RunRecord, kind: str, body: Mapping[str, Any], timeout_s: float, command: str) -> Row:
    """As `ask_any_agent`, but raises UserError without an answer, or if the agent refuses."""
    answer = ask_any_agent(record, kind, body, timeout_s)
    if answer is None:
        hint = f"`distflow status {run_word(record.path)}` tells how the run is"
        raise UserError(f"{command}: no host agent of {record.name} answers, so no workers can be started — {hint}")
    if "error" in answer:
        raise UserError(answer["error"])
    return answer


def worker_rows(record: RunRecord, timeout_s: float) -> list[Row]:
    """One row per worker: name, pid, host, state, step, version, waiting_for. Running workers are asked themselves."""
    alive = [entry.name for entry in record.workers if _may_run(record, entry.name)]
    answers = ask_all(record, alive, "status", {}, timeout_s)
    return [_row(record, entry.name, answers.get(entry.name), entry.name in alive) for entry in record.workers]


def _may_run(record: RunRecord, name: str) -> bool:
    mark = record.pids.get(name)
    return mark is not None and (elsewhere(mark) or running(mark))


def _row(record: RunRecord, name: str, answer: Row | None, alive: bool) -> Row:
    row: Row = {"name": name, "pid": None, "host": None, "state": "gone", "step": None, "version": None}
    entry = next(entry for entry in record.workers if entry.name == name)
    row |= {"waiting_for": None, "generates": entry.generates}
    host = entry.host
    if alive:
        # Before its agent knows where it listens, nobody can ask it.
        state = "no answer" if name in record.roster else "loading"
        row |= {"pid": record.pids[name].pid, "state": state}
    elif record.over:
        row["state"] = "ended"
    elif host in record.silent:
        row["state"] = "no answer"
    elif name not in record.pids and not log_file(record.path, name).exists():
        row["state"] = "starting"
    if answer is not None:
        row |= answer
        # A worker without weights of its own, or that has none yet.
        row["version"] = row["version"] if row["version"] is not None and row["version"] >= 0 else None
    if record.hosts:
        row["host"] = record.hosts[host].name
    return row


@dataclass(frozen=True, slots=True)
class Stacks:
    """The stacks of one worker. If there are none, `text` is empty and `note` tells why."""

    worker: str
    pid: int | None
    note: str
    text: str = ""


def stacks_of(record: RunRecord, workers: Sequence[str], *, everything: bool) -> list[Stacks]:
    """The stacks of these workers, in order. Those on this machine that do not answer are sent SIGUSR2; of others that
    do not, it is said where to ask.

    `everything`: include threads that are only in distflow's own code.
    """
    alive = [name for name in workers if _may_run(record, name)]
    answers = ask_all(record, alive, "stacks", {}, ANSWER_S)
    hosts = {entry.name: record.hosts[entry.host].name for entry in record.workers if record.hosts}
    found = []
    for name in workers:
        answer = answers.get(name)
        if answer is not None:
            found.append(_answered(record, name, answer, everything=everything))
        elif name in alive and not running(record.pids[name]):
            where = hosts.get(name, "another machine")
            note = f"no answer within {ANSWER_S:g} s; `distflow stacks` on {where}, where it runs, asks it by a signal"
            found.append(Stacks(name, record.pids[name].pid, note))
        elif name in alive:
            found.append(_by_signal(record, name))
        else:
            found.append(Stacks(name, None, "does not run"))
    return found


def dump_file(run_dir: Path, worker: str) -> Path:
    """The file that a worker's signal handler writes to."""
    return log_file(run_dir, worker).with_suffix(".stacks")


def _answered(record: RunRecord, name: str, answer: dict[str, Any], *, everything: bool) -> Stacks:
    waits = [f"waits for {wait['description']}" for wait in answer["waits"]]
    text = render(answer["threads"], everything=everything)
    return Stacks(name, record.pids[name].pid, "; ".join(waits) or "not waiting", text)


def _by_signal(record: RunRecord, name: str) -> Stacks:
    pid = record.pids[name].pid
    if state_of(pid) in HALTED:
        hint = f" — `kill -CONT {pid}` resumes it" if state_of(pid) == psutil.STATUS_STOPPED else ""
        return Stacks(name, pid, f"does not answer: it is {describe_state(pid)}{hint}")
    if not catches(pid, SIGNAL):
        return Stacks(name, pid, f"does not answer, and cannot handle the signal yet: it is {describe_state(pid)}")
    path = dump_file(record.path, name)
    before = _size(path)
    try:
        os.kill(pid, SIGNAL)
    except ProcessLookupError:
        return Stacks(name, pid, "has just ended")
    text = _await_dump(path, before)
    if not text:
        return Stacks(name, pid, f"neither answers nor reacts to a signal: it is {describe_state(pid)}")
    return Stacks(name, pid, f"no answer within {ANSWER_S:g} s; asked by a signal", text)


def _await_dump(path: Path, before: int) -> str:
    """What was appended after `before` bytes, once the file stops growing, or after DUMP_S seconds."""
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
