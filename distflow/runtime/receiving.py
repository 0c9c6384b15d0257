"""What a training step takes in: the groups of the own ledgers as they arrive, then what busier replicas give away.

What a training worker trains on, and for how long it waits, are its `TrainingLimits`, from the recipe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from distflow.comm.fact_exchange import Fact
from distflow.data.batch import Batch, join, padded_tokens, with_same_parts
from distflow.exchange.sample_channel import ArrivedGroup, InboundSamples
from distflow.flow.plan import BatchPlan, Plan
from distflow.runtime.lockstep import Rounds
from distflow.runtime.metrics import MetricStore
from distflow.runtime.node import Node
from distflow.runtime.replicas import Replicas
from distflow.runtime.sample_stealing import Stealing
from distflow.runtime.trace_writer import spanned


@dataclass(slots=True)
class StepTally:
    """What one training step took in."""

    step: int
    began: float
    taken: list[tuple[Batch, list[str]]] = field(default_factory=list)
    """Batches, with the worker that generated each row."""
    groups: int = 0
    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Taken:
    """Groups for the next batch."""

    groups: list[ArrivedGroup]
    complete: bool
    """The own ledgers have no more for this step."""
    stopped: bool = False
    """The run is being stopped; the replicas have to agree on that."""
    called: bool = False
    """Another replica wants a round of a divided model."""


class Receiving:
    """One replica's samples, step by step.

    `stealing` is None where every replica trains on what it owns, `rounds` where no model is divided over them.
    """

    def __init__(
        self,
        inbound: InboundSamples,
        replicas: Replicas,
        stealing: Stealing | None,
        limits: TrainingLimits,
        node: Node,
        metrics: MetricStore,
        account: Callable[[], Fact],
        rounds: Rounds | None = None,
    ) -> None:
        self.tally = StepTally(0, 0.0)
        self.accounts: list[Fact] | None = None
        """What every replica has trained on in this step, if all of them said so and nothing was stolen since."""
        self._account = account
        self._inbound = inbound
        self._replicas = replicas
        self._stealing = stealing
        self._rounds = rounds
        self._limits = limits
        self._node = node
        self._board = node.board
        self._metrics = metrics

    def begin(self, t: int) -> None:
        """Training step t opens."""
        self.tally = StepTally(t, time.perf_counter())
        self.accounts = None
        if self._stealing is not None:
            self._stealing.begin(t)

    def receive(self, t: int) -> Iterator[Batch]:
        """The samples of step t, in batches of at least `tokens_per_microbatch` as they arrive (or all at once).

        Where a model is divided, what is there makes a batch as soon as another replica wants a round.
        Ends early when the run is being stopped: the replicas then agree on that together, in `apply` at the latest.
        """
        yield from self._own(t)
        if self._stealing is not None:
            yield from self._stolen(t, self._stealing)

    # -- of the own ledgers

    def _own(self, t: int) -> Iterator[Batch]:
        pending: list[ArrivedGroup] = []
        tokens = 0
        while True:
            taken = self._next(t, self._limits.batch.tokens_per_microbatch - tokens)
            if taken.stopped:
                if not self._limits.streamed:
                    self._replicas.stop_together(self._replicas.agree("whole batches", {"stop": True}))
                return
            pending += taken.groups
            tokens += sum(padded_tokens(group.rows) for group in taken.groups)
            enough = self._limits.streamed and tokens >= self._limits.batch.tokens_per_microbatch
            if taken.complete and not self._limits.streamed and self._replicas.size > 1:
                # Steps that see the whole batch may gather facts of all replicas: all must come as far.
                self._replicas.stop_together(self._replicas.agree("whole batches", {"stop": self._replicas.stopping}))
            if pending and (taken.complete or enough or taken.called):
                yield self._batch(t, pending)
                pending, tokens = [], 0
            elif taken.called and self._rounds is not None:
                self._rounds.answer()
            if taken.complete:
                return

    def _next(self, t: int, budget: int) -> _Taken:
        """Wait for groups that step t may take, and take them."""
        inbound = self._inbound
        with self._metrics.timed("timing_s/wait_samples"):
            return self._board.until(
                lambda: self._take(budget),
                name=f"samples of training step {t}",
                peers=self._busy_holders,
                limit_s=self._limits.no_progress_s,
                # Rewards may take long after the last token: verdicts are counted among the facts of a peer.
                progress=lambda: (inbound.core.progress_count, self._node.membership.news),
                even_when_stopping=self._replicas.size > 1,
            )

    def _busy_holders(self) -> tuple[str, ...]:
        """Who has leases of this owner in hand now; if nobody has, all who ask for them."""
        holders = self._inbound.core.holders()
        return tuple(holder.name for holder in holders if holder.held) or tuple(holder.name for holder in holders)

    def _take(self, budget: int) -> _Taken | None:
        """Under the board's lock: a requester may be served by the endpoint's thread at any other time."""
        core = self._inbound.core
        if core.exhausted is not None:
            raise core.exhausted
        if self._replicas.stopping:
            return _Taken([], complete=False, stopped=True)
        if not self._limits.streamed and not core.set_complete():
            return None
        positions = core.consumable()
        if self._stealing is not None:
            # The rest can still be given away.
            positions = self._within(positions, budget)
        if not positions and not core.step_complete():
            # Those who wait for a whole batch do so before the first round.
            called = self._rounds is not None and self._limits.streamed and self._rounds.called
            return _Taken([], complete=False, called=True) if called else None
        trace = self._metrics.trace
        with spanned(trace, "take", "runtime"):
            groups = self._inbound.take(positions, time.monotonic())
            trace.arrive("group", [str(group.position) for group in groups], [group.worker for group in groups])
        return _Taken(groups, core.step_complete())

    def _within(self, positions: Sequence[int], budget: int) -> list[int]:
        chosen: list[int] = []
        for position in positions:
            if budget <= 0:
                break
            chosen.append(position)
            budget -= padded_tokens(self._inbound.peek(position).rows)
        return chosen

    # -- of other replicas

    def _stolen(self, t: int, stealing: Stealing) -> Iterator[Batch]:
        contributed = False
        while True:
            with self._metrics.timed("timing_s/wait_replicas"):
                groups, contributed = self._steal(t, stealing, contributed=contributed)
            if not groups:
                return
            yield self._batch(t, groups)

    def _steal(self, t: int, stealing: Stealing, *, contributed: bool) -> tuple[list[ArrivedGroup], bool]:
        """Wait for groups to help with; an empty list once all replicas have contributed their totals of the step.

        A replica contributes only when all groups that it handed over are known to be kept, or were returned and
        trained on. So stolen groups arrive before the totals.
        """
        said = [contributed]

        def ready() -> list[ArrivedGroup] | None:
            returned = stealing.take_back()
            if returned:
                return returned
            if not said[0] and stealing.settled:
                self._replicas.contribute("the size of the batch", self._account())
                said[0] = True
            groups = stealing.take()
            if groups:
                self._metrics.add("stealing/groups/count", len(groups))
                return groups
            facts = self._replicas.agreed() if said[0] else None
            if facts is None:
                return None
            self._replicas.stop_together(facts)
            if sum(int(fact["groups"]) for fact in facts) == self._limits.batch.prompts:
                self.accounts = facts
            return []

        with self._board.condition:
            stealing.search()
        groups = self._board.until(
            ready,
            name=f"the other training replicas in step {t}",
            peers=self._replicas.others,
            limit_s=self._limits.no_progress_s,
            progress=self._replicas.progress,
            even_when_stopping=True,
        )
        return groups, said[0]

    # -- details

    def _batch(self, t: int, groups: Sequence[ArrivedGroup]) -> Batch:
        if self._limits.streamed:
            groups = _in_long_runs(groups)
        batch = join(with_same_parts([group.rows for group in groups]))
        tally = self.tally
        tally.taken.append((batch, [g.worker for g in groups for _ in range(g.rows.start, g.rows.stop)]))
        tally.groups += len(groups)
        tally.samples += batch.rows
        tally.tokens += int(batch.ragged("prompt_ids").offsets[-1] + batch.ragged("response_ids").offsets[-1])
        lags = [t - oldest for oldest in _oldest_versions(batch)]
        self._metrics.mean("staleness/mean", sum(lags) / len(lags), len(lags))
        self._metrics.max("staleness/max", max(lags))
        return batch


def _in_long_runs(groups: Sequence[ArrivedGroup]) -> list[ArrivedGroup]:
    """Groups that arrived together side by side: their rows are then joined without being cut."""
    first: dict[int, int] = {}
    for number, group in enumerate(groups):
        first.setdefault(id(group.rows.batch), number)
    return sorted(groups, key=lambda group: (first[id(group.rows.batch)], group.rows.start))


def _oldest_versions(batch: Batch) -> list[int]:
    """The oldest policy version of each group."""
    spans = batch.ragged("policy_versions")
    versions, bounds = spans.values[:, 1].tolist(), spans.offsets.tolist()
    return [min(versions[bounds[a] : bounds[b]]) for a, b in pairwise(batch.group_bounds())]


@dataclass(frozen=True, slots=True)
class TrainingLimits:
    """Of one training worker."""

    batch: BatchPlan
    streamed: bool
    """Begin with micro-batches as they arrive; else wait for the step's whole set and take it in order."""
    dump_every: int
    save_every: int
    stop_after: int | None
    no_progress_s: float
    drain_s: float
    save_every_s: float | None = None
    keep_best: str | None = None
    """The metric by which a checkpoint is kept beside the newest."""
    hf_every: int = 0
    dump_fields: tuple[str, ...] = ()
    """Of the dumps, besides the standard ones; may hold patterns."""

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """What the plan's recipe says."""
        recipe = plan.recipe
        return cls(
            batch=plan.batch,
            streamed=plan.streamed and not recipe.run.deterministic,
            dump_every=recipe.run.dump_rollouts,
            save_every=recipe.run.save_every,
            stop_after=recipe.run.stop_after,
            no_progress_s=recipe.limits.no_progress_s,
            drain_s=recipe.limits.drain_s,
            save_every_s=recipe.run.save_every_s,
            keep_best=recipe.run.keep_best,
            hf_every=recipe.run.hf_every,
            dump_fields=plan.dump_fields,
        )
