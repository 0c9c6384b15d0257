"""The monitor of a run, for `launch` and `watch`: it polls the run and shows its status until it is over."""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path

from distflow.launch.observe.alerts import WINDOW, Alerts, where_time_went
from distflow.launch.observe.file_sync import refresh
from distflow.launch.observe.progress import REWARD, Display, RunStatus
from distflow.launch.observe.run_client import Row, worker_rows
from distflow.launch.run.metrics_merge import MetricsReader
from distflow.launch.run.record import RunRecord
from distflow.types import WorkerName

SECONDS, REPEATED = "recovery/seconds/max", "recovery/repeated_steps/max"
"""Metrics of the first training step of a term (`distflow/runtime/metrics.py`)."""

ASK_EVERY_S = 2.0
ANSWER_S = 0.5
TREND_STEPS = 400
"""Training steps whose rewards are kept for the page: more than the columns of a terminal."""
PACE_STEPS, LEAST_PACE = 50, 3
"""How many observed training steps the remaining time is estimated from, at most and at least."""
FETCH_EVERY_S = 2.0
"""How often metrics are fetched from hosts that do not share the run folder."""


class StatusReader:
    """Reads the status of a run from its metrics and workers, and displays what happens only once."""

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
        """When training steps were first seen, by number."""
        self._back = -1
        """The last term whose recovery time was shown."""

    def read(self, record: RunRecord) -> RunStatus:
        """The status now, as of the last training step that all training workers have written."""
        if record.hosts and time.monotonic() >= self._fetch_at:
            refresh(self._run_dir, ("metrics",))
            self._fetch_at = time.monotonic() + FETCH_EVERY_S
        if record.renewed != self._renewed:
            self._renewed = record.renewed
            self._display.say(record.renewed)
        if record.waits_for != self._waits_for:
            self._waits_for = record.waits_for
            if record.waits_for:
                self._display.say(f"the training workers wait for {record.waits_for}")
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
            # Several steps may be done at the first look; the first of them is always shown.
            self._seen_first = True
            first = self._metrics.first_step(record.term)
            self._display.show(RunStatus(record, first, self._metrics.step(first)))
        verdict = where_time_went(self._metrics, step, WINDOW)
        left_s = self._left_s(record, step)
        return RunStatus(record, step, self._metrics.step(step), verdict, self._rows, self._rewards, left_s)

    def _left_s(self, record: RunRecord, step: int) -> float | None:
        """Remaining seconds at the pace of the last training steps; None: not known yet."""
        now = time.monotonic()
        if self._pace and step < self._pace[-1][1]:
            # Training workers have restarted.
            self._pace.clear()
        if not self._pace or step > self._pace[-1][1]:
            self._pace.append((now, step))
        (begin, first), (end, last) = self._pace[0], self._pace[-1]
        if len(self._pace) < LEAST_PACE:
            return None
        return max(0.0, (record.training_steps - step) * (end - begin) / (last - first) - (now - end))

    def _ask(self, record: RunRecord) -> None:
        if record.state == "running" and time.monotonic() - self._asked_at >= ASK_EVERY_S:
            self._rows = worker_rows(record, ANSWER_S)
            self._asked_at = time.monotonic()
            told = (
                self._alerts.of_workers(self._rows),
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


class Monitor:
    """Shows one run until it is over, without affecting it."""

    def __init__(self, run_dir: Path, display: Display) -> None:
        self._display = display
        self._status = StatusReader(run_dir, display)
        self._interrupts = Interrupts(display)

    def watch(
        self,
        look: Callable[[], RunRecord],
        pass_on: Callable[[RunRecord, bool | None], None] | None = None,
        *,
        poll_s: float,
        until_running: bool = False,
    ) -> RunRecord:
        """Show the run until it is over (or until its workers run); returns the last record.

        `look` returns the current record. `pass_on` is called after each look with None or, once after each interrupt,
        with whether everything is to end at once. Without it, an interrupt raises KeyboardInterrupt as usual.
        """
        with self._interrupts.heard() if pass_on is not None else nullcontext(), self._display:
            while True:
                record = look()
                if record.over or (until_running and record.state == "running"):
                    self._display.finish(self._status.read(record))
                    return record
                self._display.show(self._status.read(record))
                if pass_on is not None:
                    pass_on(record, self._interrupts.news())
                time.sleep(poll_s)


class Interrupts:
    """Counts Ctrl-C and SIGTERM, which are meant for the run, within the context `heard`."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._count = 0
        self._passed_on = 0

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Count signals in this context; their former handlers are restored afterwards."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

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
