"""Named waits: every blocking wait of a worker says what for, from whom, since when, and ends by lack of progress.

The board's condition is the worker's one lock: the endpoint's thread changes state under it, then wakes who waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from distflow.errors import NoProgressError, RunStopped
from distflow.log import logger
from distflow.runtime.process_record import render, thread_stacks

T = TypeVar("T")

CHECK_EVERY_S = 0.5
"""How often a wait looks at progress when nothing wakes it."""
PATIENCE_S, REGAINED = 0.5, 0.02
"""So much longer the thread of an engine waits for episodes in all, and this share of the time that passes: where a
machine has too much to do, steps that compute nothing take longer, too, and their requests must enter the engine
together all the same."""
LONGEST_S = 1.0
"""What lies between two looks is something else if it takes longer."""

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait under way."""

    say: Callable[[], str]
    since: float
    look: Callable[[], tuple[str, ...]]
    held_up: Callable[[], str] = str

    @property
    def name(self) -> str:
        """Name what it waits for, as known now; and for whom the whole run does, if it does."""
        outside = self.held_up()
        return f"{self.say()}, while the run waits for {outside}," if outside else self.say()

    @property
    def peers(self) -> tuple[str, ...]:
        """The peers it waits for, as known now; none where it is not they who have something to do."""
        return () if self.held_up() else self.look()

    def describe(self, now: float) -> str:
        """Human-readable: `samples of training step 3 from rollout/0, rollout/1 for 2.1 s`."""
        source = f" from {', '.join(self.peers)}" if self.peers else ""
        return f"{self.name}{source} for {now - self.since:.1f} s"


class WaitBoard:
    """The waits of one worker, its lock, and the two ways all of them end early: a stop and a fault."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.current: Wait | None = None
        """The wait of the main thread."""
        self.held_up: Callable[[], str] = str
        """For which programs outside of the run its owners wait; "": for none. It is why everybody waits."""
        self._stop: str | None = None
        self._fault: BaseException | None = None

    def waits(self) -> list[dict[str, Any]]:
        """The waits under way, for `status`: `name`, `peers`, `seconds`, and all of that as one `description`."""
        wait, now = self.current, time.monotonic()
        if wait is None:
            return []
        about = {"name": wait.name, "peers": list(wait.peers), "seconds": round(now - wait.since, 3)}
        return [{**about, "description": wait.describe(now)}]

    @property
    def stopping(self) -> str | None:
        """Why the run is being stopped, if it is."""
        return self._stop

    @property
    def over(self) -> bool:
        """Whether a stop or a fault ends all waits."""
        return self._stop is not None or self._fault is not None

    def stop(self, reason: str) -> None:
        """End all waits with RunStopped."""
        with self.condition:
            self._stop = self._stop or reason
            self.condition.notify_all()

    def wake(self) -> None:
        """Have the wait that is under way look again; any thread may call this."""
        with self.condition:
            self.condition.notify_all()

    def fault(self, error: BaseException) -> None:
        """End all waits with this error; the first one counts."""
        with self.condition:
            self._fault = self._fault or error
            self.condition.notify_all()

    @property
    def failure(self) -> BaseException | None:
        """The fault that ends all waits, if there is one."""
        return self._fault

    def raise_if_over(self) -> None:
        """Raise the fault, or RunStopped, if there is one."""
        if self._fault is not None:
            raise self._fault
        if self._stop is not None:
            raise RunStopped(self._stop)

    def raise_fault(self) -> None:
        """Raise the fault, if there is one; a stop is handled where the replicas agree on it."""
        if self._fault is not None:
            raise self._fault

    @contextmanager
    def shown(self, name: str, peers: tuple[str, ...]) -> Iterator[None]:
        """Show a wait inside a library, which has its own deadline for it."""
        with self.condition:
            before, self.current = self.current, Wait(lambda: name, time.monotonic(), lambda: peers)
        try:
            yield
        finally:
            with self.condition:
                self.current = before

    def until(
        self,
        ready: Callable[[], T | None],
        *,
        name: str | Callable[[], str],
        peers: tuple[str, ...] | Callable[[], tuple[str, ...]],
        limit_s: float,
        progress: Callable[[], object],
        limit: str = "limits.no_progress_s",
        even_when_stopping: bool = False,
    ) -> T:
        """Block until `ready()` returns something other than None, and return it.

        `name` and `peers` may be functions, where what is waited for changes meanwhile.

        As long as `progress()` changes the wait goes on, however long it takes. Without a change for `limit_s` seconds
        (key `limit` of a recipe) it logs the stacks of all threads and raises NoProgressError. Faults end it at once,
        and so does a stop (RunStopped) unless `even_when_stopping`.
        """
        with self.condition:
            say, look = name if callable(name) else lambda: name, peers if callable(peers) else lambda: peers
            wait = Wait(say, time.monotonic(), look, self.held_up)
            last, changed_at = progress(), wait.since
            before, self.current = self.current, wait
            try:
                while True:
                    if self._fault is not None or not even_when_stopping:
                        self.raise_if_over()
                    found = ready()
                    if found is not None:
                        return found
                    self.condition.wait(min(CHECK_EVERY_S, limit_s))
                    now, current = time.monotonic(), progress()
                    if current != last:
                        last, changed_at = current, now
                    elif now - changed_at >= limit_s:
                        raise _no_progress(wait, now, limit_s, limit)
            finally:
                self.current = before


def _no_progress(wait: Wait, now: float, limit_s: float, limit: str) -> NoProgressError:
    log.error("no progress; stacks of this worker's threads:\n%s", render(thread_stacks()))
    return NoProgressError(
        f"waiting for {wait.describe(now)}: no sign of progress for {limit_s:g} s — see the logs "
        f"of {', '.join(wait.peers) or 'this worker'}, or raise {limit}"
    )


class ServingClock:
    """A clock that runs while it is looked at: not while a worker trains, loads weights or offloads its engine."""

    def __init__(self) -> None:
        self.now = 0.0
        self._last = time.monotonic()

    def tick(self, every_s: float, *, stands: bool) -> bool:
        """Let it go on, unless it `stands` now; returns whether that was not done for so long."""
        now = time.monotonic()
        if now < self._last + every_s:
            return False
        self.now += 0.0 if stands else min(now - self._last, LONGEST_S)
        self._last = now
        return True


class SettlePatience:
    """How long the thread of an engine waits for episodes: `settle_s` each time, and some more in all."""

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._left_s = PATIENCE_S
        self._waited_at = time.monotonic()

    def wait(self, changed: threading.Condition, settled: Callable[[], bool]) -> bool:
        """Wait until they have settled, with the condition held; returns whether they have."""
        began = time.monotonic()
        self._left_s = min(PATIENCE_S, self._left_s + (began - self._waited_at) * REGAINED)
        found = changed.wait_for(settled, self._settle_s + self._left_s)
        self._waited_at = time.monotonic()
        self._left_s -= max(0.0, self._waited_at - began - self._settle_s)
        return found
