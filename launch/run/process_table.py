"""Find the processes of a run on one host, end them, and remove their sockets and shared segments.

Two hosts of a run may share a machine, its process numbers and the run folder, so every function is about one host.
Process numbers are only valid in the machine and PID namespace they come from.

Processes are read with psutil; /proc is read only where psutil lacks something or is many times slower.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from distflow.cluster.processes import ProcessId, agent_name
from distflow.comm.addresses import remove_socket_dir, run_tag, socket_dir
from distflow.comm.processes import process_alive, started_at
from distflow.launch.run.folder import try_claim
from distflow.launch.run.record import RunRecord
from distflow.types import WorkerName

SEGMENTS = Path("/dev/shm")
LATE_ROUNDS = 4
POLL_S = 0.02
KILL_S = 5.0
_LOG_NAME = re.compile(r"[\w.-]+-\d+\.log")
NEVER = -1.0
PROC = Path("/proc")
STATES: Mapping[str, str] = {
    psutil.STATUS_DISK_SLEEP: "in uninterruptible sleep (state D): it waits for a device or a file system",
    psutil.STATUS_STOPPED: "stopped (state T)",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger (state t)",
    psutil.STATUS_ZOMBIE: "dead and not reaped yet (state Z)",
}
"""Descriptions of states whose names in psutil say too little."""
HALTED = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP})
"""States in which a process can neither answer nor handle a signal."""


@dataclass(frozen=True, slots=True)
class HostPart:
    """The part of a run on one host."""

    run_dir: Path
    host: int
    processes: tuple[ProcessId, ...]
    stems: frozenset[str] | None
    """Names of the logs its processes write to; None: all logs of the run folder."""


def host_part(record: RunRecord, host: int = 0) -> HostPart:
    """The part of a run on one host, which must be on this machine."""
    names = record.names_on(host)
    processes = tuple(record.pids[name] for name in names if name in record.pids)
    if not record.hosts:
        return HostPart(record.path, host, tuple(record.pids.values()), None)
    return HostPart(record.path, host, processes, frozenset(WorkerName.parse(name).file_stem for name in names))


def parts_here(record: RunRecord) -> list[HostPart]:
    """The parts of a run whose processes are on this machine."""
    found = [host_part(record, number) for number in record.numbers]
    return [one for one in found if not record.hosts or any(process.space == space() for process in one.processes)]


@cache
def space() -> str:
    """Identifies the machine (until it reboots) and the PID namespace of this process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def process_id(pid: int) -> ProcessId:
    """The id of a process; one that has ended already gets a start time that no process has."""
    started = started_at(pid)
    return ProcessId(pid, NEVER if started is None else started, space())


def elsewhere(process: ProcessId) -> bool:
    """Whether this process cannot be seen from here: its number belongs to another machine."""
    return process.space not in ("", space())


def running(process: ProcessId | None) -> bool:
    """Whether exactly this process runs on this machine; a zombie does not run."""
    return process is not None and _find(process) is not None


def signal_to(process: ProcessId | None, number: int) -> bool:
    """Send a signal to exactly this process; returns whether it was running."""
    if process is None or not running(process):
        return False
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)
    return True


def processes_of(part: HostPart) -> list[psutil.Process]:
    """Every live process of a part except this one: the recorded ones, their children, and writers to its logs.

    The logs distinguish two runs of one name in different folders, and find helpers whose parent is gone.
    """
    found: dict[int, psutil.Process] = {}
    for process in filter(None, map(_find, part.processes)):
        found[process.pid] = process
        found.update({child.pid: child for child in _children(process)})
    logs = part.run_dir.resolve() / "logs"
    for process in psutil.process_iter():
        if process.pid not in found and _writes_to(process.pid, logs, part.stems):
            found[process.pid] = process
    found.pop(os.getpid(), None)
    return [process for process in found.values() if _lives(process)]


def spawners_of(part: HostPart) -> list[psutil.Process]:
    """Processes that could start others: agents and fork servers, which all write to the agent's log."""
    logs, stems = part.run_dir.resolve() / "logs", frozenset({WorkerName.parse(agent_name(part.host)).file_stem})
    return [process for process in processes_of(part) if _writes_to(process.pid, logs, stems)]


def end(processes: Iterable[psutil.Process], patience_s: float) -> list[str]:
    """Send SIGTERM, and SIGKILL after `patience_s` seconds; returns a line for each process that was ended."""
    targets = list(processes)
    lines = describe(targets)
    if patience_s > 0:
        _signal(targets, kill=False)
        targets = await_end(targets, patience_s)
    _signal(targets, kill=True)
    await_end(targets, KILL_S)
    return lines


