"""Finds the processes of a run, ends them, and removes what they left: sockets and shared segments."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from distflow.comm.addresses import remove_socket_dir, run_tag, socket_dir
from distflow.comm.processes import process_alive, started_at
from distflow.launch.record import ProcessMark

SEGMENTS = Path("/dev/shm")
LATE_ROUNDS = 4
POLL_S = 0.02
KILL_S = 5.0
_LOG_NAME = re.compile(r"[\w.-]+-\d+\.log")
NEVER = -1.0


def mark(pid: int) -> ProcessMark:
    """Remember a process; one that has ended already by a time that no process started at."""
    started = started_at(pid)
    return ProcessMark(pid, NEVER if started is None else started)


def running(process: ProcessMark | None) -> bool:
    """Whether exactly this process still runs; a zombie does not."""
    return process is not None and _find(process) is not None


def processes_of(run_dir: Path, marks: Iterable[ProcessMark]) -> list[psutil.Process]:
    """Every live process of a run but this one: the marked ones, their children, and all that write to its logs.

    The logs tell apart two runs of one name in different folders, and find helpers that lost their parent.
    """
    found: dict[int, psutil.Process] = {}
    for process in filter(None, map(_find, marks)):
        found[process.pid] = process
        found.update({child.pid: child for child in _children(process)})
    logs = run_dir.resolve() / "logs"
    for process in psutil.process_iter():
        if process.pid not in found and _writes_to(process.pid, logs):
            found[process.pid] = process
    found.pop(os.getpid(), None)
    return [process for process in found.values() if _lives(process)]


def end(processes: Iterable[psutil.Process], patience_s: float) -> list[str]:
    """SIGTERM, after `patience_s` seconds SIGKILL; returns a line for each process that was ended."""
    targets = list(processes)
    lines = describe(targets)
    if patience_s > 0:
        _signal(targets, kill=False)
        targets = await_end(targets, patience_s)
    _signal(targets, kill=True)
    await_end(targets, KILL_S)
    return lines


def await_end(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until all have ended, `timeout_s` seconds at most; returns those that have not.

    A zombie has ended: who its parent is, and whether that reaps it, is not ours to wait for.
    """
    deadline = time.monotonic() + timeout_s
    while (alive := [process for process in processes if _lives(process)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return alive


def end_all(run_dir: Path, marks: Iterable[ProcessMark], patience_s: float) -> list[str]:
    """End every process of a run; again for those that were being forked while the first were ended."""
    known = list(marks)
    lines: list[str] = []
    for patience in (patience_s, *[0.0] * LATE_ROUNDS):
        found = processes_of(run_dir, known)
        if not found:
            break
        lines += end(found, patience)
    return lines


def describe(processes: Iterable[psutil.Process]) -> list[str]:
    """A line for each process: its number and its title."""
    return [f"process {process.pid} ({_title(process).strip()})" for process in processes]


def sweep(run_dir: Path) -> list[str]:
    """Remove the sockets and shared segments of a run that is over; returns what there was."""
    found = []
    if socket_dir(run_dir).is_dir():
        remove_socket_dir(run_dir)
        found.append(f"sockets {socket_dir(run_dir)}")
    for path in sorted(SEGMENTS.glob(f"distflow-{run_tag(run_dir)}-*")):
        path.unlink(missing_ok=True)
        found.append(f"shared segment {path.name}")
    return found


def leavings(run_dir: Path, marks: Mapping[str, ProcessMark]) -> list[str]:
    """What still exists of a run: processes, sockets, segments, one line each."""
    lines = describe(processes_of(run_dir, marks.values()))
    if socket_dir(run_dir).is_dir():
        lines.append(f"sockets {socket_dir(run_dir)}")
    return lines + [f"shared segment {path.name}" for path in SEGMENTS.glob(f"distflow-{run_tag(run_dir)}-*")]


def _find(wanted: ProcessMark) -> psutil.Process | None:
    try:
        process = psutil.Process(wanted.pid)
    except psutil.NoSuchProcess:
        return None
    # Looked up before it is compared: from here on psutil itself tells this process from a later one.
    return process if process_alive(wanted.pid, wanted.started) else None


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _writes_to(pid: int, logs: Path) -> bool:
    for descriptor in ("1", "2"):
        try:
            target = Path(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        except OSError:
            # Ended meanwhile, another user's, or the descriptor is closed.
            continue
        if target.parent == logs and _LOG_NAME.fullmatch(target.name):
            return True
    return False


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return "ended meanwhile"


def _signal(processes: Iterable[psutil.Process], *, kill: bool) -> None:
    for process in processes:
        try:
            process.kill() if kill else process.terminate()
        except psutil.NoSuchProcess:
            continue
