"""The publishing side of the weights: one worker of a model's home on each host makes every version available.

Engines on its host map the segment; engines on hosts without such a worker fetch chunks of it over the network.
With each heartbeat readers say which versions were announced to them last; a lost announcement is sent again.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from msgspec import structs
from torch import Tensor

from distflow.comm.addresses import run_tag
from distflow.comm.membership import BEAT_EVERY_S
from distflow.comm.message import Message
from distflow.config.plugins import VOCABULARY
from distflow.data.batch import Batch, Ragged
from distflow.data.decoding import read
from distflow.errors import ProtocolError, UserError, WorkerFailed
from distflow.exchange.facts import ANNOUNCED
from distflow.flow.resolve import resolve
from distflow.runtime.assembly import Setting
from distflow.runtime.lockstep import LockstepModel
from distflow.runtime.metrics import MetricStore
from distflow.runtime.node import Hosts, Node
from distflow.runtime.protocols import Backend
from distflow.types import Version, WorkerName
from distflow.weights.canary import Canary, Rows, canary_rows
from distflow.weights.client_requests import ASK_PUBLISHERS, ASK_WEIGHTS, AskedPublishers, AskedWeights, WaitingClients
from distflow.weights.encodings.rounded_publisher import RoundedPublisher
from distflow.weights.in_place import InPlace
from distflow.weights.manifest import Manifest
from distflow.weights.one_sided.reads import ExposedMemory, one_sided_reads
from distflow.weights.prefetch import Stage
from distflow.weights.receiver import WeightInbox
from distflow.weights.segments.segment_file import memory_name
from distflow.weights.segments.shm import ShmPublisher, ShmReader
from distflow.weights.shards.link import ShardLink
from distflow.weights.shards.reader import ShardedReader
from distflow.weights.swarm.announcing import Announcing
from distflow.weights.swarm.reader import LOOPBACK, SwarmReader
from distflow.weights.swarm.server import SwarmServer
from distflow.weights.transport import WeightPublisher, WeightReader

WEIGHTS = "weights"
WIDER = ("float32", "float64")
"""Types that bf16 rounds."""
MODEL = "model."
"""What begins the names of weights in a replica's state."""
ShardLinks = Mapping[str, ShardLink]
TELL_AGAIN_S = 2 * BEAT_EVERY_S


