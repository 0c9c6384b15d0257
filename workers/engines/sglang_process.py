"""The worker's side of the process that SGLang runs in: starts it, talks to it, and reports what it died of."""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setproctitle import getproctitle

from distflow.errors import UserError, WorkerFailed
from distflow.log import logger
from distflow.workers.engines.sglang_wire import Frames, Message, frame

MODULE = "distflow.workers.engines.sglang_host"
ASK_S = 600.0
"""Limit for loading weights or moving memory."""
SEND_S = 60.0
TAIL_LINES = 30
SLICE_S = 1.0
"""How often a long wait checks whether the run goes on."""
CLOSE_S = 30.0
"""Limit for a killed process to exit: one that hangs in a kernel driver is left behind."""
LISTEN_S = 1.0
"""Limit for reading the last output of a process that has ended."""
_CHUNK = 1 << 20
_TITLE = "distflow "
_BOOT = (
    "import sys, json, runpy; sys.path[:] = json.loads(sys.argv.pop(1)); "
    f"runpy.run_module({MODULE!r}, run_name='__main__', alter_sys=True)"
)

log = logger(__name__)


class EngineGone(WorkerFailed):
    """SGLang has ended or stopped responding; the message says what is known."""


@dataclass(frozen=True, slots=True)
class EngineStart:
    """How SGLang is started."""

    config: str
    """The model's `config.json`."""
    args: Mapping[str, Any]
    """SGLang's arguments, without the model's path."""
    env: Mapping[str, str]
    """Environment variables."""
    memory: int
    """The descriptor of the staged weights, which the process inherits."""
    update_by: str
    """How weights get from that memory into SGLang's processes: memory or group."""
    limit_s: float
    """Seconds within which it must have started."""
    folder: Path | None
    """Parent of its temporary folder; None: the system's default."""
    go_on: Callable[[], None]
    """Called every second of a wait; raises if the run has ended."""


