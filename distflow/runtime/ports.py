"""Builds the ends of the plan's edges at one worker, one function for each: what it owns, holds, publishes and reads.

What receives messages (`owns`, `holds`, `reads`) is built before the endpoint starts, what needs models afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from distflow.exchange.deal_core import DealCore
from distflow.exchange.dealing import DealRule
from distflow.exchange.intake_core import IntakeCall, IntakeRule
from distflow.exchange.lease_lanes import Lanes
from distflow.exchange.sample_channel import InboundSamples, OutboundSamples
from distflow.exchange.store_channel import SampleStore
from distflow.flow.edges import SAMPLES
from distflow.flow.memory import MIB, rows_bytes
from distflow.runtime.assembly import Setting, Standing, build_trajectories, checkpoint_writer, model_folders
from distflow.runtime.calls import Calls
from distflow.runtime.disk import VAL_ROLLOUTS, Disk
from distflow.runtime.dumps import build_dumps
from distflow.runtime.further_training import FurtherParts, FurtherTraining
from distflow.runtime.generating import Generating, Turns, build_outbound, build_turns
from distflow.runtime.held_out import HeldOut, HeldOutParts
from distflow.runtime.intake import Intake, ask_on_arrival
from distflow.runtime.lockstep import Rounds
from distflow.runtime.metrics import MetricStore, MetricWriter, Recovery
from distflow.runtime.node import Hosts, Node
from distflow.runtime.owner_side import Owned, build_inbound, lease_settings, lessors, offer_samples
from distflow.runtime.protocols import Backend, Engine, Tokenizer
from distflow.runtime.receiving import TrainingLimits
from distflow.runtime.replicas import Replicas
from distflow.runtime.rollout_loop import RolloutLoop
from distflow.runtime.rows import InboundRows, OutboundRows, register_rows
from distflow.runtime.serving import Answering
from distflow.runtime.steps import StepContext, StepRunner
from distflow.runtime.training import Training, TrainingParts
from distflow.runtime.validation import Validation, val_settings
from distflow.runtime.weight_publisher import (
    Announcer,
    Publishing,
    ShardLinks,
    build_canaries,
    build_inboxes,
    build_reader,
)
from distflow.types import LeaseKind, Version, WorkerName
from distflow.weights.in_place import InPlace
from distflow.weights.manifest import Manifest
from distflow.weights.receiver import WeightInbox
from distflow.weights.transport import InprocLink, WeightPublisher, WeightReader


@dataclass(frozen=True, slots=True)
class Base:
    """What all ports of a worker are built on."""

    setting: Setting
    node: Node
    hosts: Hosts
    lanes: Lanes
    disk: Disk
    metrics: MetricStore
    writer: MetricWriter
    links: Mapping[str, InprocLink]
    """Hand the weights of each model that is trained and generated with here from one side to the other."""
    shards: ShardLinks
    """Move those that come in parts, by model."""

    @property
    def name(self) -> str:
        """The worker's name."""
        return str(self.setting.me.name)

    @property
    def standing(self) -> Standing:
        """What it is to training."""
        return self.setting.standing


@dataclass(frozen=True, slots=True)
class HeldModels:
    """What the training side computes with."""

    models: Mapping[str, Backend]
    contexts: Mapping[str, StepContext]
    rounds: Rounds | None
    turns: Turns
    tokenizer: Tokenizer


def owns(base: Base, tokenizer: Tokenizer) -> Owned | None:
    """The owner's end of the leases; None at a worker that owns none."""
    if not base.standing.ledgers:
        return None
    with base.node.board.condition:
        # Threads begin to read prompts, of which samples may be made at once: who hears of them is built first.
        return offer_samples(base.setting, base.node, build_inbound(base.setting, base.node, base.lanes, tokenizer))


def validates(base: Base, tokenizer: Tokenizer) -> Validation | None:
    """The owner's end of the leases for validation; None at others than the first owner, and where none are needed."""
    setting = base.setting
    if setting.plan.val is None or setting.plan.reads is not None or base.name not in lessors(setting.owners, "val"):
        return None
    dumps = build_dumps(setting, base.disk, VAL_ROLLOUTS) if setting.recipe.run.dump_rollouts else None
    return Validation(setting, base.node, base.lanes, base.writer, tokenizer, dumps)


