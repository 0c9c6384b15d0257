"""Runs that are started by forking a process in which the heavy libraries are imported already.

Importing torch and transformers takes several seconds of CPU a run, and the suite launches about a hundred of them. So
there is one server that imports them once, when it is first asked. `WarmProcess` asks it for a launch command; that
command starts its agent, and the agent its fork server, by `subprocess.Popen`, which in these processes forks instead
of executing a new interpreter. All else is as it is for a user: the same processes with the same parents, arguments,
descriptors and signals. An agent has threads by the time it starts its fork server, and must not be forked any more:
it has a `Spare` from before that. `cold=True` of the `launch` fixture starts a run without all this; tests of the start
itself need it, and so does whatever must die while libraries are being imported.

Protocol, over a Unix socket with a message a packet and a connection a process: request {"module", "arguments", "cwd",
"environment", "network", "python"} with the descriptors of standard output and standard error; answers {"pid"} and
later {"code"}. See WarmProcess, and tests/warm_agent, which asks from what a test has started.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import setproctitle

from tests.polling import STARTED, Patience

MODULES = (
    "distflow.config.compose",
    "distflow.launch.cli",
    "distflow.launch.commands.launch",
    "distflow.launch.commands.metrics",
    "distflow.launch.deploy.host_checks",
    "distflow.launch.deploy.hostfile",
    "distflow.launch.deploy.launcher",
    "distflow.workers.engines.torch_options",
)
"""Imported in the server besides what the fork server of a run preloads. Not what is executed as `__main__`."""
FORKED = ("distflow.launch.agent.agent", "distflow.launch.agent.fork_server")
"""What warm processes start by forking: `python -m MODULE …`."""
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)
SPARING = "distflow.launch.agent.agent"
START_S = 120.0
DOOR = "DISTFLOW_TESTS_WARM_START"
"""Environment variable: the server's socket."""
T = TypeVar("T", IO[str], socket.socket)
NETWORK = 0x40000000
"""Linux's CLONE_NEWNET."""


EXECUTABLE = sys.executable
EXECUTE = inspect.signature(subprocess.Popen._execute_child)


class Spare:
    """A child that was forked while there was one thread, and waits for what it is to become. It ends with its parent.

    Over its socket comes one message: {"module", "arguments", "session", "keep"} with its three standard streams and
    what it is to have under the numbers `keep`.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            self._serve(theirs)
        theirs.close()
        self._line = ours

    def become(
        self, module: str, arguments: list[str], streams: Sequence[int], keep: Sequence[int], session: bool
    ) -> None:
        """Let it do what `python -m module arguments` does; `session`: in one of its own."""
        request = {"module": module, "arguments": arguments, "session": session, "keep": list(keep)}
        own = [number if stream == -1 else stream for number, stream in enumerate(streams)]
        socket.send_fds(self._line, [json.dumps(request).encode()], [*own, *keep])
        self._line.close()

    def _serve(self, line: socket.socket) -> None:
        text, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 16)
        if not text:
            os._exit(0)
        request = json.loads(text)
        # Out of the way first: the numbers that are wanted may be taken by others of them.
        high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 1000) for one in descriptors]
        for one, number in zip(high[3:], request["keep"], strict=True):
            os.dup2(one, number)
        rearrange(high[:3], request["keep"])
        if request["session"]:
            os.setsid()
        become(request["module"], request["arguments"])


class Popen(subprocess.Popen[Any]):
    """Forks this process for a module in FORKED, if nothing speaks against it; else starts it as ever."""

    spare: Spare | None = None

    def _execute_child(self, *given: Any, **named: Any) -> None:
        found = EXECUTE.bind(self, *given, **named).arguments
        # Without -P, which is about the search path of a new interpreter.
        arguments = [argument for argument in found["args"] if argument != "-P"]
        warm = found["env"] is None and found["cwd"] is None and arguments[:2] == [EXECUTABLE, "-m"]
        spare = Popen.spare
        if not warm or arguments[2] not in FORKED or (spare is None and len(os.listdir("/proc/self/task")) > 1):
            super()._execute_child(*given, **named)
            return
        streams = (found["p2cread"], found["c2pwrite"], found["errwrite"])
        if spare is None:
            spare = Spare()
        Popen.spare = None
        spare.become(arguments[2], arguments[3:], streams, found["pass_fds"], found["start_new_session"])
        self.pid = spare.pid
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*[found[name] for name in pipes])


def rearrange(streams: Sequence[int], keep: Iterable[int]) -> None:
    """In a forked child: make `streams` its standard ones (−1: as they are) and close all else but `keep`."""
    for number, stream in enumerate(streams):
        if stream not in (-1, number):
            os.dup2(stream, number)
    low = 3
    for descriptor in sorted(keep):
        os.set_inheritable(descriptor, True)
        os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, 65536)


def become(module: str, arguments: Sequence[str]) -> None:
    """In a forked child: do what `python -m module arguments` does; never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        # The objects that they replace must not close the descriptors as they go.
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        sys.argv, sys.path[0] = [module, *arguments], os.getcwd()
        Popen.spare = Spare() if module == SPARING else None
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue
        os._exit(code)


# -- the server


def serve(door: socket.socket, life: int) -> NoReturn:
    """Fork on each request and report how that ended, until the other end of the pipe `life` is closed."""
    wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    children: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([door, life, wake_r], [], [])
        if life in ready:
            os._exit(0)  # Libraries would have much to say of a usual end.
        if wake_r in ready:
            os.read(wake_r, 4096)
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            with children.pop(pid) as answer:
                tell(answer, {"code": os.waitstatus_to_exitcode(status)})
        if door in ready:
            line, _ = door.accept()
            request, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 2)
            if not request:
                line.close()  # Whoever asks was killed.
                continue
            pid = fork(json.loads(request), descriptors)
            children[pid] = line
            tell(line, {"pid": pid})


