"""Asks several workers the same thing at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from distflow.comm.client import ask
from distflow.launch.ending import log_file
from distflow.launch.processes import running
from distflow.launch.record import RunRecord

AT_ONCE = 64
Row = dict[str, Any]


def ask_all(
    record: RunRecord, names: Sequence[str], kind: str, body: Mapping[str, Any], timeout_s: float
) -> dict[str, Row | None]:
    """The answers by name; None where nobody answered within `timeout_s` seconds."""
    if not names:
        return {}
    with ThreadPoolExecutor(max_workers=min(AT_ONCE, len(names))) as pool:
        answers = pool.map(lambda name: ask(record.roster[name], kind, body, timeout_s), names)
        return dict(zip(names, answers, strict=True))


def worker_rows(record: RunRecord, timeout_s: float) -> list[Row]:
    """One row a worker: name, pid, host, state, step, version, waiting_for. Workers that run are asked themselves."""
    alive = [entry.name for entry in record.workers if running(record.pids.get(entry.name))]
    answers = ask_all(record, alive, "status", {}, timeout_s)
    return [_row(record, entry.name, answers.get(entry.name), entry.name in alive) for entry in record.workers]


def _row(record: RunRecord, name: str, answer: Row | None, alive: bool) -> Row:
    row: Row = {"name": name, "pid": None, "host": None, "state": "gone", "step": None, "version": None}
    row["waiting_for"] = None
    if alive:
        row |= {"pid": record.pids[name].pid, "state": "no answer"}
    elif record.over:
        row["state"] = "ended"
    elif not log_file(record.path, name).exists():
        row["state"] = "starting"
    if answer is not None:
        row |= answer
    return row
