"""The generating side of one worker: its script's `leases`, `generate` and `send`, and the messages behind them.

`build_outbound` wires the holder's core (`distflow/exchange/lease_client.py`) to the worker.

A worker that also trains shares its device between the two sides (`Turns`). With `offload: true` only one side is on
the device at a time: the side that needs it takes it and moves the other one away; nothing moves if it already has it.
Around training step t:

- *Generation takes the device.* A checkpoint copy that is still under way is waited for. The models, with gradients and
  optimizer, start to leave while the engine comes back. The engine then takes version t straight from the device, where
  the published weights stay until it has them; only then are the trainer's weights gone.
- *Training takes the device.* The engine leaves; open samples stay in it. Their part of the KV cache is copied to host
  memory and back: keys and values were computed by older weights and cannot be recomputed, so only the copy keeps their
  tokens and log-probs what they would have been. The rest of the cache is freed. So are the engine's weights if it
  takes every new version at once (`layout.refresh: eager`): their update begins here and ends when the engine is back.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from distflow.comm.membership import Lost
from distflow.data.batch import Batch, Ragged
from distflow.data.fields import with_fields
from distflow.data.samples import by_sample, compared, left_out
from distflow.errors import UserError
from distflow.exchange.facts import BEGINS, OWNERS, TERM
from distflow.exchange.lease_client import HolderCore
from distflow.exchange.lease_lanes import Lanes
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.ledger import SAMPLES_LEFT_OUT
from distflow.exchange.owner_links import Held, Home
from distflow.exchange.sample_channel import InboundSamples, OutboundSamples
from distflow.flow.edges import Edge
from distflow.flow.memory import MIB
from distflow.log import logger
from distflow.runtime.assembly import Setting
from distflow.runtime.calls import Asking, fields_of
from distflow.runtime.metrics import MetricStore
from distflow.runtime.node import Node
from distflow.runtime.owner_side import lessors
from distflow.runtime.protocols import Backend, Engine, Measured
from distflow.runtime.rollout_loop import RolloutLoop
from distflow.runtime.steps import by_kind
from distflow.runtime.trajectories import Trajectories
from distflow.types import DROP_REASON, LEFT_OUT, UNJUDGED, LeaseKind, Version, in_pool, lease_kind
from distflow.weights.receiver import WeightInbox
from distflow.weights.transport import InprocLink

OFFLOAD = "timing_s/offload"
log = logger(__name__)


class Generating:
    """Turns leases into groups of samples and sends them to their owners."""

    def __init__(
        self,
        loop: RolloutLoop,
        channels: Mapping[LeaseKind, OutboundSamples],
        samples: Trajectories,
        engine: Engine,
        node: Node,
        edge: Edge,
        metrics: MetricStore,
        turns: Turns,
    ) -> None:
        self.loop = loop
        self._channels = channels
        self._samples = samples
        self._engine = engine
        self._node = node
        self._edge = edge
        self._metrics = metrics
        self._turns = turns
        self._asking: Asking | None = None

    def asks_by(self, asking: Asking) -> None:
        """Set how other pools, and further engines here, are asked for steps."""
        self._asking = asking
        self.loop.accompanied_by(asking)

    def generate(self, step: str, loop: RolloutLoop) -> Iterator[Batch | None]:
        """Yield batches of whole groups, as they finish; None when something else has come that ends a wait."""
        self._node.facts |= {"state": "generating"}
        if loop.open():
            self._turns.generate()
        own = self._samples.step.plan.name
        if step != own:
            raise UserError(f"script: w.generate({step!r}, …), but this worker's generate step is {own!r}")
        groups = self._batches(loop)
        return groups if loop.endless else self._phase(groups)

    def _batches(self, loop: RolloutLoop) -> Iterator[Batch | None]:
        while (groups := loop.groups()) is None or groups:
            if groups is None:
                yield None
                continue
            for kind in self._channels:
                positions = [group.lease.position for group in groups if group.lease.kind == kind]
                if positions:
                    yield self._samples.batch(positions)

    def ask(self, step: str, source: Iterator[Batch | None]) -> Iterator[Batch | None]:
        """Yield the groups of `source` once another pool, or a further engine here, has run a step on them."""
        asking = self._asking
        assert asking is not None, f"{step!r} is asked for, so there is a port for it"
        yield from asking.through(step, source)
        if self.loop.draining:
            yield from asking.rest(step)
        elif self.loop.endless:
            with self._node.board.condition:
                asking.cancel_all()

    def _phase(self, groups: Iterator[Batch | None]) -> Iterator[Batch | None]:
        """Measure how long a colocated worker generates within each training step."""
        with self._metrics.timed("timing_s/generation", "phase"):
            yield from groups

    def send(self, groups: Batch) -> None:
        """Send groups to the owners of their leases: no dropped groups, and only fields that are read there."""
        for kind, rows in by_kind(groups).items():
            self._send(kind, groups if len(rows) == groups.rows else groups.select(rows))

    def _send(self, kind: LeaseKind, groups: Batch) -> None:
        if kind == "val":
            # Every prompt of validation counts.
            groups, dropped = _failed_are_left_out(groups), dict[int, str]()
        else:
            gone = _dropped(groups)
            self._count_out(groups, gone)
            few = _too_few_left(groups, self._edge.baseline) if self._edge.compares else {}
            dropped = few | gone
        if dropped:
            self._metrics.add("group/dropped", len(dropped))
        with self._metrics.timed("timing_s/send"):
            whole = groups.with_columns(**self._filled(groups))
            kept = whole.only(fields_of(whole, self._edge.fields, "the training side"))
            sent = [str(group) for group in dict.fromkeys(kept.dense("group").tolist()) if group not in dropped]
            self._metrics.trace.depart("group", sent)
            with self._node.board.condition:
                self._channels[kind].finish(kept, dropped, time.monotonic())
                self.loop.sent(kept.dense("group").tolist())
        self._node.work_done()

    def _count_out(self, groups: Batch, gone: Mapping[int, str]) -> None:
        """Count samples that are left out, and groups that are dropped since a step failed on a sample of theirs."""
        samples = by_sample(groups)
        positions = samples.dense("group").tolist()
        out = [position for position, is_out in zip(positions, left_out(samples).tolist(), strict=True) if is_out]
        if staying := sum(position not in gone for position in out):
            self._metrics.add("rollout/left_out", staying)
        failed_on = {position for position, reason in gone.items() if position in out or reason.startswith(UNJUDGED)}
        if failed_on:
            self._metrics.add("rollout/dropped", len(failed_on))

    def find(self, position: int) -> Held | None:
        """The lease of a position, if it is held."""
        return self._channels[lease_kind(position)].core.find(position)

    def leave(self) -> None:
        """Give up all leases and close the engine.

        After `loop.drain` no token is lost: what running samples have produced is sent to their owners first.
        """
        if self.loop.draining and not self._node.board.over:
            self.loop.hand_back()
        with self._node.board.condition:
            for channel in self._channels.values():
                channel.send(channel.core.leave())
        self._engine.close()

    def _filled(self, groups: Batch) -> dict[str, Tensor]:
        """Fill values of the optional fields that only other workers write."""
        fills = self._edge.fills.items()
        return {name: torch.full((groups.rows,), value) for name, value in fills if name not in groups}


def _dropped(groups: Batch) -> dict[int, str]:
    if DROP_REASON not in groups:
        return {}
    positions = groups.dense("group").tolist()
    return {position: reason for position, reason in zip(positions, groups.texts(DROP_REASON), strict=True) if reason}


def _too_few_left(groups: Batch, baseline: bool) -> dict[int, str]:
    """Groups of which so many samples are left out that the others have nothing to be compared with."""
    samples, left = by_sample(groups), compared(groups, baseline=baseline)
    reasons = samples.texts(LEFT_OUT) if LEFT_OUT in samples else []
    found, positions = {}, samples.dense("group").tolist()
    for first, end in pairwise(samples.group_bounds()) if any(reasons) else ():
        # Of an error its type: what follows may be another one for each sample.
        here = Counter(reason.partition(":")[0] for reason in reasons[first:end] if reason)
        if here and end - first > 1 and int(left[first:end].sum()) < 2:
            found[positions[first]] = f"{SAMPLES_LEFT_OUT}, {here.most_common(1)[0][0]}"
    return found


def _failed_are_left_out(groups: Batch) -> Batch:
    """The groups with samples left out where a reward function failed, whatever it would drop in training."""
    if DROP_REASON not in groups:
        return groups
    failed = [reason if reason.startswith(UNJUDGED) else "" for reason in groups.texts(DROP_REASON)]
    return with_fields(groups, {LEFT_OUT: Ragged.from_texts(failed)})


class Turns:
    """Both sides stay on the device, as on every worker without `offload`."""

    def generate(self) -> None:
        """The engine is about to be used."""

    def train(self) -> None:
        """Models are about to be used, published or saved."""

    def taken(self, version: Version) -> None:
        """The engine has taken these weights."""

    def settled_by(self, wait: Callable[[], None]) -> None:
        """Set what to wait for before models move: `wait` returns when no other thread reads their state."""


class OffloadedModels:
    """Models that leave the GPU while an engine is built, so that it finds as much free memory as it will later.

    `restore` brings them back, after the engine's own `offload`.
    """

    def __init__(self, models: Mapping[str, Backend], *, wanted: bool) -> None:
        self._models: list[Backend] = []
        if wanted:
            self._models += [model for model in models.values() if _is_there(model)]
            for model in self._models:
                model.offload()
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Move the models back to the GPU."""
        while self._models:
            self._models.pop().onload()


