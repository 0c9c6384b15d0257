"""The samples of a training step: groups of this replica's ledgers as they arrive, then groups of busier replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from distflow.comm.fact_exchange import Fact
from distflow.config.schema import LimitsConfig, RunConfig
from distflow.data.batch import Batch
from distflow.data.difficulty import Visit
from distflow.data.micro_batches import with_agreed
from distflow.data.samples import group_scores, sample_bounds
from distflow.exchange.intake_core import Take
from distflow.exchange.sample_channel import ArrivedGroup
from distflow.flow.edges import SAMPLES
from distflow.flow.plan import BatchPlan, Plan
from distflow.log import logger
from distflow.parts import CostRule
from distflow.runtime.intake import ComputedHere, Intake, join_groups
from distflow.runtime.lockstep import Rounds
from distflow.runtime.metrics import MetricStore
from distflow.runtime.node import Node
from distflow.runtime.protocols import Backend, Priced, packs
from distflow.runtime.replicas import Replicas
from distflow.runtime.trace_writer import spanned
from distflow.types import Scores, Uid, prefixed

log = logger(__name__)

WHOLE = "whole batches"


@dataclass(slots=True)
class StepTally:
    """What one training step has received."""

    step: int
    began: float
    taken: list[tuple[Batch, list[str]]] = field(default_factory=list)
    """Batches, with the worker that generated each row."""
    samples: int = 0
    tokens: int = 0
    overlapped: int = 0
    """Tokens that were trained on before the last group of the own ledgers had arrived."""
    judged: dict[Uid, Scores] = field(default_factory=dict)
    """What the samples of each group scored, if it matters for later prompts."""

    @property
    def epoch(self) -> int:
        """The least pass over the data that a group comes from, counted from 0; without a group, a late one."""
        return min((int(batch.dense("uid")[:, 0].min()) for batch, _ in self.taken if batch.rows), default=1 << 30)

    def measure(self, metrics: MetricStore, seconds: float, workers: int, *, generated: bool) -> None:
        """Record how fast the step was, with so many workers that this one exchanges messages with, itself included."""
        if generated and self.tokens:
            metrics.mean("perf/overlap_share", self.overlapped / self.tokens, self.tokens)
        metrics.set("perf/samples_per_s", self.samples / seconds)
        metrics.set("perf/tokens_per_s", self.tokens / seconds)
        metrics.set("perf/throughput", self.tokens / seconds / workers)


@dataclass(frozen=True, slots=True)
class _Taken:
    """Groups for the batch under way."""

    take: Take
    groups: list[ArrivedGroup]
    stopped: bool = False
    """The run is being stopped; the replicas have to agree on that."""
    here: ComputedHere | None = None
    """Nothing was taken: there is this to compute first."""


class Receiving:
    """The samples of one replica, step by step. `run` runs a step of the flow over a batch; `rounds` is None where no
    model is divided.
    """

    def __init__(
        self,
        intake: Intake,
        replicas: Replicas,
        limits: TrainingLimits,
        node: Node,
        metrics: MetricStore,
        account: Callable[[], Fact],
        run: Callable[[str, Batch], Batch],
        rounds: Rounds | None = None,
    ) -> None:
        self.tally = StepTally(0, 0.0)
        self.accounts: list[Fact] | None = None
        """What every replica has trained on in this step, once all have reported it and nothing was stolen since."""
        self._whole = False
        """Whether all replicas have agreed that they have their sets."""
        self._account = account
        self._run = run
        self._intake = intake
        self._replicas = replicas
        self._rounds = rounds
        self._limits = limits
        self._node = node
        self._board = node.board
        self._metrics = metrics
        self._passed_over = 0

    def begin(self, t: int) -> None:
        """Open training step t."""
        self.tally = StepTally(t, time.perf_counter())
        self.accounts = None
        self._whole = False
        self._intake.begin(t)

    def receive(self, t: int) -> Iterator[Batch]:
        """The samples of step t, in batches of at least `tokens_per_microbatch` as they arrive (or all at once).

        Where a model is divided, or the whole set is awaited, all replicas deal their groups among themselves first.
        Ends early when the run is being stopped: the replicas then agree on that, in `apply` at the latest.
        """
        yield from self._own(t)
        if self._intake.steals:
            yield from self._rest(t)

    def visits(self) -> list[Visit]:
        """How many samples of each prompt were solved: of the groups trained on here, and of own ones dropped."""
        core = self._intake.owner
        if core.settings.difficulty is None:
            return []
        with self._board.condition:
            found = [*self.tally.judged.items(), *core.ledgers.judged()]
        return [core.settings.difficulty.rule.visit(uid, scores) for uid, scores in found]

    def learn(self, visits: Iterable[Sequence[int]]) -> None:
        """Note what all replicas have seen of the prompts' difficulty in this step, before the next one is opened."""
        core, metrics = self._intake.owner, self._metrics
        difficulty = core.settings.difficulty
        if difficulty is None:
            return
        with self._board.condition:
            before = difficulty.reopened
            difficulty.record(self.tally.step, (Visit(*visit) for visit in visits))
            passed_over, self._passed_over = core.ledgers.passed_over - self._passed_over, core.ledgers.passed_over
        for name, count in difficulty.counts().items():
            metrics.set(f"data/{name}", count)
        metrics.add("data/passed_over", passed_over)
        if difficulty.reopened > before:
            log.warning("data.difficulty: hardly a prompt is left, so all are visited again, as if unseen")

    def note_schedule(self) -> None:
        """How well the lengths of this step's groups were predicted, where a schedule looks at them."""
        order = self._intake.owner.ledgers.order
        if order is None:
            return
        with self._board.condition:
            ranked = order.take_ranked()
            workers = order.tail_workers
        if ranked.groups:
            self._metrics.mean("rollout/length_rank_recall", ranked.recall, ranked.groups)
        if order.isolates:
            self._metrics.mean("rollout/tail_workers", workers, 1)

    # -- from its own ledgers

    def _own(self, t: int) -> Iterator[Batch]:
        pending: list[ArrivedGroup] = []
        while True:
            taken = self._next(t)
            if taken.here is not None:
                self._compute(taken.here)
                continue
            if taken.stopped:
                if not self._limits.streamed:
                    # A single owner, which stops together with the homes of further models, agrees with itself.
                    self._replicas.stop_together(self._replicas.agree(WHOLE, {"stop": True, "there": []}))
                return
            pending += taken.groups
            if taken.take.meet:
                self._meet()
            elif taken.take.train:
                yield self._batch(t, pending, taken.take.parts)
                pending = []
                self._note_overlap()
            if taken.take.over:
                return

    def _note_overlap(self) -> None:
        """All that was received so far has been trained on."""
        with self._board.condition:
            if not self._intake.owner.set_complete():
                self.tally.overlapped = self.tally.tokens

    def _compute(self, wanted: ComputedHere) -> None:
        """Run a step over groups that are not taken yet, instead of waiting for more of them."""
        batch = wanted.batch
        result = self._run(wanted.step, batch)
        with self._board.condition:
            self._intake.computed(wanted, result)

    @property
    def _meets_whole(self) -> bool:
        """Whether this replica has yet to agree with the others that all have their sets for the step."""
        return not self._limits.streamed and self._intake.deals and not self._whole

    def _meet(self) -> None:
        """Tell the other replicas what has arrived, and hear from them."""
        if not self._meets_whole:
            assert self._rounds is not None, "only replicas with a divided model deal what streams in"
            self._rounds.answer()
            return
        # Steps of batch scope may gather facts of all replicas, so all must get this far.
        with self._board.condition:
            fact = {"stop": self._replicas.stopping, "there": self._intake.tell()}
        facts = self._replicas.agree(WHOLE, fact)
        self._replicas.stop_together(facts)
        with self._board.condition:
            self._intake.hear([said["there"] for said in facts])
        self._whole = True
        # From here on each tells the other homes to train when it comes to that, and some may have: nobody stops.
        self._replicas.finishes_step = self._replicas.set.size > self._replicas.size

    def _next(self, t: int) -> _Taken:
        """Wait for groups that step t may take, and take them."""
        core = self._intake.owner
        with self._metrics.timed("timing_s/wait_samples"):
            return self._board.until(
                self._take,
                name=lambda: self._awaited(t)[0],
                peers=lambda: self._awaited(t)[1],
                limit_s=self._limits.waits.no_progress_s,
                # Rewards may take long after the last token: the facts of a peer count them as they finish. And the
                # home of a model whose answers are awaited may have to train on the last step first.
                progress=lambda: (core.progress_count, self._node.membership.news, self._replicas.set.progress()),
                even_when_stopping=self._replicas.set.size > 1,
            )

    def _awaited(self, t: int) -> tuple[str, tuple[str, ...]]:
        """What this replica waits for, and from whom: samples, answers about them, the other replicas, or what was
        dealt to it.
        """
        dealt = self._intake.core.waits_for
        if dealt:
            return f"groups of training step {t + 1} that were dealt", dealt
        answers = self._intake.waits_for_answers()
        if answers is not None:
            return answers
        if self._intake.core.awaits_others:
            return f"samples of training step {t + 1} of the other training replicas", self._replicas.others
        return f"samples of training step {t + 1}", self._busy_holders()

    def _busy_holders(self) -> tuple[str, ...]:
        """The workers that hold leases of this owner now; if none does, all that ask for them."""
        holders = self._intake.owner.holders()
        return tuple(holder.name for holder in holders if holder.held) or tuple(holder.name for holder in holders)

    def _take(self) -> _Taken | None:
        """Under the board's lock: at any other time the endpoint's thread may give groups to another replica."""
        if self._replicas.stopping and not self._whole:
            return _Taken(Take(), [], stopped=True)
        here = self._intake.wants_here()
        if here is not None:
            return _Taken(Take(), [], here=here)
        taken = self._intake.take(called=self._rounds is not None and self._rounds.called)
        if taken is None:
            return None
        take, groups, dealt = taken
        if dealt:
            self._metrics.add("dealing/groups/count", dealt)
        trace = self._metrics.trace
        with spanned(trace, "take", "runtime"):
            trace.arrive("group", [str(group.position) for group in groups], [group.worker for group in groups])
        return _Taken(take, groups)

    # -- from other replicas

    def _rest(self, t: int) -> Iterator[Batch]:
        while True:
            with self._metrics.timed("timing_s/wait_replicas"):
                groups = self._more(t)
            if not groups:
                return
            yield self._batch(t, groups)

    def _more(self, t: int) -> list[ArrivedGroup]:
        """Wait for groups of other replicas, or until all replicas have reported that none are left: an empty list."""

        def ready() -> list[ArrivedGroup] | None:
            groups, stolen = self._intake.rest(
                lambda: self._replicas.contribute("the size of the batch", self._account())
            )
            if groups:
                self._metrics.add("stealing/groups/count", stolen)
                return groups
            facts = self._replicas.agreed() if self._intake.core.reported else None
            if facts is None:
                return None
            self._replicas.stop_together(facts)
            if sum(int(fact["groups"]) for fact in facts) == self._limits.batch.prompts:
                self.accounts = facts
            return []

        with self._board.condition:
            self._intake.search()
        return self._board.until(
            ready,
            name=f"the other training replicas in step {t}",
            peers=self._replicas.others,
            limit_s=self._limits.waits.no_progress_s,
            progress=self._replicas.progress,
            even_when_stopping=True,
        )

    # -- details

    def _batch(self, t: int, groups: Sequence[ArrivedGroup], parts: Mapping[int, Sequence[int]] | None = None) -> Batch:
        if self._limits.streamed:
            groups = _in_long_runs(groups)
        batch = join_groups(groups)
        if parts is not None:
            batch = with_agreed(batch, parts)
        tally = self.tally
        tally.taken.append((batch, [g.worker for g in groups for _ in range(g.rows.start, g.rows.stop)]))
        if self._intake.owner.settings.difficulty is not None:
            tally.judged |= group_scores(batch)
        tally.samples += len(sample_bounds(batch)) - 1
        tally.tokens += int(batch.ragged("prompt_ids").offsets[-1] + batch.ragged("response_ids").offsets[-1])
        for prefix in ("", *self._limits.prefixes) if "policy_versions" in batch else ():
            lags = [t - oldest for oldest in _oldest_versions(batch, prefixed("policy_versions", prefix))]
            self._metrics.mean(prefixed("staleness/mean", prefix), sum(lags) / len(lags), len(lags))
            self._metrics.max(prefixed("staleness/max", prefix), max(lags))
        return batch


