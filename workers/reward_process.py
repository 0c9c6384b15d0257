"""A reward function in a process of its own, which can be killed when it takes too long. Imports no torch.

Parent and child exchange JSON, one object per line, over what the child finds as its standard input and output. It
moves both to descriptors of its own, so that a function may close the standard ones; what it prints goes to standard
error. The child leads a process group of its own, so that whatever the function starts is killed with it. The group
dies with the parent.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from setproctitle import getproctitle

from distflow import log
from distflow.comm.processes import name_process
from distflow.errors import PluginError, UserError
from distflow.types import Completion
from distflow.workers.reward_calls import TrainerState
from distflow.workers.reward_judging import SHOWN_VALUE, Verdict, judge_together, reward_function, shortened, shown

ENDING_S = 1.0
"""How long a child may take to exit after closing its output."""
_CHUNK = 1 << 16
_FIELDS = [field.name for field in fields(Completion)]
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from distflow.workers.reward_process import serve; serve(*sys.argv[2:])"
)


class RewardProcess:
    """A child process that judges one sample at a time, or by functions that take lists some; no method blocks."""

    def __init__(self, spec: str) -> None:
        self._name = shown(spec)
        self._received: list[bytes] = []
        """Pieces of a line that is not whole yet."""
        self._unsent = b""
        self._asked = 0
        """Samples that it was given last."""
        title = f"{getproctitle()} reward function"
        # Nothing is ever written to it: it closes when this process ends, in whatever way.
        lifeline, self._lifeline = os.pipe()
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), spec, str(lifeline), title],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        finally:
            os.close(lifeline)
        assert self._child.stdin is not None, "a pipe"
        assert self._child.stdout is not None, "a pipe"
        self.source, self.sink = self._child.stdout.fileno(), self._child.stdin.fileno()
        for pipe in (self.source, self.sink):
            os.set_blocking(pipe, False)

    @property
    def ended(self) -> bool:
        """Whether the child has exited."""
        return self._has_ended(within_s=0.0)

    @property
    def unsent(self) -> bool:
        """Whether part of the request remains to be written when `sink` is writable."""
        return bool(self._unsent)

    def ask(self, samples: Sequence[Completion], state: TrainerState) -> None:
        """Give the child samples to judge by one call."""
        self._asked = len(samples)
        # Not `asdict`, which would copy every token id while holding the interpreter lock.
        records = [{name: getattr(sample, name) for name in _FIELDS} for sample in samples]
        self._unsent = json.dumps({"samples": records, "state": asdict(state)}).encode() + b"\n"
        self.write()

    def write(self) -> None:
        """Write as much of the request as the pipe accepts."""
        try:
            self._unsent = self._unsent[os.write(self.sink, self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            # The child has exited, which `read` will notice.
            self._unsent = b""

    def read(self) -> bytes | None:
        """A line from the child; None while there is none, empty if the child has closed its output."""
        try:
            chunk = os.read(self.source, _CHUNK)
        except BlockingIOError:
            return None
        if not chunk:
            return b""
        end, newline, rest = chunk.partition(b"\n")
        self._received.append(end)
        if not newline:
            return None
        line = b"".join(self._received)
        self._received = [rest]
        return line

    def loaded(self, line: bytes) -> None:
        """Check the child's first line; raises PluginError if the function could not be loaded."""
        if not line:
            raise PluginError(
                f"reward function {self._name!r} could not be loaded (see above): its process exited with code "
                f"{self._exit_code()}"
            )
        fatal = json.loads(line)["fatal"]
        if fatal is not None:
            raise PluginError(fatal)

    def verdicts(self, line: bytes) -> list[Verdict]:
        """The child's answer to its samples; raises UserError if the function reports that it cannot work at all."""
        if not line:
            code = self._exit_code()
            return self._failed(f"the process of reward function {self._name!r} exited with code {code}")
        try:
            answer = json.loads(line)
        except ValueError:
            # The function has changed something that the child needs, such as the module json.
            shows = shortened(repr(line), SHOWN_VALUE)
            return self._failed(f"the process of reward function {self._name!r} answered {shows}")
        if "fatal" in answer:
            raise UserError(answer["fatal"])
        return [Verdict(**verdict) for verdict in answer["verdicts"]]

    def _failed(self, message: str) -> list[Verdict]:
        return [Verdict({}, "error", message)] * self._asked

    def kill(self) -> int:
        """Kill the child and what it started; returns its exit code (negative: the signal)."""
        # Nothing has waited for the child yet, so its process group still has this id.
        os.killpg(self._child.pid, signal.SIGKILL)
        code = self._child.wait()
        os.close(self._lifeline)
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None, "both are pipes"
            pipe.close()
        return code

    def _exit_code(self) -> int:
        """The exit code of a child that has closed its output and is about to exit."""
        self._has_ended(within_s=ENDING_S)
        return self.kill()

    def _has_ended(self, within_s: float) -> bool:
        """Whether the child exits in time; leaves its exit code, and with it its process id, to `kill`."""
        descriptor = os.pidfd_open(self._child.pid)
        try:
            return _readable(descriptor, within_s)
        finally:
            os.close(descriptor)


def serve(spec: str, lifeline: str, title: str) -> None:
    """The child: load the function, report that, then judge the completions of each line until the input ends."""
    if not die_with_writer(int(lifeline)):
        return
    # SIGTERM may go to a whole Slurm job; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    name_process(title)
    log.configure(title)
    with os.fdopen(os.dup(0), encoding="utf-8") as requests, os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        try:
            function = reward_function(spec)
        except UserError as error:
            _say(answers, {"fatal": shortened(str(error))})
            return
        _say(answers, {"fatal": None})
        for line in requests:
            asked: dict[str, Any] = json.loads(line)
            samples = [Completion(**{**one, "response_ids": tuple(one["response_ids"])}) for one in asked["samples"]]
            try:
                verdicts = judge_together(function, samples, state=TrainerState(**asked["state"]))
                _say(answers, {"verdicts": [asdict(verdict) for verdict in verdicts]})
            except UserError as error:
                _say(answers, {"fatal": shortened(str(error))})


def die_with_writer(pipe: int) -> bool:
    """Have the kernel kill this process group when the last writer closes the pipe; False if it is closed already.

    The signal must come from the kernel, as a function may block the interpreter forever (an endless regular
    expression), and PR_SET_PDEATHSIG would reach this process alone.
    """
    os.set_inheritable(pipe, False)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_RDONLY | os.O_ASYNC)
    return not _readable(pipe, 0.0)


def _readable(descriptor: int, within_s: float) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(within_s * 1000))


def _say(answers: Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
