"""Stop a run in whatever state it is, and make sure that nothing of it is left on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
from msgspec import structs

from distflow.cluster.processes import STOPPED, Outcome, agent_name
from distflow.errors import DistflowError
from distflow.launch.agent.start import lock_host
from distflow.launch.deploy.multi_host import latest_record
from distflow.launch.observe.file_sync import is_outside
from distflow.launch.observe.run_client import Row, ask_all, ask_any_agent, worker_rows
from distflow.launch.run.exit_status import as_it_ended, finish
from distflow.launch.run.folder import run_word
from distflow.launch.run.process_table import (
    HostPart,
    await_end,
    describe,
    elsewhere,
    end,
    end_all,
    leftovers,
    parts_here,
    processes_of,
    running,
    signal_to,
    spawners_of,
    sweep,
)
from distflow.launch.run.record import RunRecord, read_record

POLL_S = 0.1
TERM_S = 5.0
AT_ONCE_S = 20.0
"""For agents on other hosts to end everything there at once, and to clean up."""
LOOK_EVERY_S = 1.0
TELL_AFTER_S, TELL_EVERY_S, TELL_PROGRESS_S = 1.0, 2.0, 10.0
GIB = 1 << 30
MOST_TOLD = 4
ASK_S = 2.0


def stop_run(run_dir: Path, timeout_s: float, tell: Callable[[str], None] = lambda line: None) -> list[str]:
    """Ask an agent, or the workers if there is none, to save and exit; kill the processes after `timeout_s` seconds
    without progress of saving. 0: everything ends at once.

    Returns a line for everything that was ended or removed; `tell` gets lines about what it waits for. Raises
    DistflowError if something is left, or may be left on a host that cannot be reached.
    """
    record = latest_record(run_dir)
    parts = parts_here(record)
    before = [process for part in parts for process in processes_of(part)]
    lines = describe(before)
    unheard = _unheard(record)
    there = _goes_on_elsewhere(record)
    alive = bool(before) or there
    if there and not before:
        lines.append(f"its processes on {_listed([entry.name for entry in record.hosts], record.numbers)}")
    if alive and (timeout_s > 0 or record.hosts):
        asked = _ask(run_dir, at_once=timeout_s == 0)
        # With no time to save, only hosts where nothing can be killed from here are waited for.
        _await_end(run_dir, before if timeout_s > 0 else [], timeout_s or AT_ONCE_S, tell, asked=asked)
    with ExitStack() as held:
        # First the processes that could start others; the locks keep another agent from starting meanwhile.
        end([process for part in parts for process in spawners_of(part)], 0.0)
        for part in parts:
            held.callback(os.close, lock_host(run_dir, part.host, TERM_S))
        for part in parts:
            late = end_all(part, TERM_S if timeout_s > 0 else 0.0)
            lines += [line for line in late if line not in lines]
            lines += sweep(run_dir, part.host)
        _check(run_dir, parts, unheard)
        record = latest_record(run_dir)
        if not record.over:
            # A run that had ended by itself before was not stopped.
            told = structs.replace(record, state="stopped", exit_code=STOPPED) if alive else as_it_ended(record)
            assert told.exit_code is not None, "a run that is over has an exit code"
            finish(record, Outcome(told.state, told.exit_code, told.failure))
    return lines


def _check(run_dir: Path, parts: Iterable[HostPart], unheard: Iterable[int]) -> None:
    """Raise DistflowError if something is left, or may be left on one of the hosts that were `unheard` before."""
    left = [line for part in parts for line in leftovers(part)]
    if left:
        raise DistflowError(f"{run_dir}: these could not be ended: {'; '.join(left)}")
    record = latest_record(run_dir)
    if record.over:
        return
    names = [entry.name for entry in record.hosts] or ["the machine it was launched on"]
    listed = () if _unlisted(record) else record.workers
    hosts = [entry.host for entry in listed if _goes_on_there(record, entry.name)]
    if hosts := hosts or [*unheard]:
        raise DistflowError(
            f"{run_dir}: processes on {_listed(names, hosts)} cannot be stopped from here: no agent answers "
            f"there — use `distflow stop {run_word(run_dir)}` on that host"
        )
    if busy := _answering(record) if _unlisted(record) else []:
        raise DistflowError(
            f"{run_dir}: the run still goes on on {_listed(names, busy)}, where agents were asked to stop it — "
            f"`distflow stop {run_word(run_dir)}` waits for them again, with --timeout 0 nothing is saved any more"
        )


def _listed(names: Sequence[str], hosts: Iterable[int]) -> str:
    return ", ".join(dict.fromkeys(names[host] for host in hosts))


def _unlisted(record: RunRecord) -> bool:
    """Whether only the agents know what runs: this machine is outside of the run, or no process is listed yet."""
    return is_outside(record) or (bool(record.hosts) and not record.pids)


def _answering(record: RunRecord) -> list[int]:
    """Hosts whose agent answers."""
    answers = ask_all(record, [agent_name(number) for number in record.numbers], "status", {}, ASK_S)
    return [number for number in record.numbers if answers[agent_name(number)] is not None]


def _unheard(record: RunRecord) -> list[int]:
    """Hosts of which it cannot be known whether the run goes on there: no process is listed, and no agent answers."""
    if record.over or not _unlisted(record):
        return []
    return sorted({*record.numbers} - {*_answering(record)})


def _goes_on_elsewhere(record: RunRecord) -> bool:
    if record.over:
        return False
    if _unlisted(record):
        return ask_any_agent(record, "status", {}, ASK_S) is not None
    return any(elsewhere(process) for process in record.pids.values())


def _goes_on_there(record: RunRecord, name: str) -> bool:
    return name in record.pids and elsewhere(record.pids[name])


def _ask(run_dir: Path, *, at_once: bool) -> bool:
    """Ask an agent to stop the run; returns whether one will. Else asks every reachable worker."""
    record = read_record(run_dir)
    body = {"reason": "distflow stop"}
    if ask_any_agent(record, "stop", {**body, "now": at_once}, ASK_S) is not None:
        return True
    agents = [record.pids.get(agent_name(number)) for number in record.numbers]
    signalled = [agent for agent in agents if signal_to(agent, signal.SIGTERM)]
    if not signalled:
        ask_all(record, [entry.name for entry in record.workers if entry.name in record.pids], "stop", body, ASK_S)
    return bool(signalled)


def _await_end(
    run_dir: Path, processes: list[psutil.Process], timeout_s: float, tell: Callable[[str], None], *, asked: bool
) -> None:
    deadline, progress = time.monotonic() + timeout_s, StopProgress()
    tell_at, told = time.monotonic() + TELL_AFTER_S, ""
    while time.monotonic() < deadline:
        left = await_end(processes, POLL_S)
        if not left:
            time.sleep(POLL_S)
        record = latest_record(run_dir)
        if record.over:
            # Only agents can be left, and they are exiting.
            await_end(left, TERM_S)
            return
        if not left and not (asked and _goes_on_elsewhere(record)):
            return
        if progress.moved(record):
            deadline = time.monotonic() + timeout_s
        now = time.monotonic()
        if now >= tell_at:
            waits = progress.line or f"waiting for {_awaited(record)}, {deadline - now:.0f} s at most"
            if waits != told:
                tell(waits)
            tell_at, told = now + (TELL_PROGRESS_S if progress.line else TELL_EVERY_S), waits


class StopProgress:
    """What a run that is stopping saves, as its agents report it, or its workers if no agent answers."""

    def __init__(self) -> None:
        self._look_at = 0.0
        self._last: tuple[int, int] | None = None
        self.line = ""
        """What is being saved, human-readable; empty: nothing has moved at the last look."""

    def moved(self, record: RunRecord) -> bool:
        """Whether more has been saved or collected since the last look; looks once a second at most."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_EVERY_S
        saved, collected, line = _saved(record)
        before, self._last = self._last, (saved, collected)
        moved = before is not None and before != self._last
        self.line = line if moved else ""
        return moved


