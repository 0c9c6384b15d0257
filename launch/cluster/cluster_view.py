"""What follows from the reports of all hosts: whether the run goes on elsewhere, how it ended, what to wait for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from distflow.launch.cluster.gossip import Gossip
from distflow.launch.cluster.host_report import DesiredWorkers, HostReport
from distflow.launch.run.exit_status import STOPPED, Exit, Outcome
from distflow.launch.run.record import Failure, agent_name

HEAD = 0
"""The host whose run folder gets a copy of all files, if the hosts do not share one."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The state of the other hosts, as far as it is known."""

    living: bool = False
    """A worker runs there, or will. Silent hosts do not count."""
    training: bool = False
    """A training worker runs there, or will. Those of silent hosts count, since their end was not reported."""
    saved: int = 0
    """Bytes of checkpoints that workers there have read or written since the run is ending."""


def elsewhere(mesh: Gossip, trainers: Mapping[str, int]) -> Elsewhere:
    """The state of the other hosts. `trainers`: all training workers of the run, with their hosts."""
    silent = mesh.silent()
    living = any(host not in silent and _may_be_living(mesh.report(host)) for host in mesh.others)
    training = any(host != mesh.host and not _ended(mesh, host, name) for name, host in trainers.items())
    saved = sum(report.saved for host, report in mesh.reports.items() if host != mesh.host)
    # Between two terms no training worker runs, but all of them will.
    return Elsewhere(living, training or _between_terms(mesh), saved)


def _between_terms(mesh: Gossip) -> bool:
    terms = [report.term for report in mesh.reports.values()]
    return max(terms, key=lambda term: (term.number, term.broken)).broken


def _may_be_living(report: HostReport | None) -> bool:
    return report is None or (report.living and not report.gone)


def _ended(mesh: Gossip, host: int, worker: str) -> bool:
    report = mesh.report(host)
    return report is not None and worker in report.workers and not report.workers[worker].living


def wanted(mesh: Gossip) -> dict[str, DesiredWorkers]:
    """The last decision about each pool that was scaled."""
    found: dict[str, DesiredWorkers] = {}
    for report in mesh.reports.values():
        for pool, decision in report.wanted.items():
            if pool not in found or decision.stamp > found[pool].stamp:
                found[pool] = decision
    return found


def roster(mesh: Gossip, own: Callable[[str], str]) -> dict[str, str]:
    """Addresses of all workers and agents for the workers of this host; `own(name)`: of one on this host."""
    found: dict[str, str] = {}
    for host in sorted(mesh.reports.keys() | set(mesh.others)):
        report = mesh.report(host)
        found[agent_name(host)] = own(agent_name(host)) if host == mesh.host else report.entry.agent if report else ""
        for name, hosted in report.workers.items() if report is not None else ():
            if hosted.state != "left":
                found[name] = own(name) if host == mesh.host else hosted.address
    return found


def network_roster(mesh: Gossip, *, leaving_out: int | None = None) -> dict[str, str]:
    """Network addresses of all workers and agents, perhaps except those of one host."""
    found: dict[str, str] = {}
    for host, report in mesh.reports.items():
        if host != leaving_out:
            found[agent_name(host)] = report.entry.agent
            found |= {name: hosted.address for name, hosted in report.workers.items() if hosted.state != "left"}
    return found


def outcome(mesh: Gossip, trainers: Mapping[str, int], exits: Mapping[str, Exit]) -> Outcome:
    """How the run ended, once no worker is alive: the same on every host that has the same reports.

    `exits`: how workers ended whose end no agent has reported.
    """
    reports = [mesh.reports[host] for host in sorted(mesh.reports)]
    failed = [r.failure for r in reports if r.phase == "failing" and r.failure is not None]
    if failed:
        return Outcome("failed", failed[0].exit_code, failed[0])
    if any(report.phase == "stopping" for report in reports):
        return Outcome("stopped", STOPPED, _first(r.failure for r in reports if r.phase == "stopping"))
    bad = [name for name, host in trainers.items() if _code(mesh, host, name, exits) != 0]
    if not bad:
        return Outcome("done", 0)
    if any(_code(mesh, trainers[name], name, exits) == STOPPED for name in bad):
        return Outcome("stopped", STOPPED)
    agent = agent_name(trainers[bad[0]])
    why = (
        f"{agent} stopped answering, and it is unknown how {', '.join(bad)} ended — look at that host; "
        "continue from the last checkpoint with --resume"
    )
    return Outcome("failed", 3, Failure(agent, 3, "WorkerFailed", why))


def all_started(mesh: Gossip) -> bool:
    """Whether all hosts have reported, and all their workers have been started."""
    reports = mesh.reports.values()
    if len(reports) <= len(mesh.others):
        return False
    return all(hosted.state != "starting" for report in reports for hosted in report.workers.values())


def unseen(mesh: Gossip, trainers: Mapping[str, int], exits: Mapping[str, Exit]) -> list[str]:
    """Training workers whose end has not been reported."""
    return [name for name, host in trainers.items() if not _ended(mesh, host, name) and name not in exits]


def _first(values: Iterator[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


def _code(mesh: Gossip, host: int, worker: str, exits: Mapping[str, Exit]) -> int | None:
    if _ended(mesh, host, worker):
        return mesh.reports[host].workers[worker].code
    return exits[worker].code if worker in exits else None


def awaited(mesh: Gossip, apart: Collection[int], silent: Collection[int], *, writes: bool) -> str | None:
    """What an agent whose own host is cleaned up must still wait for before it exits; None: nothing.

    `apart`: hosts that do not share our run folder. `writes`: this agent writes `run.json`.
    """
    waits = [
        (agent_name(host), _awaited_of(mesh, host, apart, writes=writes))
        for host in mesh.others
        if host not in silent and not _gone(mesh.report(host))
    ]
    return next((f"{name} {what}" for name, what in waits if what is not None), None)


def _gone(report: HostReport | None) -> bool:
    return report is not None and report.gone


def _awaited_of(mesh: Gossip, host: int, apart: Collection[int], *, writes: bool) -> str | None:
    report = mesh.report(host)
    if report is None or not report.clean:
        return "to end and clean up its part"
    if not mesh.seen_by(host):
        return "to learn that this host is cleaned up"
    if host == HEAD and host in apart and not report.collected:
        return "to fetch the last files"
    if writes and host not in apart:
        return "to exit before the end is written to run.json"
    return None
