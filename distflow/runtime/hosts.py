"""The hosts and workers of a run as one worker sees them: where they are, how it reaches them, who publishes for whom.

Workers of one host meet over Unix sockets whose names are known in advance (`Hosts`). For other hosts a worker listens
on a port chosen by the system: it tells its host agent (`here`), the agents tell each other, and each agent tells its
workers (`roster`), again whenever a worker joins (`Greeting`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from distflow.comm.addresses import Address
from distflow.comm.endpoint import Endpoint
from distflow.comm.keys import Keys, NetworkListener, key_file, read_keys
from distflow.comm.membership import Identity, Membership
from distflow.comm.message import Message
from distflow.comm.processes import process_alive, started_at
from distflow.data.decoding import Form, Name, read
from distflow.exchange.facts import read_facts
from distflow.flow.digest import digest_parts
from distflow.flow.memory import frame_bytes
from distflow.flow.plan import leaders_of, publisher_for
from distflow.log import logger
from distflow.runtime.assembly import Setting
from distflow.runtime.node import SAY_EVERY_S, Node, agent_of
from distflow.runtime.waits import WaitBoard

REMIND_EVERY_S = 15.0
"""The same afterwards: a message may be lost, and the agent may have been restarted."""

log = logger(__name__)


def identity(
    name: str, incarnation: int, digest: str, parts: Mapping[str, str], host: int = 0, site: str = ""
) -> Identity:
    """The identity of this process."""
    started = started_at(os.getpid())
    assert started is not None, "this process is running"
    return Identity(name, incarnation, os.getpid(), started, digest, parts, host, site)


class Hosts:
    """The hosts and workers of a run, from a worker's document."""

    def __init__(self, setting: Setting) -> None:
        document = setting.document
        self._setting = setting
        self._run_dir = setting.run_dir
        self.roster = {str(worker.name): "" for worker in setting.plan.workers} | document.roster
        """Address of every worker by name; "" while it is unknown."""
        self.here = document.host
        self.address = document.address
        self._sites = {int(number): site for number, site in document.sites.items()}
        self._leaders = {
            model: leaders_of(setting.home_of(model), document.placement) for model in setting.plan.generating
        }
        """The workers that publish each model, by host."""

    @property
    def keys(self) -> Keys | None:
        """The keys of a run on several hosts; None on one host. Raises UserError when they are missing."""
        return None if self.address is None else read_keys(key_file(self._run_dir))

    @property
    def listener(self) -> NetworkListener | None:
        """Where to listen for other hosts; None if there are none."""
        keys = self.keys
        return None if self.address is None or keys is None else NetworkListener(self.address, keys)

    def _endpoint(self, name: str, incarnation: int, most_bytes: int) -> Endpoint:
        """The endpoint of a worker, which sends to others on its host through shared memory."""
        about, listener = (name, incarnation, self.roster), self.listener
        return Endpoint(*about, listener=listener, max_frame_bytes=most_bytes, shared_memory=True)

    def publishes_here(self, model: str) -> bool:
        """Whether a worker that trains a model is on this host, so that its weights come through shared memory."""
        return self.here in self._leaders[model]

    def publisher_for(self, host: int, site: str, model: str) -> str:
        """The worker that publishes a model's weights for a host: one of its own, of its site, or of another."""
        return publisher_for(host, self._leaders[model], site, self._sites)

    def node(self, incarnation: int, board: WaitBoard) -> Node:
        """What this worker is to its peers."""
        setting, document = self._setting, self._setting.document
        name = str(setting.me.name)
        endpoint = self._endpoint(name, incarnation, frame_bytes(setting.plan))
        digests = setting.plan.digest, digest_parts(setting.plan)
        me = identity(name, incarnation, *digests, document.host, document.site)
        membership = Membership(me, setting.peers, process_alive, read_facts)
        endpoint.afar = membership.afar
        return Node(endpoint, membership, board)


class _Roster(Form, frozen=True):
    addresses: dict[Name, Address]


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
