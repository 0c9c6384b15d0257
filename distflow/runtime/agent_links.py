"""What a worker tells its host agent, and learns of it.

Workers of one host meet over Unix sockets whose names are known in advance (`Hosts`). For other hosts a worker listens
on a port chosen by the system: it tells its host agent (`here`), the agents tell each other, and each agent tells its
workers (`roster`), again whenever a worker joins (`Greeting`).
"""

from __future__ import annotations

from collections.abc import Callable

from distflow.comm.addresses import Address
from distflow.comm.message import Message
from distflow.data.decoding import Form, Name, read
from distflow.log import logger
from distflow.runtime.node import Hosts, Node, agent_of

SAY_EVERY_S = 1.0
"""How often a worker tells its agent where it listens, until the agent answers, and how far it is with a checkpoint."""
REMIND_EVERY_S = 15.0
"""The same afterwards: a message may be lost, and the agent may have been restarted."""

log = logger(__name__)


class _Roster(Form, frozen=True):
    addresses: dict[Name, Address]


class CheckpointReports:
    """Tells the agent how far this worker is with a checkpoint: it gives a worker that is ending time to save."""

    def __init__(self, node: Node, host: int) -> None:
        self._node = node
        self._agent = agent_of(host)
        self._say_at = 0.0
        self._said = 0
        node.on_tick(self._tick)

    def _tick(self, now: float) -> None:
        amount = self._node.checkpointed
        if amount != self._said and now >= self._say_at and self._agent in self._node.endpoint.roster:
            self._say_at, self._said = now + SAY_EVERY_S, amount
            self._node.send(self._agent, "checkpointed", {"bytes": amount})


class Greeting:
    """Tells the agent where this worker listens, and learns where others do. `wanted(name)`: whether it is a peer."""

    def __init__(self, node: Node, hosts: Hosts, wanted: Callable[[str], bool]) -> None:
        self._node = node
        self._agent = agent_of(hosts.here)
        self._wanted = wanted
        self._elsewhere = hosts.address is not None
        self._say_at = 0.0
        self._said = False
        self._heard = False
        node.on_agent("roster", self._on_roster)
        node.on_tick(self._tick)

    def _tick(self, now: float) -> None:
        if self._elsewhere and now >= self._say_at:
            self._said = True
            self._say_at = now + (REMIND_EVERY_S if self._heard else SAY_EVERY_S)
            self._node.send(self._agent, "here", {"address": self._node.endpoint.network_address})

    def _on_roster(self, message: Message) -> None:
        addresses = read(message.body, _Roster, "roster").addresses
        # The agent answers each `here` with a roster; one that comes before any `here` has another reason.
        self._heard = self._heard or self._said
        endpoint = self._node.endpoint
        for name, address in addresses.items():
            if name == endpoint.name:
                continue
            if endpoint.roster.get(name) != address:
                if not endpoint.learn(name, address):
                    continue
                self._node.membership.greet(name)
            if self._wanted(name) and name not in self._node.membership.peers:
                log.info("%s was added to the run", name)
                self._node.membership.add(name)