def reads(base: Base) -> dict[str, WeightInbox]:
    """The reader's ends of the weights, by model: from this process, from this host's memory or from the network."""
    readers: dict[str, WeightReader] = {}
    for model in base.setting.me.generates:
        own = base.links.get(model)
        near = base.hosts.publishes_here(model)
        readers[model] = build_reader(base.setting, base.node, base.hosts, near=near) if own is None else InPlace(own)
    val = base.setting.plan.val if base.setting.only_validates else None
    return build_inboxes(base.setting, base.node, base.hosts, readers, base.shards, () if val is None else val.versions)


class Outbound(NamedTuple):
    """The holder's ends of the leases of a worker."""

    own: OutboundSamples
    """For training; on a pool that generates for validation only, for that."""
    val: OutboundSamples | None
    """For validation beside training."""

    @property
    def channels(self) -> dict[LeaseKind, OutboundSamples]:
        """Those that there are, by what they are for."""
        return {one.core.settings.kind: one for one in (self.own, self.val) if one is not None}


def holds(
    base: Base,
    inboxes: Mapping[str, WeightInbox],
    inbound: InboundSamples | None,
    validation: Validation | None,
    calls: Calls | None,
) -> Outbound:
    """The holder's ends of the leases. With `inbound`, or `validation`, the worker is its own owner."""
    setting, terms = base.setting, dict[int, int]()

    def newest() -> Version | None:
        """The newest version from which any sample here comes, of any model: a lost one if there is one."""
        answered = None if calls is None else calls.newest
        found = [version for inbox in inboxes.values() if (version := inbox.loaded) is not None]
        if len(found) < len(inboxes):
            # One is being loaded, and what runs on the version before cannot be told from what is lost.
            return None
        found += [] if answered is None else [answered]
        return max(found, key=lambda version: (not version.survives(terms), version))

    def begun(term: int, begins: Mapping[int, int]) -> None:
        terms.update(begins)
        for inbox in inboxes.values():
            inbox.begin_term(term, begins)
        if calls is not None:
            calls.restarted(begins)

    about = (base.node, base.lanes)
    of_validation = val_settings(setting)
    if of_validation is not None and setting.only_validates:
        return Outbound(build_outbound(setting, of_validation, *about, None, newest, begun), None)
    train = build_outbound(setting, lease_settings(setting), *about, inbound, newest, begun)
    if of_validation is None or setting.plan.validating is not None:
        return Outbound(train, None)
    own = None if validation is None else validation.inbound
    known = lambda term, begins: None  # noqa: E731  # what is for training has heard of it before
    return Outbound(train, build_outbound(setting, of_validation, *about, own, newest, known))


def generates(
    base: Base,
    outbound: Outbound,
    inbox: WeightInbox,
    engine: Engine,
    models: Mapping[str, Backend],
    steps: StepRunner,
    tokenizer: Tokenizer,
) -> tuple[Generating, Turns]:
    """What makes groups of leases, with the primary model; and how it shares the device with the `models` here."""
    setting, plan, turns = base.setting, base.setting.plan, Turns()
    of_validation = None if plan.val is None else plan.val.settings
    step = steps.generate_step(plan.generate_step.name, of_validation)
    samples = build_trajectories(setting, step, tokenizer, base.metrics)
    about = (inbox, base.node, base.metrics, setting.recipe)
    loop = RolloutLoop(engine, samples, outbound.own, *about, outbound.val)
    sampling = [one for one in plan.workers if plan.primary in one.generates and not plan.pool(one.name.pool).validates]
    loop.others_sample = len(sampling) > 1
    if plan.primary in base.links:
        turns = build_turns(setting, engine, models, base.links[plan.primary], inbox, base.metrics)
    # That of validation has the same fields.
    edge = plan.edge(SAMPLES)
    return Generating(loop, outbound.channels, samples, engine, base.node, edge, base.metrics, turns), turns


def asks(base: Base) -> Calls | None:
    """The asker's end of calls; None where nothing is asked for."""
    own = base.setting.me.port("asks")
    return Calls(base.node, base.setting.plan, own, base.metrics, base.setting.document.term) if own else None


