"""The training side of one worker: receive a step's samples, apply, publish, save — one owner's part of the run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from distflow.data.batch import Batch, RowRange, join
from distflow.errors import NoProgressError, StepError, WorkerFailed
from distflow.exchange.inbound import ArrivedGroup, InboundSamples
from distflow.flow.plan import BatchPlan
from distflow.log import logger
from distflow.runtime.checkpoint import CheckpointWriter
from distflow.runtime.context import StepContext
from distflow.runtime.dumps import DumpWriter
from distflow.runtime.metrics import MetricStore, MetricWriter
from distflow.runtime.node import Node
from distflow.runtime.protocols import Backend
from distflow.types import REWARD_PARTS, Version
from distflow.weights.link import WeightPublisher
from distflow.weights.manifest import Manifest

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingLimits:
    """From the recipe: what to train and for how long to wait."""

    batch: BatchPlan
    streamed: bool
    """Begin with micro-batches as they arrive; else wait for the step's whole set and take it in order."""
    dump_every: int
    save_every: int
    stop_after: int | None
    no_progress_s: float
    drain_s: float


@dataclass(slots=True)
class _StepTally:
    """What one training step took in."""

    step: int
    began: float
    taken: list[tuple[Batch, list[str]]] = field(default_factory=list)
    samples: int = 0
    tokens: int = 0
    dumped: bool = False


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """What the training side works with."""

    inbound: InboundSamples
    models: Mapping[str, Backend]
    contexts: Mapping[str, StepContext]
    publishers: Mapping[str, WeightPublisher]
    announce: Callable[[Manifest], None]
    """Tell every generating worker of a new version."""
    dumps: DumpWriter
    checkpoints: CheckpointWriter
    metrics: MetricStore
    writer: MetricWriter


class Training:
    """Owner of ledgers and holder of trained models. All methods run on the worker's main thread."""

    def __init__(self, parts: TrainingParts, limits: TrainingLimits, node: Node, start: Version) -> None:
        self._parts = parts
        self._limits = limits
        self._node = node
        self._board = node.board
        self._term = start.term
        self._number = start.number
        self._saved = start.number if start.number else -1
        self._tally = _StepTally(start.number, time.perf_counter())
        self._states: Mapping[str, object] = {}

    def steps(self) -> Iterator[int]:
        """Training steps t, counted from 0; afterwards everybody is told that the run is over."""
        for model in self._parts.publishers:
            self.publish(model, self._number)
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
        pending: list[ArrivedGroup] = []
        tokens, complete = 0, False
        while not complete:
            groups, complete = self._next_groups(t)
            pending += groups
            tokens += sum(_padded_tokens(group.rows) for group in groups)
            enough = self._limits.streamed and tokens >= self._limits.batch.tokens_per_microbatch
            if pending and (complete or enough):
                yield self._taken(t, pending)
                pending, tokens = [], 0

    def apply(self, model: str) -> None:
        """Optimizer step over everything accumulated, divided by the exact global denominator."""
        backend, metrics = self._parts.models[model], self._parts.metrics
        contexts = [context for context in self._parts.contexts.values() if model in context.denominators]
        denominator = sum(context.denominators.pop(model) for context in contexts)
        if denominator <= 0:
            raise WorkerFailed(
                f"training step {self._number}: nothing to train {model!r} on — no step accumulated a loss for it, "
                f"or response_mask is empty everywhere"
            )
        metrics.set("actor/lr", backend.learning_rate)
        with metrics.timed("timing_s/apply"):
            metrics.set("actor/grad_norm", backend.apply(denominator))
        self._node.work_done()

    def publish(self, model: str, number: int) -> None:
        """Make version `number` available to the engines, and open the next training step for leasing."""
        parts = self._parts
        with parts.metrics.timed("timing_s/publish"):
            manifest = parts.publishers[model].publish(Version(self._term, number), parts.models[model].named_shards())
        with self._board.condition:
            self._number = number
            self._node.facts |= {"version": number, "step": number}
            parts.announce(manifest)
            if number > parts.inbound.core.version:
                parts.inbound.send(parts.inbound.core.advance(number, time.monotonic()))
            self._board.condition.notify_all()

    def save(self, number: int) -> None:
        """Write a checkpoint if one is due: every `run.save_every` training steps, at `run.stop_after`, at the end."""
        limits = self._limits
        every = limits.save_every > 0 and number % limits.save_every == 0
        if every or number in (limits.stop_after, limits.batch.training_steps):
            self._states = _plain_states(self._parts.contexts)
            self._save()

    def save_now(self) -> None:
        """Write the state after the last whole training step, for a run that is being stopped."""
        if self._number > 0:
            self._save()

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
        """Withdraw published weights, finish the dumps."""
        for publisher in self._parts.publishers.values():
            publisher.close()
        for backend in self._parts.models.values():
            backend.close()
        # Last: it raises what writing raised.
        self._parts.dumps.close()

    # -- details

    def _begin(self, t: int) -> None:
        # Kept for a stop in the middle of this step, whose calls may have changed them by then.
        self._states = _plain_states(self._parts.contexts)
        self._board.raise_if_over()
        self._tally = _StepTally(t, time.perf_counter())
        self._node.facts |= {"state": "training", "step": t}
        for context in self._parts.contexts.values():
            context.training_step, context.policy_version = t, self._number

    def _next_groups(self, t: int) -> tuple[list[ArrivedGroup], bool]:
        """Wait for groups that step t may take; take them all. The flag says that they complete the step."""
        inbound = self._parts.inbound
        with self._parts.metrics.timed("timing_s/wait_samples"):
            positions = self._board.until(
                self._takeable,
                name=f"samples of training step {t}",
                peers=tuple(holder.name for holder in inbound.core.holders()),
                limit_s=self._limits.no_progress_s,
                progress=lambda: inbound.core.progress_count,
            )
        with self._board.condition:
            groups = inbound.take(positions, time.monotonic())
            return groups, inbound.core.step_complete()

    def _takeable(self) -> list[int] | None:
        core = self._parts.inbound.core
        if core.exhausted is not None:
            raise core.exhausted
        if not self._limits.streamed and not core.set_complete():
            return None
        return core.consumable() or None

    def _taken(self, t: int, groups: Sequence[ArrivedGroup]) -> Batch:
        if self._limits.streamed:
            groups = _in_long_runs(groups)
        batch = join(_with_same_parts([group.rows for group in groups]))
        self._tally.taken.append((batch, [g.worker for g in groups for _ in range(g.rows.start, g.rows.stop)]))
        self._tally.samples += batch.rows
        self._tally.tokens += int(batch.ragged("prompt_ids").offsets[-1] + batch.ragged("response_ids").offsets[-1])
        lags = [t - oldest for oldest in _oldest_versions(batch)]
        self._parts.metrics.mean("staleness/mean", sum(lags) / len(lags), len(lags))
        self._parts.metrics.max("staleness/max", max(lags))
        return batch

    def _end(self, t: int) -> None:
        metrics, tally = self._parts.metrics, self._tally
        self._dump()
        seconds = time.perf_counter() - tally.began
        metrics.set("timing_s/step", seconds)
        metrics.set("perf/samples_per_s", tally.samples / seconds)
        metrics.set("perf/tokens_per_s", tally.tokens / seconds)
        metrics.set("perf/throughput", tally.tokens / seconds / (1 + len(self._node.membership.peers)))
        self._parts.writer.write(t + 1, self._term, metrics.drain())

    def _dump(self) -> None:
        """Hand the samples of a trained step to the dumps, once."""
        tally, every = self._tally, self._limits.dump_every
        if every and tally.step % every == 0 and not tally.dumped:
            self._parts.dumps.write(tally.step + 1, self._term, tally.taken)
        tally.dumped = True

    def _finish(self) -> None:
        self._node.facts |= {"state": "finishing"}
        self.dismiss()
        self._node.facts |= {"state": "finished"}

    def _save(self) -> None:
        if self._saved == self._number:
            return
        parts = self._parts
        with self._board.condition:
            ledger = parts.inbound.core.snapshot()
        state = {"ledger": ledger, "steps": self._states}
        with parts.metrics.timed("timing_s/save_checkpoint"):
            # What a checkpoint counts as trained is never sampled again, so its record must be on the disk by then.
            if self._tally.step < self._number:
                self._dump()
            parts.dumps.flush()
            models = {
                name: backend.state_tensors() for name, backend in parts.models.items() if name in parts.publishers
            }
            folder = parts.checkpoints.save(Version(self._term, self._number), models, state)
        self._saved = self._number
        log.info("saved %s", folder)


