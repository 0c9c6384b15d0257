"""What takes messages in a run, with everything a real one has registered; messages are handed over as they arrive."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from distflow.cluster.processes import HostEntry
from distflow.comm.endpoint import Endpoint
from distflow.comm.keys import key_file, make_keys, write_keys
from distflow.comm.membership import KINDS as MEMBERSHIP
from distflow.comm.message import Buffer, decode, header_of, pack, prefix_of
from distflow.comm.outbox import Delivery, delivered
from distflow.config.load import load_recipe, recipe_to_mapping
from distflow.config.yamlfile import yaml_text
from distflow.errors import ProtocolError, RecipeMismatch
from distflow.exchange.dealing import DealRule
from distflow.flow.document import Place, document_text, read_worker_document, worker_document
from distflow.flow.planner import make_plan
from distflow.launch.agent import agent as agent_module
from distflow.launch.agent.agent import Agent
from distflow.launch.run.record import RunRecord, WorkerEntry
from distflow.parts import CostRule
from distflow.runtime import ports, weight_publisher
from distflow.runtime.assembly import Setting, build_tokenizer
from distflow.runtime.receiving import TrainingLimits
from distflow.runtime.session import Session
from distflow.types import WorkerName
from distflow.weights.prefetch import Stage

WITH_CRITIC = ("flow=ppo", "layout=critic", "layout.pools.trainer.count=2")
WITH_SOLVER = ("flow=self_play", "layout=self_play", "layout.pools.trainer.count=2", "batch.samples_per_prompt=2")
OVERRIDES = ("layout=async", "layout.pools.trainer.count=2", "layout.partial_rollouts=true", "batch.prompts=16")
OPEN = frozenset(("status", "stacks", "stop"))
"""What anyone may ask; the requests of clients have tests of their own (tests/client)."""


class Refused(Exception):
    """The message was refused, as it should be."""


class WorkerReceiver:
    """A worker up to its endpoint: nothing listens, and there is no model."""

    def __init__(self, setting: Setting) -> None:
        self.session = Session(setting, 0)
        self.node = self.session._node
        self.said = _silenced(self.node.endpoint)
        me = self.node.membership.me
        self.node.membership.me = replace(me, digest="digest", digest_parts={"flow": "1"})
        # The examples' processes do not exist: on a slow machine they would be found gone between two messages.
        self.node.membership._alive = lambda pid, started: True
        with _nothing_fetched():
            owned, ends = self.session._register(build_tokenizer(setting))
        inbound = None if owned is None else owned.inbound
        self._outbound = None if ends is None else ends.own
        self._inbound = inbound
        if owned is not None and self.session._replicas is not None:
            batch, streamed = setting.plan.batch, TrainingLimits.of(setting.plan).streamed
            cost = CostRule(batch.tokens_per_microbatch)
            rule = DealRule(batch.prompts, batch.ledgers, cost, streamed=streamed, divided=False)
            owner = ports.OwnerEnds(*owned, self.session._rows_out, self.session._asking)
            self._intake = ports.takes(self.session._base, owner, self.session._replicas, rule, None)
            self.session._replicas.contribute("a round", {"stop": False})
        self._tokenizer = build_tokenizer(setting)
        self.refused = self.taken = 0

    @property
    def kinds(self) -> set[str]:
        """All that it takes."""
        return MEMBERSHIP | self.node._handlers.keys() | OPEN | self.node._agent_handlers.keys()

    def take(self, header: bytes, payload: tuple[bytes, ...]) -> None:
        """As the endpoint's thread does it; whatever ends that thread is raised here."""
        endpoint = self.node.endpoint
        try:
            message = decode(header, [memoryview(frame) for frame in payload], b"\0route")
            if message.sender == endpoint.name:
                raise ProtocolError("forged")
        except ProtocolError:
            self.refused += 1
            return
        before = endpoint.traffic.dropped
        try:
            self.node._receive(message)
        except RecipeMismatch:
            # What it is there for, from a peer that we know.
            assert message.kind in ("welcome", "refused")
        self.refused += endpoint.traffic.dropped - before
        self.taken += endpoint.traffic.dropped == before

    def turn(self) -> None:
        """What runs regularly on that thread, and what the script reads."""
        self.node._tick()
        with self.node.board.condition:
            if self._inbound is not None:
                taken = self._inbound.core.consumable()[:1]
                self._inbound.core.take(taken, time.monotonic())
                self._inbound.pop(taken)
            if self._outbound is not None:
                self._outbound.core.take_granted()
                self._outbound.core.take_cancelled()
        self.node.board.raise_fault()

    def close(self) -> None:
        """Let go of threads and descriptors."""
        for inbox in self.session._inboxes.values():
            inbox.close()
        self.node.endpoint.close(0.0)


