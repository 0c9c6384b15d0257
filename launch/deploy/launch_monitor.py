"""What `launch` does once the agents run: look, show progress, pass on Ctrl-C. The run does not notice."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from msgspec import structs

from distflow.comm.client import ask
from distflow.comm.keys import key_file, read_keys
from distflow.errors import ProtocolError
from distflow.launch.agent.start import LIMIT, agent_lives
from distflow.launch.deploy.stop_run import stop_run
from distflow.launch.observe.monitor import Monitor
from distflow.launch.observe.progress import Display
from distflow.launch.observe.run_client import ask_any_agent
from distflow.launch.run.exit_status import conclude
from distflow.launch.run.process_table import parts_here, processes_of, signal_to
from distflow.launch.run.record import AGENT, RunRecord, read_record

POLL_S = 0.2
LEAVE_S = 10.0
"""The agent's last word in run.json is also its last deed."""
ANSWER_S = 1.0
ELSEWHERE_S = 20.0
"""After our own agent's death, for agents of other hosts that answered before to answer again."""
RETRY_S = 2.0
STOP_MARGIN_S = 20.0
"""On top of the recipe's `limits.drain_s`: what the agent needs for SIGTERM, SIGKILL and cleaning up."""
HOSTS_POLL_S = 0.5
ASK_S = 2.0
ASK_EVERY_S = 2.0
ASKED = 4
"""Agents asked at a time for how the run stands: each knows of all hosts."""

Fetch = Callable[[], RunRecord | None]


class Watcher:
    """Watches one run to its end."""

    def __init__(
        self,
        run_dir: Path,
        start: Callable[[], subprocess.Popen[bytes]],
        start_again: Callable[[], subprocess.Popen[bytes]],
        display: Display,
    ) -> None:
        self._run_dir = run_dir
        self._start = start
        self._start_again = start_again
        self._agent: subprocess.Popen[bytes] | None = None
        self._restarts: list[float] = []
        self._start_again_at = 0.0
        self._display = display
        self._monitor = Monitor(run_dir, display)
        self._give_up_at = float("inf")
        self._wanted: bool | None = None
        """To be passed on: an interrupt, and whether everything is to end at once."""
        self._agent_gone = False
        self._alone_at: float | None = None

    def watch(self, *, until_running: bool) -> RunRecord:
        """Start the agent and stay until the run is over, or until its workers run; returns the record of that time."""
        return self._monitor.watch(self._first_look, self._pass_on, poll_s=POLL_S, until_running=until_running)

    def _first_look(self) -> RunRecord:
        if self._agent is None:
            # By now Ctrl-C is for the run: it must not hit between the agent's start and our first look.
            self._agent = self._start()
        record = self._look()
        if record.over:
            self._await_leave()
        return record

    def _look(self) -> RunRecord:
        record = read_record(self._run_dir)
        if record.over or self._agent_runs():
            return record
        record = read_record(self._run_dir)
        if record.over:
            return record
        # The agent ended without a last word: it was killed, unless it was refused before it had begun.
        refused = self._agent is not None and (self._agent.returncode or 0) > 0 and not record.pids
        if not refused and time.monotonic() < self._start_again_at:
            return record
        if not refused and LIMIT.take(self._restarts, time.monotonic()):
            self._restart()
            return record
        # Nor is another one of use. The workers go on, and the fork server concludes; if that is gone too, we do.
        if not self._agent_gone:
            self._agent_gone = True
            self._display.say("the host agent is gone; the workers go on without it")
        if any(processes_of(part) for part in parts_here(record)) or self._goes_on_elsewhere(record):
            return record
        record = read_record(self._run_dir)
        return record if record.over else conclude(self._run_dir, {})

    def _restart(self) -> None:
        """Start another agent; what the system refuses is tried again, here and by the fork server."""
        self._display.say("the host agent was killed; it is started again, and the workers go on meanwhile")
        try:
            self._agent = self._start_again()
        except OSError as error:
            self._start_again_at = time.monotonic() + RETRY_S
            self._display.say(f"it cannot be started now ({error}): this is tried again")

    def _goes_on_elsewhere(self, record: RunRecord) -> bool:
        """Whether an agent of another host has answered within the last `ELSEWHERE_S` seconds."""
        if not record.hosts:
            return False
        now = time.monotonic()
        if self._alone_at is None or ask_any_agent(record, "status", {}, ANSWER_S) is not None:
            self._alone_at = now
        return now - self._alone_at < ELSEWHERE_S

    def _agent_runs(self) -> bool:
        """Ours, or one that the fork server has started."""
        ours = self._agent is not None and self._agent.poll() is None
        return ours or agent_lives(self._run_dir, 0)

    def _await_leave(self) -> None:
        deadline = time.monotonic() + LEAVE_S
        while self._agent_runs() and time.monotonic() < deadline:
            time.sleep(POLL_S / 10)

    def _pass_on(self, record: RunRecord, at_once: bool | None) -> None:
        if at_once is not None:
            self._give_up_at = time.monotonic() + (STOP_MARGIN_S if at_once else record.drain_s + STOP_MARGIN_S)
            self._wanted = at_once
        if self._wanted is not None and self._ask_to_stop(record, at_once=self._wanted):
            self._wanted = None
        if time.monotonic() > self._give_up_at:
            self._give_up_at = float("inf")
            stop_run(self._run_dir, timeout_s=0.0)

    def _ask_to_stop(self, record: RunRecord, *, at_once: bool) -> bool:
        """Whether somebody sees to it; not while an agent is just starting."""
        body = {"reason": "interrupted", "now": at_once}
        if ask_any_agent(record, "stop", body, ANSWER_S) is not None:
            return True
        if signal_to(record.pids.get(AGENT), signal.SIGTERM):
            return True
        if self._agent_runs():
            return False
        stop_run(self._run_dir, timeout_s=0.0 if at_once else record.drain_s)
        return True


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
        return self._monitor.watch(self._look, self._pass_on, poll_s=HOSTS_POLL_S, until_running=until_running)

    def _look(self) -> RunRecord:
        record = read_record(self._run_dir)
        if record.over or time.monotonic() - self._asked_at < ASK_EVERY_S:
            return record
        self._asked_at = time.monotonic()
        answers = self._ask("status", {})
        if answers:
            self._silent = False
            if self._fetch is not None and answers[0]["state"] != record.state:
                record = structs.replace(record, state=answers[0]["state"])
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
