"""What the host agent does when a worker dies or somebody wants the run to end. No process, socket or clock in here.

    running ──training workers all left──▶ leaving ──all gone──▶ over: done
       ├──stop───────────────────────────▶ stopping ───────────▶ over: stopped
       └──a worker failed for good───────▶ failing ────────────▶ over: failed

Leaving, stopping and failing have a deadline: then SIGTERM, a little later SIGKILL. Example: rollout/1 is killed by
SIGKILL while running: the others are told `lost`, rollout/1 starts again as incarnation 1. trainer/0 is killed: the run
fails.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from distflow.launch.ending import KNOWN_CODES, STOPPED, Exit, Outcome
from distflow.launch.record import Failure, WorkerEntry

Phase = Literal["running", "leaving", "stopping", "failing", "over"]
GRACE_S = 5.0
"""From SIGTERM to SIGKILL; also what workers get to leave when no training worker is left to save anything."""
FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class Start:
    """Fork this worker."""

    worker: WorkerEntry
    incarnation: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Send to every live worker."""

    kind: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to one worker; `pid` is None if it has not been forked yet."""

    worker: str
    pid: int | None
    number: int


Action = Start | Tell | Signal


@dataclass(slots=True)
class Life:
    """Where one worker stands."""

    entry: WorkerEntry
    state: str = "starting"
    """starting, running, or ended."""
    pid: int | None = None
    incarnation: int = 0
    restarts: int = 0
    ending: Exit | None = None


class Supervisor:
    """`explain(worker, exit)` says why a worker failed."""

    def __init__(
        self, workers: Sequence[WorkerEntry], restarts: int, drain_s: float, explain: Callable[[str, Exit], Failure]
    ) -> None:
        self.lives = {entry.name: Life(entry) for entry in workers}
        self.phase: Phase = "running"
        self.outcome: Outcome | None = None
        self._restarts = restarts
        self._drain_s = drain_s
        self._explain = explain
        self._term_at = FOREVER
        self._kill_at = FOREVER
        self._at_once = False
        self._failure: Failure | None = None

    @property
    def all_started(self) -> bool:
        """Whether every worker has been forked."""
        return all(life.state != "starting" for life in self.lives.values())

    @property
    def deadline(self) -> float:
        """When `tick` has something to do; infinite while there is nothing to wait for."""
        return min(self._term_at, self._kill_at)

    def begin(self) -> list[Action]:
        """Start everybody."""
        return [Start(life.entry, 0) for life in self.lives.values()]

    def started(self, name: str, pid: int) -> list[Action]:
        """A worker was forked."""
        life = self.lives[name]
        life.state, life.pid = "running", pid
        return []

    def restart_unborn(self) -> list[Action]:
        """The nursery died: ask the new one for the workers that the old one had not forked yet."""
        return [Start(life.entry, life.incarnation) for life in self.lives.values() if life.state == "starting"]

    def give_up_unborn(self) -> None:
        """Nobody will fork the workers that have not been forked yet."""
        for life in self._living():
            if life.state == "starting":
                life.state, life.ending = "ended", Exit(None, signal.SIGKILL)

    def exited(self, name: str, ending: Exit, now: float) -> list[Action]:
        """A worker's process is gone."""
        life = self.lives[name]
        life.state, life.pid, life.ending = "ended", None, ending
        actions: list[Action] = []
        if self.phase == "running":
            actions = self._exited_while_running(life, ending, now)
        elif self._failure is None and self.phase == "stopping":
            self._failure = self._fault_in_stopping(life, ending)
        self._close_if_empty()
        return actions

    def fail(self, failure: Failure, now: float) -> list[Action]:
        """Something went wrong for good."""
        if self.phase in ("failing", "over"):
            return []
        self._failure = failure
        training = any(life.entry.trains for life in self._living())
        self._wind_up("failing", now, self._drain_s if training else GRACE_S)
        self._close_if_empty()
        return [Tell("stop", {"reason": f"{failure.worker} failed: {failure.message}"})]

    def stop(self, reason: str, now: float, *, at_once: bool = False) -> list[Action]:
        """Somebody wants the run to end; `at_once` does not wait for anything to be saved."""
        if self.phase in ("running", "leaving"):
            self._wind_up("stopping", now, self._drain_s)
        self._at_once = self._at_once or at_once
        if at_once:
            self._term_at = self._kill_at = now
            return self.tick(now)
        self._close_if_empty()
        return [Tell("stop", {"reason": reason})]

    def tick(self, now: float) -> list[Action]:
        """Lose patience when the time has come."""
        actions: list[Action] = []
        if now >= self._kill_at:
            actions = [Signal(life.entry.name, life.pid, signal.SIGKILL) for life in self._living()]
            self._term_at, self._kill_at = FOREVER, now + GRACE_S
            self.give_up_unborn()
        elif now >= self._term_at:
            actions = [Signal(life.entry.name, life.pid, signal.SIGTERM) for life in self._living() if life.pid]
            self._term_at = FOREVER
        self._close_if_empty()
        return actions

    def _living(self) -> list[Life]:
        return [life for life in self.lives.values() if life.state != "ended"]

    def _exited_while_running(self, life: Life, ending: Exit, now: float) -> list[Action]:
        name = life.entry.name
        if ending.code == STOPPED:
            return self.stop(f"{name} was stopped", now)
        if ending.code is not None and ending.code != 0:
            return self.fail(self._explain(name, ending), now)
        if ending.code == 0 and life.entry.trains:
            return self._trainer_left(now)
        lost = Tell("lost", {"worker": name, "incarnation": life.incarnation, "reason": str(ending)})
        if ending.code == 0:
            return [lost]
        if life.entry.trains or life.restarts >= self._restarts:
            return [lost, *self.fail(self._explain(name, ending), now)]
        life.restarts += 1
        life.incarnation += 1
        life.state = "starting"
        return [lost, Start(life.entry, life.incarnation)]

    def _trainer_left(self, now: float) -> list[Action]:
        if any(life.entry.trains for life in self._living()):
            return []
        self._wind_up("leaving", now, self._drain_s)
        # Most know it from the training workers themselves, but not one that is just starting.
        return [Tell("stop", {"reason": "training has ended"})]

    def _fault_in_stopping(self, life: Life, ending: Exit) -> Failure | None:
        """It could not stop in order (could not save, say): the run is stopped, and this is worth telling."""
        if ending.code in KNOWN_CODES:
            return self._explain(life.entry.name, ending)
        if ending.signal is None or not life.entry.trains or self._at_once:
            return None
        failure = self._explain(life.entry.name, ending)
        if self._term_at == FOREVER:
            late = f"{life.entry.name} did not save and leave within limits.drain_s ({self._drain_s:g} s) of the stop"
            failure = replace(failure, message=f"{late}: raise it for the next time. {failure.message}")
        return failure

    def _wind_up(self, phase: Phase, now: float, patience_s: float) -> None:
        self.phase = phase
        self._term_at = now + patience_s
        self._kill_at = self._term_at + GRACE_S

    def _close_if_empty(self) -> None:
        if self._living() or self.phase == "over":
            return
        if self.phase == "failing":
            assert self._failure is not None, "failing without a failure"
            self.outcome = Outcome("failed", self._failure.exit_code, self._failure)
        elif self.phase == "stopping":
            self.outcome = Outcome("stopped", STOPPED, self._failure)
        else:
            self.outcome = Outcome("done", 0)
        self.phase = "over"
        self._term_at = self._kill_at = FOREVER