def _is_there(model: Backend) -> bool:
    # Some are moved to the device only later, when they are divided.
    return isinstance(model, Measured) and any(size > 0 for size in model.device_bytes().values())


class OffloadTurns(Turns):
    """One side at a time, training first. `renewed`: the engine takes every new version at once."""

    def __init__(
        self,
        engine: Engine,
        models: Mapping[str, Backend],
        link: InprocLink,
        inbox: WeightInbox,
        metrics: MetricStore,
        *,
        renewed: bool,
    ) -> None:
        self._engine = engine
        self._models = models
        self._link = link
        self._inbox = inbox
        self._metrics = metrics
        self._renewed = renewed
        self._settle: Callable[[], None] = lambda: None
        self._generating = False
        self._told: set[str] = set()
        engine.offload()

    def generate(self) -> None:
        """Move the models off and the engine onto the device; raises UserError if there are no weights for it."""
        if self._generating:
            return
        if self._renewed and self._inbox.loaded is not None and not self._inbox.waiting:
            raise UserError(
                "offload: true, and the script generates again without w.publish: the engine's weights were freed "
                "when training began — publish after every training step, or set layout.refresh to when_idle"
            )
        with self._metrics.timed(OFFLOAD):
            self._settle()
            if not self._renewed:
                self._link.keep_on_host()
            for model in self._models.values():
                model.offload()
            self._engine.onload()
        self._generating = True

    def taken(self, version: Version) -> None:
        """Free what was published: the engine has it."""
        self._link.let_go()
        self._tell("generating")

    def train(self) -> None:
        """Move the engine off and the models onto the device."""
        if not self._generating:
            return
        self._generating = False
        with self._metrics.timed(OFFLOAD):
            version = self._engine.version
            if self._renewed:
                self._link.let_go()
                if version is not None:
                    self._engine.begin_update(Version(version.term, version.number + 1))
            self._engine.offload()
            for model in self._models.values():
                model.onload()
        self._tell("training")

    def settled_by(self, wait: Callable[[], None]) -> None:
        """Set what to wait for before models leave: a copy made by another thread would keep their memory."""
        self._settle = wait

    def held(self) -> dict[str, int]:
        """Bytes on the device by owner and purpose (`engine/kv`, `policy/optimizer` …), where they can be measured."""
        owners: dict[str, Engine | Backend] = {"engine": self._engine, **self._models}
        return {
            f"{owner}/{what}": size
            for owner, part in owners.items()
            if isinstance(part, Measured)
            for what, size in part.device_bytes().items()
        }

    def _tell(self, side: str) -> None:
        """Log what is on the device, the first time that each side has it."""
        if side not in self._told:
            self._told.add(side)
            shown = ", ".join(f"{name} {size / MIB:.1f} MiB" for name, size in self.held().items())
            log.info("%s with offload; on the device: %s", side, shown)


