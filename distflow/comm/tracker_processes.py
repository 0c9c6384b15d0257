"""The trackers of a run, as processes of the worker that starts them, watched by one thread of it.

    starting ──its report──▶ running ──finish──▶ ended
       ▲                        ├──hangs: killed──┐
       └──after a wait that grows─────── failed ◀─┴──ended by itself
What a tracker could not take is lost, counted, and told once until it works again. Rows wait for it in the files of the
run, so nothing has to be kept here; how many rows still wait at the end, its process has reported.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distflow.comm.kept_process import END_S, KeptProcess
from distflow.log import logger

FAILURES, DROPPED_ROWS = "failures", "dropped"
"""Metrics `trackers/NAME/…`: how often it failed or hung, and rows that it lost by that."""
COUNTS = "trackers/"
RETRY_S = (5.0, 15.0, 60.0, 300.0)
"""How long to wait before it is started again, when it has failed so many times in a row."""
TICK_S, FLUSH_S = 0.5, 60.0
"""How often they are looked after; how long they may take at the end of a run that nobody stops."""
BOOT_S = 60.0
"""How long its process may take until it first calls the tracker: it imports our code, maybe on a busy machine."""
WRONG = 2
"""Exit code of a tracker that cannot work whenever it is started."""
log = logger(__name__)


@dataclass(frozen=True, slots=True)
class TrackerStart:
    """How one tracker is started: by `entry`, a `module:function`, which is given the path of the file `start`."""

    name: str
    entry: str
    start: Path
    output: Path
    """What it prints."""
    title: str
    timeout_s: float
    """A call of it that takes longer hangs."""


@dataclass(slots=True)
class _Watched:
    start: TrackerStart
    process: KeptProcess | None = None
    busy: str = ""
    """What it does, in words; empty: it waits for rows."""
    since: float = 0.0
    """When it began that."""
    limit_s: float = 0.0
    """How long that may take."""
    rows: int = 0
    """Rows that are lost if it fails in that."""
    behind: int = 0
    """Rows that wait for it."""
    why: str = ""
    """What it said of its last failure."""
    failed: int = 0
    """Failures since it has last done something."""
    lost: int = 0
    last: str = ""
    """Why it failed or lost rows the last time."""
    retry_at: float = 0.0
    over: bool = False


class TrackerProcesses:
    """Runs them until `close`. `count` takes the name of a metric and what to add to it; any thread may call it.

    `tell` gets a line for each that has lost rows, or did not work at the end.
    """

    def __init__(
        self, starts: Iterable[TrackerStart], count: Callable[[str, float], None], tell: Callable[[str], None]
    ) -> None:
        self._all = [_Watched(start) for start in starts]
        self._count = count
        self._tell = tell
        self._finishing = self._ending = False
        self._limit_s = 0.0
        self._wake_r, self._wake_w = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="trackers", daemon=True)
        if self._all:
            self._thread.start()

    def close(self, limit_s: float) -> None:
        """Have all of them write what is left, for `limit_s` seconds at most; then end them."""
        if self._all:
            self._limit_s, self._finishing = limit_s, True
            os.write(self._wake_w, b"f")
            self._thread.join(limit_s)
            self._ending = True
            self._thread.join(2 * END_S)
        os.close(self._wake_w)
        os.close(self._wake_r)

    # -- the thread

    def _watch(self) -> None:
        while not (self._ending or all(one.over for one in self._all)):
            for one in self._all:
                self._look(one, time.monotonic())
            sources = [one.process.reports for one in self._all if one.process is not None]
            ready, _, _ = select.select([self._wake_r, *sources], [], [], TICK_S)
            if self._wake_r in ready:
                os.read(self._wake_r, 1)
                for process in (one.process for one in self._all if one.process is not None):
                    process.finish()
        for one in self._all:
            if one.process is not None:
                self._lose(one, one.behind + one.rows, f"it was not done {self._limit_s:g} s after the end of the run")
                one.process.close()
            if one.lost or one.failed:
                lost = f"; rows lost: {one.lost}" if one.lost else ""
                self._tell(f"tracker {one.start.name}: {one.last}{lost} (see {one.start.output})")

    def _look(self, one: _Watched, now: float) -> None:
        if one.over:
            return
        if one.process is None:
            self._start(one, now)
            return
        for line in one.process.read():
            self._hear(one, json.loads(line), now)
        if one.process.ended:
            self._ended(one, one.process, now)
        elif one.busy and now - one.since >= one.limit_s:
            limit = f"timeout_s={one.limit_s:g}" if one.limit_s == one.start.timeout_s else f"{one.limit_s:g} s"
            one.why = f"{one.busy} took longer than {limit}"
            one.process.kill()
            # It is not done with its helpers yet: that it has ended is seen later.
            one.since = now

    def _start(self, one: _Watched, now: float) -> None:
        if self._finishing:
            one.over = True
            if one.behind:
                self._lose(one, one.behind, "it did not work when the run ended")
        elif now >= one.retry_at:
            start = one.start
            one.busy, one.since, one.rows, one.why = "its start", now, 0, ""
            one.limit_s = max(BOOT_S, start.timeout_s)
            try:
                one.process = KeptProcess(start.entry, [str(start.start)], start.title, start.output)
            except OSError as error:
                one.why = str(error)
                self._failed(one, now)

    def _hear(self, one: _Watched, report: dict[str, Any], now: float) -> None:
        one.behind = report.get("behind", one.behind)
        one.limit_s = one.start.timeout_s
        one.busy, one.since, one.rows = report.get("busy", ""), now, report.get("rows", 0)
        if "why" in report:
            one.why = report["why"]
        if "lost" in report:
            self._trouble(one, report["lost"])
        elif report.get("done"):
            if one.failed:
                log.warning("tracker %s works again; rows lost: %d", one.start.name, one.lost)
            one.failed, one.why = 0, ""

    def _ended(self, one: _Watched, process: KeptProcess, now: float) -> None:
        code = process.code
        for line in process.read():
            self._hear(one, json.loads(line), now)
        process.close()
        one.process = None
        if code == 0 and self._finishing:
            one.over = True
            return
        one.why = one.why or f"its process ended with {code}{' in ' + one.busy if one.busy else ''}"
        one.over = code == WRONG
        self._failed(one, now)

    def _failed(self, one: _Watched, now: float) -> None:
        self._trouble(one, one.rows)
        one.retry_at = now + RETRY_S[min(one.failed, len(RETRY_S)) - 1]
        one.busy, one.rows = "", 0

    def _trouble(self, one: _Watched, rows: int) -> None:
        one.failed += 1
        one.last = one.why
        self._count(f"{COUNTS}{one.start.name}/{FAILURES}", 1)
        if one.failed == 1:
            after = "it is not started again" if one.over else "training goes on, and it is tried again"
            log.error("tracker %s: %s — %s (see %s)", one.start.name, one.why, after, one.start.output)
        self._lose(one, rows)

    def _lose(self, one: _Watched, rows: int, why: str = "") -> None:
        one.lost += rows
        if rows:
            self._count(f"{COUNTS}{one.start.name}/{DROPPED_ROWS}", rows)
        if why:
            one.last = why
            log.warning("tracker %s: %s; rows lost: %d (see %s)", one.start.name, why, one.lost, one.start.output)
