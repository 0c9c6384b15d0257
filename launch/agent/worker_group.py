"""The workers of one host as processes: started by the fork server, told, signalled, and seen to end.

A worker is the child of the fork server that forked it. Of one whose fork server is gone the end is noticed by looking:
its parent is then this agent, if it started that fork server, or else the system's first process, and its exit code is
in what it has written itself (`process_record`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distflow.comm.addresses import socket_dir
from distflow.comm.processes import started_at
from distflow.launch.agent.fork_server import dead_child, end_group
from distflow.launch.agent.restart_policy import Action, Life, RestartPolicy, Signal, StartWorker, Tell
from distflow.launch.agent.start import LIMIT
from distflow.launch.run.exit_status import Exit, document_file, exit_of, failure_file, log_file
from distflow.launch.run.process_table import mark, running, signal_to, space
from distflow.launch.run.record import FILE_NAME, Failure, ProcessMark, RunRecord, agent_name, nursery_name
from distflow.log import logger
from distflow.runtime.process_record import ProcessRecord, process_file, read_process

ENTRY = "distflow.runtime.main:run_worker"
PRELOAD = (
    "torch",
    "safetensors.torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "distflow.runtime.main",
)
"""What nearly every worker needs. None of it starts a thread or touches a device; the fork server checks the former."""
Send = Callable[[str, str, Mapping[str, Any]], object]
log = logger(__name__)
WAITING = 8
"""Agents that may have connected, one after the other, before the fork server has imported its libraries."""


class WorkerGroup:
    """Drives a RestartPolicy with processes and the clock. `entry` is what the workers' processes run."""

    def __init__(self, record: RunRecord, host: int, entry: str, core: RestartPolicy, send: Send) -> None:
        self._run_dir = record.path
        self._host = host
        self._entry = entry
        self._core = core
        self._send = send
        self._record = FILE_NAME
        self._fork_server: ForkServerLine | None = None
        self._fork_server_deaths: list[float] = []
        self._ready = False
        """Whether the fork server has said whom it has."""
        self._begun = False
        self._forked: set[str] = set()
        """Workers whose parent is the present fork server, or will be."""
        self.pids: dict[str, ProcessMark] = {}
        """Processes of this host by name, the fork server included."""

    @property
    def inputs(self) -> list[Any]:
        """For select: ready when there is something to `hear`."""
        return [self._fork_server] if self._fork_server is not None and self._fork_server.open else []

    def open(self, record: str, before: Mapping[str, ProcessMark] | None) -> None:
        """Find the fork server of this host, or start one. `before`: the workers of an agent before this one, if any.

        `record`: file in the run folder that an agent of this host begins from.
        """
        self._record = record
        if before is None:
            for name in self._core.lives:
                # Of an earlier launch.
                process_file(document_file(self._run_dir, name)).unlink(missing_ok=True)
        else:
            self.pids |= {name: found for name, found in before.items() if name in self._core.lives}
        self._open_fork_server()

    def begin(self) -> None:
        """Start the workers that have not been started yet, as soon as the fork server can."""
        self._begun = True
        self._ask_for_unborn()

    def hear(self) -> None:
        """Take what the fork server says and who has ended."""
        self._hear_fork_server()
        self._reap()
        self._look_after_orphans()

    def do(self, actions: Sequence[Action]) -> None:
        """Carry out what the RestartPolicy decided."""
        for action in actions:
            if isinstance(action, StartWorker):
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
        """The fork server is not needed any more; it ends when its last worker has."""
        if self._fork_server is not None:
            self._fork_server.dismiss()

    # -- the fork server

    def _open_fork_server(self) -> None:
        self._ready = False
        self._forked.clear()
        preload = PRELOAD if self._entry == ENTRY else ()
        self._fork_server = ForkServerLine(self._run_dir, self._entry, preload, self._host, self._record)
        if self._fork_server.pid is not None:
            self.pids[nursery_name(self._host)] = mark(self._fork_server.pid)

    def _hear_fork_server(self) -> None:
        if self._fork_server is None:
            return
        for message in self._fork_server.read():
            if "ready" in message:
                self._hear_ready(float(message["ready"]), int(message["pid"]))
            elif "started" in message:
                self._started(message["started"], int(message["incarnation"]), int(message["pid"]))
            elif "exited" in message:
                life = self._core.lives.get(message["exited"])
                ending = Exit(message["code"], message["signal"], message["early"], message["term"])
                if life is not None and life.state != "ended" and life.incarnation == message["incarnation"]:
                    self._exited(message["exited"], ending)
            elif "broken" in message:
                self._broken(message["broken"])
        if not self._fork_server.open:
            self._fork_server_died()

    def _hear_ready(self, import_s: float, pid: int) -> None:
        log.info("fork server is ready after %.2f s of imports", import_s)
        self._ready = True
        self.pids[nursery_name(self._host)] = mark(pid)
        # A fork server before this one may have forked some that were still asked for.
        self._look_after_orphans()
        self._ask_for_unborn()

    def _ask_for_unborn(self) -> None:
        if not self._ready:
            # It may still say that it has forked them for the agent before this one.
            return
        if self._core.winding_up:
            self._core.give_up_unborn()
        elif self._begun:
            self.do(self._core.start_unborn())

    def _started(self, name: str, incarnation: int, pid: int) -> None:
        life = self._core.lives.get(name)
        if life is None or incarnation < life.incarnation:
            log.warning("ending process %d: nothing is known of an incarnation %d of %s", pid, incarnation, name)
            signal_to(mark(pid), signal.SIGKILL)
            return
        # A higher number: the agent before this one was killed before it could write that down.
        life.incarnation = incarnation
        self._forked.add(name)
        self.pids[name] = mark(pid)
        self.do(self._core.started(name, pid))

    def _broken(self, reason: str) -> None:
        last = reason.strip().splitlines()[-1]
        message = f"the worker's libraries cannot be imported: {last}"
        where = str(log_file(self._run_dir, agent_name(self._host)))
        failure = Failure(nursery_name(self._host), 1, "ImportError", message, reason, where)
        self._core.give_up_unborn()
        self.do(self._core.fail(failure, time.monotonic()))

    def _fork_server_died(self) -> None:
        self._fork_server = None
        self.pids.pop(nursery_name(self._host), None)
        if self._core.winding_up:
            self._core.give_up_unborn()
        elif not LIMIT.take(self._fork_server_deaths, time.monotonic()):
            self._broken(f"the fork server was killed {LIMIT.count + 1} times within {LIMIT.window_s:g} s")
        else:
            log.warning("the fork server was killed; its workers go on, a new one is started")
            self._open_fork_server()

    # -- the workers

    def _exited(self, name: str, ending: Exit) -> None:
        log.info("%s ended with %s", name, ending)
        self.pids.pop(name, None)
        self._forked.discard(name)
        self.do(self._core.exited(name, ending, time.monotonic()))

    def _reap(self) -> None:
        """Take the exit codes of our children: the fork server, and workers that lost it and came to us."""
        while (found := dead_child()) is not None:
            names = [name for name, life in self._core.lives.items() if life.pid == found.si_pid]
            if names:
                end_group(found.si_pid)
            os.waitpid(found.si_pid, 0)
            for name in names:
                self._exited(name, exit_of(found, read_process(document_file(self._run_dir, name))))

    def _look_after_orphans(self) -> None:
        """Whether workers of a fork server that is gone still live, of which the present one says nothing."""
        if self._fork_server is not None and not self._ready and self._fork_server.pid is None:
            # It was there before us, and will say whom it has.
            return
        for name, life in list(self._core.lives.items()):
            if life.state != "ended" and name not in self._forked:
                self._look_after_orphan(name, life)

    def _look_after_orphan(self, name: str, life: Life) -> None:
        found = read_process(document_file(self._run_dir, name))
        known = found is not None and found.incarnation >= life.incarnation
        if found is not None and known and found.alive:
            if life.pid != found.pid:
                log.info("found %s, incarnation %d, as process %d", name, found.incarnation, found.pid)
                life.incarnation = found.incarnation
                self.pids[name] = ProcessMark(found.pid, found.started, space())
                self.do(self._core.started(name, found.pid))
        elif (found is not None and known) or (life.pid is not None and not running(self.pids.get(name))):
            self._orphan_ended(name, life, found if known else None)

    def _orphan_ended(self, name: str, life: Life, found: ProcessRecord | None) -> None:
        pid = life.pid if found is None else found.pid
        if pid is not None and _is_our_child(pid):
            # The next `_reap` says how it ended.
            return
        if pid is not None and started_at(pid) is None:
            end_group(pid)
        life.incarnation = life.incarnation if found is None else found.incarnation
        self._exited(name, Exit(None) if found is None else Exit(found.code, term=found.term))

    def _fork(self, action: StartWorker) -> None:
        name = action.worker.name
        if self._fork_server is None or not self._ready:
            # It is asked for when there is a fork server that can.
            return
        failure_file(self._run_dir, name).unlink(missing_ok=True)
        document = document_file(self._run_dir, name)
        process_file(document).unlink(missing_ok=True)
        log.info("starting %s, incarnation %d", name, action.incarnation)
        self._forked.add(name)
        self._fork_server.start(
            name,
            action.incarnation,
            document,
            log_file(self._run_dir, name),
            action.worker.threads,
            action.worker.python or sys.executable,
        )

    def _signal(self, action: Signal) -> None:
        if action.pid is not None and signal_to(self.pids.get(action.worker), action.number):
            log.warning("sent %s to %s", signal.Signals(action.number).name, action.worker)