class _NoReader:
    chunks = 0

    def fetch(self, manifest: Any, superseded: Callable[[], bool] = lambda: False) -> Any:
        return []

    def close(self) -> None:
        pass


@contextmanager
def _nothing_fetched() -> Iterator[None]:
    """Inboxes made meanwhile fetch no weights."""
    before = weight_publisher.build_reader
    weight_publisher.build_reader = ports.build_reader = lambda *about, near: Stage(_NoReader(), lambda: None)
    try:
        yield
    finally:
        weight_publisher.build_reader = ports.build_reader = before


def setting_of(name: str, folder: Path, overrides: Sequence[str] = OVERRIDES) -> Setting:
    """Of a worker of two trainers and two rollouts, unless the overrides say otherwise."""
    loaded = load_recipe("quickstart", list(overrides))
    plan = make_plan(loaded.recipe)
    worker = WorkerName.parse(name)
    names = [*map(str, (one.name for one in plan.workers)), "agent/0"]
    roster = {one: f"ipc://{folder}/{one.replace('/', '-')}" for one in names}
    path = folder / f"{worker.file_stem}.yaml"
    placement = {one: 1 for one in ("rollout/1", "trainer/1") if one in names}
    place = Place(folder, {one: roster[one] for one in roster if one not in placement}, 0, "127.0.0.1", placement)
    write_keys(key_file(folder), make_keys())
    path.write_text(document_text(worker_document(plan, worker, place, recipe_source=str(loaded.source))))
    document = read_worker_document(path)
    found = make_plan(document.recipe)
    return Setting(document, found.recipe, found, found.worker(worker), folder, None)


class AgentReceiver:
    """An agent of two hosts, without processes: its messages, and what it makes of them at every turn."""

    def __init__(self, folder: Path) -> None:
        hosts = (HostEntry("here", "127.0.0.1"), HostEntry("there", "127.0.0.1"))
        workers = (
            WorkerEntry("rollout/0", False, host=0),
            WorkerEntry("rollout/1", False, host=1),
            WorkerEntry("trainer/0", True, host=0),
            WorkerEntry("trainer/1", True, host=1),
        )
        (folder / "workers").mkdir(exist_ok=True)
        write_keys(key_file(folder), make_keys())
        (folder / "logs").mkdir(exist_ok=True)
        (folder / "logs" / "agent-0.log").write_text("a line\n")
        recipe = load_recipe("quickstart", list(OVERRIDES)).recipe
        (folder / "recipe.yaml").write_text(yaml_text(recipe_to_mapping(recipe)))
        roster = {worker.name: "" for worker in workers}
        record = RunRecord("fuzz", str(folder), 5, workers, roster, 1.0, 3, hosts=hosts)
        self.agent = Agent(record, 0, "tests:none", None, None)
        self._said = _silenced(self.agent._endpoint)
        self.refused = self.taken = 0

    @property
    def kinds(self) -> set[str]:
        """All that it takes."""
        return set(self.agent._handlers)

    def take(self, header: bytes, payload: tuple[bytes, ...]) -> None:
        """As its main loop does it."""
        try:
            message = decode(header, [memoryview(frame) for frame in payload], b"\0route")
        except ProtocolError:
            self.refused += 1
            return
        self._said.clear()
        self.agent._inbox.put(message)
        self.agent._hear_messages()
        refused = any(b"error" in frames[0] for frames in self._said)
        self.refused += refused
        self.taken += not refused

    def turn(self) -> None:
        """What follows from what it has heard."""
        self.agent._conclude()
        self.agent._publish()

    def close(self) -> None:
        """Let go of descriptors."""
        self.agent._endpoint.close(0.0)
        os.close(self.agent._wake_r)
        os.close(self.agent._wake_w)


def _silenced(endpoint: Endpoint) -> list[Sequence[Buffer]]:
    """Nothing is sent: what would be is put into the list."""
    said: list[Sequence[Buffer]] = []

    def send(to: str | bytes, kind: str, body: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> Delivery:
        prefix = prefix_of(endpoint.name, endpoint.incarnation)
        said.append([header_of(prefix, [pack(kind, body, len(payload))]), *payload])
        return delivered()

    endpoint._over_sockets.send = send  # type: ignore[method-assign]
    return said


class _NoWorkerGroup:
    """Stands in for the processes of a host."""

    def __init__(self, *given: Any) -> None:
        self.pids: dict[str, Any] = {}
        self.inputs: list[Any] = []

    def do(self, actions: Any) -> None:
        pass

    def tell(self, what: Any) -> None:
        pass


@contextmanager
def no_processes() -> Iterator[None]:
    """Agents made meanwhile start none."""
    before: Mapping[str, Any] = {"WorkerGroup": agent_module.WorkerGroup}
    agent_module.WorkerGroup = _NoWorkerGroup  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        agent_module.WorkerGroup = before["WorkerGroup"]  # type: ignore[misc]