def answers(base: Base) -> Answering | None:
    """The answering end of calls; None where nobody asks for anything."""
    setting = base.setting
    own, term = setting.me.port("answers"), setting.document.term
    return Answering(base.node, setting.plan, own, setting.owners, term, base.metrics) if own else None


def sends(base: Base) -> dict[str, OutboundRows]:
    """The owner's ends of the rows that further models are trained on, by edge."""
    setting, plan = base.setting, base.setting.plan
    found = {}
    for port in setting.me.port("sends"):
        receivers = [name for name in setting.members if WorkerName.parse(name).pool == port.peer]
        rows = (plan.edge(port.edge), receivers, setting.start, base.node)
        found[port.edge] = OutboundRows(*rows, plan.recipe.limits, base.metrics)
    if found:
        register_rows(base.node, found)
    return found


def receives(base: Base) -> InboundRows | None:
    """The other end; None where no further model is trained."""
    setting, plan = base.setting, base.setting.plan
    edges = [plan.edge(port.edge) for port in setting.me.port("receives")]
    if not edges:
        return None
    step_bytes = rows_bytes(plan.recipe, plan.edges, edges[0], plan.response_tokens)
    home = next(iter(base.standing.gradients.values()))
    memory, rank = setting.me.sample_memory_mb * MIB, home.index(base.name)
    return InboundRows(edges[0], setting.owners, setting.start, base.node, memory, step_bytes, rank)


def publishes(base: Base, held: HeldModels, inboxes: Mapping[str, WeightInbox]) -> Publishing:
    """How new versions are announced: to the engine of this process, to all readers, or not by this worker."""
    setting, plan, node = base.setting, base.setting.plan, base.node
    further = [model for model in plan.generating[1:] if model in base.standing.gradients]
    models = [*further, *(model for model in plan.generating[:1] if model in base.standing.gradients)]
    publishers: dict[str, WeightPublisher] = {}
    announce: dict[str, Callable[[Manifest], None]] = {}
    for model in models:
        if model in base.links:
            publishers[model], announce[model] = base.links[model], inboxes[model].announce
        elif model in base.standing.publishes:
            announcer = Announcer(setting, model, base.hosts, node, base.shards.get(model))
            publishers[model], announce[model] = announcer, announcer.announce
    canaries = {model: build_canaries(setting, model) for model in models}
    return Publishing(models, held.models, publishers, announce, canaries, base.metrics, node.work_done, base.shards)


@dataclass(frozen=True, slots=True)
class OwnerEnds:
    """What an owner has registered before its endpoint started."""

    inbound: InboundSamples
    store: SampleStore
    rows: Mapping[str, OutboundRows]
    calls: Calls | None
    validation: Validation | None = None


@dataclass(frozen=True, slots=True)
class FurtherEnds:
    """What the home of a further model has registered before its endpoint started."""

    rows: InboundRows
    answering: Answering | None


def trains(
    base: Base, ends: OwnerEnds, replicas: Replicas, held: HeldModels, publishing: Publishing, steps: StepRunner
) -> Training:
    """The training side over the samples that arrive here."""
    setting, limits = base.setting, TrainingLimits.of(base.setting.plan)
    _introduce(base, replicas, held)
    dealing = _deal_rule(base, limits, held, setting.plan.primary)
    parts = TrainingParts(
        inbound=ends.inbound,
        store=ends.store,
        models=held.models,
        trained={name: setting.plan.metrics_of(name) for name in base.standing.gradients},
        primary=setting.plan.primary,
        contexts=held.contexts,
        replicas=replicas,
        intake=takes(base, ends, replicas, dealing, held.rounds),
        dealing=dealing,
        publishing=publishing,
        dumps=build_dumps(setting, base.disk),
        checkpoints=checkpoint_writer(setting, base.metrics.add),
        folders=model_folders(setting),
        commits=base.standing.commits,
        run=steps.call,
        metrics=base.metrics,
        writer=base.writer,
        rounds=held.rounds,
        turns=held.turns,
        rows=ends.rows,
        recovery=_recovery(setting),
        validation=ends.validation,
        validates=setting.plan.val is not None and setting.plan.reads is None,
        held_out=_held_out(base, ends, replicas, held),
    )
    return Training(parts, limits, base.node, setting.start)


