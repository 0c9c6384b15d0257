"""The fork server imports the heavy libraries once, and forks a worker from itself for each request of the host agent.

It has one thread and touches no device, so forking is safe. If an imported library has started a thread nevertheless,
the child replaces itself by a fresh interpreter, which is slower but safe. So does a child that another Python is to
execute: that imports the libraries again, but one fork server per host reaps and reports all workers.

It listens on a Unix socket and serves the agent that connected last, by lines of JSON. From the agent: {"serve": true}
first, {"start": name, "incarnation", "document", "log", "threads", "python"}, {"end": true}. To the agent: {"exited":
name, "incarnation", "pid", "code", "signal", "early", "term"}, {"started": name, "incarnation", "pid"}, {"ready":
seconds of importing, "pid"}, {"broken": traceback}. Before `ready` an agent, which may replace a killed one, is told of
the last process of every worker.

If the agent disappears without {"end": true} and no other connects, it starts one. If all of them fail, it waits for
the workers to end, writes down how the run ended in place of the agent, and cleans up.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from distflow.cluster.processes import Exit
from distflow.comm.processes import module_command, name_process
from distflow.errors import UserError
from distflow.launch.agent.start import LIMIT, agent_command, agent_lives, become, environment_of, start_agent
from distflow.launch.run.exit_status import conclude, exit_of, failure_file
from distflow.launch.run.record import read_record
from distflow.runtime.process_record import note_end, note_start, read_process

Entry = Callable[[Path, int], int]
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
AGENT_S = 2.0
"""An agent is started after so long without one; `launch`, while it runs, does it sooner."""
LATE_S = 10.0
"""The time that it has to connect."""
LOOK_S = 1.0
SERVE = b'{"serve": true}\n'
"""The first line from an agent."""


@dataclass(frozen=True, slots=True)
class Child:
    """A forked worker."""

    name: str
    incarnation: int
    pid: int
    document: Path


class ForkServer:
    """Forks and reaps. `entry` is "module:function", called in the child with the document's path and incarnation."""

    def __init__(self, listener: socket.socket, run_dir: Path, host: int, entry: str, record: str) -> None:
        self._listener = listener
        self._callers: list[socket.socket] = []
        """Connections that have not sent `SERVE` yet."""
        self._line: socket.socket | None = None
        self._run_dir = run_dir
        self._host = host
        self._agent = agent_command(run_dir, host, entry, record)
        self._agents: list[float] = []
        self._agent_due: float | None = time.monotonic() + AGENT_S
        """When to start one unless one connects before; None: never again."""
        self._import_s = 0.0
        self._dismissed = False
        self._exits: dict[str, tuple[Child, Exit]] = {}
        """How the last process ended, for workers without a process."""
        self._entry_name = entry
        self._entry = resolve_entry(entry)
        self._children: dict[int, Child] = {}
        self._buffer = b""
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self, import_s: float) -> None:
        """Serve agents until one has sent {"end": true} or none can be started, and no worker is left."""
        self._import_s = import_s
        while self._goes_on():
            inputs: list[Any] = [self._wake_r, self._listener, *self._callers]
            inputs += [] if self._line is None else [self._line]
            ready, _, _ = select.select(inputs, [], [], None if self._line is not None else LOOK_S)
            if self._wake_r in ready:
                os.read(self._wake_r, 4096)
            self._reap()
            # A new agent first: it repeats whatever a dead one has asked for.
            before = self._line
            self._accept(ready)
            if self._line is before and before in ready:
                self._listen()
            if self._line is None and not self._dismissed:
                self._ensure_agent(time.monotonic())
        if not self._dismissed:
            conclude(self._run_dir, {name: ending for name, (_, ending) in self._exits.items()}, self._host)

    def _goes_on(self) -> bool:
        if self._line is not None or self._children:
            return True
        return not self._dismissed and (self._agent_due is not None or self._others_live())

    def _others_live(self) -> bool:
        """Whether workers run that a previous fork server has forked."""
        # Imported late, as in `conclude`: needed at most once in a run, and by no worker.
        from distflow.launch.run.process_table import running

        record = read_record(self._run_dir)
        return any(entry.host == self._host and running(record.pids.get(entry.name)) for entry in record.workers)

    def _accept(self, ready: Sequence[Any]) -> None:
        """Accept agents; other processes connect only to see whether the fork server is alive."""
        if self._listener in ready:
            self._callers.append(self._listener.accept()[0])
        for caller in [one for one in self._callers if one in ready]:
            self._callers.remove(caller)
            try:
                data = caller.recv(65536)
            except ConnectionResetError:
                data = b""
            greeting, _, rest = data.partition(b"\n")
            if greeting == SERVE.rstrip():
                self._serve(caller, rest)
            else:
                caller.close()

    def _serve(self, agent: socket.socket, rest: bytes) -> None:
        """Serve this agent from now on. `rest`: what it has sent after `SERVE`."""
        self._hang_up()
        self._line, self._buffer, self._dismissed, self._agent_due = agent, b"", False, None
        for child, ending in self._exits.values():
            self._tell(_exited(child, ending))
        for child in self._children.values():
            self._tell({"started": child.name, "incarnation": child.incarnation, "pid": child.pid})
        self._tell({"ready": self._import_s, "pid": os.getpid()})
        self._take(rest)

    def _ensure_agent(self, now: float) -> None:
        if self._agent_due is None or now < self._agent_due:
            return
        self._agent_due = now + LATE_S
        try:
            self._start_agent(now)
        except (OSError, UserError) as error:
            _print(f"cannot start a host agent ({error}); trying again in {LATE_S:g} s")
            if self._children:
                # Unlimited while there are workers to watch; without any, a few times.
                self._agents = [started for started in self._agents if started != now]

    def _start_agent(self, now: float) -> None:
        """Start an agent unless there is one; raises OSError and UserError."""
        if agent_lives(self._run_dir, self._host):
            # Another process has started it, and it is about to connect.
            return
        if not LIMIT.take(self._agents, now):
            self._agent_due = None
        elif read_record(self._run_dir).over:
            self._dismissed = True
        else:
            _print("the host agent is gone; starting another one")
            # `_reap` reaps it like any child; Popen must not wait for it.
            start_agent(self._run_dir, self._agent, self._host).returncode = 0

    def _listen(self) -> None:
        assert self._line is not None, "only an open line can be ready"
        try:
            data = self._line.recv(65536)
        except ConnectionResetError:
            data = b""
        if data:
            self._take(data)
        else:
            self._hang_up()

    def _take(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "end" in request:
                self._dismissed = True
            else:
                self._start(request)

    def _tell(self, message: dict[str, Any]) -> None:
        if self._line is None:
            return
        try:
            self._line.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self._hang_up()

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
            self._agent_due = time.monotonic() + AGENT_S

    def _start(self, request: dict[str, Any]) -> None:
        name, incarnation = str(request["start"]), int(request["incarnation"])
        if any(child.name == name for child in self._children.values()):
            # Requested by an agent that is gone, and again by the next one.
            return
        flush()
        threads = os.listdir("/proc/self/task")
        pid = os.fork()
        if pid == 0:
            self._become_worker(request, fresh_interpreter=len(threads) > 1)
        self._exits.pop(name, None)
        self._children[pid] = Child(name, incarnation, pid, Path(request["document"]))
        self._tell({"started": name, "incarnation": incarnation, "pid": pid})

    def _become_worker(self, request: dict[str, Any], *, fresh_interpreter: bool) -> None:
        """Run the worker in the child process; never returns."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if self._line is not None:
            self._line.close()
        redirect(Path(request["log"]))
        os.setsid()
        name_process(f"distflow {self._run_dir.name} {request['start']}")
        for variable in THREAD_VARIABLES:
            os.environ[variable] = str(request["threads"])
        note_start(Path(request["document"]), int(request["incarnation"]))
        arguments = [str(request["document"]), str(request["incarnation"])]
        python = str(request["python"])
        if fresh_interpreter or python != sys.executable:
            command = module_command(python, "distflow.launch.agent.fork_server")[1:]
            command += ["--worker", self._entry_name, *arguments]
            failed = partial(_not_executed, self._run_dir, str(request["start"]))
            become(python, command, lambda: self._environment(python), failed)
        run_entry(self._entry, *arguments)

    def _environment(self, python: str) -> dict[str, str]:
        if python == sys.executable:
            return dict(os.environ)
        return environment_of(python, os.environ, self._run_dir, self._host)

    def _reap(self) -> None:
        # Look first and reap last: while the dead leader is a zombie, its number cannot be given to another process,
        # so the signal to its group reaches the helpers it left behind and nobody else.
        while (found := dead_child()) is not None:
            child = self._children.pop(found.si_pid, None)
            if child is not None:
                end_group(child.pid)
                # Reported before it is reaped: if we are killed in between, the agent inherits the zombie and ignores
                # it; the other way round it would wait for ever for a process that nobody can tell it about.
                self._report(child, exit_of(found, read_process(child.document)))
            os.waitpid(found.si_pid, 0)

    def _report(self, child: Child, ending: Exit) -> None:
        self._exits[child.name] = child, ending
        self._tell(_exited(child, ending))


def dead_child() -> os.waitid_result | None:
    """A child that has ended but has not been reaped, if there is one."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None


def _print(text: str) -> None:
    with suppress(OSError):
        print(text, flush=True)


def _exited(child: Child, ending: Exit) -> dict[str, Any]:
    return {"exited": child.name, "incarnation": child.incarnation, "pid": child.pid, **asdict(ending)}


def end_group(leader: int) -> None:
    """Kill what is left of a dead worker's process group. Its leader must not have been reaped yet."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # It died before it had a process group of its own.
        return


def _not_executed(run_dir: Path, worker: str, reason: str) -> int:
    """Record the failure of a worker whose Python cannot be executed; returns its exit code."""
    message = f"{worker}: the Python of its pool (layout.pools.NAME.python) cannot be executed — {reason}"
    failure = {"worker": worker, "exit_code": 2, "error": "UserError", "message": message, "traceback": ""}
    failure_file(run_dir, worker).write_text(json.dumps(failure))
    return 2


def resolve_entry(entry: str) -> Entry:
    """Import "module:function"."""
    module, _, function = entry.partition(":")
    found: Entry = vars(importlib.import_module(module))[function]
    return found


def redirect(log: Path) -> None:
    """Send standard output and error to a log file, and close every other descriptor this process inherited."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.closerange(3, 65536)


def run_entry(entry: Entry, document: str, incarnation: str) -> None:
    """Run a worker and end this process with its exit code, skipping the fork server's clean-up."""
    faulthandler.enable()
    code = 1
    try:
        code = entry(Path(document), int(incarnation))
        note_end(Path(document), code)
    except BaseException:
        traceback.print_exc()
    finally:
        flush()
        os._exit(code)


def flush() -> None:
    """Flush the standard streams, as far as the disk has room."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()


def survive_slurm_sigterm() -> None:
    """In a Slurm job, ignore SIGTERM: every process of the job gets it, and the agent winds up the run in order."""
    if "SLURM_JOB_ID" in os.environ:
        # Not SIG_IGN: processes that a worker starts would inherit it, and SIGTERM could not end them.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.siginterrupt(signal.SIGTERM, False)


def main(arguments: Sequence[str]) -> None:
    """`--worker ENTRY DOCUMENT INCARNATION`, or `DESCRIPTOR RUN_DIR HOST ENTRY RECORD MODULE…`.

    The descriptor is a listening socket: agents are served once the modules are imported.
    """
    survive_slurm_sigterm()
    if arguments[0] == "--worker":
        _, entry, document, incarnation = arguments
        run_entry(resolve_entry(entry), document, incarnation)
    descriptor, folder, host, entry, record, *modules = arguments
    run_dir = Path(folder)
    name_process(f"distflow {run_dir.name} nursery/{host}")
    for variable in THREAD_VARIABLES:
        # One thread while importing: some libraries start their thread pool at import.
        os.environ[variable] = "1"
    listener = socket.socket(fileno=int(descriptor))
    listener.set_inheritable(False)
    begin = time.monotonic()
    try:
        # Imported modules never become garbage: do not collect now, nor in the workers, where collecting would also
        # copy the memory pages that they share.
        gc.disable()
        for module in modules:
            importlib.import_module(module)
        gc.freeze()
        gc.enable()
        server = ForkServer(listener, run_dir, int(host), entry, record)
    except Exception:
        _tell_broken(listener, traceback.format_exc())
        raise
    server.serve(time.monotonic() - begin)
    # Without clean-up, like its children: libraries would only log what they have not released.
    flush()
    os._exit(0)


def _tell_broken(listener: socket.socket, reason: str) -> None:
    """Tell all agents that have connected (all but the last may be gone), or one that will soon."""
    listener.settimeout(LATE_S)
    while True:
        try:
            line, _ = listener.accept()
            line.sendall(json.dumps({"broken": reason}).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            continue
        except (TimeoutError, BlockingIOError):
            return
        listener.setblocking(False)


if __name__ == "__main__":
    main(sys.argv[1:])
