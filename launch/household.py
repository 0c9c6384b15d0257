"""The workers of one host as processes: started by the nursery, told, signalled, and seen to end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distflow.launch.ending import Exit, failure_file, log_file
from distflow.launch.nursery import end_group
from distflow.launch.nursery_line import NurseryLine
from distflow.launch.processes import mark
from distflow.launch.record import Failure, ProcessMark, RunRecord, agent_name, nursery_name
from distflow.launch.supervisor import Action, Signal, Start, Supervisor, Tell
from distflow.log import logger
from distflow.types import WorkerName

ENTRY = "distflow.runtime.main:run_worker"
PRELOAD = (
    "torch",
    "safetensors.torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "distflow.runtime.main",
)
"""What nearly every worker needs. None of it starts a thread or touches a device; the nursery checks the former."""
NURSERY_RESTARTS = 3
Send = Callable[[str, str, Mapping[str, Any]], object]
log = logger(__name__)


class Household:
    """Drives a Supervisor with processes and the clock. `entry` is what the workers' processes run."""

    def __init__(self, record: RunRecord, host: int, entry: str, core: Supervisor, send: Send) -> None:
        self._run_dir = record.path
        self._host = host
        self._entry = entry
        self._core = core
        self._send = send
        self._nursery_deaths = 0
        self.pids: dict[str, ProcessMark] = {}
        """Processes of this host by name, the nursery included."""
        self._nursery = self._open_nursery()

    @property
    def inputs(self) -> list[Any]:
        """For select: ready when there is something to `hear`."""
        return [self._nursery] if self._nursery.open else []

    def hear(self) -> None:
        """Take what the nursery says and who has ended."""
        self._hear_nursery()
        self._reap()

    def do(self, actions: Sequence[Action]) -> None:
        """Carry out what the Supervisor decided."""
        for action in actions:
            if isinstance(action, Start):
                self._fork(action)
            elif isinstance(action, Tell):
                self.tell(action)
            else:
                self._signal(action)

    def tell(self, what: Tell) -> None:
        """Send to one worker or to all that live; nobody is told of its own death."""
        for name, life in self._core.lives.items():
            itself = what.kind == "lost" and what.body["worker"] == name
            if life.state != "ended" and not itself and what.to in (None, name):
                self._send(name, what.kind, what.body)

    def dismiss(self) -> None:
        """The nursery is not needed any more; it ends when its last worker has."""
        self._nursery.dismiss()

    def _hear_nursery(self) -> None:
        for message in self._nursery.read():
            if "ready" in message:
                log.info("nursery is ready after %.2f s", message["ready"])
            elif "started" in message:
                self.pids[message["started"]] = mark(int(message["pid"]))
                self.do(self._core.started(message["started"], int(message["pid"])))
            elif "exited" in message:
                self._exited(message["exited"], Exit(message["code"], message["signal"]))
            elif "broken" in message:
                self._broken(message["broken"])

    def _exited(self, name: str, ending: Exit) -> None:
        log.info("%s ended with %s", name, ending)
        self.pids.pop(name, None)
        self.do(self._core.exited(name, ending, time.monotonic()))

    def _broken(self, reason: str) -> None:
        last = reason.strip().splitlines()[-1]
        message = f"the worker's libraries cannot be imported: {last}"
        where = str(log_file(self._run_dir, agent_name(self._host)))
        failure = Failure(nursery_name(self._host), 1, "ImportError", message, reason, where)
        self._core.give_up_unborn()
        self.do(self._core.fail(failure, time.monotonic()))

    def _reap(self) -> None:
        """Take the exit codes of our children: the nursery, and whoever lost its parent and came to us."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            names = [name for name, life in self._core.lives.items() if life.pid == found.si_pid]
            if names:
                end_group(found.si_pid)
            os.waitpid(found.si_pid, 0)
            by_itself = found.si_code == os.CLD_EXITED
            for name in names:
                self._exited(name, Exit(found.si_status) if by_itself else Exit(None, found.si_status))
            if found.si_pid == self._nursery.pid:
                self._nursery_died()

    def _nursery_died(self) -> None:
        self._hear_nursery()
        self.pids.pop(nursery_name(self._host), None)
        self._nursery_deaths += 1
        if self._core.winding_up:
            self._core.give_up_unborn()
            return
        if self._nursery_deaths > NURSERY_RESTARTS:
            self._broken(f"the nursery was killed {self._nursery_deaths} times")
            return
        log.warning("the nursery was killed; its workers go on, a new one is started")
        self._nursery = self._open_nursery()
        self.do(self._core.restart_unborn())

    def _fork(self, action: Start) -> None:
        name = action.worker.name
        failure_file(self._run_dir, name).unlink(missing_ok=True)
        document = self._run_dir / "workers" / f"{WorkerName.parse(name).file_stem}.yaml"
        log.info("starting %s, incarnation %d", name, action.incarnation)
        self._nursery.start(
            name,
            action.incarnation,
            document,
            log_file(self._run_dir, name),
            action.worker.threads,
            action.worker.python or sys.executable,
        )

    def _signal(self, action: Signal) -> None:
        if action.pid is None:
            return
        log.warning("sending %s to %s", signal.Signals(action.number).name, action.worker)
        try:
            os.kill(action.pid, action.number)
        except ProcessLookupError:
            # It ended meanwhile; the nursery's word about that is on its way.
            return

    def _open_nursery(self) -> NurseryLine:
        preload = PRELOAD if self._entry == ENTRY else ()
        line = NurseryLine(self._run_dir, self._entry, preload, self._host)
        self.pids[nursery_name(self._host)] = mark(line.pid)
        return line
