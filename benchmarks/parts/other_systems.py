"""Other systems as contestants: a script of `peers/`, run by a Python that has them installed.

The script keeps running between its turns, so that starting it is not measured. It says on one line of JSON which
contestants it has, reads the name of one from its standard input whenever it is that one's turn, and answers with the
figures. It runs in an empty folder and a session of its own; each answer has a time limit, after which it is ended.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.parts.turns import Figures, Turn
from distflow.errors import DistflowError

SCRIPTS = Path(__file__).resolve().parents[1] / "peers"
START_S = 120.0
TURN_S = 120.0
END_S = 20.0
ERRORS = "errors"
"""File with what a script writes to standard error; its last lines tell why it ended."""
USUAL = Path(".venv-peers/bin/python")
"""Where `make peers-venv` puts them."""


class OtherSystemFailed(DistflowError):
    """A script of `peers/` ended, or did not answer in time."""


def found_from_here(python: str) -> str:
    """`python` for a process that starts in another folder; a bare name is looked for in PATH there, as here."""
    return os.path.abspath(python) if os.sep in python else python


class OtherSystems:
    """A running script; use as a context. What cannot take part is in `left_out` with the reason."""

    def __init__(self, script: str, python: str | None, names: Sequence[str], arguments: Mapping[str, int]) -> None:
        """`names`: the contestants that the script may have. `python` None: that of `make peers-venv`, if there."""
        self.left_out: dict[str, str] = {}
        self.turns: dict[str, Turn] = {}
        self._names = names
        self._script = SCRIPTS / f"{script}.py"
        self._options = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        chosen = python or (str(USUAL) if USUAL.exists() else None)
        self._python = None if chosen is None else found_from_here(chosen)
        self._folder = tempfile.TemporaryDirectory(prefix="df-", ignore_cleanup_errors=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""

    def __enter__(self) -> Self:
        if self._python is None:
            self._leave_out("`make peers-venv` installs it; then name its Python by --peers .venv-peers/bin/python")
            return self
        try:
            self._start(self._python)
        except (OSError, OtherSystemFailed) as error:
            self._leave_out(str(error))
            self._end()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()
        self._folder.cleanup()

    def _leave_out(self, reason: str) -> None:
        self.left_out = dict.fromkeys(self._names, reason)
        self.turns = {}

    def _start(self, python: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (Path(self._folder.name) / ERRORS).open("wb") as errors:
            self._process = subprocess.Popen(
                [python, str(self._script), *self._options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=self._folder.name,
                env=environment,
                start_new_session=True,
            )
        said = self._answer(START_S)
        self.left_out = {name: str(reason) for name, reason in said["left_out"].items()}
        self.turns = {name: partial(self._turn, name) for name in said["ready"] if name in self._names}

    def _turn(self, name: str) -> Figures:
        assert self._process is not None, "a turn of a script that does not run"
        assert self._process.stdin is not None, "its standard input is a pipe"
        self._process.stdin.write(f"{name}\n".encode())
        self._process.stdin.flush()
        return {figure: float(value) for figure, value in self._answer(TURN_S).items()}

    def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._process is not None, "nobody is there to answer"
        assert self._process.stdout is not None, "its standard output is a pipe"
        deadline = time.monotonic() + limit_s
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._read:
            left = deadline - time.monotonic()
            with selectors.DefaultSelector() as selector:  # `select.select` takes no descriptor above 1,023
                selector.register(descriptor, selectors.EVENT_READ)
                ready = selector.select(max(0.0, left))
            if not ready:
                raise OtherSystemFailed(f"{self._script.name} did not answer within {limit_s:g} s{self._last_words()}")
            some = os.read(descriptor, 1 << 16)
            if not some:
                raise OtherSystemFailed(f"{self._script.name} ended{self._last_words()}")
            self._read += some
        line, _, self._read = self._read.partition(b"\n")
        answer = json.loads(line)
        assert isinstance(answer, dict), f"{self._script.name} answers with objects, not {line!r}"
        return answer

    def _last_words(self) -> str:
        errors = Path(self._folder.name) / ERRORS
        lines = errors.read_text(errors="replace").strip().splitlines() if errors.exists() else []
        return ": " + " / ".join(lines[-2:]) if lines else ""

    def _end(self) -> None:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return
        process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_S)
        process.stdout.close()
        self._process = None
