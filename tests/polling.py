"""Waiting in tests: for what another thread or process does, as long as something works on it.

A machine that is busy with other tests may need ten times as long for anything. So a wait is not over at some time, but
when hardly anything has worked for so long: no other thread of this process, and none of the processes that it has
started. (What never ends although it works is ended by pytest's own time limit.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import psutil

WAIT_S = 20.0
WORKS = 0.1
"""Who gets less than this share of one processor does not work: it waits, too, and looks now and then."""
FIRST = 0.25
"""Most waits are short: work is looked at from this share of their limit on."""
STARTED: list[int] = []
"""Processes that the warm server (`warm_start.py`) has started for this one."""


class Patience:
    """Of one wait, which is over when hardly anything has worked for `limit_s` seconds."""

    def __init__(self, limit_s: float = WAIT_S) -> None:
        self._limit_s = limit_s
        self._look_at = time.monotonic() + FIRST * limit_s
        self._since: float | None = None
        self._worked = 0.0

    def left_s(self) -> float:
        """How long to wait before asking again."""
        return max(0.0, self._look_at - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether to give up."""
        if time.monotonic() < self._look_at:
            return False
        worked, before, first = worked_s(), self._worked, self._since is None
        if not first and abs(worked - before) < WORKS * (1 - FIRST) * self._limit_s:
            return True
        self._since, self._worked = time.monotonic(), worked
        self._look_at = self._since + (1 - FIRST) * self._limit_s
        return self._limit_s == 0


def worked_s() -> float:
    """Seconds of processors that other threads here and all processes that this one has started have used so far.

    Those of a process that has ended count for its parent once that has looked; what changes is what matters.
    """
    total = time.process_time() - time.thread_time()
    for process in _family():
        try:
            used = process.cpu_times()
        except (psutil.Error, OSError):
            continue
        total += used.user + used.system + used.children_user + used.children_system
    return total


def _family() -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for pid in (os.getpid(), *STARTED):
        try:
            first = psutil.Process(pid)
            found |= {first, *first.children(recursive=True)}
        except (psutil.Error, OSError):  # it has ended; or a test has taken all descriptors
            continue
    return {process for process in found if process.pid != os.getpid()}


def eventually(
    what: Callable[[], Any], name: str = "what was waited for", limit_s: float = WAIT_S, every_s: float = 0.01
) -> Any:
    """What `what` returns as soon as that is true; a failed test, which says the `name`, where nothing works on it."""
    patience = Patience(limit_s)
    while not (found := what()):
        assert not patience.over, f"{name}: waited in vain, and for {limit_s:g} s nothing has worked on it"
        time.sleep(every_s)
    return found
