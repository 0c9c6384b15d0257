"""Trackers that do what libraries do at their worst."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from distflow.flow.trackers import TrackedRun


class Forks:
    """Notes what it is given. Starts a helper without a title, in a session of its own, that outlives its parent."""

    def __init__(self, run: TrackedRun) -> None:
        self._file = (run.folder / "given.jsonl").open("a")
        self._note("life", run.id)
        if os.fork() == 0:
            os.setsid()
            # A part of its command line, for the test to find it by.
            subprocess.Popen(
                [sys.executable, "-c", f"import time; time.sleep(600)  # helper of {run.folder}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            os._exit(0)
        os.wait()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._note("step", step, sorted(values))
        self._note("values", step, values)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._note("samples", step, len(rows))

    def close(self) -> None:
        self._note("close")

    def _note(self, *what: object) -> None:
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()


class Hangs:
    """Takes three rows, and floods the output, before it hangs."""

    def __init__(self, run: TrackedRun) -> None:
        self._rows = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._rows += 1
        print("flood " * 100_000)
        if self._rows > 3:
            time.sleep(600)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        pass

    def close(self) -> None:
        pass
