"""How a worker ended, why a run failed, and the last entry in `run.json`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from distflow.cluster.processes import FAULTY, STOPPED, Exit, Failure, Outcome, agent_name
from distflow.errors import WorkerFailed
from distflow.launch.run.folder import run_options, run_word, try_claim
from distflow.launch.run.record import RunRecord, read_record
from distflow.runtime.checkpoint.commit import checkpoints_of, commits
from distflow.runtime.disk import END_ROOM, write_last
from distflow.runtime.process_record import ProcessRecord, read_process
from distflow.types import WorkerName

KNOWN_CODES = (1, 2, 3)
AGAIN = 75
"""Exit code of a training worker that ended because another one is gone: `errors.ReplicaLost`."""
TAKEOVER_S = 6.0
"""Time for the agents of other hosts to take over `run.json` from one that died; they try every 2 s."""
LOOK_S = 0.5


def exit_of(status: os.waitid_result, record: ProcessRecord | None) -> Exit:
    """How a process ended, from its wait status; `record`: what the process itself wrote."""
    if status.si_code != os.CLD_EXITED:
        return Exit(None, status.si_status)
    unfinished = record is not None and record.pid == status.si_pid and record.code is None
    if unfinished and status.si_status in (0, STOPPED):
        return Exit(None, early=status.si_status)
    return Exit(status.si_status, term=None if record is None or record.pid != status.si_pid else record.term)


def failure_file(run_dir: Path, worker: str) -> Path:
    """The file in which a failing worker writes the reason."""
    return run_dir / "workers" / f"{WorkerName.parse(worker).file_stem}.failure.json"


def document_file(run_dir: Path, worker: str) -> Path:
    """The document that a worker reads when it starts."""
    return run_dir / "workers" / f"{WorkerName.parse(worker).file_stem}.yaml"


def log_file(run_dir: Path, worker: str) -> Path:
    """Log of a worker, or of `agent/0`."""
    return run_dir / "logs" / f"{WorkerName.parse(worker).file_stem}.log"


def explain(run_dir: Path, worker: str, ending: Exit) -> Failure:
    """Why a worker failed: from what it wrote itself, else from how it died."""
    log = str(log_file(run_dir, worker))
    path = failure_file(run_dir, worker)
    told = None if ending.code is None else _told(path)
    if told is not None:
        error, message, traceback = (_encodable(told[name]) for name in ("error", "message", "traceback"))
        return Failure(
            worker, 3 if ending.code in (AGAIN, FAULTY) else int(told["exit_code"]), error, message, traceback, log
        )
    if ending.code is None:
        how = "was killed by" if ending.early is None else "ended with"
        return Failure(worker, 3, "WorkerFailed", f"{worker} {how} {ending} — {goes_on_from(run_dir)}", "", log)
    code = ending.code if ending.code in KNOWN_CODES else 3
    odd = "" if code == ending.code else ": a plug-in or a library has ended its process, by os._exit for example"
    message = f"{worker} ended with {ending} without giving a reason{odd} — see its log"
    return Failure(worker, code, "WorkerFailed", message, "", log)


def goes_on_from(run_dir: Path) -> str:
    """Say which checkpoint of a run is here, and how to go on from it."""
    command = f"`distflow launch … {run_options(run_dir)} --resume`"
    step = _saved_step(run_dir)
    if not step:
        return f"no checkpoint is here yet: {command} begins at training step 1"
    return f"the checkpoint of training step {step} is here: {command} goes on from it"


def has_unsaved(run_dir: Path) -> bool:
    """Tell whether training steps were done, as far as is known here, of which there is no checkpoint."""
    # Imported late: every worker imports this module, and needs this never.
    from distflow.metrics.merge import MetricsReader

    reader = MetricsReader(run_dir)
    reader.read()
    return max((int(step["step"]) for step in reader.merged()), default=0) > _saved_step(run_dir)


def _saved_step(run_dir: Path) -> int:
    """The training step of the newest checkpoint of a run; 0: there is none."""
    return max((commit.step for _, commit in commits(checkpoints_of(run_dir))), default=0)


def _encodable(text: str) -> str:
    """Escape what is not valid Unicode: file names in messages may contain surrogates (`surrogateescape`)."""
    return text.encode(errors="backslashreplace").decode()


def _told(path: Path) -> dict[str, Any] | None:
    """What a worker wrote about its failure; None if it wrote nothing, or only part of it."""
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    names = ("exit_code", "error", "message", "traceback")
    return told if isinstance(told, dict) and all(name in told for name in names) else None


def finish(record: RunRecord, outcome: Outcome) -> RunRecord:
    """Record the end of a run in `run.json`; raises WorkerFailed if it cannot be written."""
    ended = structs.replace(
        record, state=outcome.state, exit_code=outcome.exit_code, failure=outcome.failure, ended=time.time(), pids={}
    )
    try:
        write_last(record.path, END_ROOM, ended.write)
    except OSError as error:
        raise WorkerFailed(
            f"{record.path}: the run is over ({outcome.state}), but run.json cannot be written ({error.strerror}) — "
            f"free some space, then `distflow stop {run_word(record.path)}` writes it"
        ) from error
    return ended


def read_exits(run_dir: Path, workers: Iterable[str]) -> dict[str, Exit]:
    """How workers ended, by name, from the process records in this folder: for ends that no agent saw."""
    found = {name: read_process(document_file(run_dir, name)) for name in workers}
    return {name: Exit(one.code) for name, one in found.items() if one is not None and one.code is not None}


def conclude(run_dir: Path, exits: Mapping[str, Exit], host: int = 0) -> RunRecord:
    """End a host's part of a run whose agent is gone, and remove what it left behind.

    The end of the run is recorded, judged by how the training workers ended, only if no agent of another host writes
    `run.json`.
    """
    # Imported late: every worker imports this module, and needs these at most once.
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
    """The record of a run that has no live process and no recorded end, with the end filled in; writes nothing."""
    told = (explain(record.path, entry.name, Exit(3)) for entry in record.workers)
    failure = next((one for one in told if one.traceback or one.error != "WorkerFailed"), None)
    outcome = judge(record.path, record, read_exits(record.path, [entry.name for entry in record.workers]))
    if outcome.state == "failed" and failure is not None:
        outcome = Outcome("failed", failure.exit_code, failure)
    return structs.replace(record, state=outcome.state, exit_code=outcome.exit_code, failure=outcome.failure)


def _others_write(run_dir: Path) -> bool:
    """Whether an agent of another host takes over the folder; waits up to TAKEOVER_S seconds for it."""
    deadline = time.monotonic() + TAKEOVER_S
    while time.monotonic() < deadline:
        lock = try_claim(run_dir)
        if lock is None:
            return True
        os.close(lock)
        time.sleep(LOOK_S)
    return False


def judge(run_dir: Path, record: RunRecord, exits: Mapping[str, Exit], host: int = 0) -> Outcome:
    """Done if every training worker finished; stopped if those that did not were asked to stop; else failed."""
    trainers = {entry.name: exits[entry.name] for entry in record.workers if entry.trains and entry.name in exits}
    bad = {name: ending for name, ending in trainers.items() if ending.code not in (0, STOPPED)}
    if bad:
        failure = explain(run_dir, *next(iter(bad.items())))
        return Outcome("failed", failure.exit_code, failure)
    if len(trainers) < sum(entry.trains for entry in record.workers):
        agent = agent_name(host)
        why = "the host agent ended before the run did, and how the training workers ended is unknown"
        return Outcome("failed", 3, Failure(agent, 3, "WorkerFailed", why, "", str(log_file(run_dir, agent))))
    if any(ending.code == STOPPED for ending in trainers.values()):
        return Outcome("stopped", STOPPED)
    return Outcome("done", 0)