def _in_long_runs(groups: Sequence[ArrivedGroup]) -> list[ArrivedGroup]:
    """Put groups that arrived together side by side: their rows are then joined without being cut."""
    first: dict[int, int] = {}
    for number, group in enumerate(groups):
        first.setdefault(id(group.rows.batch), number)
    return sorted(groups, key=lambda group: (first[id(group.rows.batch)], group.rows.start))


def _oldest_versions(batch: Batch, field: str) -> list[int]:
    """The oldest version of each group, of one model."""
    spans = batch.ragged(field)
    versions, bounds = spans.values[:, 1].tolist(), spans.offsets.tolist()
    return [min(versions[bounds[a] : bounds[b]]) for a, b in pairwise(batch.group_bounds())]


@dataclass(frozen=True, slots=True)
class TrainingLimits:
    """What a training worker trains on, when it saves and dumps, and how long it waits."""

    batch: BatchPlan
    streamed: bool
    """Train on micro-batches as they arrive; otherwise wait for the whole set of the step and take it in order."""
    run: RunConfig
    waits: LimitsConfig
    dump_fields: tuple[str, ...] = ()
    """Further fields of the dumps; may hold patterns."""
    prefixes: tuple[str, ...] = ()
    """Of further models that generate."""
    judged: tuple[str, ...] = ()
    """Prefixes of the train steps."""
    compared: tuple[str, ...] = ()
    """Those of them whose advantages compare the samples of a group."""
    whole_groups: bool = False
    """A train step compares the samples of a group, so that they are computed together."""
    receives: str = SAMPLES
    """The edge on which samples come, or the step that reads them from the data."""

    def cost_of(self, backend: Backend) -> CostRule:
        """What rows cost a model, and what its micro-batches hold."""
        quadratic = backend.quadratic if isinstance(backend, Priced) else 0.0
        return CostRule(self.batch.tokens_per_microbatch, quadratic, self.whole_groups, packs(backend))

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The limits that the plan and its recipe set."""
        recipe, prefixes = plan.recipe, tuple(step.prefix for step in plan.further_generation)
        receives = SAMPLES if plan.reads is None else plan.reads.name
        train = [step for step in plan.steps if step.role == "train"]
        judged = tuple(dict.fromkeys(step.prefix for step in train))
        compared = tuple(prefix for prefix in judged if plan.compares_samples(prefix))
        whole_groups = any(step.scope == "group" and not step.writes for step in train)
        given = (recipe.run, recipe.limits, plan.dump_fields, prefixes, judged, compared, whole_groups, receives)
        return cls(plan.batch, plan.streamed, *given)