class Announcer:
    """A WeightPublisher of one model that also tells those who generate with it.

    `announce` is called under the worker's lock.
    """

    def __init__(self, setting: Setting, model: str, hosts: Hosts, node: Node, parts: ShardLink | None = None) -> None:
        self._parts = parts
        self._name = str(setting.me.name)
        self._model = model
        edges = [edge for edge in setting.plan.edges if edge.kind == "weights" and edge.model == model]
        self._readers_in = {edge.target for edge in edges} - {setting.me.name.pool}
        self._hosts = hosts
        self._node = node
        self._server: SwarmServer | None = None
        tag = run_tag(setting.run_dir, hosts.here)
        if hosts.address is not None:
            self._server = _server_for(setting, model, hosts, tag, node.board.fault)
            node.status_rows["weights"].append(self._server.status)
        pinned = None if self._server is None else self._server.pinned
        shown = partial(node.board.shown, peers=())
        self._publisher = ShmPublisher(tag, model, setting.document.term, pinned, shown)
        self._summing = Announcing("weights-sums", self._publisher.summed, node.board.fault)
        self._newest: Manifest | None = None
        """The version published last, and how it is announced on this host and on others, once that is known."""
        self._summed: Manifest | None = None
        self._described: Manifest | None = None
        self._told_at: dict[str, float] = {}
        self._clients = WaitingClients(model, node.endpoint.reply)
        node.on_joined(self._welcome)
        node.on_tick(self._remind)

    def publish(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
        """Copy a version into shared memory; `announce` computes what it is checked by."""
        return self._publisher.publish(version, tensors)

    def announce(self, manifest: Manifest) -> None:
        """Announce a version to this worker's readers, as soon as what they check it by is computed, on threads:
        checksums for this host, digests for others."""
        self._newest = manifest
        near, far = self._readers()
        if near or self._clients.any(far=False) or self._parts is not None:
            self._offer_near(manifest)
        if far or self._clients.any(far=True):
            self._offer(manifest)

    @property
    def serves_far(self) -> bool:
        """Whether readers on other hosts get versions here."""
        return self._server is not None

    def ask(self, asked: AskedWeights, message: Message) -> None:
        """A client outside the run waits for a version. Called under the worker's lock."""
        self._clients.add(asked, message)
        known, offer = (self._described, self._offer) if asked.far else (self._summed, self._offer_near)
        if known is not None and self._newest is not None and known.version == self._newest.version:
            self._clients.answer(known, far=asked.far)
        elif self._newest is not None:
            offer(self._newest)

    def close(self) -> None:
        """Withdraw all versions."""
        self._summing.close()
        if self._server is not None:
            self._server.close()
        self._publisher.close()

    def _welcome(self, name: str, _incarnation: int) -> None:
        near, far = self._readers()
        for readers, announced, offer in ((near, self._summed, self._offer_near), (far, self._described, self._offer)):
            if name not in readers or self._newest is None:
                continue
            if announced is not None:
                self._tell([name], announced)
            if announced is None or announced.version != self._newest.version:
                offer(self._newest)

    def _remind(self, now: float) -> None:
        """Announce again to readers that missed it: one with nothing else to do would wait forever."""
        for readers, manifest in zip(self._readers(), (self._summed, self._described), strict=True):
            if manifest is not None:
                self._tell([name for name in readers if self._missed(name, manifest, now)], manifest)

    def _missed(self, name: str, manifest: Manifest, now: float) -> bool:
        heard = self._node.membership.peers[name].facts.get(ANNOUNCED, {}).get(self._model)
        return heard != list(manifest.version) and now - self._told_at.get(name, -math.inf) > TELL_AGAIN_S

    def _tell(self, readers: Sequence[str], manifest: Manifest) -> None:
        body = manifest.to_wire() if readers else {}  # made once: it lists every parameter
        for name in readers:
            self._told_at[name] = time.monotonic()
            self._node.send(name, WEIGHTS, body)

    def _offer_near(self, manifest: Manifest) -> None:
        self._summing.offer(manifest, self._announce_near)

    def _announce_near(self, summed: Manifest) -> None:
        with self._node.board.condition:
            self._summed = summed
            self._tell(self._readers()[0], summed)
            self._clients.answer(summed, far=False)
            if self._parts is not None:
                self._parts.announce(summed)

    def _offer(self, manifest: Manifest) -> None:
        if self._server is not None:
            self._server.offer(manifest, self._announce_far)

    def _announce_far(self, described: Manifest) -> None:
        with self._node.board.condition:
            self._described = described
            self._tell(self._readers()[1], described)
            self._clients.answer(described, far=True)

    def _readers(self) -> tuple[list[str], list[str]]:
        """The workers that read the weights, are present and read from this one: on this host, and on others."""
        near: list[str] = []
        far: list[str] = []
        membership = self._node.membership
        for name, peer in membership.peers.items():
            reads = WorkerName.parse(name).pool in self._readers_in and membership.present(name)
            if reads and self._hosts.publisher_for(peer.host, peer.site, self._model) == self._name:
                (near if peer.host == self._hosts.here else far).append(name)
        return near, far


def _server_for(
    setting: Setting, model: str, hosts: Hosts, tag: str, on_fault: Callable[[BaseException], None]
) -> SwarmServer:
    """What serves a model to other hosts, encoded and encrypted as the recipe says."""
    recipe = setting.plan.recipe
    encoding, dtype = recipe.weights.encoding, recipe.models[model].dtype
    assert hosts.address is not None, "there are other hosts"
    rounding = None
    if encoding == "fp8" or (encoding == "bf16" and dtype in WIDER):
        rounding = RoundedPublisher(tag, encoding)
    return SwarmServer(
        hosts.address,
        encrypted=recipe.security.encrypt == "all",
        deltas=encoding != "full",
        rounding=rounding,
        exposed=None if hosts.nixl is None else ExposedMemory(hosts.nixl),
        on_fault=on_fault,
    )


class Publishing:
    """The models trained here that are generated with, by this worker or others. All but `announce` on the main thread.

    `publishers` and `announce` are empty for a model that another replica of this host publishes. `canaries`: where
    versions are compared with what engines compute with them. `models`: all that are generated with, in the order in
    which they are published; the primary one comes last, since it opens the next training step for leasing.
    `work_done` is called for each tensor: a large model takes long, and peers wait for signs of progress.
    """

    def __init__(
        self,
        models: Sequence[str],
        backends: Mapping[str, Backend],
        publishers: Mapping[str, WeightPublisher],
        announce: Mapping[str, Callable[[Manifest], None]],
        canaries: Mapping[str, Canaries],
        metrics: MetricStore,
        work_done: Callable[[], None],
        shards: ShardLinks,
    ) -> None:
        self.models = tuple(models)
        self._shards = shards
        self._backends = backends
        self._publishers = publishers
        self._announce = announce
        self._canaries = canaries
        self._metrics = metrics
        self._work_done = work_done

    def make(self, model: str, version: Version) -> Manifest | None:
        """Make a version available; returns what to announce, None where another replica publishes.

        All replicas of a divided model take part in its canary and in putting every parameter together, whichever one
        publishes it. Raises UserError for a model that nobody generates with, WorkerFailed for weights that diverged.
        """
        if model not in self.models:
            published = ", ".join(self.models) or "none"
            raise UserError(f"w.publish({model!r}): nobody generates with it; models to publish here: {published}")
        with self._metrics.timed("timing_s/publish"):
            manifest = self._make(model, version)
            if manifest is not None:
                self._metrics.trace.depart("weights", [f"{model}:{version.term}:{version.number}"])
            return manifest

    def announce(self, manifest: Manifest | None) -> None:
        """Announce what `make` has returned. Called under the worker's lock."""
        if manifest is not None:
            self._announce[manifest.model](manifest)

    def serve_clients(self, node: Node) -> None:
        """Tell clients outside the run which models are published here, and give them the versions of these."""
        shared = {model: one for model, one in self._publishers.items() if isinstance(one, Announcer)}

        def on_publishers(message: Message) -> None:
            asked = read(message.body, AskedPublishers, message.kind)
            near, far = asked.memory == memory_name(), any(one.serves_far for one in shared.values())
            body = {"number": asked.number, "models": list(shared), "near": near, "far": far}
            node.endpoint.reply(message, body)

        def on_weights(message: Message) -> None:
            asked = read(message.body, AskedWeights, message.kind)
            # One that is not published here was, before this worker restarted: the client asks around again.
            if asked.model in shared:
                shared[asked.model].ask(asked, message)

        node.on_request(ASK_PUBLISHERS, on_publishers)
        node.on_request(ASK_WEIGHTS, on_weights)

    def close(self) -> None:
        """Withdraw all versions."""
        for publisher in self._publishers.values():
            publisher.close()

    def _make(self, model: str, version: Version) -> Manifest | None:
        backend, publishes = self._backends[model], model in self._publishers
        if model in self._shards:
            shards = (shard for shard in backend.state_shards() if shard.name.startswith(MODEL))
            own = (replace(shard, name=shard.name.removeprefix(MODEL)) for shard in shards)
            self._shards[model].keep(version, own)
        if not publishes and not backend.lockstep:
            return None
        canary = self._canaries[model].compute(backend) if model in self._canaries else None
        if canary is not None and not canary.finite:
            raise WorkerFailed(
                f"the weights of version {version.number} of {model} contain NaN or inf: training has diverged — "
                f"resume from a checkpoint before that with a smaller models.{model}.optimizer.lr or max_grad_norm"
            )
        tensors = self._counted(backend.named_shards())
        if publishes:
            return structs.replace(self._publishers[model].publish(version, tensors), canary=canary)
        deque(tensors, maxlen=0)
        return None

    def _counted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for named in tensors:
            yield named
            del named  # before the next one is gathered
            self._work_done()


class Canaries:
    """Canaries of one model: log-probs of the same rows with every version, for engines to compare.

    `precision` is the type that the model computes in.
    """

    def __init__(self, rows: Rows, precision: str) -> None:
        self._rows = tuple(map(tuple, rows))
        self._precision = precision
        self._batch = Batch(
            {
                "prompt_ids": Ragged.from_rows([row[:1] for row in rows], torch.int64),
                "response_ids": Ragged.from_rows([row[1:] for row in rows], torch.int64),
            }
        )

    def compute(self, model: Backend | LockstepModel) -> Canary:
        """The canary of the present weights; all replicas of a divided model call this at the same point."""
        if isinstance(model, LockstepModel):
            scores = model.score_together(self._batch)
        else:
            scores = model.score(self._batch, temperature=1.0, grad=False, entropy=False)
        found = scores.logprobs_BT.double().tolist()
        logprobs = tuple(tuple(line[: len(row) - 1]) for line, row in zip(found, self._rows, strict=True))
        return Canary(self._rows, logprobs, self._precision)


def build_canaries(setting: Setting, model: str) -> Canaries:
    """Canaries of a model that generates; rows are no longer than a sample, so every engine has room for them."""
    section = setting.plan.recipe.models[model]
    vocabulary = int(resolve(VOCABULARY)(section.model_dump()))
    return Canaries(canary_rows(vocabulary, setting.plan.longest_sample(model)), section.dtype)


def _by_parts(node: Node, reader: WeightReader, link: ShardLink, inbox: Callable[[], WeightInbox]) -> WeightReader:
    """A reader that takes what comes in parts, too."""

    def arrived(manifest: Manifest) -> None:
        inbox().announce(manifest)

    by_parts = ShardedReader(reader, node.board.condition, lambda: link.joined, arrived, link.report)
    link.lands_at(by_parts)
    node.on_tick(by_parts.look)
    return by_parts


def build_reader(setting: Setting, node: Node, hosts: Hosts, *, near: bool) -> WeightReader:
    """A reader of weights that are published on this host, or on another one."""
    if near:
        return InPlace(ShmReader(partial(node.board.shown, peers=()), setting.device))
    limit_s = setting.recipe.limits.no_progress_s
    nixl = one_sided_reads(hosts.nixl, node.endpoint.traffic)
    about = (run_tag(setting.run_dir, hosts.here), hosts.address or LOOPBACK, limit_s, setting.document.site, nixl)
    reader = SwarmReader(*about)
    node.status_rows["weights"].append(reader.status)
    return Stage(reader, node.board.wake)


def build_inboxes(
    setting: Setting,
    node: Node,
    hosts: Hosts,
    readers: Mapping[str, WeightReader],
    shards: ShardLinks,
    only: Sequence[int] = (),
) -> dict[str, WeightInbox]:
    """Receive announcements of weights, by model. `shards` bring them in parts, beside `readers`, which others replace
    when training comes to this host or leaves it; `only`: the versions that are wanted, all if there are none.
    """

    def other(manifest: Manifest) -> WeightReader:
        return build_reader(setting, node, hosts, near=not manifest.digests)

    inboxes: dict[str, WeightInbox] = {}
    for model, reader in readers.items():
        if model in shards and not only:
            reader = _by_parts(node, reader, shards[model], partial(inboxes.__getitem__, model))
        inboxes[model] = WeightInbox(reader, other, only)

    def on_weights(message: Message) -> None:
        manifest = Manifest.from_wire(message.body)
        if manifest.model not in inboxes:
            known = ", ".join(inboxes)
            raise ProtocolError(f"{manifest.title} from {message.sender}: this worker generates with {known}")
        inboxes[manifest.model].announce(manifest)
        node.facts[ANNOUNCED] = {model: list(one.newest) for model, one in inboxes.items() if one.newest is not None}

    node.on(WEIGHTS, on_weights)
    return inboxes
