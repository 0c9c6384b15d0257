"""Both sides of a run in one thread: real cores, channels, loop and training; a wire that delivers when told to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch

from distflow.comm.collective import LOOPBACK
from distflow.comm.endpoint import Endpoint
from distflow.comm.membership import Identity, Membership
from distflow.comm.message import Buffer, Message, decode, encode
from distflow.comm.outbox import Delivery, delivered
from distflow.config.load import load_recipe
from distflow.config.schema import LimitsConfig, Recipe, RunConfig
from distflow.data.batch import Batch
from distflow.exchange.dealing import DealRule
from distflow.exchange.intake_core import IntakeRule
from distflow.exchange.lease_client import HolderCore
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.messages import LeasePrompt
from distflow.exchange.owner import OwnerCore
from distflow.exchange.rollout_core import FinishedGroup
from distflow.exchange.sample_channel import HOLDER_KINDS, OWNER_KINDS, RESULTS, InboundSamples, OutboundSamples
from distflow.exchange.store_channel import SampleStore
from distflow.flow.plan import BatchPlan, StepPlan
from distflow.flow.step import GENERATED
from distflow.parts import CostRule
from distflow.runtime.checkpoint.commit import Keeping
from distflow.runtime.checkpoint.parts import CheckpointWriter
from distflow.runtime.disk import Disk
from distflow.runtime.dumps import DumpWriter
from distflow.runtime.generate_step import GenerateStep, SampleLimits
from distflow.runtime.generating import Turns
from distflow.runtime.intake import Intake
from distflow.runtime.metrics import MetricStore, MetricWriter
from distflow.runtime.node import Node
from distflow.runtime.receiving import TrainingLimits
from distflow.runtime.replicas import Replicas
from distflow.runtime.rollout_loop import RolloutLoop
from distflow.runtime.steps import StepContext, StepRunner
from distflow.runtime.training import Training, TrainingParts
from distflow.runtime.trajectories import Trajectories
from distflow.runtime.waits import WaitBoard
from distflow.runtime.weight_publisher import Canaries, Publishing
from distflow.testing.fakes import FakeBackend, FakeEngine
from distflow.types import LeaseKind, Uid, Version, WorkerName
from distflow.weights.in_place import InPlace
from distflow.weights.manifest import Manifest
from distflow.weights.receiver import WeightInbox
from distflow.weights.transport import InprocLink
from distflow.workers.tokenizers import CharTokenizer, build_tokenizer

OWNER, HOLDER = "trainer/0", "rollout/0"
GROUP = 2
TOKENS = 3
PROMPT = (1, 2)
TOKENIZER = build_tokenizer({"tokenizer": "chars:0123456789=", "path": None, "init": {}})


class EndlessTokenizer(CharTokenizer):
    """Of no token at which a sample ends."""

    def __init__(self) -> None:
        super().__init__("chars:0123456789=")
        self.eos_token_id = None


def lease_settings(**changes: Any) -> LeaseSettings:
    values: dict[str, Any] = {
        "ledgers": 2,
        "groups_per_ledger": 2,
        "samples_per_prompt": GROUP,
        "max_staleness": 0,
        "training_steps": 3,
        "memory_bytes": 1 << 20,
        "group_bytes": lambda prompt: 4096,
        "max_prompt_tokens": 8,
    }
    return LeaseSettings(**{**values, **changes})


def prompt_at(position: int) -> LeasePrompt:
    return LeasePrompt(Uid(0, position, position), PROMPT, f"{position}=", "{}")


def make_node(name: str, peers: Sequence[str], folder: Path, incarnation: int = 0) -> Node:
    """A node whose door stays closed: nothing listens until `start`."""
    roster = {peer: f"ipc://{folder}/{peer.replace('/', '-')}" for peer in (name, *peers, "agent/0")}
    me = Identity(name, incarnation, 1, 0.0, "digest", {})
    membership = Membership(me, peers, lambda pid, started: True)
    return Node(Endpoint(name, incarnation, roster), membership, WaitBoard())


def generate_step() -> GenerateStep:
    """The shipped one: three tokens, whatever they are."""
    settings = {"max_new_tokens": TOKENS}
    plan = StepPlan("sample", "distflow.workers.rollout:sample", "generate", "sample", None, settings, (), GENERATED)
    context = StepContext("sample", tokenizer=EndlessTokenizer())
    return StepRunner(HOLDER, [plan], {"sample": context}).generate_step("sample")


class Wire:
    """Messages between the two sides, encoded as on a socket; `lose` says which are lost on the way."""

    def __init__(self) -> None:
        self.queue: deque[tuple[str, Message]] = deque()
        self.doors: dict[str, Callable[[Message], None]] = {}
        self.lose: Callable[[str, Message], bool] = lambda to, message: False
        self.log: list[tuple[str, str]] = []

    def post_from(self, sender: str) -> Callable[[str, str, Mapping[str, Any], Sequence[Buffer]], Delivery]:
        def post(to: str, kind: str, body: Mapping[str, Any], payload: Sequence[Buffer]) -> Delivery:
            frames = [memoryview(bytes(part)) for part in payload]
            self.queue.append((to, decode(encode(kind, sender, 0, body, len(frames)), frames)))
            return delivered()

        return post

    def deliver(self) -> None:
        while self.queue:
            to, message = self.queue.popleft()
            self.log.append((to, message.kind))
            if not self.lose(to, message):
                self.doors[to](message)


class World:
    """One training and one generating worker."""

    def __init__(
        self,
        folder: Path,
        settings: LeaseSettings,
        *,
        engine: FakeEngine | None = None,
        overrides: Sequence[str] = (),
        turns: Callable[[World], Turns] | None = None,
        **limits: Any,
    ):
        self.settings = settings
        self.folder = folder
        self.now = 100.0
        self.wire = Wire()
        self.owner = OwnerCore(OWNER, settings, range(settings.ledgers), prompt_at)
        self.inbound = InboundSamples(self.owner, self.wire.post_from(OWNER))
        self.holder = HolderCore(HOLDER, 0, [OWNER], settings)
        self.outbound = OutboundSamples(self.holder, self.wire.post_from(HOLDER), HOLDER)
        self.wire.doors = {
            OWNER: lambda message: self.inbound.on_message(message, self.now),
            HOLDER: lambda message: self.outbound.on_message(message, self.now),
        }
        assert RESULTS not in HOLDER_KINDS
        assert "ack" in OWNER_KINDS
        self.engine = engine or FakeEngine()
        self.link = InprocLink("policy")
        self.inbox = WeightInbox(InPlace(self.link))
        self.backend = FakeBackend()
        self.metrics = MetricStore()
        self.context = StepContext("update", metrics=self.metrics, models={"policy": self.backend}, model="policy")
        self.turns = Turns() if turns is None else turns(self)
        self.training = self._training(self.turns, **limits)
        self.loop = self._loop(overrides)

    def _training(self, turns: Turns, **limits: Any) -> Training:
        settings = self.settings
        groups = settings.ledgers * settings.groups_per_ledger
        plan = BatchPlan(
            prompts=groups,
            samples_per_prompt=GROUP,
            samples=groups * GROUP,
            ledgers=settings.ledgers,
            groups_per_ledger=settings.groups_per_ledger,
            max_staleness=settings.max_staleness,
            training_steps=settings.training_steps,
            max_refills=settings.refill_limit,
            tokens_per_microbatch=limits.pop("tokens_per_microbatch", 1 << 20),
        )
        streamed = limits.pop("streamed", True)
        run = RunConfig(**{"training_steps": settings.training_steps, **limits})
        waits = LimitsConfig(connect_s=0.2, no_progress_s=0.2, drain_s=0.2)
        self.node = make_node(OWNER, [HOLDER], self.folder)
        parts = TrainingParts(
            inbound=self.inbound,
            store=SampleStore(self.inbound, 1 << 20, lambda fields: "", self.node.endpoint.reply),
            models={"policy": self.backend},
            contexts={"update": self.context},
            trained={"policy": "actor"},
            primary="policy",
            replicas=Replicas(OWNER, [OWNER], [OWNER], self.node, waits, LOOPBACK),
            intake=Intake(self.inbound, self.node, IntakeRule(CostRule(plan.tokens_per_microbatch), streamed)),
            publishing=self.publishing(),
            dumps=DumpWriter(self.folder, WorkerName.parse(OWNER), Disk(), 1 << 30),
            checkpoints=CheckpointWriter(self.folder, "trainer-0", "digest", Keeping(9)),
            commits=True,
            dealing=DealRule(groups, settings.ledgers, CostRule(plan.tokens_per_microbatch)),
            run=lambda step, batch: batch,
            metrics=self.metrics,
            writer=MetricWriter(self.folder, "trainer-0", Disk()),
            turns=turns,
        )
        return Training(parts, TrainingLimits(plan, streamed, run, waits), self.node, Version(0, 0))

    def _loop(self, overrides: Sequence[str]) -> RolloutLoop:
        recipe: Recipe = load_recipe("quickstart", [f"batch.samples_per_prompt={GROUP}", *overrides]).recipe
        limits = recipe.limits.model_copy(update={"no_progress_s": 0.2})
        recipe = recipe.model_copy(update={"limits": limits})
        self.holder_node = make_node(HOLDER, [OWNER], self.folder)
        limits: dict[LeaseKind, SampleLimits] = {"train": SampleLimits(GROUP, TOKENS, TOKENS)}
        self.samples = Trajectories(generate_step(), limits, TOKENIZER, torch.float32)
        node, metrics = self.holder_node, MetricStore()
        return RolloutLoop(self.engine, self.samples, self.outbound, self.inbox, node, metrics, recipe)

    def publishing(self, *, publishes: bool = True, canaries: Mapping[str, Canaries] | None = None) -> Publishing:
        """How the policy is published: in this process, unless another replica does."""
        publishers = {"policy": self.link} if publishes else {}
        announce = {"policy": self._announce}
        backends = {"policy": self.backend}
        about = (self.metrics, self.node.work_done, {})
        return Publishing(["policy"], backends, publishers, announce, canaries or {}, *about)

    def _announce(self, manifest: Manifest) -> None:
        self.inbox.announce(manifest)

    # -- what a generating worker does, one part at a time

    def submit(self) -> list[int]:
        """What the loop does before a decode step, twice, as messages are delivered; returns the positions started."""
        before = set(self.engine.progress())
        for _ in range(2):
            self.loop.prepare()
            self.wire.deliver()
        return [position for position in self.engine.progress() if position not in before]

    def decode(self) -> list[FinishedGroup]:
        return self.loop.decode()

    def finish(self, groups: Sequence[FinishedGroup], dropped: Mapping[int, str] | None = None, **more: Any) -> None:
        """Send groups; `more` are further columns."""
        if groups:
            batch = self.samples.batch([group.lease.position for group in groups])
            reward = torch.tensor([float(group.lease.position) for group in groups for _ in group.samples])
            self.outbound.finish(batch.with_columns(reward=reward, **more), dropped or {}, self.now)
        self.wire.deliver()

    def generate_all(self) -> list[int]:
        """Until nothing can be leased or decoded any more; returns the positions."""
        seen: list[int] = []
        while True:
            seen += self.submit()
            if not self.engine.progress():
                return seen
            self.finish(self.decode())

    def accumulate(self, batch: Batch) -> None:
        """What an update step does."""
        tokens = float(len(batch.ragged("response_ids").values))
        self.backend.accumulate(torch.tensor(tokens))
        self.context.denominators["policy"] = self.context.denominators.get("policy", 0.0) + tokens

    def train(self, t: int) -> list[Batch]:
        """The body of a trainer's script."""
        batches = []
        for batch in self.training.receive(t):
            batches.append(batch)
            self.accumulate(batch)
        self.training.apply("policy")
        self.training.publish("policy", t + 1)
        self.training.save(t + 1)
        self.settle()
        return batches

    def settle(self) -> None:
        """A checkpoint that was begun is on the disk: steps are too short here to wait for the next one."""
        flight = self.training._saving._flight
        if flight is not None:
            wait([flight.written], timeout=10.0)

    def steps(self) -> Iterator[int]:
        return self.training.steps()


def positions(batch: Batch) -> list[int]:
    return list(dict.fromkeys(batch.dense("group").tolist()))
