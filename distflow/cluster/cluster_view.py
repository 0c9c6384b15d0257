"""What follows from the reports of all hosts: whether the run goes on elsewhere, how it ended, what to wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import structs

from distflow.cluster.gossip import Gossip
from distflow.cluster.host_report import DesiredWorkers, HostReport, Successor, Term
from distflow.cluster.processes import STOPPED, Exit, Failure, Outcome, agent_name
from distflow.cluster.report_totals import ReportTotals
from distflow.errors import UserError
from distflow.types import WorkerName

if TYPE_CHECKING:
    from distflow.flow.plan import Plan, WorkerPlan

LEAST_MARGIN_S = 3.0
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


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of the recipe."""

    shrinks: bool
    """layout.on_failure: shrink: the pool goes on without members that cannot return."""
    silence_s: float
    """limits.host_silence_s"""
    restarts: int
    """limits.restarts"""

    @property
    def margin_s(self) -> float:
        """The time that a cut-off host has to end its workers before others go on without it."""
        return max(LEAST_MARGIN_S, self.silence_s / 4)

    @property
    def gone_s(self) -> float:
        """A host that has been silent for so long counts as gone."""
        return self.silence_s + self.margin_s


@dataclass(frozen=True, slots=True)
class View:
    """What the agent of `host` knows at one moment."""

    host: int
    hosts: Mapping[str, int]
    """The training workers that the run began with, and their hosts."""
    names: Mapping[int, str]
    """Names of the hosts, for messages."""
    terms: Mapping[int, Term]
    """As last reported by the hosts, including our own."""
    unheard_s: Mapping[int, float]
    """Seconds since any host that we hear has heard from a host."""
    unseen_s: Mapping[int, float]
    """Seconds since our last message that a host has confirmed."""
    wanted: Mapping[str, DesiredWorkers] = field(default_factory=dict)
    """What `distflow scale` has decided last about pools that train."""

    @property
    def own(self) -> Term:
        """Our own term."""
        return self.terms[self.host]

    @property
    def members(self) -> Mapping[str, int]:
        """The members of the current term, and their hosts."""
        return members_of(self.own.begun, self.hosts)

    @property
    def member_hosts(self) -> frozenset[int]:
        """Hosts with a member."""
        return frozenset(self.members.values())

    def weight(self, hosts: frozenset[int]) -> int:
        """How many members these hosts have."""
        return sum(host in hosts for host in self.members.values())

    def majority(self, hosts: frozenset[int]) -> bool:
        """Whether these hosts have more than half of the members."""
        return 2 * self.weight(hosts) > len(self.members)

    def there(self) -> frozenset[int]:
        """Hosts whose agents have reported the end of their members."""
        found = {host: self.terms.get(host) for host in self.member_hosts}
        return frozenset(h for h, term in found.items() if term and term.number == self.own.number and term.ended)

    def gone_after_end(self, rules: Rules) -> frozenset[int]:
        """Hosts that have reported the end of their members, and have been silent for too long since."""
        others = self.there() - {self.host}
        return frozenset(host for host in others if self.unheard_s.get(host, 0.0) >= rules.gone_s)

    def gone(self, rules: Rules) -> frozenset[int]:
        """Hosts that have been silent for too long and have not reported the end of their members."""
        away = self.member_hosts - self.there() - {self.host}
        return frozenset(host for host in away if self.unheard_s.get(host, 0.0) >= rules.gone_s)

    def cut_off(self, rules: Rules, term: Successor | None = None) -> bool:
        """Whether the others may be about to go on without our host, in the current term or another one."""
        hosts = list((self.members if term is None else members_of(term, self.hosts)).values())
        near = {host for host in hosts if host == self.host or self.unseen_s.get(host, 0.0) < rules.silence_s}
        return self.host in hosts and 2 * sum(host in near for host in hosts) <= len(hosts)

    def unreachable(self, hosts: Iterable[int], rules: Rules) -> frozenset[int]:
        """Those of these hosts that nobody could tell to start a worker now."""
        silent = (h for h in hosts if h not in self.terms or self.unheard_s.get(h, 0.0) >= rules.silence_s)
        return frozenset(silent) - {self.host}

    def named(self, hosts: frozenset[int]) -> str:
        """Names of hosts, for messages."""
        return ", ".join(self.names.get(host) or f"host {host}" for host in sorted(hosts))


def members_of(term: Successor | None, first: Mapping[str, int]) -> Mapping[str, int]:
    """The training workers of a term, with their hosts. `first`: those that the run began with."""
    if term is None or not term.members:
        return first
    return dict(zip(term.members, term.hosts or [first[name] for name in term.members], strict=True))


def takes_up(term: Successor, before: Term) -> bool:
    """Whether a term takes up a decision of `distflow scale` that the one before did not know."""
    return term.scaled != (() if before.begun is None else before.begun.scaled)


def head_of(mesh: Gossip) -> int:
    """The host whose run folder gets a copy of all files, if the hosts do not share one: the first that is heard."""
    return first_heard(mesh, mesh.silent())


def first_heard(mesh: Gossip, silent: Collection[int]) -> int:
    """The first host that is not silent."""
    return min(mesh.host, next((host for host in mesh.others if host not in silent), mesh.host))


def elsewhere(totals: ReportTotals, trainers: Mapping[str, int]) -> Elsewhere:
    """The state of the other hosts. `trainers`: all training workers of the run, with their hosts."""
    mesh, silent = totals.mesh, totals.mesh.silent()
    # A host that has not reported may be living.
    living = len(mesh.others) > len(totals.idle) + len(silent - totals.idle)
    training = any(host != mesh.host and not _ended(mesh, host, name) for name, host in trainers.items())
    # Between two terms no training worker runs, but all of them will.
    return Elsewhere(living, training or totals.between_terms, totals.saved)


