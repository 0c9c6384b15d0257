"""The training side of one worker: receive a step's samples, apply, publish, save — one owner's part of the run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from distflow.comm.fact_exchange import Fact
from distflow.data.batch import Batch
from distflow.errors import NoProgressError, WorkerFailed
from distflow.exchange.sample_channel import InboundSamples
from distflow.log import logger
from distflow.runtime.checkpoint.model_folders import ModelFolders
from distflow.runtime.checkpoint.parts import CheckpointWriter
from distflow.runtime.checkpoint.policy import Saving, SavingParts, SavingRules
from distflow.runtime.context import StepContext
from distflow.runtime.device_sharing import Turns
from distflow.runtime.dumps import DumpWriter, dumped
from distflow.runtime.lockstep import STEP, Rounds
from distflow.runtime.metrics import MetricStore, MetricWriter, Recovery
from distflow.runtime.node import Node
from distflow.runtime.protocols import Backend
from distflow.runtime.receiving import Receiving, TrainingLimits
from distflow.runtime.replicas import Replicas
from distflow.runtime.sample_stealing import Stealing
from distflow.runtime.weight_publisher import Canaries
from distflow.types import Version
from distflow.weights.manifest import Manifest
from distflow.weights.transport import WeightPublisher

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """What the training side works with."""

    inbound: InboundSamples
    models: Mapping[str, Backend]
    trained: Sequence[str]
    """Those among them that are trained: published version by version, and saved."""
    contexts: Mapping[str, StepContext]
    replicas: Replicas
    stealing: Stealing | None
    """None where every replica trains on what it owns."""
    publishers: Mapping[str, WeightPublisher]
    """By model; empty where another replica of this host publishes for all of them."""
    announce: Callable[[Manifest], None]
    """Tell the generating workers of a new version."""
    dumps: DumpWriter
    checkpoints: CheckpointWriter
    commits: bool
    """This replica writes COMMIT for its host."""
    metrics: MetricStore
    writer: MetricWriter
    canaries: Mapping[str, Canaries] = field(default_factory=dict)
    """By model: where versions are compared with what engines compute with them."""
    rounds: Rounds | None = None
    """Where the models are divided over the replicas."""
    folders: ModelFolders | None = None
    """Where Hugging Face folders are wanted."""
    turns: Turns = field(default_factory=Turns)
    """Where the device is shared with an engine."""
    recovery: Recovery | None = None
    """Where the pool has restarted while the run goes on."""


class Training:
    """Owner of ledgers and holder of trained models. All methods run on the worker's main thread."""

    def __init__(self, parts: TrainingParts, limits: TrainingLimits, node: Node, start: Version) -> None:
        self._parts = parts
        self._limits = limits
        self._node = node
        self._board = node.board
        self._term = start.term
        self._number = start.number
        self._totals: dict[str, float] = {}
        self.finished = False
        """Whether all training steps are done, and everybody was told so."""
        self._dumped = -1
        self._recovery = parts.recovery
        self._receiving = Receiving(
            parts.inbound, parts.replicas, parts.stealing, limits, node, parts.metrics, self._account, parts.rounds
        )
        saved = SavingParts(
            core=parts.inbound.core,
            models={name: parts.models[name] for name in parts.trained},
            contexts=parts.contexts,
            writer=parts.checkpoints,
            folders=parts.folders,
            commits=parts.commits,
            record=self._record,
            flush=parts.dumps.flush,
        )
        rules = SavingRules(
            every=limits.save_every,
            every_s=limits.save_every_s,
            hf_every=limits.hf_every,
            metric=limits.keep_best,
            last=frozenset({limits.batch.training_steps, limits.stop_after or limits.batch.training_steps}),
            no_progress_s=limits.no_progress_s,
        )
        self._saving = Saving(saved, rules, parts.replicas, node.board, parts.metrics)
        parts.turns.settled_by(self._saving.wait_for_copy)
        # Who waits for a replica that writes waits by what it has written.
        node.count_work(lambda: parts.checkpoints.written)
        if start.number:
            self._saving.already(start.number)

    def steps(self) -> Iterator[int]:
        """Training steps t, counted from 0; afterwards everybody is told that the run is over."""
        for model in self._parts.trained:
            self.publish(model, self._number)
        self._saving.prepare()
        last = self._limits.batch.training_steps
        if self._limits.stop_after is not None:
            last = min(last, self._limits.stop_after)
        for t in range(self._number, last):
            self._begin(t)
            yield t
            self._end(t)
        self._finish()

    def receive(self, t: int) -> Iterator[Batch]:
        """The samples of step t, in batches of at least `tokens_per_microbatch` as they arrive (or all at once)."""
        self._parts.turns.train()
        return self._receiving.receive(t)

    def note(self, before: Batch, after: Batch) -> None:
        """A step has written further fields: dumps show them."""
        if not self._limits.dump_fields or after is before:
            return
        taken = self._receiving.tally.taken
        for index in reversed(range(len(taken))):
            if taken[index][0] is before:
                taken[index] = (after, taken[index][1])
                return

    def apply(self, model: str) -> None:
        """Optimizer step over everything accumulated, divided by the exact global denominator."""
        backend, metrics = self._parts.models[model], self._parts.metrics
        if not self._totals:
            with metrics.timed("timing_s/wait_replicas"):
                if self._parts.rounds is not None:
                    self._parts.rounds.meet(STEP)
                self._totals = self._agree_on_totals()
        denominator = self._totals.pop(model, 0.0)
        if denominator <= 0:
            raise WorkerFailed(
                f"training step {self._number}: nothing to train {model!r} on — no step accumulated a loss for it, "
                f"or response_mask is empty everywhere"
            )
        metrics.set("actor/lr", backend.learning_rate)
        self._saving.wait_for_copy()
        with metrics.timed("timing_s/apply"):
            metrics.set("actor/grad_norm", backend.apply(denominator))
        self._node.work_done()

    def publish(self, model: str, number: int) -> None:
        """Make version `number` available to the engines, and open the next training step for leasing."""
        parts = self._parts
        with parts.metrics.timed("timing_s/publish"):
            manifest = self._publish(model, Version(self._term, number))
            if manifest is not None:
                parts.metrics.trace.depart("weights", [f"{model}:{self._term}:{number}"])
        with self._board.condition:
            self._number = number
            self._node.facts |= {"version": number, "step": number}
            if manifest is not None:
                parts.announce(manifest)
            if number > parts.inbound.core.version:
                parts.inbound.send(parts.inbound.core.advance(number, time.monotonic()))
            self._board.condition.notify_all()

    def save(self, number: int) -> None:
        """Begin a checkpoint if one is due (`run.save_every`, `run.save_every_s`); the last one of the run is whole."""
        self._saving.step_done(Version(self._term, number))

    def save_now(self) -> None:
        """Write the state after the last whole training step, for a run that is being stopped."""
        if self._number > 0:
            self._parts.turns.train()
            self._saving.save_now(Version(self._term, self._number))

    def dismiss(self) -> None:
        """Tell the generating workers that the run ends here, and give them `drain_s` seconds to take leave."""
        core = self._parts.inbound.core
        # The host agent counts `drain_s` from the stop on, with what saving took: do not be ended for others' delay.
        limit_s = self._limits.drain_s if self._board.stopping is None else self._limits.drain_s / 2
        with self._board.condition:
            self._parts.inbound.send(core.finish(time.monotonic()))
        try:
            self._board.until(
                lambda: True if core.all_left else None,
                name="the generating workers to leave",
                peers=tuple(holder.name for holder in core.holders()),
                limit_s=limit_s,
                limit="limits.drain_s",
                progress=lambda: len(core.holders()),
                even_when_stopping=True,
            )
        except NoProgressError as error:
            log.warning("%s; leaving without them", error)

    def close(self) -> None:
        """Finish what is being saved, withdraw published weights, finish the dumps."""
        self._saving.close(self._limits.drain_s / 2)
        for publisher in self._parts.publishers.values():
            publisher.close()
        for backend in self._parts.models.values():
            backend.close()
        # Last: it raises what writing raised.
        self._parts.dumps.close()

    # -- details

    def _publish(self, model: str, version: Version) -> Manifest | None:
        """What to announce; None where another replica publishes. Of divided models all put every parameter together,
        and all take part in the canary, whoever publishes them."""
        parts, backend = self._parts, self._parts.models[model]
        publishes = model in parts.publishers
        if not publishes and not backend.lockstep:
            return None
        canary = parts.canaries[model].compute(backend) if model in parts.canaries else None
        if publishes:
            return structs.replace(parts.publishers[model].publish(version, backend.named_shards()), canary=canary)
        deque(backend.named_shards(), maxlen=0)
        return None

    def _record(self) -> None:
        """Hand the samples of the training step that is just over to the dumps."""
        if self._receiving.tally.step < self._number:
            self._dump()

    def _begin(self, t: int) -> None:
        # Kept for a stop in the middle of this step, whose calls may have changed them by then.
        self._saving.note_states()
        if self._parts.replicas.size == 1:
            self._board.raise_if_over()
        self._receiving.begin(t)
        self._totals = {}
        self._node.facts |= {"state": "training", "step": t}
        for context in self._parts.contexts.values():
            context.training_step, context.policy_version = t, self._number

    def _account(self) -> Fact:
        """What this replica has trained on so far in this step, and whether it was asked to stop."""
        sums: dict[str, float] = {}
        fixed: dict[str, float] = {}
        for context in self._parts.contexts.values():
            for model, value in context.denominators.items():
                sums[model] = sums.get(model, 0.0) + value
            fixed |= context.fixed_denominators
        groups = self._receiving.tally.groups
        return {"sums": sums, "fixed": fixed, "groups": groups, "stop": self._parts.replicas.stopping}

    def _agree_on_totals(self) -> dict[str, float]:
        """What each model's gradient is divided by, over all replicas; raises RunStopped when one was asked to stop."""
        facts = self._receiving.accounts or self._parts.replicas.agree("the size of the batch", self._account())
        for context in self._parts.contexts.values():
            context.denominators.clear()
            context.fixed_denominators.clear()
        self._parts.replicas.stop_together(facts)
        groups = sum(int(fact["groups"]) for fact in facts)
        expected = self._limits.batch.prompts
        assert groups == expected, f"training step {self._number}: {groups} groups were trained on, not {expected}"
        totals: dict[str, float] = {}
        for fact in facts:
            for model, value in fact["sums"].items():
                totals[model] = totals.get(model, 0.0) + float(value)
        return totals | {model: float(value) for fact in facts for model, value in fact["fixed"].items()}

    def _end(self, t: int) -> None:
        metrics, tally = self._parts.metrics, self._receiving.tally
        self._dump()
        seconds = time.perf_counter() - tally.began
        metrics.set("timing_s/step", seconds)
        metrics.trace.span(f"training step {t + 1}", "step", tally.began, tally.began + seconds)
        if self._recovery is not None:
            self._recovery.note(metrics)
            self._recovery = None
        metrics.set("perf/samples_per_s", tally.samples / seconds)
        metrics.set("perf/tokens_per_s", tally.tokens / seconds)
        metrics.set("perf/throughput", tally.tokens / seconds / (1 + len(self._node.membership.peers)))
        self._parts.writer.write(t + 1, self._term, metrics.drain())

    def _dump(self) -> None:
        """Hand the samples of a trained step to the dumps, once."""
        tally, every = self._receiving.tally, self._limits.dump_every
        if every and tally.step % every == 0 and self._dumped != tally.step:
            groups = [(dumped(batch, self._limits.dump_fields), workers) for batch, workers in tally.taken]
            self._parts.dumps.write(tally.step + 1, self._term, groups)
        self._dumped = tally.step

    def _finish(self) -> None:
        self._node.facts |= {"state": "finishing"}
        self.dismiss()
        self.finished = True
        self._node.facts |= {"state": "finished"}
