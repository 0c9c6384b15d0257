"""The monitor of a run, for `launch` and `watch`: shows the status of the run until its end.

For `launch` it also passes on Ctrl-C and keeps the agent of this machine alive. The run does not depend on it.
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from msgspec import structs

from distflow.cluster.processes import agent_name
from distflow.errors import UserError
from distflow.launch.deploy.multi_host import record_by_ssh
from distflow.launch.deploy.stop_run import StopProgress, stop_run
from distflow.launch.observe.alerts import WINDOW, Alerts, where_time_went
from distflow.launch.observe.file_sync import TELL_EVERY_S, is_outside, record_of_agents, refresh, told
from distflow.launch.observe.progress import REWARD, Display, RunStatus
from distflow.launch.observe.run_client import Row, ask_all, ask_any_agent, without_agents, worker_rows
from distflow.launch.run.exit_status import as_it_ended
from distflow.launch.run.process_table import is_lost, signal_to
from distflow.launch.run.record import AGENT, RunRecord, read_record
from distflow.metrics.merge import MetricsReader
from distflow.types import WorkerName

SECONDS, REPEATED = "recovery/seconds/max", "recovery/repeated_steps/max"
"""Metrics of the first training step of a term (`distflow/runtime/metrics.py`)."""

POLL_S = 0.2
ASK_EVERY_S = 2.0
ROWS_S, AGENT_S, STOP_S = 0.5, 2.0, 1.0
"""How long to wait for the status of workers, for that of an agent, and for agents to confirm a stop."""
STOP_MARGIN_S = 20.0
"""Beyond `limits.drain_s` without progress: what the agent needs for SIGTERM, SIGKILL and cleaning up."""
UNHEARD_S = 10.0
"""How long no agent answers before `launch` says so: at the end of a run they leave before its record is here."""
UNREACHED_S = 20.0
"""How long `watch` waits for an answer from any agent of a run on other hosts."""
TREND_STEPS = 400
"""Training steps whose rewards are kept for the page: more than the columns of a terminal."""
PACE_STEPS, LEAST_PACE = 50, 3
"""How many observed training steps the remaining time is estimated from, at most and at least."""
FETCH_EVERY_S = 2.0
"""How often metrics are fetched from hosts that do not share the run folder."""

NO_AGENTS: Mapping[int, str] = {}


class StatusReader:
    """Reads the status of a run from its metrics and workers, and displays each event once."""

    def __init__(self, run_dir: Path, display: Display) -> None:
        self._run_dir = run_dir
        self._display = display
        self._metrics = MetricsReader(run_dir)
        self._fetch_at = 0.0
        self._seen_first = False
        self._renewed = self._waits_for = ""
        self._rows: list[Row] = []
        self._asked_at = 0.0
        self._alerts = Alerts()
        self._alerted = 0
        """The last training step that was checked for warnings."""
        self._rewards: list[float] = []
        self._pace: deque[tuple[float, int]] = deque(maxlen=PACE_STEPS)
        """When training steps of a term were first seen, by number."""
        self._paced = -1
        """The term that they are of."""
        self._back = -1
        """The last term whose recovery time was shown."""

    def read(self, record: RunRecord) -> RunStatus:
        """The status now, as of the last training step that all training workers have written."""
        if record.hosts and time.monotonic() >= self._fetch_at:
            refresh(self._run_dir, ("metrics",), "metrics")
            self._fetch_at = time.monotonic() + FETCH_EVERY_S
        if record.renewed != self._renewed:
            self._renewed = record.renewed
            self._display.say(record.renewed)
        if record.waits_for != self._waits_for:
            self._waits_for = record.waits_for
            if record.waits_for:
                self._display.say(f"the training workers wait for {record.waits_for}")
        for line in self._alerts.of_processes(record):
            self._display.say(line)
        self._ask(record)
        self._metrics.read()
        trainers = [WorkerName.parse(entry.name).file_stem for entry in record.workers if entry.trains]
        step = self._metrics.last_step(trainers, record.term)
        if step and record.renewed and record.term != self._back:
            self._back = record.term
            self._show_recovery(record.term)
        if not step:
            return RunStatus(record, 0, {}, rows=self._rows)
        self._check_steps(record.term, step)
        if not self._seen_first:
            # Several steps may be done at the first read; the first of them is always shown.
            self._seen_first = True
            first = self._metrics.first_step(record.term)
            self._display.show(RunStatus(record, first, self._metrics.step(first)))
        verdict = where_time_went(self._metrics, step, WINDOW)
        left_s = self._left_s(record, step)
        return RunStatus(record, step, self._metrics.step(step), verdict, self._rows, self._rewards, left_s)

    def _left_s(self, record: RunRecord, step: int) -> float | None:
        """Remaining seconds at the pace of the last training steps; None: not known yet."""
        now = time.monotonic()
        if record.term != self._paced:
            # The training workers have restarted, which is no part of their pace.
            self._paced = record.term
            self._pace.clear()
        if not self._pace or step > self._pace[-1][1]:
            self._pace.append((now, step))
        (begin, first), (end, last) = self._pace[0], self._pace[-1]
        if len(self._pace) < LEAST_PACE:
            return None
        return max(0.0, (record.training_steps - step) * (end - begin) / (last - first) - (now - end))

    def _ask(self, record: RunRecord) -> None:
        if record.state == "running" and time.monotonic() - self._asked_at >= ASK_EVERY_S:
            self._rows = worker_rows(record, ROWS_S)
            self._asked_at = time.monotonic()
            told = (
                self._alerts.of_workers(self._rows),
                self._alerts.of_late_rewards(self._rows),
                self._alerts.of_trackers(self._rows),
                self._alerts.of_copies(self._rows),
                self._alerts.of_outside(self._rows),
                self._alerts.of_disk(self._rows, record.run_dir, self._asked_at),
            )
            for line in chain(*told):
                self._display.say(line)

    def _check_steps(self, term: int, last: int) -> None:
        """Show warnings about training steps up to `last` that have not been checked yet."""
        begin = self._alerted + 1 if self._alerted else self._metrics.first_step(term)
        for step in range(begin, last + 1):
            metrics = self._metrics.step(step)
            self._rewards = [*self._rewards[1 - TREND_STEPS :], metrics.get(REWARD, math.nan)]
            for line in self._alerts.of_step(step, metrics):
                self._display.say(line)
        self._alerted = max(self._alerted, last)

    def _show_recovery(self, term: int) -> None:
        first = self._metrics.first_step(term)
        found = self._metrics.step(first)
        if SECONDS in found and REPEATED in found:
            cost = f"training step {first} was done {found[SECONDS]:.1f} s after that"
            self._display.say(f"{cost}; training steps repeated: {found[REPEATED]:.0f}")


class Interrupts:
    """Counts Ctrl-C and SIGTERM, which are meant for the run, within the context `heard`, or earlier from `hear` on."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._count = 0
        self._passed_on = 0
        self._before: dict[int, Any] = {}

    def hear(self) -> None:
        """Count signals from now on, until the context `heard` has been left."""
        if not self._before:
            self._before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Count signals in this context; their former handlers are restored afterwards."""
        self.hear()
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before = {}

    def news(self) -> bool | None:
        """None if there was no new signal; else whether everything is to end at once. Shows it on the display."""
        if self._count <= self._passed_on:
            return None
        self._passed_on = self._count
        at_once = self._passed_on > 1
        how = "ending everything at once" if at_once else "draining and saving; once more ends everything at once"
        self._display.say(f"interrupted — {how}")
        return at_once

    def _on_signal(self, number: int, frame: object) -> None:
        self._count += 1


class AgentHere(Protocol):
    """The agent of a run on this machine only, which the monitor starts and keeps alive."""

    def look(self) -> RunRecord:
        """The current record, after starting or restarting the agent if needed."""
        ...

    def runs(self) -> bool:
        """Whether an agent runs."""
        ...

    def await_leave(self) -> None:
        """Wait until it has exited."""
        ...


class Monitor:
    """Shows one run until it is over.

    `agent`: the agent of a run on this machine only, which we start. `addresses`: of the agents we started on hosts, by
    host number. `interrupts`: may already be counting.
    """

    def __init__(
        self,
        run_dir: Path,
        display: Display,
        agent: AgentHere | None = None,
        *,
        addresses: Mapping[int, str] = NO_AGENTS,
        interrupts: Interrupts | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._display = display
        self._agent = agent
        self._addresses = {agent_name(number): address for number, address in addresses.items()}
        self._status = StatusReader(run_dir, display)
        self._interrupts = interrupts or Interrupts(display)
        self._asked_at = -math.inf
        self._heard_at = time.monotonic()
        self._told = ""
        """The state that an agent reported last."""
        self._collecting_at = -math.inf
        self._silent = False
        self._give_up_at = math.inf
        self._progress = StopProgress()
        self._stop_wanted: bool | None = None
        """An interrupt still to be passed on: whether everything is to end at once; None: there is none."""

    def watch(self, *, until_running: bool = False) -> RunRecord:
        """Show the run until it is over, or until its workers run; returns the last record.

        Ctrl-C is meant for the run: the first one stops it, the second one ends it at once.
        """
        with self._interrupts.heard(), self._display:
            while not self._show(record := self._look(), until_running=until_running):
                self._pass_on(record, self._interrupts.news())
                time.sleep(POLL_S)
        return record

    def only_look(self, timeout_s: float = math.inf) -> RunRecord:
        """Show the run until it is over, or for so long; returns its last record.

        Raises KeyboardInterrupt on Ctrl-C, and UserError when no agent of a run on other hosts can be reached.
        """
        deadline = time.monotonic() + timeout_s
        with self._display:
            while not self._show(record := self._ask_agents(self._lost_or_unreached)):
                if (left := deadline - time.monotonic()) <= 0:
                    break
                time.sleep(min(POLL_S, left))
        return record

    def _show(self, record: RunRecord, *, until_running: bool = False) -> bool:
        """Show the status of the run; returns whether there is nothing more to wait for."""
        ended = record.over or (until_running and record.state == "running")
        (self._display.finish if ended else self._display.show)(self._status.read(record))
        return ended

    def _look(self) -> RunRecord:
        if self._agent is None:
            return self._ask_agents(self._unheard)
        record = self._agent.look()
        if record.over:
            self._agent.await_leave()
        return record

    def _ask_agents(self, unanswered: Callable[[RunRecord], RunRecord]) -> RunRecord:
        """The record on disk, with the state reported by an agent; from `unanswered` if none answers."""
        record, now = read_record(self._run_dir), time.monotonic()
        if record.over:
            return record
        if now - self._asked_at >= ASK_EVERY_S:
            self._asked_at = now
            answer = ask_any_agent(self._reachable(record), "status", {}, AGENT_S)
            if answer is None:
                return unanswered(record)
            self._heard_at, self._told, self._silent = now, str(answer["state"]), False
            if "collecting" in answer and now - self._collecting_at >= TELL_EVERY_S:
                self._collecting_at = now
                self._display.say(told(answer["collecting"]))
            if is_outside(record):
                record = record_of_agents(self._reachable(record)) or record
        return structs.replace(record, state="running") if self._told == "running" else record

    def _reachable(self, record: RunRecord) -> RunRecord:
        """The record, with addresses of agents filled in that it does not have yet."""
        known = {name: address for name, address in record.roster.items() if address}
        return structs.replace(record, roster={**self._addresses, **known})

    def _unheard(self, record: RunRecord) -> RunRecord:
        # Agents exit when the run is over; their record says how it ended.
        found = record_by_ssh(self._run_dir) or record
        if not found.over and not self._silent and time.monotonic() - self._heard_at > UNHEARD_S:
            self._silent = True
            self._display.say("no host agent answers; the workers continue without them")
        return found

    def _lost_or_unreached(self, record: RunRecord) -> RunRecord:
        if is_lost(record):
            record = record_by_ssh(self._run_dir) or read_record(self._run_dir)
            return record if record.over else as_it_ended(record)
        if (found := record_by_ssh(self._run_dir)) is not None and found.over:
            return found
        if record.hosts and time.monotonic() - self._heard_at > UNREACHED_S:
            raise UserError(f"{self._run_dir}: no host agent of this run can be reached from here")
        if not self._silent and (line := without_agents(record)):
            self._silent = True
            self._display.say(line)
        return record

    def _pass_on(self, record: RunRecord, at_once: bool | None) -> None:
        if at_once is not None:
            self._give_up_at = time.monotonic() + (STOP_MARGIN_S if at_once else record.drain_s + STOP_MARGIN_S)
            self._stop_wanted = at_once
        if self._stop_wanted is not None and self._ask_to_stop(record, at_once=self._stop_wanted):
            self._stop_wanted = None
        if self._agent is None or self._give_up_at == math.inf:
            return
        if self._progress.moved(record):
            self._give_up_at = max(self._give_up_at, time.monotonic() + record.drain_s + STOP_MARGIN_S)
        if time.monotonic() > self._give_up_at:
            self._give_up_at = math.inf
            stop_run(self._run_dir, timeout_s=0.0)

    def _ask_to_stop(self, record: RunRecord, *, at_once: bool) -> bool:
        """Ask for a stop; returns whether it is under way. Raises KeyboardInterrupt if no agent can be asked."""
        # All of them: one may have lost contact with the others.
        names, body = [agent_name(number) for number in record.numbers], {"reason": "interrupted", "now": at_once}
        answers = ask_all(self._reachable(record), names, "stop", body, STOP_S)
        if any(answer is not None for answer in answers.values()):
            return True
        if self._agent is None:
            # They may have left in order after the first interrupt; then it is in their record how the run ended.
            if at_once and ((ended := record_by_ssh(self._run_dir)) is None or not ended.over):
                raise KeyboardInterrupt
            return at_once
        if signal_to(record.pids.get(AGENT), signal.SIGTERM):
            return True
        if self._agent.runs():
            return False
        stop_run(self._run_dir, timeout_s=0.0 if at_once else record.drain_s)
        return True
