"""The hosts of a run, as one worker sees them: its own, who publishes weights for which, and how peers are found.

Within a host workers meet over Unix sockets whose names are known beforehand. On another host a worker listens on a
port that the system chose: it tells its host agent (`here`), the agents tell each other, and each agent tells its
workers (`roster`), again whenever somebody comes.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from distflow.comm.addresses import Address
from distflow.comm.keys import Keys, NetworkListener, key_file, read_keys
from distflow.comm.message import Message
from distflow.data.decoding import Name, read
from distflow.flow.publishing import leaders_of, publisher_for
from distflow.log import logger
from distflow.runtime.assembly import Setting
from distflow.runtime.node import Node, agent_of

SAY_EVERY_S = 1.0
REMIND_EVERY_S = 15.0
"""A message may be lost, and an agent may be a new one."""

log = logger(__name__)


class _Roster(msgspec.Struct, frozen=True):
    addresses: dict[Name, Address]


class Hosts:
    """Read from a worker's document."""

    def __init__(self, setting: Setting) -> None:
        document = setting.document
        self._run_dir = setting.run_dir
        self._roster = {str(worker.name): "" for worker in setting.plan.workers} | dict(document.roster)
        self.here = document.host
        self.address = document.address
        self._leaders = leaders_of(setting.owners, document.placement)

    @property
    def roster(self) -> dict[str, str]:
        """Address of every worker by name; "" where it is not known yet."""
        return dict(self._roster)

    @property
    def keys(self) -> Keys | None:
        """The run's, where it has several hosts. Raises UserError when they are missing."""
        return None if self.address is None else read_keys(key_file(self._run_dir))

    @property
    def listener(self) -> NetworkListener | None:
        """What to listen on for other hosts; None: there are none."""
        keys = self.keys
        return None if self.address is None or keys is None else NetworkListener(self.address, keys)

    def leads(self, worker: str) -> bool:
        """Whether this is the first training worker of its host, which acts there for all of them."""
        return worker in self._leaders.values()

    @property
    def trains_here(self) -> bool:
        """Whether a training worker is on this host, so that weights come through shared memory."""
        return self.here in self._leaders

    def publisher_for(self, host: int) -> str:
        """Who publishes weights for the engines of a host: its own training worker, else one of the others in turn."""
        return publisher_for(host, self._leaders)


class Greeting:
    """Says where this worker listens, and learns where the others do. `wanted(name)`: is this a peer of ours?"""

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
        # The agent answers each `here` by a roster; one that came before any was for another reason.
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
                log.info("%s has come to the run", name)
                self._node.membership.add(name)
