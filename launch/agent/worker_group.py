"""The workers of one host as processes: the agent has them forked, sends them messages and signals, and notices exits.

A worker is a child of the fork server that forked it. If that fork server is gone, the worker is adopted by this agent
(if it started that fork server) or by init. The agent then polls for its end, and takes the exit code from what the
worker has written itself (`process_record`).
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

from distflow.cluster.processes import Exit, Failure, ProcessId, agent_name, nursery_name
from distflow.comm.addresses import socket_dir
from distflow.comm.message import Message
from distflow.comm.processes import module_command, started_at
from distflow.data.decoding import Form, Whole, read
from distflow.launch.agent.fork_server import dead_child, end_group
from distflow.launch.agent.restart_policy import Action, Life, RestartPolicy, Signal, StartWorker, Tell
from distflow.launch.agent.start import LIMIT
from distflow.launch.run.exit_status import document_file, exit_of, failure_file, log_file
from distflow.launch.run.process_table import process_id, running, signal_to, space
from distflow.launch.run.record import FILE_NAME, RunRecord
from distflow.log import logger
from distflow.runtime.process_record import ProcessRecord, process_file, read_process, trouble_file

ENTRY = "distflow.runtime.main:run_worker"
PRELOAD = (
    "torch",
    "safetensors.torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "distflow.runtime.main",
    "distflow.workers.backends.torch_backend",
    "distflow.workers.engines.torch_engine",
    "distflow.workers.critic",
    "distflow.workers.reward",
    "distflow.workers.rollout",
    "distflow.workers.trainer",
)
"""What every worker imports, or one of two. It starts no thread, as the fork server checks, and touches no device."""
Send = Callable[[str, str, Mapping[str, Any]], object]
log = logger(__name__)
WAITING = 8
"""How many agents may connect, one after another, before the fork server has imported its libraries."""


class _Checkpointed(Form, frozen=True):
    bytes: Whole


class WorkerGroup:
    """Drives a RestartPolicy with real processes and the clock. `entry`: what the workers' processes run."""

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
        """Whether the fork server has reported which workers it has."""
        self._begun = False
        self._forked: set[str] = set()
        """Workers that the current fork server has forked or was asked to fork."""
        self.pids: dict[str, ProcessId] = {}
        """Processes of this host by name, including the fork server."""

    @property
    def inputs(self) -> list[Any]:
        """File objects for select; when one is ready, call `hear`."""
        return [self._fork_server] if self._fork_server is not None and self._fork_server.open else []

    def open(self, record: str, before: Mapping[str, ProcessId] | None) -> None:
        """Connect to the fork server of this host, or start one.

        `before`: the workers of the previous agent, if there was one. `record`: the file in the run folder that agents
        of this host begin from.
        """
        self._record = record
        if before is None:
            for name in self._core.lives:
                # Left by an earlier launch.
                process_file(document_file(self._run_dir, name)).unlink(missing_ok=True)
        else:
            self.pids |= {name: found for name, found in before.items() if name in self._core.lives}
        self._open_fork_server()

    def begin(self) -> None:
        """Start the workers, as soon as the fork server is ready."""
        self._begun = True
        self._fork_missing()

    def hear(self) -> None:
        """Handle messages of the fork server, and exits."""
        self._hear_fork_server()
        self._reap()
        self._check_orphans()

    def do(self, actions: Sequence[Action]) -> None:
        """Carry out the decisions of the RestartPolicy."""
        for action in actions:
            if isinstance(action, StartWorker):
                self._fork(action)
            elif isinstance(action, Tell):
                self.tell(action)
            else:
                self._signal(action)

    def tell(self, what: Tell) -> None:
        """Send a message to one worker or to all live ones; a worker is not told of its own former death."""
        for name, life in self._core.lives.items():
            itself = what.kind == "lost" and what.body["worker"] == name
            if life.state != "ended" and not itself and what.to in (None, name):
                self._send(name, what.kind, what.body)

    def dismiss(self) -> None:
        """Tell the fork server to exit when its last worker has ended."""
        if self._fork_server is not None:
            self._fork_server.dismiss()

    # -- the fork server

    def _open_fork_server(self) -> None:
        self._ready = False
        self._forked.clear()
        preload = PRELOAD if self._entry == ENTRY else ()
        self._fork_server = ForkServerLine(self._run_dir, self._entry, preload, self._host, self._record)
        if self._fork_server.pid is not None:
            self.pids[nursery_name(self._host)] = process_id(self._fork_server.pid)

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
        self.pids[nursery_name(self._host)] = process_id(pid)
        # The previous fork server may have forked workers whose start was not reported.
        self._check_orphans()
        self._fork_missing()

    def _fork_missing(self) -> None:
        if not self._ready:
            # It may still report that it has forked them for the previous agent.
            return
        if self._core.winding_up:
            self._core.give_up_unforked()
        elif self._begun:
            self.do(self._core.start_unforked())

    def _started(self, name: str, incarnation: int, pid: int) -> None:
        life = self._core.lives.get(name)
        if life is None or incarnation < life.incarnation:
            log.warning("killing process %d: stale incarnation %d of %s", pid, incarnation, name)
            signal_to(process_id(pid), signal.SIGKILL)
            return
        # If the number is higher, the previous agent was killed before it could write it down.
        life.incarnation = incarnation
        self._forked.add(name)
        self.pids[name] = process_id(pid)
        self.do(self._core.started(name, pid))

    def _broken(self, reason: str) -> None:
        last = reason.strip().splitlines()[-1]
        message = f"the worker's libraries cannot be imported: {last}"
        where = str(log_file(self._run_dir, agent_name(self._host)))
        failure = Failure(nursery_name(self._host), 1, "ImportError", message, reason, where)
        self._core.give_up_unforked()
        self.do(self._core.fail(failure, time.monotonic()))

    def _fork_server_died(self) -> None:
        self._fork_server = None
        self.pids.pop(nursery_name(self._host), None)
        if self._core.winding_up:
            self._core.give_up_unforked()
        elif not LIMIT.take(self._fork_server_deaths, time.monotonic()):
            self._broken(f"the fork server was killed {LIMIT.count + 1} times within {LIMIT.window_s:g} s")
        else:
            log.warning("the fork server was killed; its workers go on, starting a new one")
            self._open_fork_server()

    # -- the workers

    def _exited(self, name: str, ending: Exit) -> None:
        log.info("%s ended with %s", name, ending)
        self.pids.pop(name, None)
        self._forked.discard(name)
        self.do(self._core.exited(name, ending, time.monotonic()))

    def _reap(self) -> None:
        """Take the exit codes of our children: the fork server, and adopted workers."""
        while (found := dead_child()) is not None:
            names = [name for name, life in self._core.lives.items() if life.pid == found.si_pid]
            if names:
                end_group(found.si_pid)
            os.waitpid(found.si_pid, 0)
            for name in names:
                self._exited(name, exit_of(found, read_process(document_file(self._run_dir, name))))

    def _check_orphans(self) -> None:
        """Check on workers of former fork servers, whose ends the current one cannot report."""
        if self._fork_server is not None and not self._ready and self._fork_server.pid is None:
            # It is older than this agent, and will report which workers it has.
            return
        for name, life in list(self._core.lives.items()):
            if life.state != "ended" and name not in self._forked:
                self._check_orphan(name, life)

    def _check_orphan(self, name: str, life: Life) -> None:
        found = read_process(document_file(self._run_dir, name))
        known = found is not None and found.incarnation >= life.incarnation
        if found is not None and known and found.alive:
            if life.pid != found.pid:
                log.info("found %s, incarnation %d, as process %d", name, found.incarnation, found.pid)
                life.incarnation = found.incarnation
                self.pids[name] = ProcessId(found.pid, found.started, space())
                self.do(self._core.started(name, found.pid))
        elif (found is not None and known) or (life.pid is not None and not running(self.pids.get(name))):
            self._orphan_ended(name, life, found if known else None)

    def _orphan_ended(self, name: str, life: Life, found: ProcessRecord | None) -> None:
        pid = life.pid if found is None else found.pid
        if pid is not None and _is_our_child(pid):
            # `_reap` will tell how it ended.
            return
        if pid is not None and started_at(pid) is None:
            end_group(pid)
        life.incarnation = life.incarnation if found is None else found.incarnation
        self._exited(name, Exit(None) if found is None else Exit(found.code, term=found.term))

    def _fork(self, action: StartWorker) -> None:
        name = action.worker.name
        if self._fork_server is None or not self._ready:
            # It is forked as soon as a fork server is ready.
            return
        failure_file(self._run_dir, name).unlink(missing_ok=True)
        document = document_file(self._run_dir, name)
        process_file(document).unlink(missing_ok=True)
        trouble_file(self._run_dir, document.stem).unlink(missing_ok=True)
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