def _ended(mesh: Gossip, host: int, worker: str) -> bool:
    report = mesh.report(host)
    return report is not None and worker in report.workers and not report.workers[worker].living


def wanted(mesh: Gossip) -> dict[str, DesiredWorkers]:
    """The last decision about each pool that was scaled."""
    found: dict[str, DesiredWorkers] = {}
    for report in mesh.reports.values():
        take_newer(found, report.wanted)
    return found


def take_newer(decisions: dict[str, DesiredWorkers], others: Mapping[str, DesiredWorkers]) -> None:
    """Replace decisions about pools by later ones."""
    for pool, decision in others.items():
        if pool not in decisions or decision.stamp > decisions[pool].stamp:
            decisions[pool] = decision


def addresses_on(report: HostReport) -> dict[str, str]:
    """Network addresses of the agent and the workers of a host."""
    there = {name: hosted.address for name, hosted in report.workers.items() if hosted.state != "left"}
    return {agent_name(report.host): report.entry.agent, **there}


def status(mesh: Gossip) -> dict[str, Any]:
    """What any agent tells commands about all hosts, as plain data."""
    roster: dict[str, str] = {}
    workers: list[dict[str, Any]] = []
    for host, report in mesh.reports.items():
        roster |= addresses_on(report)
        for name, hosted in report.workers.items():
            about = {"name": name, "host": host, "incarnation": hosted.incarnation, "state": hosted.state}
            workers.append(about)
    return {
        "workers": workers,
        "silent": sorted(mesh.silent()),
        "hosts": {str(host): structs.asdict(report.entry) for host, report in sorted(mesh.reports.items())},
        "saved": sum(report.saved for report in mesh.reports.values()),
        "roster": roster,
    }


def orphaned(mesh: Gossip, silent: Collection[int]) -> Iterator[tuple[str, int]]:
    """Workers on silent hosts, with their hosts, if this agent is the one that tells them things: the first of those
    that are not silent."""
    if not silent or mesh.host != first_heard(mesh, silent):
        return
    for host in sorted(silent):
        report = mesh.report(host)
        for name, hosted in report.workers.items() if report is not None else ():
            if hosted.living and hosted.address:
                yield name, host


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
    waits = (
        (agent_name(host), _awaited_of(mesh, host, apart, writes=writes))
        for host in mesh.others
        if host not in silent and not _gone(mesh.report(host))
    )
    return next((f"{name} {what}" for name, what in waits if what is not None), None)


def _gone(report: HostReport | None) -> bool:
    return report is not None and report.gone


def _awaited_of(mesh: Gossip, host: int, apart: Collection[int], *, writes: bool) -> str | None:
    report = mesh.report(host)
    if report is None or not report.clean:
        return "to end and clean up its part"
    if not mesh.seen_by(host):
        return "to learn that this host is cleaned up"
    if host == head_of(mesh) and host in apart and not report.collected:
        return "to fetch the last files"
    if writes and host not in apart:
        return "to exit before the end is written to run.json"
    return None


class FreeGpus:
    """The GPUs of the hosts: new workers take those that no worker of the run uses.

    `leaving`: workers that give theirs up. One that has ended keeps them, since it may be restarted.
    """

    def __init__(self, mesh: Gossip, plan: Plan, leaving: Container[str]) -> None:
        self._mesh, self._plan = mesh, plan
        self._users = {
            host: Counter(
                number
                for name, hosted in report.workers.items()
                if hosted.state != "left" and name not in leaving
                for number in hosted.gpus
            )
            for host, report in mesh.reports.items()
        }

    def take(self, name: str, hosts: Sequence[int]) -> int:
        """Choose one of these hosts, the best one first. Raises UserError if none has a free GPU."""
        from distflow.flow.gpus import width

        found = next((host for host in hosts if self.hold(name, host)), None)
        if found is None:
            raise UserError(f"scale: {self._refusal(name, hosts, width(self._worker(name)))}")
        return found

    def hold(self, name: str, host: int) -> bool:
        """Hold what a worker will take of a host; whether there is enough."""
        from distflow.flow.gpus import free_gpu, takes_free_gpu, width

        worker, count = self._worker(name), self._count(host)
        if not takes_free_gpu(worker, count):
            return True
        first = free_gpu(self._users[host], count, width(worker))
        if first is not None:
            self._users[host].update(range(first, first + width(worker)))
        return first is not None

    def _worker(self, name: str) -> WorkerPlan:
        """As planned; for a pool whose own scaling is not in this plan, its first worker."""
        pool = [worker for worker in self._plan.workers if worker.name.pool == WorkerName.parse(name).pool]
        return next((worker for worker in pool if str(worker.name) == name), pool[0])

    def _count(self, host: int) -> int:
        return self._mesh.reports[host].entry.gpus if host in self._mesh.reports else 0

    def _refusal(self, name: str, hosts: Sequence[int], wide: int) -> str:
        pool, named = WorkerName.parse(name).pool, [self._mesh.reports[host].entry.name for host in hosts]
        where = f"{', '.join(named)} {'has' if len(named) == 1 else 'have'}" if all(named) else "this machine has"
        needed = f"{wide} consecutive GPUs" if wide > 1 else "a GPU"
        further = "add a host with --hosts, " if all(named) else ""
        return (
            f"{name} needs {needed} that no other worker uses, and of {sum(map(self._count, hosts))} GPUs {where} "
            f"none to spare — scale another pool down, {further}or let it share one: stop the run, and continue with "
            f"--resume layout.pools.{pool}.count=… layout.pools.{pool}.device=cuda:N"
        )
