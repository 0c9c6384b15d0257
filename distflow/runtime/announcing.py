"""The publishing side of the weights: one training worker of each host makes every version available.

Engines on its host map the segment; engines on hosts without a training worker fetch chunks of it over the network.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from distflow.comm.addresses import run_tag
from distflow.runtime.assembly import Setting
from distflow.runtime.hosts import Hosts
from distflow.runtime.node import Node
from distflow.types import Version
from distflow.weights.manifest import Manifest
from distflow.weights.shm import ShmPublisher
from distflow.weights.swarm_server import SwarmServer

WEIGHTS = "weights"


class Announcer:
    """A WeightPublisher that also tells the generating workers.

    `announce` and `welcome` are called under the worker's lock.
    """

    def __init__(self, setting: Setting, hosts: Hosts, node: Node) -> None:
        self._name = str(setting.me.name)
        self._owners = setting.plan.owners
        self._hosts = hosts
        self._node = node
        self._server: SwarmServer | None = None
        if hosts.address is not None:
            self._server = SwarmServer(hosts.address, hosts.keys if setting.recipe.security.encrypt == "all" else None)
        pinned = None if self._server is None else self._server.pinned
        tag = run_tag(setting.run_dir, hosts.here)
        self._publisher = ShmPublisher(tag, setting.plan.primary, setting.document.term, pinned)
        self._newest: Manifest | None = None
        self._described: Manifest | None = None

    def publish(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
        """Copy a version into shared memory."""
        return self._publisher.publish(version, tensors)

    def announce(self, manifest: Manifest) -> None:
        """Tell those that read here. Digests for other hosts are computed on the server's thread."""
        self._newest = manifest
        near, far = self._readers()
        if near:
            body = manifest.to_wire()  # once for all: it lists every parameter
            for name in near:
                self._node.send(name, WEIGHTS, body)
        if far and self._server is not None:
            self._server.offer(manifest, self._announce_far)

    def welcome(self, name: str, _incarnation: int) -> None:
        """Tell one worker that has come of the newest weights."""
        near, far = self._readers()
        if name in near and self._newest is not None:
            self._node.send(name, WEIGHTS, self._newest.to_wire())
        if name in far and self._described is not None:
            self._node.send(name, WEIGHTS, self._described.to_wire())
        if name in far and self._server is not None and self._newest is not None:
            described = None if self._described is None else self._described.version
            if described != self._newest.version:
                self._server.offer(self._newest, self._announce_far)

    def close(self) -> None:
        """Withdraw everything."""
        if self._server is not None:
            self._server.close()
        self._publisher.close()

    def _announce_far(self, described: Manifest) -> None:
        with self._node.board.condition:
            self._described = described
            body = described.to_wire()
            for name in self._readers()[1]:
                self._node.send(name, WEIGHTS, body)

    def _readers(self) -> tuple[list[str], list[str]]:
        """The generating workers that are there and read here: on this host, and on others."""
        near: list[str] = []
        far: list[str] = []
        membership = self._node.membership
        for name, peer in membership.peers.items():
            generates = name not in self._owners and membership.present(name)
            if generates and self._hosts.publisher_for(peer.host) == self._name:
                (near if peer.host == self._hosts.here else far).append(name)
        return near, far
