"""Looks whether training workers still answer on hosts whose agents are silent: an agent may be gone and they well.

Each look is at most a few seconds long, on a thread of its own; the agent goes on meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path

from distflow.comm.client import ask
from distflow.comm.keys import key_file, read_keys
from distflow.errors import DistflowError

LONGEST_S = 2.0


class Lookout:
    """`silence_s`: the limit by which somebody must have answered."""

    def __init__(self, run_dir: Path, silence_s: float) -> None:
        self._run_dir = run_dir
        self._every_s = silence_s / 5
        self._answered: dict[int, float] = {}
        """When the last question was asked that was answered, by host."""
        self._next = 0.0
        self._thread: threading.Thread | None = None

    def answered_s(self, host: int, now: float) -> float:
        """Seconds since a training worker of a host was asked for the last time that it answered."""
        return now - self._answered.get(host, float("-inf"))

    def look(self, addresses: Mapping[int, tuple[str, ...]], now: float) -> None:
        """Ask the training workers of these hosts, if it is time. `addresses`: of those of a host."""
        busy = self._thread is not None and self._thread.is_alive()
        if not addresses or busy or now < self._next:
            return
        self._next = now + self._every_s
        self._thread = threading.Thread(target=self._ask_all, args=(dict(addresses),), name="lookout", daemon=True)
        self._thread.start()

    def _ask_all(self, addresses: Mapping[int, tuple[str, ...]]) -> None:
        keys = read_keys(key_file(self._run_dir))
        limit_s = min(LONGEST_S, self._every_s)
        for host, doors in addresses.items():
            for address in doors:
                asked = time.monotonic()
                try:
                    answer = ask(address, "status", {}, limit_s, keys)
                except DistflowError:
                    # Somebody else listens there by now.
                    continue
                if answer is not None:
                    self._answered[host] = asked
                    break