def _saved(record: RunRecord) -> tuple[int, int, str]:
    """Bytes that were saved by workers, and collected from other hosts, so far; and that as text."""
    answer = ask_any_agent(record, "status", {}, ASK_S)
    if answer is None:
        rows = worker_rows(record, ASK_S)
        saved = sum(int(row["checkpointed"]) for row in rows if "checkpointed" in row)
    else:
        saved = int(answer["saved"])
        found = answer.get("collecting")
        if found is not None:
            got, total = int(found["bytes"]), int(found["total"])
            return saved, got, f"collecting {found['checkpoint']}: {got / GIB:.2f} of {total / GIB:.2f} GiB"
    return saved, 0, f"saving: {saved / GIB:.2f} GiB so far"


def _awaited(record: RunRecord) -> str:
    """The processes being waited for, and what they do meanwhile."""
    live = [name for name, process in record.pids.items() if elsewhere(process) or running(process)]
    rows = {row["name"]: row for row in worker_rows(record, TELL_AFTER_S) if row["name"] in live}
    told = [f"{name} ({row['state']}{_waits(row)})" for name, row in rows.items()]
    shown = told[:MOST_TOLD] + ([f"{len(told) - MOST_TOLD} more workers"] if len(told) > MOST_TOLD else [])
    return ", ".join(shown or [name for name in live if name not in rows] or ["remaining processes"])


def _waits(row: Row) -> str:
    return f", waits for {row['waits'][0]['name']}" if row.get("waits") else ""