class EngineProcess:
    """A child process with SGLang in it, for use by one thread. It dies with this process, whatever happens."""

    def __init__(self, start: EngineStart) -> None:
        """Returns when SGLang runs.

        Raises UserError if SGLang refuses its arguments, EngineGone if it does not start within `start.limit_s`, and
        whatever `start.go_on` raises.
        """
        self.start = start
        self._frames = Frames()
        self._pending: list[Message] = []
        self._closed = False
        self._asked = 0
        self._awaited: dict[int, str] = {}
        """What requests without an answer are to do."""
        self._answers: dict[int, Message] = {}
        self._said: deque[str] = deque(maxlen=TAIL_LINES)
        self._line, theirs = socket.socketpair()
        title = getproctitle()
        title = f"{title} sglang" if title.startswith(_TITLE) else f"{_TITLE}engine sglang"
        arguments = [str(theirs.fileno()), str(os.getpid()), title]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), start.memory),
                start_new_session=True,
            )
        self._listener = threading.Thread(target=self._listen, name="sglang log", daemon=True)
        self._listener.start()
        atexit.register(self.close)
        self._line.settimeout(SEND_S)
        with tempfile.TemporaryDirectory(
            prefix="distflow-sglang-", dir=start.folder, ignore_cleanup_errors=True
        ) as folder:
            Path(folder, "config.json").write_text(start.config)
            try:
                told = {"args": dict(start.args), "env": dict(start.env), "update_by": start.update_by}
                self.send({"do": "start", "folder": folder, **told})
                self._await_start(start.limit_s)
            except Exception:
                self.close()
                raise

    def send(self, message: Message) -> None:
        """Raises EngineGone if the process has ended, or reads nothing for SEND_S."""
        try:
            self._line.sendall(frame(message))
        except TimeoutError as error:
            raise self._failure(f"read nothing for {SEND_S:.0f} s") from error
        except OSError as error:
            raise self._failure() from error

    def receive(self, wait_s: float) -> list[Message]:
        """The messages that have arrived, but for answers; waits up to `wait_s` for one.

        Raises EngineGone if the process has ended.
        """
        if not self._pending:
            self._read(wait_s)
        messages, self._pending = self._pending, []
        return messages

    def ask(self, message: Message) -> Message:
        """Send a request and wait for its answer. Other messages are kept for `receive`.

        Raises EngineGone if the process has ended or takes longer than ASK_S, WorkerFailed if it fails, and whatever
        `start.go_on` raises.
        """
        number = self.begin(message)
        answer = self.answer(number, ASK_S)
        if answer is None:
            raise self._failure(f"did not {message['do']} within {ASK_S:.0f} s")
        return answer

    def begin(self, message: Message) -> int:
        """Send a request; returns the number by which to look for its `answer`."""
        self._asked += 1
        self._awaited[self._asked] = str(message["do"])
        self.send({**message, "ask": self._asked})
        return self._asked

    def answer(self, number: int, wait_s: float) -> Message | None:
        """The answer to a request, for which it waits so long; None: there is none yet. Raises what `ask` raises."""
        deadline = time.monotonic() + wait_s
        while number not in self._answers:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._read(min(left, SLICE_S))
            self.start.go_on()
        answer, what = self._answers.pop(number), self._awaited.pop(number)
        if "failed" in answer:
            raise WorkerFailed(self._with_output(f"failed to {what}: {answer['text']}"))
        return answer

    def forget(self, number: int) -> None:
        """Nobody waits for this answer any more."""
        self._awaited.pop(number, None)
        self._answers.pop(number, None)

    def close(self) -> None:
        """Kill the process, and with it all of SGLang's."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self.process.poll() is None:
            self.process.kill()
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            log.warning("SGLang's process %d was killed, but has not exited after %.0f s", self.process.pid, CLOSE_S)
        self._line.close()
        self._listener.join(LISTEN_S)

    def _await_start(self, start_s: float) -> None:
        begin = time.monotonic()
        while (left := begin + start_s - time.monotonic()) > 0:
            self.start.go_on()
            for message in self.receive(min(left, SLICE_S)):
                if "refused" in message:
                    raise UserError(f"engine sglang: {message['refused']}")
                if "broken" in message:
                    raise self._failure(f"could not start:\n{message['broken']}")
                log.info("SGLang %s started in %.1f s", message["ready"], time.monotonic() - begin)
                return
        raise self._failure(f"did not start within engine_options.start_s={start_s} s")

    def _read(self, wait_s: float) -> None:
        if not select.select([self._line], [], [], wait_s)[0]:
            if self.process.poll() is not None:
                raise self._failure()
            return
        try:
            data = self._line.recv(_CHUNK)
        except OSError as error:
            raise self._failure() from error
        if not data:
            raise self._failure()
        for message in self._frames.feed(data):
            number = message.get("done", message.get("failed"))
            if number is None:
                self._pending.append(message)
            elif number in self._awaited:
                self._answers[number] = message

    def _failure(self, what: str | None = None) -> EngineGone:
        """The error to raise; `what` happened, or None to find out."""
        if what is None:
            try:
                what = f"ended with exit code {self.process.wait(timeout=5)}"
            except subprocess.TimeoutExpired:
                what = "closed its connection"
        self._listener.join(LISTEN_S)
        return EngineGone(self._with_output(what))

    def _with_output(self, what: str) -> str:
        """A message that ends with the last lines the process printed."""
        said = "; its last output:\n" + "\n".join(self._said) if self._said else ""
        return f"engine sglang: its process {self.process.pid} {what}{said}"

    def _listen(self) -> None:
        """Copy SGLang's output to the worker's log, and keep the last lines for errors."""
        assert self.process.stdout is not None, "a pipe"
        with self.process.stdout as output:
            for line in output:
                text = line.decode(errors="replace").rstrip()
                self._said.append(text)
                log.info("sglang: %s", text)
