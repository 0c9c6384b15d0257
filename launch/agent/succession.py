"""How one agent of a host follows another that was killed, and keeps what the one after it will need."""

from __future__ import annotations

import time
from collections.abc import Mapping

from msgspec import structs

from distflow.comm.addresses import place_of, worker_address
from distflow.comm.endpoint import Endpoint
from distflow.comm.keys import NetworkListener, agent_keys, key_file, read_keys
from distflow.launch.agent.peer_agents import PeerAgents
from distflow.launch.agent.pool_recovery import PoolRecovery
from distflow.launch.agent.record_writer import Journal, JournalWriter
from distflow.launch.agent.restart_policy import Action, RestartPolicy
from distflow.launch.cluster.host_report import HostReport
from distflow.launch.run.record import ProcessMark, RunRecord, agent_name
from distflow.log import logger

log = logger(__name__)


class Succession:
    """Of one agent; `before`: the journal of the one that it follows."""

    def __init__(
        self,
        record: RunRecord,
        host: int,
        before: Journal | None,
        core: RestartPolicy,
        peers: PeerAgents,
        terms: PoolRecovery,
    ) -> None:
        self._launch_term = record.launch_term
        self._before = before
        self._writer = JournalWriter(record.path, host)
        self._core = core
        self._peers = peers
        self._terms = terms

    @property
    def workers(self) -> Mapping[str, ProcessMark] | None:
        """Processes of the workers that the agent before had; None if there was none."""
        return None if self._before is None else self._before.workers()

    def take_over(self) -> list[Action]:
        """Become the agent before; returns what is left to be done for it."""
        if self._before is None:
            return []
        log.warning("the agent before this one was killed: going on with its workers")
        self._peers.resume(self._before)
        self._terms.resume(self._before.report.term, self._before.former_culprits)
        return self._core.resume(self._before.lives(), self._before.report, self._before.culprits, time.monotonic())

    def keep(self, report: HostReport) -> bool:
        """Write down where we stand; whether that is on disk."""
        lives, core = self._core.lives.items(), self._core
        journal = Journal(
            launch_term=self._launch_term,
            report=report,
            first=self._peers.first,
            agents=self._peers.agents(),
            begun=self._peers.begun,
            restarted={name: list(life.restarted) for name, life in lives if life.restarted},
            told=tuple(name for name, life in lives if life.told),
            culprits=tuple(sorted(core.culprits)),
            former_culprits=self._terms.former_culprits,
        )
        return self._writer.write(journal)

    def publish(self, report: HostReport) -> None:
        """Tell the other hosts what is new here; a vote only once no later agent of this host can forget it."""
        said = self._peers.mesh.own.term
        if not self.keep(report) and report.term.vote != said.vote:
            report = structs.replace(report, term=structs.replace(report.term, vote=said.vote))
        self._peers.publish(report)


def make_endpoint(record: RunRecord, host: int, before: Journal | None) -> Endpoint:
    """The agent's endpoint, which other hosts reach where they reached the agent before it."""
    name, roster = agent_name(host), _own_roster(record, host, before)
    if not record.hosts:
        return Endpoint(name, record.launch_term, roster)
    own, former = agent_keys(record.path, host), _former_address(before)
    listener = NetworkListener(record.hosts[host].address, read_keys(key_file(record.path)), own, former)
    return Endpoint(name, record.launch_term, roster, listener=listener)


def _former_address(before: Journal | None) -> str:
    """Where the agent before listened for other hosts; "" if it did not."""
    return "" if before is None else place_of(before.report.entry.agent)


def _own_roster(record: RunRecord, host: int, before: Journal | None) -> dict[str, str]:
    """Where the agent and all workers of a host listen there, with those that it got while the run went on."""
    planned = [worker.name for worker in record.workers if worker.host == host]
    later = [] if before is None else before.report.seats
    return {name: worker_address(record.path, name, host) for name in (*planned, *later, agent_name(host))}
