"""How a worker ended, why a run failed, and the last entry in `run.json`."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from distflow.launch.record import AGENT, Failure, RunRecord, RunState, read_record
from distflow.types import WorkerName

STOPPED = 130
KNOWN_CODES = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Exit:
    """Of one process: its exit code, or the signal that killed it."""

    code: int | None
    signal: int | None = None

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code}"
        hint = ", often the system running out of memory" if self.signal == signal.SIGKILL else ""
        return f"signal {self.signal} ({signal.Signals(self.signal).name}{hint})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    state: RunState
    exit_code: int
    failure: Failure | None = None


def failure_file(run_dir: Path, worker: str) -> Path:
    """Where a worker that fails writes why."""
    return run_dir / "workers" / f"{WorkerName.parse(worker).file_stem}.failure.json"


def log_file(run_dir: Path, worker: str) -> Path:
    """Log of a worker, or of `agent/0`."""
    return run_dir / "logs" / f"{WorkerName.parse(worker).file_stem}.log"


def explain(run_dir: Path, worker: str, ending: Exit) -> Failure:
    """What is known about a worker that failed: what it wrote itself, or else how it died."""
    log = str(log_file(run_dir, worker))
    path = failure_file(run_dir, worker)
    if ending.signal is None and path.is_file():
        told = json.loads(path.read_text())
        return Failure(worker, int(told["exit_code"]), told["error"], told["message"], told["traceback"], log)
    if ending.signal is not None:
        cure = f"go on from the last checkpoint: `distflow launch … --run {run_dir.name} --resume`"
        return Failure(worker, 3, "WorkerFailed", f"{worker} was killed by {ending} — {cure}", "", log)
    code = ending.code if ending.code in KNOWN_CODES else 3
    assert code is not None, "a process ends by a code or by a signal"
    message = f"{worker} ended with {ending} and gave no reason — see its log"
    return Failure(worker, code, "WorkerFailed", message, "", log)


def finish(record: RunRecord, outcome: Outcome) -> RunRecord:
    """Write the end of a run into `run.json`."""
    ended = replace(
        record, state=outcome.state, exit_code=outcome.exit_code, failure=outcome.failure, ended=time.time(), pids={}
    )
    ended.write()
    return ended


def conclude(run_dir: Path, exits: Mapping[str, Exit]) -> RunRecord:
    """End a run whose agent is gone: judge by the training workers' ends, and remove what was left behind."""
    # Imported late: the nursery is imported by every worker, this is needed at most once in its life.
    from distflow.launch.processes import end_all, sweep

    record = read_record(run_dir)
    if record.over:
        return record
    end_all(run_dir, record.pids.values(), patience_s=1.0)
    sweep(run_dir)
    return finish(record, judge(run_dir, record, exits))


def judge(run_dir: Path, record: RunRecord, exits: Mapping[str, Exit]) -> Outcome:
    """Done if every training worker ended well; stopped if all that did not were asked to stop; else failed."""
    trainers = {entry.name: exits[entry.name] for entry in record.workers if entry.trains and entry.name in exits}
    bad = {name: ending for name, ending in trainers.items() if ending.code not in (0, STOPPED)}
    if bad:
        failure = explain(run_dir, *next(iter(bad.items())))
        return Outcome("failed", failure.exit_code, failure)
    if len(trainers) < sum(entry.trains for entry in record.workers):
        why = "the host agent ended before the run did, and nobody saw how the training workers ended"
        return Outcome("failed", 3, Failure(AGENT, 3, "WorkerFailed", why, "", str(log_file(run_dir, AGENT))))
    if any(ending.code == STOPPED for ending in trainers.values()):
        return Outcome("stopped", STOPPED)
    return Outcome("done", 0)