def fork(request: dict[str, Any], descriptors: Sequence[int]) -> int:
    """Start what is asked for; returns its process number."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        if request["network"] is not None:
            enter(request["network"])
        if request["python"] is not None:
            sys.executable = request["python"]
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        null = os.open(os.devnull, os.O_RDONLY)
        rearrange([null, *descriptors], ())
        become(request["module"], request["arguments"])
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def enter(network: str) -> None:
    """Be in a network namespace from here on."""
    with open(network, "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {network}")


def tell(answer: socket.socket, what: dict[str, int]) -> None:
    """To the test, which may have ended."""
    try:
        answer.send(json.dumps(what).encode())
    except (BrokenPipeError, ConnectionResetError):
        return


def main(path: str, life: str) -> None:
    """Import at the first request, then serve."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(path)
    door.listen(64)
    print("listening", flush=True)
    if int(life) in select.select([door, int(life)], [], [])[0]:
        return
    from distflow.launch.agent.fork_server import THREAD_VARIABLES
    from distflow.launch.agent.worker_group import PRELOAD

    # As in the fork server of a run: some libraries start their threads while they are imported.
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    gc.disable()
    for module in (*PRELOAD, *MODULES):
        importlib.import_module(module)
    for module in FORKED:
        # What they import stays; they themselves are executed as `__main__`.
        importlib.import_module(module)
        del sys.modules[module]
    gc.freeze()
    gc.enable()
    # It looks for the place of the title where the environment lies now; a child's environment lies elsewhere.
    setproctitle.getproctitle()
    assert len(os.listdir("/proc/self/task")) == 1, "a library has started a thread: forking is not safe"
    subprocess.Popen = Popen
    serve(door, int(life))


# -- in the tests


@functools.cache
def door() -> str:
    """Socket of the server: one for pytest and all its workers, which ends with the process that asked first."""
    if DOOR in os.environ:
        return os.environ[DOOR]
    folder = tempfile.mkdtemp(prefix="distflow-tests-")
    os.environ[DOOR] = f"{folder}/door"
    # Its writing end stays open for as long as this process lives.
    life, _ = os.pipe()
    command = [sys.executable, "-m", "tests.warm_start", os.environ[DOOR], str(life)]
    where = Path(__file__).parents[1]
    server = subprocess.Popen(
        command, pass_fds=(life,), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=where, start_new_session=True
    )
    os.close(life)
    assert server.stdout is not None
    assert server.stdout.readline() == b"listening\n"
    atexit.register(shutil.rmtree, folder)
    return os.environ[DOOR]


class WarmProcess:
    """`python -m module arguments` in a session of its own: what tests use of a Popen with text in pipes."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        merged: bool = False,
        output: IO[Any] | None = None,
        network: str | None = None,
        python: str | None = None,
    ) -> None:
        """`merged`: standard error goes where standard output goes. `output`: a file for both, in place of pipes.

        `network`: file of the network namespace it is to be in, if not in ours. `python`: what it takes for the Python
        that executes it, and starts others by.
        """
        request = {"module": module, "arguments": list(arguments), "network": network, "python": python}
        request |= {"cwd": str(cwd or Path.cwd()), "environment": dict(environment or os.environ)}
        self._answer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._answer.connect(door())
        pipes = [] if output else [os.pipe() for _ in range(1 if merged else 2)]
        ends = [output.fileno()] if output else [writing for _, writing in pipes]
        socket.send_fds(self._answer, [json.dumps(request).encode()], [ends[0], ends[-1]])
        for _, writing in pipes:
            os.close(writing)
        readers = [os.fdopen(reading) for reading, _ in pipes]
        self.stdout: IO[str] | None = readers[0] if readers else None
        self.stderr: IO[str] | None = readers[1] if len(readers) > 1 else None
        self.returncode: int | None = None
        self._answer.settimeout(START_S)
        self.pid = int(json.loads(self._answer.recv(4096))["pid"])
        STARTED.append(self.pid)

    def poll(self) -> int | None:
        """The exit code, as Popen gives it, once it has ended."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended. Raises TimeoutExpired where nothing has worked on it for so long."""
        if self.returncode is None:
            if not _ready([self._answer], timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = int(json.loads(self._answer.recv(4096))["code"])
            self._answer.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it wrote to standard output and error, once it has ended. Raises TimeoutExpired as `wait` does."""
        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None]
        found: dict[IO[str], bytes] = dict.fromkeys(streams, b"")
        unread = [stream for stream in streams if not stream.closed]
        while unread:
            ready = _ready(unread, timeout)
            if not ready:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0, b"".join(found.values()))
            for stream in ready:
                part = os.read(stream.fileno(), 1 << 16)
                found[stream] += part
                if not part:
                    unread.remove(stream)
                    stream.close()
        self.wait(timeout)
        out, *rest = (text.decode() for text in found.values())
        return out, "".join(rest)

    def send_signal(self, number: int) -> None:
        """As `kill` does; nothing if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _ready(unread: Sequence[T], timeout: float | None) -> Sequence[T]:
    """Those that can be read; none where there is nothing, and nothing has worked on it for so many seconds."""
    if not timeout:
        return select.select(unread, [], [], timeout)[0]
    patience = Patience(timeout)
    while not (ready := select.select(unread, [], [], patience.left_s())[0]):
        if patience.over:
            return []
    return ready


if __name__ == "__main__":
    main(*sys.argv[1:])