def build_turns(
    setting: Setting,
    engine: Engine,
    models: Mapping[str, Backend],
    link: InprocLink,
    inbox: WeightInbox,
    metrics: MetricStore,
) -> Turns:
    """How the two sides of a worker that generates and trains share its device."""
    if not setting.me.offload:
        return Turns()
    renewed = setting.recipe.layout.refresh == "eager"
    return OffloadTurns(engine, models, link, inbox, metrics, renewed=renewed)


def build_outbound(
    setting: Setting,
    settings: LeaseSettings,
    node: Node,
    lanes: Lanes,
    inbound: InboundSamples | None,
    loaded: Callable[[], Version | None],
    begun: Callable[[int, Mapping[int, int]], None],
) -> OutboundSamples:
    """Wire the holder's side. With `inbound`, the worker is its own owner. `loaded`: the version in its engine.

    `begun` is called with each later term and the training steps at which terms began, before groups continue in it.
    """
    name, index = str(setting.me.name), setting.me.name.index
    owners = lessors(setting.owners, settings.kind)
    core = HolderCore(
        name,
        node.endpoint.incarnation,
        owners,
        settings,
        home=Home(index, setting.document.near(owners)),
        term=setting.document.term,
        seed=index,
    )
    accept = None if inbound is None else lambda results, batch: inbound.accept(results, batch, time.monotonic())
    outbound = OutboundSamples(core, lanes.post, name, accept)
    lanes.register(node.on, outbound.kinds, outbound.on_message)
    node.on_tick(lambda now: outbound.send(core.tick(now)))

    def owner_lost(lost: Lost) -> None:
        if lost.name not in core.owners:
            return
        if lost.orderly:
            core.owner_left(lost.name)
        elif not core.run_finished:
            # It will come back with another term, or the host agents will end the run.
            log.warning("%s is lost (%s): waiting for its pool to restart", lost.name, lost.reason)

    node.on_lost(owner_lost)
    _follow_terms(node, outbound, setting.plan.home.name, loaded, begun)
    return outbound


