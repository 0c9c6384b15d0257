"""A reward function in a process of its own, which can be killed when it takes too long. Imports no torch.

Parent and child speak JSON, one object a line, over the child's standard input and output; what the function prints
goes to standard error. The child dies with its parent.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

from setproctitle import getproctitle

from distflow.comm.processes import name_process
from distflow.errors import PluginError, UserError
from distflow.types import Completion
from distflow.workers.judge import Verdict, judge, reward_function

START_S = 120.0
"""For the child's imports."""
_CHUNK = 1 << 16
_PR_SET_PDEATHSIG = 1
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from distflow.workers.reward_process import serve; serve(*sys.argv[2:])"
)


class RewardProcess:
    """Calls one reward function in a child process, which is started when first needed and anew after a time-out."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._child: subprocess.Popen[bytes] | None = None
        self._received = b""
        atexit.register(self.close)

    def judge(self, sample: Completion, timeout_s: float) -> Verdict:
        """The verdict, or a failure after at most `timeout_s` (plus the start of the child).

        Raises PluginError when the function cannot be loaded, UserError when it says that it cannot work at all.
        """
        child = self._child if self._child is not None and self._child.poll() is None else self._start()
        line = self._exchange(child, json.dumps(asdict(sample)).encode() + b"\n", time.monotonic() + timeout_s)
        if line is None:
            self.close()
            return Verdict({}, "timeout", f"reward function {self._name!r} took longer than timeout_s={timeout_s}")
        if not line:
            code = self.close()
            return Verdict({}, "error", f"the process of reward function {self._name!r} ended with exit code {code}")
        answer = json.loads(line)
        if "fatal" in answer:
            raise UserError(answer["fatal"])
        return Verdict(answer["values"], answer["failure"], answer["message"])

    def close(self) -> int | None:
        """End the child; returns its exit code (negative: the signal)."""
        child, self._child, self._received = self._child, None, b""
        if child is None:
            return None
        # One that ended by itself keeps its own exit code.
        with contextlib.suppress(subprocess.TimeoutExpired):
            return _closed(child, child.wait(timeout=0.05))
        child.kill()
        return _closed(child, child.wait())

    def _start(self) -> subprocess.Popen[bytes]:
        self.close()
        title = f"{getproctitle()} reward function"
        child = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path), self._name, str(os.getpid()), title],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._child = child
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None, "both are pipes"
            os.set_blocking(pipe.fileno(), False)
        ready = self._exchange(child, b"", time.monotonic() + START_S)
        if not ready:
            self.close()
            reason = f"was not ready within {START_S:.0f} s" if ready is None else "could not be loaded (see above)"
            raise PluginError(f"reward function {self._name!r} {reason}")
        fatal = json.loads(ready)["fatal"]
        if fatal is not None:
            self.close()
            raise PluginError(fatal)
        return child

    def _exchange(self, child: subprocess.Popen[bytes], request: bytes, deadline: float) -> bytes | None:
        """Write the request, read one line; None: not in time, empty: the child has ended."""
        assert child.stdin is not None, "a pipe"
        assert child.stdout is not None, "a pipe"
        source, sink = child.stdout.fileno(), child.stdin.fileno()
        while True:
            line, newline, rest = self._received.partition(b"\n")
            if newline:
                self._received = rest
                return line
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            readable, writable, _ = select.select([source], [sink] if request else [], [], left)
            try:
                if writable:
                    request = request[os.write(sink, request) :]
                if readable:
                    chunk = os.read(source, _CHUNK)
                    if not chunk:
                        return b""
                    self._received += chunk
            except BrokenPipeError:
                return b""


def _closed(child: subprocess.Popen[bytes], code: int) -> int:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    return code


def serve(name: str, parent: str, title: str) -> None:
    """The child: load the function, say so, then judge one completion a line until the input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    # Ctrl-C goes to the whole process group, SIGTERM to a whole job of Slurm; the parent decides what becomes of us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    name_process(title)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        try:
            function = reward_function(name)
        except UserError as error:
            _say(answers, {"fatal": str(error)})
            return
        _say(answers, {"fatal": None})
        for line in sys.stdin:
            fields: dict[str, Any] = json.loads(line)
            sample = Completion(**{**fields, "response_ids": tuple(fields["response_ids"])})
            try:
                _say(answers, asdict(judge(function, sample)))
            except UserError as error:
                _say(answers, {"fatal": str(error)})


def _say(answers: Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1], str(os.getppid()), f"distflow reward function {sys.argv[1]}")
