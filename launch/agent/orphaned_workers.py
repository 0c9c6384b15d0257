"""Workers whose host agent is silent: they go on, and the first of the other agents tells them what theirs cannot.

That is deaths, new addresses of workers on other hosts, and the end of the run. Nothing else is concluded about such
workers; if their agent was only slow, they are told some things twice, which is harmless.
"""

from __future__ import annotations

from collections.abc import Iterator

from distflow.cluster.cluster_view import orphaned
from distflow.cluster.gossip import Gossip
from distflow.comm.endpoint import Endpoint
from distflow.launch.agent.address_book import AddressBook
from distflow.launch.agent.peer_agents import SILENT_S
from distflow.launch.agent.restart_policy import RestartPolicy, Tell
from distflow.log import logger

log = logger(__name__)


class OrphanedWorkers:
    """What one agent tells workers whose own agent is silent."""

    def __init__(self) -> None:
        self._deaths: set[tuple[str, str, int]] = set()
        self._looked: dict[str, int] = {}
        """By orphan: the revision of the reports whose deaths it was told."""
        self._book: AddressBook | None = None
        """Made when there is an orphan."""
        self._rosters: dict[str, int] = {}
        """By orphan: the number of the roster that it was sent last."""
        self._stopped: set[tuple[str, str]] = set()

    def tell(self, mesh: Gossip, core: RestartPolicy, endpoint: Endpoint) -> None:
        """Send them what is new."""
        for name, address in addresses(mesh).items():
            if endpoint.roster.get(name) != address:
                endpoint.learn(name, address)
        for tell in self.tells(mesh, core):
            assert tell.to is not None, "an orphan is told by name"
            if tell.to not in endpoint.roster:
                continue
            log.info("telling %s, whose agent is silent: %s", tell.to, tell.kind)
            endpoint.send(tell.to, tell.kind, tell.body)

    def tells(self, mesh: Gossip, core: RestartPolicy) -> Iterator[Tell]:
        """What they must be told now; each thing once."""
        for name, host in orphaned(mesh, mesh.silent()):
            yield from self._deaths_for(name, mesh)
            yield from self._roster_for(name, host, mesh)
        if core.winding_up:
            for name, _ in orphaned(mesh, _quiet(mesh)):
                if (name, core.course) not in self._stopped:
                    self._stopped.add((name, core.course))
                    yield Tell("stop", {"reason": core.reason or f"the run is {core.course}"}, name)

    def _deaths_for(self, name: str, mesh: Gossip) -> Iterator[Tell]:
        changed = mesh.changed_since(self._looked[name]) if name in self._looked else list(mesh.reports)
        self._looked[name] = mesh.revision
        for report in (mesh.reports[host] for host in changed if host in mesh.reports):
            for worker, hosted in report.workers.items():
                for death in hosted.deaths:
                    if worker != name and (name, worker, death.incarnation) not in self._deaths:
                        self._deaths.add((name, worker, death.incarnation))
                        body = {"worker": worker, "incarnation": death.incarnation, "reason": death.reason}
                        yield Tell("lost", body, name)

    def _roster_for(self, name: str, host: int, mesh: Gossip) -> Iterator[Tell]:
        """Addresses on other hosts only: it knows those on its own."""
        if self._book is None:
            self._book = AddressBook(mesh)
        self._book.look()
        if self._rosters.get(name) != self._book.number:
            self._rosters[name] = self._book.number
            # All of them: it has nobody whom it could tell that it missed some.
            yield Tell("roster", {"addresses": self._book.since(0, besides=host)}, name)


def addresses(mesh: Gossip) -> dict[str, str]:
    """The addresses of workers on silent hosts."""
    return {name: mesh.reports[host].workers[name].address for name, host in orphaned(mesh, _quiet(mesh))}


def _quiet(mesh: Gossip) -> frozenset[int]:
    return mesh.silent(SILENT_S) | mesh.silent()
