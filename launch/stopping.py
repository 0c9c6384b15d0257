"""Ends a run, whatever state it is in, and makes sure that nothing of it is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

from distflow.errors import DistflowError
from distflow.launch.asking import ask_all
from distflow.launch.ending import STOPPED, Outcome, finish
from distflow.launch.processes import await_end, describe, end_all, leavings, processes_of, running, sweep
from distflow.launch.record import AGENT, NURSERY, read_record

POLL_S = 0.1
TERM_S = 5.0
ASK_S = 2.0


def stop_run(run_dir: Path, timeout_s: float) -> list[str]:
    """Ask the agent, or in its absence the workers, to save and leave; after `timeout_s` seconds end the processes.

    Returns a line for everything that was ended or removed. Raises DistflowError if something is left all the same.
    """
    record = read_record(run_dir)
    before = processes_of(run_dir, record.pids.values())
    lines = describe(before)
    if timeout_s > 0 and before:
        _ask(run_dir)
        _await_end(run_dir, before, timeout_s)
    # First who could start others, then the others.
    starters = [record.pids[name] for name in (AGENT, NURSERY) if name in record.pids and running(record.pids[name])]
    for starter in starters:
        os.kill(starter.pid, signal.SIGKILL)
    late = end_all(run_dir, record.pids.values(), TERM_S if timeout_s > 0 else 0.0)
    lines += [line for line in late if line not in lines]
    lines += sweep(run_dir)
    left = leavings(run_dir, record.pids)
    if left:
        raise DistflowError(f"{run_dir}: could not be ended: {'; '.join(left)}")
    record = read_record(run_dir)
    if not record.over:
        finish(record, Outcome("stopped", STOPPED))
    return lines


def _ask(run_dir: Path) -> None:
    record = read_record(run_dir)
    body = {"reason": "distflow stop"}
    agent = record.pids.get(AGENT)
    if agent is None or running(agent):
        # Without a mark it is just starting.
        if ask_all(record, [AGENT], "stop", body, ASK_S)[AGENT] is None and agent is not None:
            os.kill(agent.pid, signal.SIGTERM)
        return
    workers = [entry.name for entry in record.workers if running(record.pids.get(entry.name))]
    ask_all(record, workers, "stop", body, ASK_S)


def _await_end(run_dir: Path, processes: list[psutil.Process], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not await_end(processes, POLL_S) or (read_record(run_dir).over and not running_agent(run_dir)):
            return


def running_agent(run_dir: Path) -> bool:
    """Whether the host agent of a run is there."""
    record = read_record(run_dir)
    return running(record.pids.get(AGENT))
