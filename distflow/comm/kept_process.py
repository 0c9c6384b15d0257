"""A child process that ends with this one, together with everything that it has started, whatever these are.

    worker ── keeper ── child ── its helpers, theirs …
The keeper is a small process of ours that adopts whoever of the child's descendants loses its parent, even in a session
of its own. It kills all of them when the child has ended, or when the worker has: a pipe that nothing is written to
closes then, in whatever way the worker ends. Should the keeper be killed, the child is, by the kernel.

What the child prints goes through the keeper into a file that does not grow without bound. (Rewards, of which there are
many processes for a short time each, have no keeper: they start nothing that leaves their process group.)
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from distflow.comm.processes import name_process

OUTPUT_BYTES = 1 << 20
"""Of what the child prints, so much is kept; the rest is dropped."""
END_S = 5.0
"""How long killed processes may take to end, before the keeper leaves them to others."""
TELL_S = 1.0
"""How long the child may take to read what it is told."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CHUNK = 1 << 16
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from distflow.comm.kept_process import {function}; sys.exit({function}(*sys.argv[2:]))"
)


class KeptProcess:
    """A child that runs `module:function` with arguments; its methods do not block, but for `tell` and `close`.

    The function also gets, as its last argument, the descriptor of a pipe that `read` reads. Its standard input ends
    when `finish` is called.
    """

    def __init__(self, entry: str, arguments: Sequence[str], title: str, output: Path) -> None:
        lifeline, self._lifeline = os.pipe()
        self.reports, reports = os.pipe()
        os.set_blocking(self.reports, False)
        command = [str(lifeline), str(reports), str(output), title, entry, *arguments]
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT.format(function="keep"), json.dumps(sys.path), *command],
                stdin=subprocess.PIPE,
                pass_fds=(lifeline, reports),
                # What ends the worker's process group must leave the keeper the time to end the child's descendants.
                start_new_session=True,
            )
        finally:
            os.close(lifeline)
            os.close(reports)
        self._received = b""
        self._killing = threading.Lock()

    @property
    def ended(self) -> bool:
        """Whether child, descendants and keeper have ended."""
        return self._keeper.poll() is not None

    @property
    def code(self) -> int | None:
        """The child's exit code; None while it runs."""
        return self._keeper.poll()

    def read(self) -> list[bytes]:
        """The whole lines that the child has reported."""
        with suppress(BlockingIOError):
            while chunk := os.read(self.reports, _CHUNK):
                self._received += chunk
        *lines, self._received = self._received.split(b"\n")
        return lines

    def tell(self, data: bytes, limit_s: float = TELL_S) -> bool:
        """Write to the child's standard input; whether it has taken all of that in time."""
        assert self._keeper.stdin is not None, "a pipe"
        into, deadline = self._keeper.stdin.fileno(), time.monotonic() + limit_s
        os.set_blocking(into, False)
        room = select.poll()
        room.register(into, select.POLLOUT)
        while data and room.poll(max(0, math.ceil((deadline - time.monotonic()) * 1000))):
            try:
                data = data[os.write(into, data) :]
            except BlockingIOError:
                # Room for less than what is written in one piece.
                time.sleep(0.001)
            except BrokenPipeError:
                return False
            if time.monotonic() > deadline:
                break
        return not data

    def finish(self) -> None:
        """End the child's standard input, which tells it to finish."""
        assert self._keeper.stdin is not None, "a pipe"
        with suppress(BrokenPipeError):
            self._keeper.stdin.close()

    def kill(self) -> None:
        """Have the child and its descendants killed."""
        # Once, whichever threads call this together: its number is soon that of another file.
        with self._killing:
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1

    def close(self, limit_s: float = END_S) -> None:
        """Kill what still runs and wait for that."""
        self.kill()
        self.finish()
        with suppress(subprocess.TimeoutExpired):
            self._keeper.wait(limit_s)
        if self.reports >= 0:
            os.close(self.reports)
            self.reports = -1


# -- in the keeper


def keep(lifeline: str, reports: str, output: str, title: str, entry: str, *arguments: str) -> int:
    """The keeper: start the child, pass on what it prints, and end all of it; returns the child's exit code."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    name_process(f"{title} keeper")
    # These may go to all processes of a Slurm job; the worker decides when this one ends. The child inherits it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    command = [json.dumps(sys.path), title, entry, str(os.getpid()), *arguments, reports]
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOT.format(function="run_kept"), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(int(reports),),
    )
    os.close(int(reports))
    _pass_on(child, int(lifeline), _Output(Path(output)))
    return _end_all(child)


def _pass_on(child: subprocess.Popen[bytes], lifeline: int, output: _Output) -> None:
    """Write down what the child prints, until it has ended or the worker has."""
    assert child.stdout is not None, "a pipe"
    ended = os.pidfd_open(child.pid)
    source = child.stdout.fileno()
    os.set_blocking(source, False)
    poller = select.poll()
    for descriptor in (lifeline, ended, source):
        poller.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poller.poll()}
        if source in ready and not output.take(source):
            # Closed, which a daemon does.
            poller.unregister(source)
        if lifeline in ready:
            return
        if ended in ready:
            output.take(source)
            return


def _end_all(child: subprocess.Popen[bytes]) -> int:
    """Kill the child and all that descends from it; returns the child's exit code."""
    deadline = time.monotonic() + END_S
    me, code = psutil.Process(), None
    while time.monotonic() < deadline:
        # Those whose parents have ended meanwhile are our own children now.
        for process in me.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        code = child.poll() if code is None else code
        with suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if found.si_pid == child.pid:
                    code = child.wait()
                else:
                    os.waitpid(found.si_pid, 0)
        if code is not None and not me.children():
            return code if code >= 0 else 128 - code
        time.sleep(0.01)
    return 1


class _Output:
    """A file of bounded length. It is begun anew when it is too long already."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.stat().st_size if path.exists() else 0
        mode = "ab" if there < OUTPUT_BYTES // 2 else "wb"
        self._file = path.open(mode, buffering=0)
        self._left = OUTPUT_BYTES - (there if mode == "ab" else 0)

    def take(self, source: int) -> bool:
        """Read what is there; returns whether there may be more later."""
        try:
            data = os.read(source, _CHUNK)
        except BlockingIOError:
            return True
        kept, self._left = data[: self._left], self._left - len(data[: self._left])
        # On a full disk it is lost.
        with suppress(OSError):
            if kept:
                self._file.write(kept)
                if not self._left:
                    self._file.write(b"\n[further output is dropped]\n")
        return bool(data)


# -- in the child


def run_kept(title: str, entry: str, keeper: str, *arguments: str) -> int:
    """The child: run the function, which returns the exit code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(keeper):
        return 1
    name_process(title)
    # Imported here: the keeper needs none of it.
    from importlib import import_module

    module, _, function = entry.partition(":")
    code: int = getattr(import_module(module), function)(*arguments)
    return code
