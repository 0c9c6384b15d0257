"""What the host agent does when a worker of its host dies, or the run is to end. No process, socket or clock in here.

    running ──training workers all left──▶ leaving ──all gone──▶ over: done
       ├──stop───────────────────────────▶ stopping ───────────▶ over: stopped
       └──a worker failed for good───────▶ failing ────────────▶ over: failed

Leaving, stopping and failing have a deadline, at which workers get SIGTERM, and SIGKILL a little later. It moves on as
long as any worker anywhere reads or writes more of a checkpoint. In a run on many hosts each agent decides about its
own workers; "training workers" and "all" above mean those on all hosts. A worker whose GPU failed counts as killed.
Example: rollout/1 is killed while running: the others are told `lost`, and rollout/1 starts again as incarnation 1.
trainer/0 is killed: the training pool is broken. All training workers, here and elsewhere, are ended, and restart once
the agents have agreed from which checkpoint (`renew`); without `renews` the run fails.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import structs

from distflow.cluster.cluster_view import Elsewhere
from distflow.cluster.host_report import Death, HostReport
from distflow.cluster.processes import FAULTY, STOPPED, Exit, Failure, Outcome
from distflow.cluster.term_vote import ELSEWHERE, SCALED
from distflow.launch.agent.start import RestartLimit
from distflow.launch.run.exit_status import AGAIN, KNOWN_CODES
from distflow.launch.run.record import WorkerEntry

Phase = Literal["running", "leaving", "stopping", "failing", "over"]
PHASES: Mapping[str, Phase] = {"leaving": "leaving", "stopping": "stopping", "failing": "failing"}
TELL_S = 1.0
"""How often other hosts are told at most how much has been saved."""
GRACE_S = 5.0
"""Between SIGTERM and SIGKILL; also the time to leave when no training worker is left to save anything."""
FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Fork this worker."""

    worker: WorkerEntry
    incarnation: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Send to one worker, or to every live one of this host."""

    kind: str
    body: Mapping[str, Any]
    to: str | None = None


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to one worker; `pid` is None if it has not been forked yet."""

    worker: str
    pid: int | None
    number: int


Action = StartWorker | Tell | Signal


@dataclass(slots=True)
class Life:
    """The state of one worker."""

    entry: WorkerEntry
    state: str = "starting"
    """starting, running, or ended."""
    pid: int | None = None
    incarnation: int = 0
    restarted: list[float] = field(default_factory=list)
    """When it was restarted after accidents, as far as that still counts."""
    ending: Exit | None = None
    checkpointed: int = 0
    """Bytes of checkpoints that its process has read or written, as far as it has told."""
    drained: bool = False
    """It is to leave, or has left, while the run goes on without it."""
    told: bool = False
    """Its current incarnation was told to drain."""
    deaths: list[Death] = field(default_factory=list)
    """The deaths of its former incarnations, for its peers."""

    @property
    def standing(self) -> str:
        """Its state for others: starting, running, draining, ended, or left."""
        if not self.drained:
            return self.state
        return "left" if self.state == "ended" else "draining"


