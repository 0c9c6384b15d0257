"""The monitor that ends with its run: for `launch`, which also passes Ctrl-C on and keeps the agent of this machine
alive, and for `watch`, which only looks. The run does not notice either.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from msgspec import structs

from distflow.errors import DistflowError
from distflow.launch.deploy.stop_run import stop_run
from distflow.launch.observe.monitor import Monitor
from distflow.launch.observe.progress import Display
from distflow.launch.observe.run_client import ask_all, ask_any_agent
from distflow.launch.run.exit_status import as_it_ended
from distflow.launch.run.process_table import is_lost, signal_to
from distflow.launch.run.record import AGENT, RunRecord, agent_name, read_record

POLL_S = 0.2
ANSWER_S = 1.0
STOP_MARGIN_S = 20.0
"""On top of the recipe's `limits.drain_s`: what the agent needs for SIGTERM, SIGKILL and cleaning up."""
ASK_S = 2.0
ASK_EVERY_S = 2.0
UNREACHED_S = 20.0
"""Without an answer of any agent, after which `watch` gives up on a run on other hosts."""

Fetch = Callable[[], RunRecord | None]
NOBODY: Mapping[int, str] = {}


class AgentHere(Protocol):
    """The agent of a run on this machine alone, which is started and kept alive by whoever watches."""

    def look(self) -> RunRecord:
        """The record as of now, after whatever the agent needs has been done."""
        ...

    def runs(self) -> bool:
        """Whether there is one."""
        ...

    def await_leave(self) -> None:
        """Wait until it has exited."""
        ...


class Watcher:
    """Watches one run to its end.

    `agent`: of a run on this machine alone that we start. `addresses`: of the agents that we have started on hosts, by
    their numbers. `fetch`: brings the record and the metrics here where no agent of the run writes into this machine's
    run folder; None where one does.
    """

    def __init__(
        self,
        run_dir: Path,
        display: Display,
        agent: AgentHere | None = None,
        *,
        addresses: Mapping[int, str] = NOBODY,
        fetch: Fetch | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._display = display
        self._agent = agent
        self._addresses = {agent_name(number): address for number, address in addresses.items()}
        self._fetch = fetch
        self._monitor = Monitor(run_dir, display)
        self._asked_at = -math.inf
        self._heard_at = time.monotonic()
        self._told = ""
        """The state that an agent has told last."""
        self._silent = False
        self._give_up_at = math.inf
        self._stop_wanted: bool | None = None
        """An interrupt that is to be passed on, and whether everything is to end at once."""

    def watch(self, *, until_running: bool = False) -> RunRecord:
        """Stay until the run is over, or until its workers run; returns the record of that time.

        Ctrl-C is for the run: the first one stops it, the second ends it at once.
        """
        return self._monitor.watch(self._look, self._pass_on, poll_s=POLL_S, until_running=until_running)

    def only_look(self) -> RunRecord:
        """Stay until the run is over; returns its record.

        Raises KeyboardInterrupt at Ctrl-C, and DistflowError when no agent of a run on other hosts can be reached.
        """
        return self._monitor.watch(self._look_from_outside, poll_s=POLL_S)

    def _look(self) -> RunRecord:
        if self._agent is None:
            return self._ask_agents(self._unheard)
        record = self._agent.look()
        if record.over:
            self._agent.await_leave()
        return record

    def _look_from_outside(self) -> RunRecord:
        return self._ask_agents(self._lost_or_unreached)

    def _ask_agents(self, unanswered: Callable[[RunRecord], RunRecord]) -> RunRecord:
        """The record as it is written here, with the state that an agent tells; `unanswered` gives it if none does."""
        record, now = read_record(self._run_dir), time.monotonic()
        if record.over:
            return record
        if now - self._asked_at >= ASK_EVERY_S:
            self._asked_at = now
            answer = ask_any_agent(self._reachable(record), "status", {}, ASK_S)
            if answer is None:
                return unanswered(record)
            self._heard_at, self._told, self._silent = now, str(answer["state"]), False
            if self._fetch is not None and self._told != record.state:
                structs.replace(record, state=answer["state"]).write()
        return structs.replace(record, state="running") if self._told == "running" else record

    def _reachable(self, record: RunRecord) -> RunRecord:
        """The record with the addresses of agents that it does not have yet."""
        known = {name: address for name, address in record.roster.items() if address}
        return structs.replace(record, roster={**self._addresses, **known})

    def _unheard(self, record: RunRecord) -> RunRecord:
        # The agents leave when the run is over, and it is in their record how.
        found = (None if self._fetch is None else self._fetch()) or record
        if not found.over and not self._silent:
            self._silent = True
            self._display.say("no host agent answers; the workers go on without them")
        return found

    def _lost_or_unreached(self, record: RunRecord) -> RunRecord:
        if is_lost(record):
            record = read_record(self._run_dir)
            return record if record.over else as_it_ended(record)
        if record.hosts and time.monotonic() - self._heard_at > UNREACHED_S:
            raise DistflowError(f"{self._run_dir}: no host agent of this run can be reached from here any more")
        return record

    def _pass_on(self, record: RunRecord, at_once: bool | None) -> None:
        if at_once is not None:
            self._give_up_at = time.monotonic() + (STOP_MARGIN_S if at_once else record.drain_s + STOP_MARGIN_S)
            self._stop_wanted = at_once
        if self._stop_wanted is not None and self._ask_to_stop(record, at_once=self._stop_wanted):
            self._stop_wanted = None
        if self._agent is not None and time.monotonic() > self._give_up_at:
            self._give_up_at = math.inf
            stop_run(self._run_dir, timeout_s=0.0)

    def _ask_to_stop(self, record: RunRecord, *, at_once: bool) -> bool:
        """Whether somebody sees to it; not while an agent is just starting. Raises KeyboardInterrupt if nobody can."""
        # All of them: one may have lost contact with the others.
        names, body = [agent_name(number) for number in record.numbers], {"reason": "interrupted", "now": at_once}
        answers = ask_all(self._reachable(record), names, "stop", body, ANSWER_S)
        if any(answer is not None for answer in answers.values()):
            return True
        if self._agent is None:
            if at_once:
                raise KeyboardInterrupt
            return False
        if signal_to(record.pids.get(AGENT), signal.SIGTERM):
            return True
        if self._agent.runs():
            return False
        stop_run(self._run_dir, timeout_s=0.0 if at_once else record.drain_s)
        return True