def _is_our_child(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


class ForkServerLine:
    """Talks to the fork server of a host, in lines of JSON, and starts it if there is none.

    `fileno` is ready when the fork server has said something or has died.
    """

    def __init__(
        self, run_dir: Path, entry: str, preload: Sequence[str], host: int = 0, record: str = FILE_NAME
    ) -> None:
        self._buffer = b""
        self.open = True
        self.pid: int | None = None
        """Of a fork server that we have started; of another one it is in its first message."""
        path = socket_dir(run_dir, host) / f"nursery-{host}"
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            path.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen(WAITING)
                self.pid = _start(listener, [str(run_dir), str(host), entry, record, *preload])
            self._socket.connect(str(path))
        self._socket.setblocking(False)
        self._send({"serve": True})

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def start(
        self, name: str, incarnation: int, document: Path, log: Path, threads: int, python: str = sys.executable
    ) -> None:
        """Ask for a worker, executed by `python`."""
        request = {"start": name, "incarnation": incarnation, "document": str(document), "log": str(log)}
        self._send({**request, "threads": threads, "python": python})

    def dismiss(self) -> None:
        """Nothing more will be asked, and the agent sees to the end of the run."""
        if self.open:
            self._send({"end": True})
            self._socket.close()
        self.open = False

    def read(self) -> list[Mapping[str, Any]]:
        """The messages that have arrived; `open` is False once it has hung up."""
        while self.open:
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                self._socket.close()
                self.open = False
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def _send(self, message: Mapping[str, Any]) -> None:
        if not self.open:
            return
        try:
            # A few hundred bytes a worker into a buffer of 200 kB: this does not block in practice, and if it
            # would, the fork server is broken, which its end of the line reports.
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self._socket.close()
            self.open = False


def _start(listener: socket.socket, arguments: Sequence[str]) -> int:
    """Start a fork server that serves whoever connects to this socket; returns its process number."""
    command = [sys.executable, "-m", "distflow.launch.agent.fork_server", str(listener.fileno()), *arguments]
    process = subprocess.Popen(command, pass_fds=(listener.fileno(),), stdin=subprocess.DEVNULL)
    # The agent reaps all its children itself, also those that it adopts; Popen must not wait for this one.
    process.returncode = 0
    return process.pid
