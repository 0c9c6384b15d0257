"""The host agent: one light process a host that starts the workers, restarts them, tells the others, and cleans up.

`python -m distflow.launch.agent RUN_DIR [--entry module:function]`. Workers need it for none of their work: when it is
killed, they finish, and the nursery writes down how.
"""

from __future__ import annotations

import ctypes
import os
import queue
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

from distflow.comm.addresses import ensure_socket_dir
from distflow.comm.endpoint import Endpoint
from distflow.comm.message import Message
from distflow.launch.ending import Exit, explain, failure_file, finish, log_file
from distflow.launch.nursery import end_group
from distflow.launch.nursery_line import NurseryLine
from distflow.launch.processes import end_all, mark, sweep
from distflow.launch.record import AGENT, NURSERY, Failure, ProcessMark, RunRecord, RunState, read_record
from distflow.launch.supervisor import Action, Signal, Start, Supervisor, Tell
from distflow.log import configure, logger
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
LINGER_S = 0.1
_PR_SET_CHILD_SUBREAPER = 36
log = logger(__name__)


class Agent:
    """Drives a Supervisor with processes, sockets and the clock."""

    def __init__(self, record: RunRecord, entry: str) -> None:
        self._record = record
        self._entry = entry
        self._run_dir = record.path
        self._core = Supervisor(record.workers, record.restarts, record.drain_s, self._explain)
        self._inbox: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._terminated = 0
        self._heard = 0
        self._nursery_deaths = 0
        self._pids: dict[str, ProcessMark] = {}
        self._nursery = self._open_nursery()
        self._endpoint = Endpoint(AGENT, record.term, record.roster)

    def run(self) -> int:
        """Until the run is over; returns its exit code."""
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_terminate)
        ensure_socket_dir(self._run_dir)
        self._endpoint.start(self._on_message, on_fault=self._on_message)
        self._pids[AGENT] = mark(os.getpid())
        self._save()
        self._do(self._core.begin())
        while self._core.outcome is None:
            self._wait()
            self._hear_nursery()
            self._reap()
            self._hear_messages()
            self._hear_signals()
            self._do(self._core.tick(time.monotonic()))
            self._save()
        return self._close()

    # -- what comes in

    def _on_message(self, message: Message | BaseException) -> None:
        self._inbox.put(message)
        with suppress(BlockingIOError):
            # A pipe that is full wakes as well.
            os.write(self._wake_w, b"m")

    def _on_terminate(self, number: int, frame: object) -> None:
        self._terminated += 1

    def _wait(self) -> None:
        patience = min(1.0, max(0.0, self._core.deadline - time.monotonic()))
        inputs: list[Any] = [self._wake_r]
        if self._nursery.open:
            inputs.append(self._nursery)
        ready, _, _ = select.select(inputs, [], [], patience)
        if self._wake_r in ready:
            os.read(self._wake_r, 65536)

    def _hear_nursery(self) -> None:
        for message in self._nursery.read():
            if "ready" in message:
                log.info("nursery is ready after %.2f s", message["ready"])
            elif "started" in message:
                self._pids[message["started"]] = mark(int(message["pid"]))
                self._do(self._core.started(message["started"], int(message["pid"])))
            elif "exited" in message:
                self._exited(message["exited"], Exit(message["code"], message["signal"]))
            elif "broken" in message:
                self._broken(message["broken"])

    def _exited(self, name: str, ending: Exit) -> None:
        log.info("%s ended with %s", name, ending)
        self._pids.pop(name, None)
        self._do(self._core.exited(name, ending, time.monotonic()))

    def _broken(self, reason: str) -> None:
        last = reason.strip().splitlines()[-1]
        message = f"the worker's libraries cannot be imported: {last}"
        failure = Failure(NURSERY, 1, "ImportError", message, reason, str(log_file(self._run_dir, AGENT)))
        self._core.give_up_unborn()
        self._do(self._core.fail(failure, time.monotonic()))

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
        self._pids.pop(NURSERY, None)
        self._nursery_deaths += 1
        if self._core.phase != "running":
            self._core.give_up_unborn()
            return
        if self._nursery_deaths > NURSERY_RESTARTS:
            self._broken(f"the nursery was killed {self._nursery_deaths} times")
            return
        log.warning("the nursery was killed; its workers go on, a new one is started")
        self._nursery = self._open_nursery()
        self._do(self._core.restart_unborn())

    def _hear_messages(self) -> None:
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, BaseException):
                # Deaf and dumb it is of no use: the workers go on, and the nursery writes down how they ended.
                raise message
            if message.kind == "status":
                self._endpoint.reply(message, self._status())
            elif message.kind == "stop":
                body = message.body
                self._endpoint.reply(message, {"stopping": True})
                self._stop(str(body["reason"]), at_once="now" in body and bool(body["now"]))
            elif message.kind not in ("hello", "welcome", "beat"):
                log.warning("dropped a message of kind %r from %r", message.kind, message.sender)

    def _hear_signals(self) -> None:
        if self._terminated > self._heard:
            self._heard = self._terminated
            self._stop("the host agent was told to terminate", at_once=self._heard > 1)

    def _stop(self, reason: str, *, at_once: bool) -> None:
        log.info("stopping%s: %s", " at once" if at_once else "", reason)
        self._do(self._core.stop(reason, time.monotonic(), at_once=at_once))

    def _status(self) -> dict[str, Any]:
        workers = [
            {"name": name, "pid": life.pid, "incarnation": life.incarnation, "state": life.state}
            for name, life in self._core.lives.items()
        ]
        return {"workers": workers, "state": self._record.state}

    # -- what goes out

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._fork(action)
            elif isinstance(action, Tell):
                self._tell(action.kind, action.body)
            else:
                self._signal(action)

    def _fork(self, action: Start) -> None:
        name = action.worker.name
        failure_file(self._run_dir, name).unlink(missing_ok=True)
        document = self._run_dir / "workers" / f"{WorkerName.parse(name).file_stem}.yaml"
        log.info("starting %s, incarnation %d", name, action.incarnation)
        self._nursery.start(name, action.incarnation, document, log_file(self._run_dir, name), action.worker.threads)

    def _tell(self, kind: str, body: Mapping[str, Any]) -> None:
        for name, life in self._core.lives.items():
            itself = kind == "lost" and body["worker"] == name
            if life.state != "ended" and not itself:
                self._endpoint.send(name, kind, body)

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
        line = NurseryLine(self._run_dir, self._entry, preload)
        self._pids[NURSERY] = mark(line.pid)
        return line

    def _explain(self, worker: str, ending: Exit) -> Failure:
        return explain(self._run_dir, worker, ending)

    def _save(self) -> None:
        state: RunState = "running" if self._core.all_started or self._record.state == "running" else "starting"
        new = replace(self._record, state=state, pid=os.getpid(), pids=dict(self._pids))
        if new != self._record:
            self._record = new
            new.write()

    def _close(self) -> int:
        """Nothing of the run may be left when `run.json` says that it is over."""
        outcome = self._core.outcome
        assert outcome is not None, "closing a run that is not over"
        # Everybody it could still say something to is gone; only the reply to a last `stop` may be on its way.
        self._endpoint.close(linger_s=LINGER_S)
        self._nursery.dismiss()
        for line in end_all(self._run_dir, self._pids.values(), patience_s=1.0):
            log.info("ended %s", line)
        for line in sweep(self._run_dir):
            log.info("removed %s", line)
        finish(self._record, outcome)
        log.info("the run is over: %s", outcome.state)
        return outcome.exit_code


def main(arguments: Sequence[str]) -> int:
    """`RUN_DIR [ENTRY]`."""
    run_dir = Path(arguments[0])
    entry = arguments[1] if len(arguments) > 1 else ENTRY
    setproctitle(f"distflow {run_dir.name} {AGENT}")
    configure(AGENT)
    # Workers whose nursery dies come to us instead of to init, so that their deaths are still seen.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return Agent(read_record(run_dir), entry).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
