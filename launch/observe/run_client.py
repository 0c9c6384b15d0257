"""Asks several workers the same thing at once, and any agent for what all of them know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from distflow.comm.client import ask
from distflow.comm.keys import Keys, key_file, read_keys
from distflow.errors import DistflowError, ProtocolError, UserError
from distflow.launch.run.exit_status import log_file
from distflow.launch.run.process_table import elsewhere, running
from distflow.launch.run.record import RunRecord, agent_name

AT_ONCE = 64
Row = dict[str, Any]


def keys_of(record: RunRecord) -> Keys | None:
    """What opens the doors of a run on many hosts; None on one host, where there are none."""
    return read_keys(key_file(record.path)) if record.hosts else None


def ask_all(
    record: RunRecord, names: Sequence[str], kind: str, body: Mapping[str, Any], timeout_s: float
) -> dict[str, Row | None]:
    """The answers by name; None where nobody answered within `timeout_s` seconds."""
    if not names:
        return {}
    keys = keys_of(record)

    def one(name: str) -> Row | None:
        address = record.roster.get(name)
        try:
            return ask(address, kind, body, timeout_s, keys) if address else None
        except ProtocolError:
            # Something else listens there by now: whom we meant is not there.
            return None

    with ThreadPoolExecutor(max_workers=min(AT_ONCE, len(names))) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def ask_any_agent(record: RunRecord, kind: str, body: Mapping[str, Any], timeout_s: float) -> Row | None:
    """The answer of the first agent that gives one, those first that were heard of last; None if none does."""
    for host in sorted(record.numbers, key=lambda number: (number in record.silent, number)):
        name = agent_name(host)
        mark = record.pids.get(name)
        if mark is not None and not elsewhere(mark) and not running(mark):
            continue
        answer = ask_all(record, [name], kind, body, timeout_s)[name]
        if answer is not None:
            return answer
    return None


def answer_of_an_agent(record: RunRecord, kind: str, body: Mapping[str, Any], timeout_s: float, command: str) -> Row:
    """As `ask_any_agent`, for a command that cannot do without; raises UserError with why an agent refuses."""
    answer = ask_any_agent(record, kind, body, timeout_s)
    if answer is None:
        raise DistflowError(
            f"{command}: no host agent of {record.name} answers, and without one nobody can start workers"
        )
    if "error" in answer:
        raise UserError(answer["error"])
    return answer


def worker_rows(record: RunRecord, timeout_s: float) -> list[Row]:
    """One row a worker: name, pid, host, state, step, version, waiting_for. Workers that run are asked themselves."""
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
        row |= {"pid": record.pids[name].pid, "state": "no answer"}
    elif record.over:
        row["state"] = "ended"
    elif host in record.silent:
        row["state"] = "no answer"
    elif name not in record.pids and not log_file(record.path, name).exists():
        row["state"] = "starting"
    if answer is not None:
        row |= answer
    if record.hosts:
        row["host"] = record.hosts[host].name
    return row
