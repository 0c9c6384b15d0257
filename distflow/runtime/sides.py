"""Wires the two sides of a worker: the owner of ledgers (training) and the holder of leases (generating)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from distflow.comm.membership import Lost
from distflow.comm.message import Message
from distflow.exchange.lease_client import HolderCore
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.ledgers import merge_snapshots
from distflow.exchange.messages import LeasePrompt
from distflow.exchange.owner import OwnerCore
from distflow.exchange.sample_channel import HOLDER_KINDS, OWNER_KINDS, RESULTS, InboundSamples, OutboundSamples
from distflow.flow.memory import MIB, group_bytes
from distflow.log import logger
from distflow.runtime.assembly import Setting
from distflow.runtime.node import Lanes, Node
from distflow.runtime.prompts import PromptReader, blamed, build_prompts
from distflow.runtime.protocols import Tokenizer
from distflow.runtime.weight_publisher import ANNOUNCED, BEGINS, OWNERS, TERM, WEIGHTS
from distflow.types import Version
from distflow.weights.manifest import Manifest
from distflow.weights.prefetch import Stage
from distflow.weights.receiver import WeightInbox
from distflow.weights.transport import WeightReader

READ_AHEAD = 64
"""Prompts that are read before they are needed, at least; and those of two training steps."""
log = logger(__name__)


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
        memory_bytes=trainer.sample_memory_mb * MIB,
        group_bytes=lambda prompt_tokens: group_bytes(samples, prompt_tokens, new_tokens),
        max_prompt_tokens=recipe.data.max_prompt_tokens,
        seed=recipe.run.seed,
        max_refills=batch.max_refills,
        announce_closed=trainer.generates is not None,
        hedging=recipe.layout.hedging,
        host_silence_s=recipe.limits.host_silence_s,
        partial_rollouts=recipe.layout.partial_rollouts,
    )


def build_inbound(setting: Setting, node: Node, lanes: Lanes, tokenizer: Tokenizer) -> InboundSamples:
    """The owner's side: its ledgers, new or from the checkpoint, and the messages that reach them."""
    name, plan = str(setting.me.name), setting.plan
    where = f"data source {setting.recipe.data.source} on {name}"
    order = build_prompts(setting.recipe, tokenizer, where)

    def read(position: int) -> LeasePrompt:
        with blamed(f"{where}, at prompt position {position}"):
            prompt = order.prompt(position)
        return LeasePrompt(order.uid(position), prompt.token_ids, prompt.text, prompt.task)

    ledgers = range(setting.owners.index(name), plan.batch.ledgers, len(setting.owners))
    snapshot = None
    if setting.resumed is not None:
        # Of all owners there were: their number may be another one now.
        snapshot = merge_snapshots([part["ledger"] for part in setting.resumed.workers()])
    term = setting.document.term
    ahead = max(READ_AHEAD, 2 * plan.batch.groups_per_ledger * len(ledgers))

    def arrived() -> None:
        with node.board.condition:
            if reader.take_news():
                inbound.send(core.prompts_arrived(time.monotonic()))
                node.board.condition.notify_all()

    reader = PromptReader(read, plan.batch.ledgers, ahead, arrived, node.board.fault)
    prompts = reader.prompt_at
    core = OwnerCore(
        name, lease_settings(setting), list(ledgers), prompts, term=term, snapshot=snapshot, begins=setting.begins
    )
    inbound = InboundSamples(core, lanes.post)
    reader.start()
    node.on_close(reader.close)
    node.on_tick(lambda now: arrived())  # the reader says so itself, unless it is held up by the next prompt
    core.prompts_arrived(time.monotonic())  # none has; the first ones are asked for
    for kind in (*HOLDER_KINDS, RESULTS):
        _handle(node, lanes, kind, inbound.on_message)
    node.on_lost(lambda lost: inbound.send(core.worker_lost(lost.name, lost.incarnation, time.monotonic())))
    node.on_tick(lambda now: _look(inbound, now))
    node.count_work(lambda: core.progress_count)
    return inbound


def _look(inbound: InboundSamples, now: float) -> None:
    core = inbound.core
    inbound.send(core.tick(now))
    for name, count in core.lapsed:
        log.warning("%s has not been heard of for limits.host_silence_s: its %d leases go to others", name, count)
    core.lapsed.clear()


def build_outbound(
    setting: Setting,
    node: Node,
    lanes: Lanes,
    inbound: InboundSamples | None,
    loaded: Callable[[], Version | None],
    begun: Callable[[int, Mapping[int, int]], None],
) -> OutboundSamples:
    """The holder's side. With `inbound`, the worker is its own owner. `loaded`: the version in its engine.

    `begun` is called with each later term and the training steps at which terms began, before anything goes on in it.
    """
    name, index, owners = str(setting.me.name), setting.me.name.index, setting.owners
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

    def owner_lost(lost: Lost) -> None:
        if lost.name not in core.owners:
            return
        if lost.orderly:
            outbound.send(core.owner_left(lost.name, time.monotonic()))
        elif not core.run_finished:
            # It comes back, with another term, or the host agents end the run.
            log.warning("%s is lost (%s): waiting for its pool to restart", lost.name, lost.reason)

    node.on_lost(owner_lost)
    _follow_terms(node, outbound, owners, loaded, begun)
    return outbound


def _follow_terms(
    node: Node,
    outbound: OutboundSamples,
    owners: Sequence[str],
    loaded: Callable[[], Version | None],
    begun: Callable[[int, Mapping[int, int]], None],
) -> None:
    """Training workers of a pool that restarted say so from their first hello on."""
    core, peers = outbound.core, node.membership.peers

    def look(now: float) -> None:
        for facts in [peers[name].facts for name in owners if name in peers and OWNERS in peers[name].facts]:
            known, term, names, begins = core.term, facts[TERM], list(facts[OWNERS]), dict(facts[BEGINS])
            if not set(names) <= set(owners):
                # Nobody can lease from them: they are no training workers of this run.
                continue
            if term > known:
                # Before groups go on: no version that does not survive is loaded from here on.
                begun(term, begins)
            outbound.send(core.begin_term(term, names, begins, loaded(), now))
            if core.term != known:
                log.info("term %d of the training workers: %d groups go on here", core.term, len(core.held()))

    def joined(name: str, _incarnation: int) -> None:
        look(time.monotonic())
        outbound.send(core.offer(name))

    node.on_joined(joined)
    node.on_tick(look)


def build_inbox(node: Node, reader: WeightReader | Stage, far: Callable[[], Stage]) -> WeightInbox:
    """Where announcements of weights arrive. `far` makes what reads over the network."""
    inbox = WeightInbox(reader, far)

    def on_weights(message: Message) -> None:
        inbox.announce(Manifest.from_wire(message.body))
        node.facts[ANNOUNCED] = inbox.newest

    node.on(WEIGHTS, on_weights)
    return inbox


def _handle(node: Node, lanes: Lanes, kind: str, handler: Callable[[Message, float], None]) -> None:
    lanes.on(kind, handler)
    node.on(kind, lambda message: handler(message, time.monotonic()))
