"""Wires the two sides of a worker: the owner of ledgers (training) and the holder of leases (generating)."""

from __future__ import annotations

import time
from collections.abc import Callable

from distflow.comm.message import Message
from distflow.data.sources import PromptOrder, PromptSettings
from distflow.errors import WorkerFailed
from distflow.exchange.holder import HolderCore
from distflow.exchange.inbound import HOLDER_KINDS, RESULTS, InboundSamples
from distflow.exchange.messages import LeasePrompt
from distflow.exchange.outbound import OWNER_KINDS, OutboundSamples
from distflow.exchange.owner import OwnerCore
from distflow.exchange.settings import LeaseSettings
from distflow.flow.resolve import resolve
from distflow.runtime.assembly import Setting
from distflow.runtime.lanes import Lanes
from distflow.runtime.node import Node
from distflow.runtime.protocols import Tokenizer
from distflow.weights.inbox import WeightInbox
from distflow.weights.link import WeightReader
from distflow.weights.manifest import Manifest

WEIGHTS = "weights"
BYTES_PER_TOKEN = 48
"""Of a result, all fields of a response or prompt token together: ids, log-prob, mask, text, advantage; generous."""
BYTES_PER_SAMPLE = 1024
"""Of a result, beside its tokens: identity, rewards, spans, the task's text."""


def lease_settings(setting: Setting) -> LeaseSettings:
    """The recipe's numbers, as the lease protocol wants them."""
    recipe, batch = setting.recipe, setting.plan.batch
    new_tokens = int(setting.generate_step.settings["max_new_tokens"])
    samples = batch.samples_per_prompt
    trainer = setting.plan.owner_plan
    return LeaseSettings(
        ledgers=batch.ledgers,
        groups_per_ledger=batch.groups_per_ledger,
        samples_per_prompt=samples,
        max_staleness=batch.max_staleness,
        training_steps=batch.training_steps,
        memory_bytes=trainer.sample_memory_mb << 20,
        group_bytes=lambda prompt: samples * (BYTES_PER_SAMPLE + BYTES_PER_TOKEN * (prompt + new_tokens)),
        max_prompt_tokens=recipe.data.max_prompt_tokens,
        seed=recipe.run.seed,
        max_refills=batch.max_refills,
        announce_closed=trainer.generates is not None,
    )


def build_inbound(setting: Setting, node: Node, lanes: Lanes, tokenizer: Tokenizer) -> InboundSamples:
    """The owner's side: its ledgers, begun anew or from the checkpoint, and the messages that reach them."""
    name, plan, data = str(setting.me.name), setting.plan, setting.recipe.data
    source = resolve(data.source)(**data.with_)
    settings = PromptSettings(setting.recipe.run.seed, data.shuffle, data.chat, data.max_prompt_tokens)
    order = PromptOrder(source, tokenizer, settings)

    def prompt_at(position: int) -> LeasePrompt:
        prompt = order.prompt(position)
        return LeasePrompt(order.uid(position), prompt.token_ids, prompt.text, prompt.task)

    ledgers = range(plan.owners.index(name), plan.batch.ledgers, len(plan.owners))
    snapshot = setting.resumed.worker()["ledger"] if setting.resumed is not None else None
    term = setting.document.term
    core = OwnerCore(name, lease_settings(setting), list(ledgers), prompt_at, term=term, snapshot=snapshot)
    inbound = InboundSamples(core, lanes.post)
    for kind in (*HOLDER_KINDS, RESULTS):
        _handle(node, lanes, kind, inbound.on_message)
    node.on_lost(lambda worker, life, reason: inbound.send(core.worker_lost(worker, life, time.monotonic())))
    node.on_tick(lambda now: inbound.send(core.tick(now)))
    node.count_work(lambda: core.progress_count)
    return inbound


def build_outbound(setting: Setting, node: Node, lanes: Lanes, inbound: InboundSamples | None) -> OutboundSamples:
    """The holder's side. With `inbound`, the worker is its own owner."""
    name, index, owners = str(setting.me.name), setting.me.name.index, setting.plan.owners
    core = HolderCore(
        name,
        node.endpoint.incarnation,
        owners,
        lease_settings(setting),
        home=index % len(owners),
        term=setting.document.term,
        seed=index,
    )
    accept = None if inbound is None else lambda results, batch: inbound.accept(results, batch, time.monotonic())
    outbound = OutboundSamples(core, lanes.post, name, accept)
    for kind in OWNER_KINDS:
        _handle(node, lanes, kind, outbound.on_message)
    node.on_tick(lambda now: outbound.send(core.tick(now)))

    def owner_lost(worker: str, _life: int, reason: str) -> None:
        if worker in owners and not core.run_finished:
            node.board.fault(WorkerFailed(f"{worker} is lost ({reason}); resume the run from its last checkpoint"))

    node.on_lost(owner_lost)
    return outbound


def build_inbox(node: Node, reader: WeightReader) -> WeightInbox:
    """Where announcements of weights arrive."""
    inbox = WeightInbox(reader)
    node.on(WEIGHTS, lambda message: inbox.announce(Manifest.from_wire(message.body)))
    return inbox


def _handle(node: Node, lanes: Lanes, kind: str, handler: Callable[[Message, float], None]) -> None:
    lanes.on(kind, handler)
    node.on(kind, lambda message: handler(message, time.monotonic()))