def note_checkpointed(message: Message, core: RestartPolicy) -> None:
    """Handle `checkpointed`: a worker that reads or writes a checkpoint repeats how much it has done so far."""
    amount = read(message.body, _Checkpointed, message.kind).bytes
    core.checkpointed(message.sender, amount, time.monotonic())


def _is_our_child(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


class ForkServerLine:
    """The connection to the fork server of a host, which it starts if there is none; see fork_server.py.

    `fileno` is ready when the fork server has sent something or has died.
    """

    def __init__(
        self, run_dir: Path, entry: str, preload: Sequence[str], host: int = 0, record: str = FILE_NAME
    ) -> None:
        self._buffer = b""
        self.open = True
        self.pid: int | None = None
        """Of a fork server that this agent has started; another one sends its own in `ready`."""
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
        """The descriptor, for select."""
        return self._socket.fileno()

    def start(
        self, name: str, incarnation: int, document: Path, log: Path, threads: int, python: str = sys.executable
    ) -> None:
        """Request a worker, to be executed by `python`."""
        request = {"start": name, "incarnation": incarnation, "document": str(document), "log": str(log)}
        self._send({**request, "threads": threads, "python": python})

    def dismiss(self) -> None:
        """Announce that there will be no more requests, and that the agent concludes the run."""
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
            # A few hundred bytes per worker into a buffer of 200 kB: if this blocked, the fork server would be stuck.
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self._socket.close()
            self.open = False


def _start(listener: socket.socket, arguments: Sequence[str]) -> int:
    """Start a fork server on this listening socket; returns its process number."""
    command = [*module_command(sys.executable, "distflow.launch.agent.fork_server"), str(listener.fileno()), *arguments]
    process = subprocess.Popen(command, pass_fds=(listener.fileno(),), stdin=subprocess.DEVNULL)
    # The agent reaps all its children itself, including adopted ones; Popen must not wait for this one.
    process.returncode = 0
    return process.pid
