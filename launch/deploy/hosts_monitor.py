"""What `launch` does once the agents of all hosts run: look, show progress, pass on Ctrl-C. The run does not notice."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from distflow.comm.client import ask
from distflow.comm.keys import key_file, read_keys
from distflow.errors import ProtocolError
from distflow.launch.observe.monitor import Monitor
from distflow.launch.observe.progress import Display
from distflow.launch.run.record import RunRecord, read_record

POLL_S = 0.5
ASK_S = 2.0
ASK_EVERY_S = 2.0
ASKED = 4
"""Agents asked at a time for how the run stands: each knows of all hosts."""

Fetch = Callable[[], RunRecord | None]


class HostsWatcher:
    """Watches a run to its end.

    `fetch` brings the record and the metrics here where no agent writes into this machine's run folder; None where
    one does.
    """

    def __init__(self, run_dir: Path, agents: Mapping[int, str], display: Display, fetch: Fetch | None) -> None:
        self._run_dir = run_dir
        self._agents = list(agents.values())
        self._keys = read_keys(key_file(run_dir))
        self._display = display
        self._fetch = fetch
        self._monitor = Monitor(run_dir, display)
        self._asked_at = 0.0
        self._silent = False

    def watch(self, *, until_running: bool) -> RunRecord:
        """Stay until the run is over, or until its workers run; returns the record of that time."""
        return self._monitor.watch(self._look, self._pass_on, poll_s=POLL_S, until_running=until_running)

    def _look(self) -> RunRecord:
        record = read_record(self._run_dir)
        if record.over or time.monotonic() - self._asked_at < ASK_EVERY_S:
            return record
        self._asked_at = time.monotonic()
        answers = self._ask("status", {})
        if answers:
            self._silent = False
            if self._fetch is not None and answers[0]["state"] != record.state:
                record = replace(record, state=answers[0]["state"])
                record.write()
        elif self._fetch is not None:
            # They leave when the run is over, and it is in their record how.
            record = self._fetch() or record
        if not answers and not record.over and not self._silent:
            self._silent = True
            self._display.say("no host agent answers; the workers go on without them")
        return record

    def _ask(self, kind: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The answers of some agents; those that answered come first the next time."""

        def one(address: str) -> dict[str, Any] | None:
            try:
                return ask(address, kind, body, ASK_S, self._keys)
            except ProtocolError:
                # Another run's process has got its port meanwhile, so it is gone.
                return None

        count = len(self._agents) if self._silent or kind == "stop" else ASKED
        asked = self._agents[:count]
        with ThreadPoolExecutor(max_workers=len(asked)) as pool:
            found = list(zip(asked, pool.map(one, asked), strict=True))
        gone = [address for address, answer in found if answer is None]
        self._agents = [address for address in self._agents if address not in gone] + gone
        return [answer for _, answer in found if answer is not None]

    def _pass_on(self, record: RunRecord, at_once: bool | None) -> None:
        """Tell the agents to stop; raises KeyboardInterrupt if nobody is left to be told, and we were told twice."""
        if at_once is None:
            return
        if not self._ask("stop", {"reason": "interrupted", "now": at_once}) and at_once:
            raise KeyboardInterrupt
