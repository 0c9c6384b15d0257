"""Where all workers and agents of a run listen, as one agent knows it, and what of it somebody lacks.

Every change gets a number. Who was told everything up to a number is told only what came later: what an agent sends its
workers at one host's news does not grow with the number of hosts.

Example: a worker has number 40. rollout/7 of another host comes back at a new address, number 41, so the worker is sent
this one address, with 40 and 41; had it missed number 40, it would say so by the number that it has.
"""

from __future__ import annotations

from collections.abc import Callable

from distflow.cluster.cluster_view import addresses_on
from distflow.cluster.gossip import Gossip


class AddressBook:
    """`own(name)`: the address of a process on this agent's host, if it is not that for other hosts. `first`: the
    number before the first one."""

    def __init__(self, mesh: Gossip, own: Callable[[str], str] | None = None, first: int = 0) -> None:
        self.number = self.first = first
        self._mesh = mesh
        self._own = own
        self._places: dict[str, tuple[int, str, int]] = {}
        """By name, the last one that changed at the end: host, address, and number of the change."""
        self._revision = mesh.revision
        for host in mesh.reports:
            self._look_at(host)

    def note(self, host: int, name: str, address: str) -> None:
        """A process of a host listens there; "": nobody knows where."""
        known = self._places.get(name)
        if known is None or known[:2] != (host, address):
            self.number += 1
            self._places.pop(name, None)
            self._places[name] = host, address, self.number

    def look(self) -> None:
        """Take up what has changed."""
        for host in self._mesh.changed_since(self._revision):
            self._look_at(host)
        self._revision = self._mesh.revision

    def since(self, number: int, *, besides: int | None = None) -> dict[str, str]:
        """Addresses that have changed after this number, perhaps without those of one host."""
        found: dict[str, str] = {}
        for name, (host, address, changed) in reversed(self._places.items()):
            if changed <= number:
                break
            if host != besides:
                found[name] = address
        return found

    def _look_at(self, host: int) -> None:
        report, own = self._mesh.report(host), self._own if host == self._mesh.host else None
        if report is None:
            return
        for name in [name for name, hosted in report.workers.items() if hosted.state == "left"]:
            # Who knows its address is not told to forget it, but nobody else needs it.
            self._places.pop(name, None)
        for name, address in addresses_on(report).items():
            if own is None:
                self.note(host, name, address)
            elif name not in self._places:
                # Never another one, and to make it asks the file system.
                self.note(host, name, own(name))