def _plain_states(contexts: Mapping[str, StepContext]) -> dict[str, object]:
    """A copy of what the steps keep in `ctx.state`; raises StepError for what cannot go into a checkpoint."""
    copies: dict[str, object] = {}
    for name, context in contexts.items():
        try:
            copies[name] = json.loads(json.dumps(context.state))
        except (TypeError, ValueError) as error:
            raise StepError(
                f"step {name!r} on {context.worker}: ctx.state cannot go into a checkpoint ({error}) — keep numbers, "
                "texts, lists, and dicts with text keys there"
            ) from error
    return copies


def _in_long_runs(groups: Sequence[ArrivedGroup]) -> list[ArrivedGroup]:
    """Groups that arrived together side by side: their rows are then joined without being cut."""
    first: dict[int, int] = {}
    for number, group in enumerate(groups):
        first.setdefault(id(group.rows.batch), number)
    return sorted(groups, key=lambda group: (first[id(group.rows.batch)], group.rows.start))


def _with_same_parts(ranges: Sequence[RowRange]) -> list[RowRange]:
    """Rows whose worker has not met a part of the reward yet have NaN there: not every sample need have all parts."""
    batches = {id(piece.batch): piece.batch for piece in ranges}
    parts = {name for batch in batches.values() for name in batch.columns if name.startswith(REWARD_PARTS)}
    for key, batch in batches.items():
        lacking = {name: torch.full((batch.rows,), torch.nan) for name in sorted(parts - batch.columns.keys())}
        batches[key] = batch.with_columns(**lacking) if lacking else batch
    return [RowRange(batches[id(piece.batch)], piece.start, piece.stop) for piece in ranges]


def _padded_tokens(group: RowRange) -> int:
    """Tokens of a group when its rows are padded to the longest."""
    begin, end = group.start, group.stop
    lengths = [group.batch.ragged(name).offsets[begin : end + 1].diff() for name in ("prompt_ids", "response_ids")]
    return (end - begin) * int((lengths[0] + lengths[1]).max())


def _oldest_versions(batch: Batch) -> list[int]:
    """The oldest policy version of each group."""
    spans = batch.ragged("policy_versions")
    versions, bounds = spans.values[:, 1].tolist(), spans.offsets.tolist()
    return [min(versions[bounds[a] : bounds[b]]) for a, b in pairwise(batch.group_bounds())]
