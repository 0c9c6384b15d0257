"""The nursery imports the heavy libraries once and forks a worker from itself on each request of the host agent.

It has one thread and touches no device, so that forking is safe. Should an imported library have started a thread
nevertheless, the child replaces itself by a fresh interpreter, which is slower and as safe. So does the child that is
to be executed by another Python: it costs the import of the libraries, but the nursery of a host stays the only one,
so that who reaps, who reports and who concludes a run whose agent is gone is the same for all workers.

Lines of JSON over a Unix socket. From the agent: {"start": name, "incarnation", "document", "log", "threads",
"python"}. To the agent: {"ready": seconds}, {"started": name, "incarnation", "pid"}, {"exited": name, "incarnation",
"pid", "code", "signal"}, {"broken": traceback}. If the agent disappears without {"end": true}, the nursery stays until
its children have ended, and then does the agent's last duty: it writes down how the run ended, and cleans up.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from distflow.comm.processes import name_process
from distflow.launch.ending import Exit, conclude, failure_file, write_exits
from distflow.launch.interpreters import become, code_folder, environment_of

Entry = Callable[[Path, int], int]
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Child:
    """A forked worker."""

    name: str
    incarnation: int
    pid: int


class Nursery:
    """Forks and reaps. `entry` is "module:function", called in the child with the document's path and incarnation."""

    def __init__(self, line: socket.socket, run_dir: Path, entry: str, host: int) -> None:
        self._line: socket.socket | None = line
        self._run_dir = run_dir
        self._host = host
        self._dismissed = False
        self._exits: dict[str, Exit] = {}
        self._entry_name = entry
        self._entry = resolve_entry(entry)
        self._children: dict[int, Child] = {}
        self._buffer = b""
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self, import_s: float) -> None:
        """Until the agent has closed its end and no child is left."""
        self._tell({"ready": import_s})
        while self._line is not None or self._children:
            inputs: list[Any] = [self._wake_r] if self._line is None else [self._wake_r, self._line]
            ready, _, _ = select.select(inputs, [], [])
            if self._wake_r in ready:
                os.read(self._wake_r, 4096)
            self._reap()
            if self._line in ready:
                self._listen()
        if not self._dismissed:
            conclude(self._run_dir, self._exits, self._host)

    def _listen(self) -> None:
        assert self._line is not None, "only an open line can be ready"
        data = self._line.recv(65536)
        if not data:
            self._hang_up()
            return
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
        # The agent is gone. The workers need neither it nor us; we only stay to take their exit codes.
        if self._line is not None:
            self._line.close()
        self._line = None

    def _start(self, request: dict[str, Any]) -> None:
        name, incarnation = str(request["start"]), int(request["incarnation"])
        sys.stdout.flush()
        sys.stderr.flush()
        threads = os.listdir("/proc/self/task")
        pid = os.fork()
        if pid == 0:
            self._be_worker(request, fresh_interpreter=len(threads) > 1)
        self._children[pid] = Child(name, incarnation, pid)
        self._tell({"started": name, "incarnation": incarnation, "pid": pid})

    def _be_worker(self, request: dict[str, Any], *, fresh_interpreter: bool) -> None:
        """In the child: never returns."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if self._line is not None:
            self._line.close()
        redirect(Path(request["log"]))
        os.setsid()
        name_process(f"distflow {self._run_dir.name} {request['start']}")
        for variable in THREAD_VARIABLES:
            os.environ[variable] = str(request["threads"])
        arguments = [str(request["document"]), str(request["incarnation"])]
        python = str(request["python"])
        if fresh_interpreter or python != sys.executable:
            command = ["-m", "distflow.launch.nursery", "--worker", self._entry_name, *arguments]
            failed = partial(_not_executed, self._run_dir, str(request["start"]))
            become(python, command, lambda: self._environment(python), failed)
        run_entry(self._entry, *arguments)

    def _environment(self, python: str) -> dict[str, str]:
        if python == sys.executable:
            return dict(os.environ)
        return environment_of(python, os.environ, code_folder(self._run_dir, self._host))

    def _reap(self) -> None:
        while self._children:
            # Look first and reap last: while the dead leader is a zombie, its number cannot be given to another
            # process, so the signal to its group reaches the helpers it left behind and nobody else.
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return
            end_group(found.si_pid)
            # Told before it is reaped: were we killed in between, the agent would find the zombie among its own
            # children and have nothing to add, instead of waiting for ever for one that nobody can ask about.
            if found.si_pid in self._children:
                by_itself = found.si_code == os.CLD_EXITED
                code, number = (found.si_status, None) if by_itself else (None, found.si_status)
                self._report(self._children.pop(found.si_pid), Exit(code, number))
            os.waitpid(found.si_pid, 0)

    def _report(self, child: Child, ending: Exit) -> None:
        self._exits[child.name] = ending
        life = {"exited": child.name, "incarnation": child.incarnation, "pid": child.pid}
        self._tell({**life, "code": ending.code, "signal": ending.signal})
        if self._line is None and not self._dismissed:
            write_exits(self._run_dir, self._host, self._exits)


def end_group(leader: int) -> None:
    """Kill what is left of a dead worker's process group. Its leader must not have been reaped yet."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # It died before it could form a group of its own.
        return


def _not_executed(run_dir: Path, worker: str, reason: str) -> int:
    """Leave word of a worker whose Python cannot be executed; returns its exit code."""
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
    """Run a worker and end this process with its exit code, skipping the clean-up that belongs to the nursery."""
    faulthandler.enable()
    code = 1
    try:
        code = entry(Path(document), int(incarnation))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def await_the_agents_word() -> None:
    """In a job of Slurm: outlive SIGTERM. It goes to every process of the job, to the agent too, which winds up."""
    if "SLURM_JOB_ID" in os.environ:
        # No SIG_IGN: what a worker starts would inherit that, and could not be ended by SIGTERM either.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.siginterrupt(signal.SIGTERM, False)


def main(arguments: Sequence[str]) -> None:
    """`--worker ENTRY DOCUMENT INCARNATION`, or `DESCRIPTOR RUN_DIR HOST ENTRY MODULE…`; imports the modules first."""
    await_the_agents_word()
    if arguments[0] == "--worker":
        _, entry, document, incarnation = arguments
        run_entry(resolve_entry(entry), document, incarnation)
    descriptor, folder, host, entry, *modules = arguments
    run_dir = Path(folder)
    name_process(f"distflow {run_dir.name} nursery/{host}")
    for variable in THREAD_VARIABLES:
        # One thread while importing: some libraries start their pool at once.
        os.environ[variable] = "1"
    line = socket.socket(fileno=int(descriptor))
    begin = time.monotonic()
    try:
        # Nothing that is imported becomes garbage: do not look for it now, nor in the workers, where looking would
        # also copy the memory that they share.
        gc.disable()
        for module in modules:
            importlib.import_module(module)
        gc.freeze()
        gc.enable()
        nursery = Nursery(line, run_dir, entry, int(host))
    except Exception:
        line.sendall(json.dumps({"broken": traceback.format_exc()}).encode() + b"\n")
        raise
    nursery.serve(time.monotonic() - begin)
    # As its children end: libraries would only report to the log what they have not tidied up.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