class RestartPolicy:
    """Decides about the workers of one host. `explain(worker, exit)` tells why a worker failed; `unsaved()`, whether
    there are training steps that no checkpoint has."""

    def __init__(
        self,
        workers: Sequence[WorkerEntry],
        restarts: RestartLimit,
        drain_s: float,
        explain: Callable[[str, Exit], Failure],
        *,
        renews: bool = False,
        unsaved: Callable[[], bool] = lambda: True,
    ) -> None:
        self.lives = {entry.name: Life(entry) for entry in workers}
        self.phase: Phase = "running"
        self.course: Phase = "running"
        """The last phase before over."""
        self.reason = ""
        self.at_once = False
        self.failure: Failure | None = None
        self.elsewhere = Elsewhere()
        self.outcome: Outcome | None = None
        self.broken: str | None = None
        """Why the training workers of this host are to restart; None: they are not."""
        self.culprits: set[str] = set()
        """Training workers of this host that were killed in the current term, not by us."""
        self.term = 0
        """Number of the training workers' current term."""
        self.renews = renews
        """A killed training worker does not end the run."""
        self.asked_to_leave = False
        """Training workers were asked to save and leave, for the next term."""
        self._restarts = restarts
        self._drain_s = drain_s
        self._explain = explain
        self._unsaved = unsaved
        self.saved = 0
        """Bytes of checkpoints that workers of this host have read or written since the run is ending, for others."""
        self._saved = 0
        self._told_at = 0.0
        self._patience_s = 0.0
        self._term_at = FOREVER
        self._kill_at = FOREVER

    @property
    def all_started(self) -> bool:
        """Whether every worker has been forked."""
        return all(life.state != "starting" for life in self.lives.values())

    @property
    def deadline(self) -> float:
        """When `tick` has something to do; infinite: never."""
        return min(self._term_at, self._kill_at)

    @property
    def winding_up(self) -> bool:
        """Whether the run is ending."""
        return self.phase != "running"

    def start_unforked(self) -> list[Action]:
        """Start the workers that have not been forked yet, or whose fork server died before it could do so."""
        return [StartWorker(life.entry, life.incarnation) for life in self.lives.values() if life.state == "starting"]

    def resume(self, lives: dict[str, Life], report: HostReport, culprits: Collection[str], now: float) -> list[Action]:
        """Continue from where the previous agent was killed; repeats what it may not have told its workers."""
        self.lives = lives
        self.culprits, self.term = set(culprits), report.term.number
        self.broken = (report.term.reason or ELSEWHERE) if report.term.broken else None
        actions: list[Action] = [
            Tell("lost", {"worker": name, "incarnation": death.incarnation, "reason": death.reason})
            for name, life in lives.items()
            for death in life.deaths
        ]
        draining = [life for life in self._living() if life.told]
        actions += [Tell("drain", {"reason": "distflow scale"}, life.entry.name) for life in draining]
        if report.phase != "running":
            self.reason, self.failure = report.reason, report.failure
            self._wind_up(PHASES[report.phase], now, self._drain_s)
            actions += [Tell("stop", {"reason": report.reason or f"the run is {report.phase}"})]
        return actions + (self.stop(report.reason, now, at_once=True) if report.at_once else [])

    def started(self, name: str, pid: int) -> list[Action]:
        """A worker was forked."""
        life = self.lives[name]
        life.state, life.pid = "running", pid
        return self.break_up(self.broken) if self.broken and life.entry.trains else []

    def give_up_unforked(self) -> None:
        """Treat workers that have not been forked as killed: they will not be forked any more."""
        for life in self._living():
            if life.state == "starting":
                life.state, life.ending = "ended", Exit(None, signal.SIGKILL)

    def exited(self, name: str, ending: Exit, now: float) -> list[Action]:
        """A worker's process has ended."""
        life = self.lives[name]
        life.state, life.pid, life.ending = "ended", None, ending
        actions: list[Action] = []
        if self.phase == "running":
            actions = self._exited_while_running(life, ending, now)
        elif self.failure is None and self.phase == "stopping":
            self.failure = self._fault_in_stopping(life, ending)
        elif self._is_the_cause(life, ending):
            self.failure = self._explain(name, ending)
        self._close_if_empty()
        return actions

    @property
    def trains(self) -> bool:
        """Whether a training worker of this host is alive."""
        return any(life.entry.trains for life in self._living())

    def break_up(self, reason: str) -> list[Action]:
        """The training pool is to restart: kill its workers here, since nothing that they could save would count."""
        self.broken = self.broken or reason
        lives = [life for life in self._living() if life.entry.trains]
        return [Signal(life.entry.name, life.pid, signal.SIGKILL) for life in lives if life.pid is not None]

    def renew(self, term: int, members: Collection[str], joining: Sequence[WorkerEntry] = ()) -> list[Action]:
        """Start the training workers of this host that are `members` of the new term; the former term is over.

        `joining`: those that were none before. The other training workers have left. Generating workers that had left
        because training was over are needed again.
        """
        self.broken, self.term, self.asked_to_leave = None, term, False
        self.culprits.clear()
        for entry in joining:
            self.lives.setdefault(entry.name, Life(entry, state="ended", incarnation=-1)).entry = entry
        trainers = [life for life in self.lives.values() if life.entry.trains]
        for life in trainers:
            life.drained = life.entry.name not in members
        left = [life for life in self.lives.values() if not life.entry.trains and life.state == "ended"]
        return [action for life in (*trainers, *left) if not life.drained for action in self._again(life)]

    def fail(self, failure: Failure, now: float) -> list[Action]:
        """Something failed that cannot be recovered."""
        if self.phase in ("failing", "over"):
            return []
        self.failure = failure
        self._wind_up("failing", now, self._drain_s if self._training() else GRACE_S)
        self._close_if_empty()
        return [Tell("stop", {"reason": f"{failure.worker} failed: {failure.message}"})]

    def stop(self, reason: str, now: float, *, at_once: bool = False) -> list[Action]:
        """End the run on request; `at_once`: without waiting for anything to be saved."""
        if self.phase in ("running", "leaving"):
            self._wind_up("stopping", now, self._drain_s)
            self.reason = reason
        self.at_once = self.at_once or at_once
        if at_once:
            self._term_at = self._kill_at = now
            return self.tick(now)
        self._close_if_empty()
        return [Tell("stop", {"reason": reason})]

    def heard(self, elsewhere: Elsewhere, now: float) -> list[Action]:
        """The state of the workers on other hosts has changed."""
        if elsewhere.saved != self.elsewhere.saved:
            self._go_on(now)
        self.elsewhere = elsewhere
        actions = self._leave_if_trained(now) if self.phase == "running" else []
        self._close_if_empty()
        return actions

    def checkpointed(self, name: str, amount: int, now: float) -> None:
        """A worker has read or written so many bytes of checkpoints so far: if it is ending, it gets more time."""
        life = self.lives.get(name)
        if life is None or life.checkpointed == amount:
            return
        self._saved += max(0, amount - life.checkpointed) if self.winding_up else 0
        life.checkpointed = amount
        self._go_on(now)

    def grow(self, entry: WorkerEntry) -> list[Action]:
        """Start a worker that is new or has left. One that is still draining restarts when it is done."""
        if entry.name not in self.lives:
            self.lives[entry.name] = Life(entry)
            return [StartWorker(entry, 0)]
        life = self.lives[entry.name]
        life.entry, life.drained = entry, False
        return self._again(life) if life.state == "ended" else []

    def shrink(self, name: str) -> list[Action]:
        """Tell a worker to hand back its leases and leave for good."""
        life = self.lives[name]
        if life.drained or life.state == "ended":
            return []
        life.drained = life.told = True
        return [Tell("drain", {"reason": "distflow scale"}, name)]

    def tick(self, now: float) -> list[Action]:
        """Send SIGTERM or SIGKILL when the deadline has passed."""
        actions: list[Action] = []
        if now - self._told_at >= TELL_S:
            self.saved, self._told_at = self._saved, now
        if now >= self._kill_at:
            actions = [Signal(life.entry.name, life.pid, signal.SIGKILL) for life in self._living()]
            self._term_at, self._kill_at = FOREVER, now + GRACE_S
            self.give_up_unforked()
        elif now >= self._term_at:
            actions = [Signal(life.entry.name, life.pid, signal.SIGTERM) for life in self._living() if life.pid]
            self._term_at = FOREVER
        self._close_if_empty()
        return actions

    def _living(self) -> list[Life]:
        return [life for life in self.lives.values() if life.state != "ended"]

    def _training(self) -> bool:
        return self.elsewhere.training or any(life.entry.trains for life in self._living())

    def _again(self, life: Life) -> list[Action]:
        life.incarnation += 1
        life.state, life.told, life.checkpointed = "starting", False, 0
        return [StartWorker(life.entry, life.incarnation)]

    def _exited_while_running(self, life: Life, ending: Exit, now: float) -> list[Action]:
        name = life.entry.name
        if life.entry.trains and self.renews and (self.broken or ending.accident or ending.code == AGAIN):
            lost = _died(life, ending)
            if self.broken is None and ending.accident:
                self.culprits.add(name)
            leaves = ending.code == AGAIN and self.asked_to_leave
            return [lost, *self.break_up(SCALED if leaves else f"{name} was ended by {ending}")]
        if ending.code == STOPPED and not life.told:
            return self.stop(f"{name} was stopped", now)
        if not ending.accident and ending.code not in (0, STOPPED):
            return self.fail(self._explain(name, ending), now)
        if ending.code == 0 and life.entry.trains:
            return self._leave_if_trained(now)
        lost = _died(life, ending)
        if life.told:
            # If it is wanted again by now, this does not count as a restart after an accident.
            return [lost] if life.drained else [lost, *self._again(life)]
        if ending.code == 0:
            # It may have left because training was over in a former term, before that term was broken.
            return [lost, *(self._again(life) if ending.term is not None and ending.term < self.term else [])]
        if life.entry.trains:
            return [lost, *self.fail(self._explain(name, ending), now)]
        again = self._restarts.take(life.restarted, now)
        return [lost, *(self._again(life) if again else self.fail(self._too_often(name, ending), now))]

    def _too_often(self, name: str, ending: Exit) -> Failure:
        limit, failure = self._restarts, self._explain(name, ending)
        often = f"it had been restarted {limit.count} times within {limit.window_s:g} s"
        keys = "(limits.restarts, limits.restart_window_s)"
        return structs.replace(failure, message=f"{failure.message}; {often} {keys}")

    def _leave_if_trained(self, now: float) -> list[Action]:
        if self._training() or self.broken:
            return []
        self._wind_up("leaving", now, self._drain_s)
        # Most are told by the training workers themselves, but not those that are just starting.
        return [Tell("stop", {"reason": "training has ended"})]

    def _is_the_cause(self, life: Life, ending: Exit) -> bool:
        """Whether this worker's death, not by us, is why another training worker reported a failure."""
        told = None if self.failure is None else self.lives.get(self.failure.worker)
        lost = told is not None and told.ending is not None and told.ending.code == AGAIN
        return lost and life.entry.trains and ending.code is None and self._term_at != FOREVER

    def _fault_in_stopping(self, life: Life, ending: Exit) -> Failure | None:
        """Why a worker could not stop properly (it could not save, say): worth reporting although the run stops."""
        if ending.code in (*KNOWN_CODES, FAULTY):
            return self._explain(life.entry.name, ending)
        if ending.code is not None or not life.entry.trains or self.at_once or not self._unsaved():
            return None
        failure = self._explain(life.entry.name, ending)
        if self._term_at == FOREVER:
            late = (
                f"{life.entry.name} did not save within limits.drain_s ({self._drain_s:g} s without progress), which a "
                "micro-batch or a file may take longer than"
            )
            failure = structs.replace(failure, message=f"{late} — increase it for the next run. {failure.message}")
        return failure

    def _wind_up(self, phase: Phase, now: float, patience_s: float) -> None:
        self.phase = self.course = phase
        self._patience_s = patience_s
        self._term_at = now + patience_s
        self._kill_at = self._term_at + GRACE_S

    def _go_on(self, now: float) -> None:
        """Something is being saved: move the deadline on, unless it has passed or everything is to end at once."""
        if self.winding_up and not self.at_once and self._term_at != FOREVER:
            self._wind_up(self.phase, now, self._patience_s)

    def _close_if_empty(self) -> None:
        if self._living() or self.elsewhere.living or self.phase == "over":
            return
        if self.phase == "running" and self.broken:
            return
        if self.phase == "failing":
            assert self.failure is not None, "failing without a failure"
            self.outcome = Outcome("failed", self.failure.exit_code, self.failure)
        elif self.phase == "stopping":
            self.outcome = Outcome("stopped", STOPPED, self.failure)
        else:
            self.outcome = Outcome("done", 0)
        self.phase = "over"
        self._term_at = self._kill_at = FOREVER


def _died(life: Life, ending: Exit) -> Tell:
    """Note the death of a worker's incarnation, for its peers."""
    life.deaths.append(Death(life.incarnation, str(ending), life.entry.gpus if ending.code == FAULTY else ()))
    return Tell("lost", {"worker": life.entry.name, "incarnation": life.incarnation, "reason": str(ending)})