def _held_out(base: Base, ends: OwnerEnds, replicas: Replicas, held: HeldModels) -> HeldOut | None:
    if base.setting.plan.val is None or base.setting.plan.reads is None:
        return None
    about = (base.setting, base.node, replicas, held.contexts, base.writer, base.metrics, held.rounds, ends.calls)
    return HeldOut(HeldOutParts(*about), held.tokenizer)


def trains_further(
    base: Base, ends: FurtherEnds, replicas: Replicas, held: HeldModels, steps: StepRunner, publishing: Publishing
) -> FurtherTraining:
    """The training side over rows that owners send."""
    setting, limits = base.setting, TrainingLimits.of(base.setting.plan)
    _introduce(base, replicas, held)
    parts = FurtherParts(
        rows=ends.rows,
        models=held.models,
        trained={name: setting.plan.metrics_of(name) for name in base.standing.gradients},
        contexts=held.contexts,
        replicas=replicas,
        dealing=_deal_rule(base, limits, held, next(iter(base.standing.gradients))),
        checkpoints=checkpoint_writer(setting, base.metrics.add),
        commits=base.standing.commits,
        metrics=base.metrics,
        writer=base.writer,
        answering=ends.answering,
        publishing=publishing,
        run=steps.call,
        rounds=held.rounds,
    )
    return FurtherTraining(parts, limits, base.node, setting.start)


def _introduce(base: Base, replicas: Replicas, held: HeldModels) -> None:
    """Give each context its replica number, and the steps that all replicas call alike a way to ask the others."""
    for step in base.setting.me.steps:
        context = held.contexts[step.name]
        context.replica = replicas.rank
        gather = replicas.gather if held.rounds is None else held.rounds.gather
        context.gather = gather if step.role == "train" and step.scope == "batch" else None


def takes(base: Base, ends: OwnerEnds, replicas: Replicas, dealt: DealRule, rounds: Rounds | None) -> Intake:
    """What takes the groups that arrive for the open step, and those of busier replicas, once they are complete."""
    recipe, plan = base.setting.recipe, base.setting.plan
    edges = [plan.edge(port.edge) for port in base.setting.me.ports if port.end in ("asks", "collects")]
    versioned = {edge.name for edge in edges if edge.when == "in window"}
    answers = {edge.name: edge.back for edge in edges if edge.when == "on arrival" or edge.name in versioned}
    outside = {edge.name for edge in edges if edge.kind == "client"}
    asked = [IntakeCall(name, in_window=name in versioned, outside=name in outside) for name in answers]
    # A forward of a divided model is a round, at which all replicas meet.
    early = plan.on_arrival if rounds is None else ()
    here = {step.name: step.writes for step in plan.steps if step.name in early}
    asked += [IntakeCall(name, in_window=True, here=True) for name in here]
    rule = IntakeRule(dealt.cost, dealt.streamed, tuple(asked))
    rng = random.Random(f"{recipe.run.seed}/{replicas.rank}")
    deals = replicas.size > 1 and (dealt.divided or not dealt.streamed)
    dealing = DealCore(base.name, base.setting.owners, dealt) if deals else None
    others = replicas.others if deals or recipe.layout.stealing else ()
    intake = Intake(ends.inbound, base.node, rule, others, rng, answers | here, dealing)
    if rounds is not None:
        rounds.carry(intake.tell, intake.hear)
    if ends.calls is not None:
        ask_on_arrival(ends.calls, intake, answers.keys() - outside, dealt.prompts, versioned)
    return intake


def _deal_rule(base: Base, limits: TrainingLimits, held: HeldModels, model: str) -> DealRule:
    """How the replicas that train a model deal groups. To other homes, owners deal by what their own model costs."""
    batch = limits.batch
    return DealRule(
        batch.prompts,
        batch.ledgers,
        limits.cost_of(held.models[model]),
        minibatches=batch.minibatches,
        streamed=limits.streamed,
        divided=held.rounds is not None,
        pinned=not base.setting.recipe.layout.stealing,
    )


def _recovery(setting: Setting) -> Recovery | None:
    broken_at, stem = setting.document.broken_at, setting.me.name.file_stem
    if broken_at is None:
        return None
    return Recovery(setting.run_dir, stem, broken_at, setting.start.number)
