"""How a worker ended, why a run failed, and the last entry in `run.json`."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from distflow.errors import WorkerFailed
from distflow.launch.run.folder import try_claim
from distflow.launch.run.record import Failure, RunRecord, RunState, agent_name, read_record
from distflow.runtime.disk import END_ROOM, write_last
from distflow.runtime.process_record import ProcessRecord, read_process
from distflow.types import WorkerName

STOPPED = 130
KNOWN_CODES = (1, 2, 3)
AGAIN = 75
"""A training worker ended since another one is gone: `errors.ReplicaLost`."""
TAKEOVER_S = 6.0
"""What the agents of other hosts get to take over `run.json` from one that died; they try every 2 s."""
LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Exit:
    """How one process of a worker ended. Example: `Exit(0)`, `Exit(None, 9)`, `Exit(None, early=0)`."""

    code: int | None
    """Exit code of one that came to its end, or failed; None: something else ended it."""
    signal: int | None = None
    """What killed it, if that is known."""
    early: int | None = None
    """Exit code, which claims that all was well, of one that had not come to its end: `os._exit` in a reward, say."""
    term: int | None = None
    """Of the training workers, in which a generating worker found that they want no more samples."""

    def __str__(self) -> str:
        if self.code is not None:
            return f"exit code {self.code}"
        if self.early is not None:
            return f"exit code {self.early} in the midst of its work (does a plug-in call os._exit?)"
        if self.signal is None:
            return "a signal that nobody saw"
        hint = ", often the system running out of memory" if self.signal == signal.SIGKILL else ""
        return f"signal {self.signal} ({signal.Signals(self.signal).name}{hint})"


def exit_of(status: os.waitid_result, record: ProcessRecord | None) -> Exit:
    """How a process ended, by what its parent was told; `record`: what it has written itself."""
    if status.si_code != os.CLD_EXITED:
        return Exit(None, status.si_status)
    unfinished = record is not None and record.pid == status.si_pid and record.code is None
    if unfinished and status.si_status in (0, STOPPED):
        return Exit(None, early=status.si_status)
    return Exit(status.si_status, term=None if record is None or record.pid != status.si_pid else record.term)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    state: RunState
    exit_code: int
    failure: Failure | None = None


def failure_file(run_dir: Path, worker: str) -> Path:
    """Where a worker that fails writes why."""
    return run_dir / "workers" / f"{WorkerName.parse(worker).file_stem}.failure.json"


def document_file(run_dir: Path, worker: str) -> Path:
    """What a worker reads when it is started."""
    return run_dir / "workers" / f"{WorkerName.parse(worker).file_stem}.yaml"


def log_file(run_dir: Path, worker: str) -> Path:
    """Log of a worker, or of `agent/0`."""
    return run_dir / "logs" / f"{WorkerName.parse(worker).file_stem}.log"


def explain(run_dir: Path, worker: str, ending: Exit) -> Failure:
    """What is known about a worker that failed: what it wrote itself, or else how it died."""
    log = str(log_file(run_dir, worker))
    path = failure_file(run_dir, worker)
    told = None if ending.code is None else _told(path)
    if told is not None:
        error, message, traceback = (_encodable(told[name]) for name in ("error", "message", "traceback"))
        return Failure(worker, 3 if ending.code == AGAIN else int(told["exit_code"]), error, message, traceback, log)
    if ending.code is None:
        hint = f"go on from the last checkpoint: `distflow launch … --run {run_dir.name} --resume`"
        how = "was killed by" if ending.early is None else "ended with"
        return Failure(worker, 3, "WorkerFailed", f"{worker} {how} {ending} — {hint}", "", log)
    code = ending.code if ending.code in KNOWN_CODES else 3
    message = f"{worker} ended with {ending} and gave no reason — see its log"
    return Failure(worker, code, "WorkerFailed", message, "", log)


def _encodable(text: str) -> str:
    """With escapes for what is not Unicode: names of files may come into a message by `surrogateescape`."""
    return text.encode(errors="backslashreplace").decode()


def _told(path: Path) -> dict[str, Any] | None:
    """What a worker wrote; None if it wrote nothing, or not all of it."""
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    names = ("exit_code", "error", "message", "traceback")
    return told if isinstance(told, dict) and all(name in told for name in names) else None


def finish(record: RunRecord, outcome: Outcome) -> RunRecord:
    """Write the end of a run into `run.json`; raises WorkerFailed when the disk refuses."""
    ended = structs.replace(
        record, state=outcome.state, exit_code=outcome.exit_code, failure=outcome.failure, ended=time.time(), pids={}
    )
    try:
        write_last(record.path, END_ROOM, ended.write)
    except OSError as error:
        raise WorkerFailed(
            f"{record.path}: the run is over ({outcome.state}), but run.json cannot say so ({error.strerror}) — make "
            f"room; `distflow stop {record.name}` writes it then"
        ) from error
    return ended


def read_exits(run_dir: Path, workers: Iterable[str]) -> dict[str, Exit]:
    """How those of some workers ended, by name, that say so themselves in this folder: for what no agent saw."""
    found = {name: read_process(document_file(run_dir, name)) for name in workers}
    return {name: Exit(one.code) for name, one in found.items() if one is not None and one.code is not None}


def conclude(run_dir: Path, exits: Mapping[str, Exit], host: int = 0) -> RunRecord:
    """End a host's part of a run whose agent is gone, and remove what was left behind.

    The run itself is ended, judged by how the training workers ended, only if no agent of another host writes
    `run.json`.
    """
    # Imported late: the fork server is imported by every worker, this is needed at most once in its life.
    from distflow.launch.run.process_table import end_all, host_part, sweep

    record = read_record(run_dir)
    if record.over:
        return record
    end_all(host_part(record, host), patience_s=1.0)
    sweep(run_dir, host)
    if record.hosts:
        if _others_write(run_dir):
            return read_record(run_dir)
        record = read_record(run_dir)
    if record.over:
        return record
    told = read_exits(run_dir, [entry.name for entry in record.workers])
    return finish(record, judge(run_dir, record, {**told, **exits}, host))


def as_it_ended(record: RunRecord) -> RunRecord:
    """A run that nobody saw end, and of which nothing is alive any more, as it is to be told: nothing is written."""
    told = (explain(record.path, entry.name, Exit(3)) for entry in record.workers)
    failure = next((one for one in told if one.traceback or one.error != "WorkerFailed"), None)
    outcome = judge(record.path, record, read_exits(record.path, [entry.name for entry in record.workers]))
    if outcome.state == "failed" and failure is not None:
        outcome = Outcome("failed", failure.exit_code, failure)
    return structs.replace(record, state=outcome.state, exit_code=outcome.exit_code, failure=outcome.failure)


def _others_write(run_dir: Path) -> bool:
    """Whether the agent of another host has taken over the folder; gives it time to do so."""
    deadline = time.monotonic() + TAKEOVER_S
    while time.monotonic() < deadline:
        lock = try_claim(run_dir)
        if lock is None:
            return True
        os.close(lock)
        time.sleep(LOOK_S)
    return False


def judge(run_dir: Path, record: RunRecord, exits: Mapping[str, Exit], host: int = 0) -> Outcome:
    """Done if every training worker ended well; stopped if all that did not were asked to stop; else failed."""
    trainers = {entry.name: exits[entry.name] for entry in record.workers if entry.trains and entry.name in exits}
    bad = {name: ending for name, ending in trainers.items() if ending.code not in (0, STOPPED)}
    if bad:
        failure = explain(run_dir, *next(iter(bad.items())))
        return Outcome("failed", failure.exit_code, failure)
    if len(trainers) < sum(entry.trains for entry in record.workers):
        agent = agent_name(host)
        why = "the host agent ended before the run did, and nobody saw how the training workers ended"
        return Outcome("failed", 3, Failure(agent, 3, "WorkerFailed", why, "", str(log_file(run_dir, agent))))
    if any(ending.code == STOPPED for ending in trainers.values()):
        return Outcome("stopped", STOPPED)
    return Outcome("done", 0)
