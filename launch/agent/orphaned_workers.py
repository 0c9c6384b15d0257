"""Workers whose host agent is silent: they go on, and the first of the other agents tells them what theirs cannot.

That is: deaths, new addresses of workers on other hosts, and that the run comes to its end. Nothing is concluded about
such workers; should their agent only have been slow, they hear some things twice, which does no harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distflow.comm.endpoint import Endpoint
from distflow.launch.agent.restart_policy import Supervisor, Tell
from distflow.launch.cluster import cluster_view as standing
from distflow.launch.cluster.gossip import Mesh
from distflow.launch.cluster.host_report import Seat
from distflow.log import logger

SILENT_S = 5.0
"""After which a host's workers are told of the end of the run: that is decided, and waits for nobody."""
log = logger(__name__)


class Orphans:
    """What one agent has told them."""

    def __init__(self) -> None:
        self._deaths: set[tuple[str, str, int]] = set()
        self._rosters: dict[str, Mapping[str, str]] = {}
        self._stopped: set[tuple[str, str]] = set()

    def tell(self, mesh: Mesh, core: Supervisor, endpoint: Endpoint) -> None:
        """Say it."""
        for name, address in addresses(mesh).items():
            if endpoint.roster.get(name) != address:
                endpoint.learn(name, address)
        for tell in self.tells(mesh, core):
            assert tell.to is not None, "an orphan is told by name"
            if tell.to not in endpoint.roster:
                continue
            log.info("telling %s, whose agent is silent: %s", tell.to, tell.kind)
            endpoint.send(tell.to, tell.kind, tell.body)

    def tells(self, mesh: Mesh, core: Supervisor) -> Iterator[Tell]:
        """What there is to say now; each thing once."""
        for name, host in _orphans(mesh, mesh.silent()):
            yield from self._deaths_for(name, mesh)
            yield from self._roster_for(name, host, mesh)
        if core.winding_up:
            for name, _ in _orphans(mesh, _quiet(mesh)):
                if (name, core.course) not in self._stopped:
                    self._stopped.add((name, core.course))
                    yield Tell("stop", {"reason": core.reason or f"the run is {core.course}"}, name)

    def _deaths_for(self, name: str, mesh: Mesh) -> Iterator[Tell]:
        for report in mesh.reports.values():
            for worker, seat in report.seats.items():
                for death in seat.deaths:
                    if worker != name and (name, worker, death.incarnation) not in self._deaths:
                        self._deaths.add((name, worker, death.incarnation))
                        body = {"worker": worker, "incarnation": death.incarnation, "reason": death.reason}
                        yield Tell("lost", body, name)

    def _roster_for(self, name: str, host: int, mesh: Mesh) -> Iterator[Tell]:
        """Of the other hosts only: how it reaches its own, it knows."""
        addresses = standing.network_roster(mesh, leaving_out=host)
        if self._rosters.get(name) != addresses:
            self._rosters[name] = addresses
            yield Tell("roster", {"addresses": addresses}, name)


def addresses(mesh: Mesh) -> dict[str, str]:
    """Where the workers of silent hosts are reached."""
    return {name: mesh.reports[host].seats[name].address for name, host in _orphans(mesh, _quiet(mesh))}


def _quiet(mesh: Mesh) -> frozenset[int]:
    return mesh.silent(SILENT_S) | mesh.silent()


def _orphans(mesh: Mesh, silent: frozenset[int]) -> Iterator[tuple[str, int]]:
    first = min(host for host in (mesh.host, *mesh.others) if host not in silent)
    if first != mesh.host:
        return
    for host in sorted(silent):
        report = mesh.report(host)
        for name, seat in report.seats.items() if report is not None else ():
            if _reachable(seat):
                yield name, host


def _reachable(seat: Seat) -> bool:
    return seat.living and bool(seat.address)