def _follow_terms(
    node: Node,
    outbound: OutboundSamples,
    home: str,
    loaded: Callable[[], Version | None],
    begun: Callable[[int, Mapping[int, int]], None],
) -> None:
    """Follow the facts of owners, of pool `home`, who may be others in each term: they come with the first hello."""
    core, peers = outbound.core, node.membership.peers

    def look(now: float) -> None:
        for facts in [peers[name].facts for name in in_pool(home, peers) if OWNERS in peers[name].facts]:
            known, term, names, begins = core.term, facts[TERM], list(facts[OWNERS]), dict(facts[BEGINS])
            if not set(names) <= {*in_pool(home, peers), core.name} or len(names) > core.settings.ledgers:
                # Not training workers of this run, or not known here yet.
                continue
            if term > known:
                # Before groups continue: from here on no version is loaded that does not survive.
                begun(term, begins)
            outbound.send(core.begin_term(term, lessors(names, core.settings.kind), begins, loaded(), now))
            if core.term != known and core.settings.kind == "train":
                log.info(
                    "term %d of the training workers has begun: %d groups continue here", core.term, len(core.held())
                )

    def joined(name: str, _incarnation: int) -> None:
        look(time.monotonic())
        outbound.send(core.offer(name))

    node.on_joined(joined)
    node.on_tick(look)
