"""The publishing side of the weights: one training worker of each host makes every version available.

Engines on its host map the segment; engines on hosts without a training worker fetch chunks of it over the network.
With each heartbeat readers say which version was announced to them last; a lost announcement is sent again.

A worker sends facts about itself in its hello and with every heartbeat; `read_facts` checks them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from torch import Tensor

from distflow.comm.addresses import run_tag
from distflow.comm.membership import BEAT_EVERY_S
from distflow.data.decoding import Name, Whole, read
from distflow.errors import ProtocolError
from distflow.runtime.assembly import Setting
from distflow.runtime.node import Hosts, Node
from distflow.types import Version, WorkerName
from distflow.weights.manifest import Manifest
from distflow.weights.shm import ShmPublisher
from distflow.weights.swarm_server import SwarmServer

WEIGHTS = "weights"
TELL_AGAIN_S = 2 * BEAT_EVERY_S
ANNOUNCED = "announced"
"""The fact in which a reader says which version of the weights was announced to it last."""
OWNERS, TERM, BEGINS = "owners", "term", "begins"
"""Facts of a training worker once its pool has restarted: its members, its term, and where all terms began."""
LOAD = "load"
"""The fact in which a worker that answers calls says how many tokens it has to compute for them."""
WHAT = "facts of a worker"


class Announcer:
    """A WeightPublisher that also tells the generating workers.

    `announce` is called under the worker's lock.
    """

    def __init__(self, setting: Setting, hosts: Hosts, node: Node) -> None:
        self._name = str(setting.me.name)
        plan = setting.plan
        edges = [edge for edge in plan.edges if edge.kind == "weights" and edge.model == plan.primary]
        self._readers_in = {edge.target for edge in edges} - {setting.me.name.pool}
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
        self._told_at: dict[str, float] = {}
        node.on_joined(self._welcome)
        node.on_tick(self._remind)

    def publish(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
        """Copy a version into shared memory."""
        return self._publisher.publish(version, tensors)

    def announce(self, manifest: Manifest) -> None:
        """Announce a version to this worker's readers. Digests for other hosts are computed on the server's thread."""
        self._newest = manifest
        near, far = self._readers()
        self._tell(near, manifest)
        if far:
            self._offer(manifest)

    def close(self) -> None:
        """Withdraw all versions."""
        if self._server is not None:
            self._server.close()
        self._publisher.close()

    def _welcome(self, name: str, _incarnation: int) -> None:
        near, far = self._readers()
        if name in near and self._newest is not None:
            self._tell([name], self._newest)
        if name in far and self._described is not None:
            self._tell([name], self._described)
        if name in far and self._newest is not None:
            described = None if self._described is None else self._described.version
            if described != self._newest.version:
                self._offer(self._newest)

    def _remind(self, now: float) -> None:
        """Announce again to readers that missed it: one with nothing else to do would wait forever."""
        for readers, manifest in zip(self._readers(), (self._newest, self._described), strict=True):
            if manifest is not None:
                self._tell([name for name in readers if self._missed(name, manifest, now)], manifest)

    def _missed(self, name: str, manifest: Manifest, now: float) -> bool:
        heard = self._node.membership.peers[name].facts.get(ANNOUNCED)
        return heard != list(manifest.version) and now - self._told_at.get(name, -math.inf) > TELL_AGAIN_S

    def _tell(self, readers: Sequence[str], manifest: Manifest) -> None:
        body = manifest.to_wire() if readers else {}  # encoded once: it lists every parameter
        for name in readers:
            self._told_at[name] = time.monotonic()
            self._node.send(name, WEIGHTS, body)

    def _offer(self, manifest: Manifest) -> None:
        if self._server is not None:
            self._server.offer(manifest, self._announce_far)

    def _announce_far(self, described: Manifest) -> None:
        with self._node.board.condition:
            self._described = described
            self._tell(self._readers()[1], described)

    def _readers(self) -> tuple[list[str], list[str]]:
        """The workers that read the weights, are present and read from this one: on this host, and on others."""
        near: list[str] = []
        far: list[str] = []
        membership = self._node.membership
        for name, peer in membership.peers.items():
            reads = WorkerName.parse(name).pool in self._readers_in and membership.present(name)
            if reads and self._hosts.publisher_for(peer.host) == self._name:
                (near if peer.host == self._hosts.here else far).append(name)
        return near, far


class _Reader(msgspec.Struct, frozen=True):
    announced: tuple[Whole, Whole] | None = None
    load: Whole = 0
    judged: dict[str, tuple[Whole, Whole]] = {}
    judged_by_all: dict[str, tuple[Whole, Whole]] = {}


class _Pool(msgspec.Struct, frozen=True):
    owners: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1)]
    term: Whole
    begins: tuple[tuple[Whole, Whole], ...]


def read_facts(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """The facts of a peer, after checking those that are used; raises ProtocolError."""
    read(facts, _Reader, WHAT)
    if OWNERS in facts:
        owners = read(facts, _Pool, WHAT).owners
        if len(set(owners)) < len(owners):
            raise ProtocolError(f"malformed {WHAT}: duplicate owner")
    return facts
