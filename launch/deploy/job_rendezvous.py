"""How the nodes of a job find each other: who has come, who is missing, and when to give up. No socket or clock here.

    gathering ──all have come──▶ complete
        └──deadline────────────▶ failed: names who is missing

A node says again and again that it is there, so nothing is lost with a message. A node that comes twice with another
life (it was restarted) replaces itself while the others are still awaited, and is refused afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from distflow.errors import DistflowError


class RendezvousFailed(DistflowError):
    """Nodes did not come, or are not of one job."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Hello:
    """What a node says of itself."""

    rank: int
    nodes: int
    life: str
    """Random, new with every start of the process."""
    hostname: str
    address: str
    """Its own address on the way to node 0."""
    python: str
    slots: int | None


class Rendezvous:
    """Node 0's account of who has come."""

    def __init__(self, nodes: int, deadline: float, name: Callable[[int], str]) -> None:
        self.hellos: dict[int, Hello] = {}
        self._nodes = nodes
        self._deadline = deadline
        self._name = name

    @property
    def complete(self) -> bool:
        """Whether all have come."""
        return len(self.hellos) == self._nodes

    @property
    def missing(self) -> list[int]:
        """Ranks that have not come."""
        return [rank for rank in range(self._nodes) if rank not in self.hellos]

    def heard(self, hello: Hello) -> str | None:
        """Somebody says that it is there; returns why it is refused, None if it is not."""
        if hello.nodes != self._nodes:
            return f"it counts {hello.nodes} nodes, node 0 counts {self._nodes}: start all with the same number"
        if not 0 <= hello.rank < self._nodes:
            return f"there is no node {hello.rank} among {self._nodes}"
        known = self.hellos.get(hello.rank)
        if known is not None and known.life != hello.life and self.complete:
            return f"{self._name(hello.rank)} is there already, on {known.hostname} at {known.address}"
        self.hellos[hello.rank] = hello
        return None

    def tick(self, now: float, where: str, refused: int) -> None:
        """Raises RendezvousFailed when it is too late; `refused`: connections turned away for their key."""
        if self.complete or now < self._deadline:
            return
        names = ", ".join(map(self._name, self.missing))
        keys = f"; {refused} connection(s) with another DISTFLOW_RUN_KEY were refused" if refused else ""
        raise RendezvousFailed(
            f"{len(self.missing)} of {self._nodes} nodes have not come to {where}: {names}{keys} — were they "
            "started, do they reach this port, and have all the same DISTFLOW_RUN_KEY? limits.connect_s is their time"
        )
