"""Ends a run, whatever state it is in, and makes sure that nothing of it is left on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from distflow.errors import DistflowError
from distflow.launch.asking import ask_all, ask_any_agent
from distflow.launch.ending import STOPPED, Outcome, finish
from distflow.launch.processes import (
    Share,
    await_end,
    describe,
    elsewhere,
    end_all,
    leavings,
    processes_of,
    running,
    shares_here,
    sweep,
)
from distflow.launch.record import ProcessMark, RunRecord, agent_name, nursery_name, read_record

POLL_S = 0.1
TERM_S = 5.0
ASK_S = 2.0


def stop_run(run_dir: Path, timeout_s: float) -> list[str]:
    """Ask an agent, or in its absence the workers, to save and leave; after `timeout_s` seconds end the processes.

    Returns a line for everything that was ended or removed. Raises DistflowError if something is left all the same, or
    may be on a host that cannot be reached.
    """
    record = read_record(run_dir)
    parts = shares_here(record)
    before = [process for part in parts for process in processes_of(part)]
    lines = describe(before)
    if timeout_s > 0 and (before or _goes_on_elsewhere(record)):
        asked = _ask(run_dir)
        _await_end(run_dir, before, timeout_s, asked=asked)
    # First who could start others, then the others.
    for starter in _starters(record):
        os.kill(starter.pid, signal.SIGKILL)
    for part in parts:
        late = end_all(part, TERM_S if timeout_s > 0 else 0.0)
        lines += [line for line in late if line not in lines]
        lines += sweep(run_dir, part.host)
    _check(run_dir, parts)
    if not read_record(run_dir).over:
        finish(read_record(run_dir), Outcome("stopped", STOPPED))
    return lines


def _check(run_dir: Path, parts: Iterable[Share]) -> None:
    left = [line for part in parts for line in leavings(part)]
    if left:
        raise DistflowError(f"{run_dir}: could not be ended: {'; '.join(left)}")
    record = read_record(run_dir)
    names = [entry.name for entry in record.hosts] or ["the machine it was launched on"]
    hosts = [names[entry.host] for entry in record.workers if _goes_on_there(record, entry.name)]
    if not record.over and hosts:
        raise DistflowError(
            f"{run_dir}: what runs on {', '.join(dict.fromkeys(hosts))} cannot be ended from here: no agent answers "
            f"there — use `distflow stop {run_dir.name}` on that host"
        )


def _goes_on_elsewhere(record: RunRecord) -> bool:
    return not record.over and any(elsewhere(mark) for mark in record.pids.values())


def _goes_on_there(record: RunRecord, name: str) -> bool:
    return name in record.pids and elsewhere(record.pids[name])


def _starters(record: RunRecord) -> list[ProcessMark]:
    names = [name(number) for number in record.numbers for name in (agent_name, nursery_name)]
    return [record.pids[name] for name in names if name in record.pids and running(record.pids[name])]


def _ask(run_dir: Path) -> bool:
    """Whether an agent will see to it; else every worker that can be reached was asked by itself."""
    record = read_record(run_dir)
    body = {"reason": "distflow stop"}
    if ask_any_agent(record, "stop", body, ASK_S) is not None:
        return True
    agents = [record.pids.get(agent_name(number)) for number in record.numbers]
    deaf = [agent for agent in agents if agent is not None and running(agent)]
    for agent in deaf:
        os.kill(agent.pid, signal.SIGTERM)
    if not deaf:
        ask_all(record, [entry.name for entry in record.workers if entry.name in record.pids], "stop", body, ASK_S)
    return bool(deaf)


def _await_end(run_dir: Path, processes: list[psutil.Process], timeout_s: float, *, asked: bool) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        left = await_end(processes, POLL_S)
        record = read_record(run_dir)
        if record.over:
            # Nothing but agents can be left, and they are leaving.
            await_end(left, TERM_S)
            return
        if not left and not (asked and _goes_on_elsewhere(record)):
            return