def await_end(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait up to `timeout_s` seconds until all have ended; returns those that have not.

    A zombie has ended (`psutil.wait_procs` would wait until it is reaped, which is up to its parent).
    """
    deadline = time.monotonic() + timeout_s
    while (alive := [process for process in processes if _lives(process)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return alive


def end_all(part: HostPart, patience_s: float) -> list[str]:
    """End every process of a part, repeatedly: some may have been forked while the first were being ended."""
    lines: list[str] = []
    for patience in (patience_s, *[0.0] * LATE_ROUNDS):
        found = processes_of(part)
        if not found:
            break
        lines += end(found, patience)
    return lines


def describe(processes: Iterable[psutil.Process]) -> list[str]:
    """One line per process: pid and title."""
    return [f"process {process.pid} ({_title(process).strip()})" for process in processes]


def sweep(run_dir: Path, host: int = 0) -> list[str]:
    """Remove the sockets and shared segments that a finished run left on a host; returns what was removed."""
    found = []
    if socket_dir(run_dir, host).is_dir():
        remove_socket_dir(run_dir, host)
        found.append(f"sockets {socket_dir(run_dir, host)}")
    for path in _segments(run_dir, host):
        path.unlink(missing_ok=True)
        found.append(f"shared segment {path.name}")
    return found


def sweep_term(run_dir: Path, host: int, term: int) -> None:
    """Remove the shared weights of a finished term from a host; processes that have mapped them can go on."""
    for path in SEGMENTS.glob(f"distflow-{run_tag(run_dir, host)}-*-t{term}-*"):
        path.unlink(missing_ok=True)


def leftovers(part: HostPart) -> list[str]:
    """What still exists of a part: one line per process, socket folder and shared segment."""
    lines = describe(processes_of(part))
    if socket_dir(part.run_dir, part.host).is_dir():
        lines.append(f"sockets {socket_dir(part.run_dir, part.host)}")
    return lines + [f"shared segment {path.name}" for path in _segments(part.run_dir, part.host)]


def is_lost(record: RunRecord) -> bool:
    """Whether a run was not ended properly, but has no live process and none that could start one.

    Processes on other machines cannot be seen here: a run that may still go on there is not lost.
    """
    if record.over or any(map(elsewhere, record.pids.values())) or (record.hosts and not record.pids):
        return False
    if any(processes_of(part) for part in parts_here(record)):
        return False
    try:
        lock = try_claim(record.path)
    except OSError:
        # The folder is not writable from here, so whether the run is locked is unknown.
        return False
    if lock is not None:
        os.close(lock)
    return lock is not None


def _segments(run_dir: Path, host: int) -> Iterator[Path]:
    return iter(sorted(SEGMENTS.glob(f"distflow-{run_tag(run_dir, host)}-*")))


def _find(wanted: ProcessId) -> psutil.Process | None:
    if elsewhere(wanted):
        return None
    try:
        process = psutil.Process(wanted.pid)
    except psutil.NoSuchProcess:
        return None
    # Looked up before the start time is compared: from here on psutil detects a reused pid itself.
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


def outputs_of(pid: int) -> Iterator[Path]:
    """Where the standard output and standard error of a process go, as far as that can be seen.

    psutil's `open_files` looks at every descriptor: in a search of all processes it takes three times as long.
    """
    for descriptor in ("1", "2"):
        # The process has ended or is another user's, or the descriptor is closed.
        with suppress(OSError):
            yield Path(os.readlink(f"/proc/{pid}/fd/{descriptor}"))


def _writes_to(pid: int, logs: Path, stems: frozenset[str] | None) -> bool:
    for path in outputs_of(pid):
        if path.parent == logs and _LOG_NAME.fullmatch(path.name):
            return stems is None or path.stem in stems
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


def state_of(pid: int) -> str | None:
    """One of psutil's states; None if there is no such process."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return None


def describe_state(pid: int) -> str:
    """The state in words, with the kernel function if the process hangs there and the system shows it."""
    state = state_of(pid)
    if state is None:
        return "gone"
    words = STATES.get(state, state)
    place = _kernel_place(pid) if state == psutil.STATUS_DISK_SLEEP else ""
    return f"{words}, in {place}" if place else words


def catches(pid: int, number: int) -> bool:
    """Whether a process handles a signal; otherwise the signal might end it. psutil does not provide this."""
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return bool(mask >> (number - 1) & 1)


def _kernel_place(pid: int) -> str:
    try:
        place = (PROC / str(pid) / "wchan").read_text().strip()
    except OSError:
        # Some systems do not let others read it.
        return ""
    return "" if place == "0" else place
