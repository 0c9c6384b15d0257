"""The optimizer steps of one training worker: what train steps have accumulated, divided by what all replicas count;
and whether the step that they belong to is the last one of the run.

A step whose norm is not finite is skipped by all replicas alike, and the run goes on: the samples are consumed, the
version that is published has the weights of the one before, and the schedule counts the step. Too many training steps
in a row that leave a model as it was for that reason end the run (`distflow.metrics.learning_signal`). A step whose
norm is 0 is empty: it had nothing to say, for example because all rewards were alike. So is one of samples without a
token to train on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from distflow.comm.fact_exchange import Fact
from distflow.config.schema import StopConfig
from distflow.data.batch import Batch
from distflow.data.prefixes import own_fields
from distflow.data.samples import FINISHED, MASK, OUT_OF_LOSS, out_of_loss
from distflow.errors import NoProgressError, ReplicaLost, UserError, WorkerFailed
from distflow.flow.plan import BatchPlan
from distflow.log import logger
from distflow.runtime.metrics import MetricStore
from distflow.runtime.protocols import Backend
from distflow.runtime.steps import StepContext, shown_uids
from distflow.types import LEFT_OUT, is_validated

log = logger(__name__)
_BAD_NORMS = "look for infinite rewards, advantages or losses, or lower models.<name>.optimizer.lr"
SHOWN_GROUPS = 64
"""Of a batch, in the warning of an update that is skipped."""


class Updates:
    """The models of one home, `trained` each with what its metrics' names begin with.

    `policies`: those that generate. They rest during `batch.critic_warmup`, and each after `batch.target_kl`.
    """

    def __init__(
        self,
        models: Mapping[str, Backend],
        trained: Mapping[str, str],
        policies: Sequence[str],
        contexts: Mapping[str, StepContext],
        metrics: MetricStore,
        batch: BatchPlan,
        *,
        leads: bool,
    ) -> None:
        """`leads`: this replica counts for all of them what they do alike."""
        self._models = models
        self._trained = trained
        self._policies = tuple(policies)
        self._contexts = contexts
        self._metrics = metrics
        self._batch = batch
        self._leads = leads
        self._step = 0
        self._totals: dict[str, float] = {}
        self._trains: set[str] = set()
        """Models for which a replica had a token to train on."""
        self._done: dict[str, int] = {}
        """Updates of each model in this training step, skipped ones too, and below the norms of the others."""
        self._norms: dict[str, list[float]] = {}
        self._here: list[Batch] = []
        """What the next updates are computed from at this replica."""
        self._learnt: dict[str, set[int]] = {}
        """By model, positions of groups here that one of its updates in this training step has learnt from, and below
        those of skipped updates."""
        self._skipped: dict[str, set[int]] = {}
        self._unmoved: dict[str, str] = {}
        """Of models that an update in this training step has left as they were: why."""
        self._moved: dict[str, float] = {}
        """How far all updates of a policy in this epoch have moved it, as a mean over the tokens of all replicas; it is
        missing where no step has said."""
        self._resting: set[str] = set()

    def begin(self, t: int, version: int) -> None:
        """Open training step t, with this version of the policies."""
        self._step = t
        self._totals = {}
        self._done = dict.fromkeys(self._trained, 0)
        self._norms = {model: [] for model in self._trained}
        self._here = []
        self._learnt = {model: set() for model in self._trained}
        self._skipped = {model: set() for model in self._trained}
        self._unmoved = {}
        self._resting = set()
        for context in self._contexts.values():
            context.training_step, context.policy_version = t, version
            context.update_epoch, context.rests, context.moved = 0, False, [0.0, 0.0]
        if t < self._batch.critic_warmup:
            self._rest(self._policies)

    def epochs(self, parts: Sequence[Batch]) -> Iterator[Batch]:
        """The mini-batches of a training step, once in every epoch; a policy rests when it has moved far enough."""
        plan = self._batch
        for epoch in range(plan.epochs):
            if epoch and plan.target_kl is not None:
                self._rest_beyond(plan.target_kl)
            for context in self._contexts.values():
                context.update_epoch, context.moved = epoch, [0.0, 0.0]
            for part in parts:
                self._here = [part]
                yield part
        for policy in self._policies if plan.epochs > 1 else ():
            done = sum(self._done[policy] > m for m in range(0, plan.updates, plan.minibatches))
            self._metrics.set(f"{self._trained[policy]}/epochs", done)

    def account(self) -> Fact:
        """What this replica has accumulated since the last agreement."""
        sums: dict[str, float] = {}
        fixed: dict[str, float] = {}
        for context in self._contexts.values():
            for model, value in context.denominators.items():
                sums[model] = sums.get(model, 0.0) + value
            fixed |= context.fixed_denominators
        moved = {}
        for policy in self._policies:
            found = [context.moved for context in self._contexts.values() if context.model == policy]
            moved[policy] = [sum(column) for column in zip(*found, strict=True)]
        return {"sums": sums, "fixed": fixed, "moved": moved, "trains": list(filter(self._has_tokens, self._trained))}

    def resting(self, model: str) -> bool:
        """Whether a model is left as it is now; raises UserError if a step accumulated a loss for it."""
        if model not in self._resting:
            return False
        for context in self._contexts.values():
            if model in context.denominators or model in context.fixed_denominators:
                raise UserError(
                    f"step {context.step_name!r} accumulated a loss for {model!r}, which rests (batch.critic_warmup or "
                    "batch.target_kl): return the batch unchanged while ctx.rests is true"
                )
        return True

    def apply(self, model: str, agree: Callable[[], Sequence[Fact]], ready: Callable[[], None]) -> None:
        """One optimizer step over everything accumulated, divided by the exact global denominator.

        `agree` returns the accounts of all replicas; it is called once for all models. `ready` is called just before
        the model changes.
        """
        if not self._totals:
            facts = agree()
            self._totals = self._add_up(facts)
            self._trains = {model for fact in facts for model in fact["trains"]}
        denominator = self._totals.pop(model, 0.0)
        if denominator <= 0 and model not in self._trains:
            self._done[model] += 1
            self._tell_empty(model)
            return
        if denominator <= 0:
            raise WorkerFailed(
                f"training step {self._step + 1}: nothing to train {model!r} on — no step accumulated a loss for it "
                "and added its divisor to ctx.denominators, although response_mask is not empty"
            )
        backend, metrics, prefix = self._models[model], self._metrics, self._trained[model]
        backend.schedule_at(self._step * self._batch.updates + self._done[model])
        metrics.set(f"{prefix}/lr", backend.learning_rate)
        ready()
        with metrics.timed("timing_s/apply"):
            norm = self._applied(model, denominator)
        self._done[model] += 1
        positions = {position for batch in self._here for position in batch.dense("group").tolist()}
        if math.isfinite(norm):
            self._norms[model].append(norm)
            self._learnt[model] |= positions
            self._count(model, "empty_updates", int(norm == 0))
        else:
            self._skipped[model] |= positions
            self._tell_skipped(model, norm)
        norms = self._norms[model]
        metrics.set(f"{prefix}/grad_norm", sum(norms) / len(norms) if norms else norm)

    def took(self, batch: Batch) -> None:
        """Note samples that the next update of this training step is computed from."""
        self._here.append(batch)

    def lost(self, model: str) -> set[int]:
        """Positions of groups here of which, in this training step, a model has learnt nothing: its norm was not
        finite."""
        return self._skipped[model] - self._learnt[model]

    def end(self) -> dict[str, str]:
        """Close the training step. Returns why it has left a model as it was, empty if it has not, of each model that
        had updates: the same on all replicas."""
        return {model: "" if self._norms[model] else self._unmoved[model] for model, done in self._done.items() if done}

    def _count(self, model: str, name: str, updates: int = 1) -> None:
        """Add to what all replicas find alike."""
        if self._leads and updates:
            self._metrics.add(f"{self._trained[model]}/{name}", updates)

    def _rows_of(self, model: str) -> Iterator[Batch]:
        """Yield what its steps see of the batches here, as far as tokens are trained on."""
        prefixes = {context.prefix for context in self._contexts.values() if context.model == model}
        for batch in (own_fields(batch, prefix) for prefix in prefixes for batch in self._here):
            yield out_of_loss(batch) if self._batch.mask_truncated == "loss" and FINISHED in batch else batch

    def _has_tokens(self, model: str) -> bool:
        return any(MASK not in batch or bool(batch.ragged(MASK).values.any()) for batch in self._rows_of(model))

    def _tell_empty(self, model: str) -> None:
        self._count(model, "empty_updates")
        rows = list(self._rows_of(model))
        reasons = {text for batch in rows if LEFT_OUT in batch for text in batch.texts(LEFT_OUT) if text}
        if any(OUT_OF_LOSS in batch and bool(batch.dense(OUT_OF_LOSS).any()) for batch in rows):
            reasons.add("responses that were cut off, with batch.mask_truncated: loss")
        self._unmoved[model] = f"no sample had a token to train on ({'; '.join(sorted(reasons)) or MASK})"
        log.warning("training step %d: %r is not updated: %s", self._step + 1, model, self._unmoved[model])

    def _tell_skipped(self, model: str, norm: float) -> None:
        self._count(model, "skipped_updates")
        self._unmoved[model] = (
            f"no norm of its gradients was finite; the logs of the training workers name the samples — {_BAD_NORMS}"
        )
        log.warning(
            "training step %d: an update of model %r is skipped, since the norm of its gradient is %s; this worker "
            "computed it from %s, which count as consumed. If that goes on, %s",
            self._step + 1,
            model,
            norm,
            " and ".join(shown_uids(batch, SHOWN_GROUPS) for batch in self._here) or "no samples",
            _BAD_NORMS,
        )

    def _applied(self, model: str, denominator: float) -> float:
        try:
            return self._models[model].apply(denominator)
        except (ReplicaLost, NoProgressError):
            raise
        except WorkerFailed as error:
            raise WorkerFailed(f"model {model!r}: {error}") from error

    def _add_up(self, facts: Sequence[Fact]) -> dict[str, float]:
        """The denominator of each model's gradient over all replicas."""
        for context in self._contexts.values():
            context.denominators.clear()
            context.fixed_denominators.clear()
        self._moved = {}
        for policy in self._policies:
            moved, tokens = (sum(column) for column in zip(*(fact["moved"][policy] for fact in facts), strict=True))
            if tokens:
                self._moved[policy] = moved / tokens
        totals = {model: 0.0 for model in self._trained if model not in self._resting}
        for fact in facts:
            for model, value in fact["sums"].items():
                totals[model] = totals.get(model, 0.0) + float(value)
        return totals | {model: float(value) for fact in facts for model, value in fact["fixed"].items()}

    def _rest_beyond(self, target_kl: float) -> None:
        for policy in self._policies:
            if policy in self._resting:
                continue
            if policy not in self._moved:
                raise UserError(
                    f"batch.target_kl: no step that trains {policy!r} has said how far it moved — call "
                    "ctx.report_moved(sum, tokens) with the sum of r - 1 - log r over its tokens, or remove "
                    "batch.target_kl"
                )
            if self._moved[policy] > target_kl:
                self._rest([policy])

    def _rest(self, policies: Sequence[str]) -> None:
        """Leave these as they are until the end of the training step."""
        self._resting.update(policies)
        for context in self._contexts.values():
            context.rests = context.model in self._resting


class Goal:
    """Whether `run.stop_when` ends the run. All replicas judge the same value in a training step, that of all of them.

    `validated`: values that validation has measured here, by metric and version.
    """

    def __init__(
        self, goal: StopConfig | None, metrics: MetricStore, validated: Callable[[], Mapping[str, Mapping[int, float]]]
    ) -> None:
        self._goal = goal
        self._metrics = metrics
        self._validated = validated
        self._measured = goal is None or is_validated(goal.metric)
        self.reached = False

    def value(self) -> tuple[float, float]:
        """Sum and weight of the metric on this replica; zeros if it has not measured it."""
        if self._goal is None:
            return 0.0, 0.0
        if not is_validated(self._goal.metric):
            return self._metrics.mean_so_far(self._goal.metric)
        values = self._validated().get(self._goal.metric, {})
        return (values[max(values)], 1.0) if values else (0.0, 0.0)

    def judge(self, facts: Sequence[Fact], step: int) -> None:
        """Decide from the values of all replicas in training step `step`, counted from 1.

        Raises UserError if in the first one no replica has measured the metric.
        """
        if self._goal is None:
            return
        total, weight = (sum(column) for column in zip(*(fact["goal"] for fact in facts), strict=True))
        if not weight and not self._measured:
            raise UserError(
                f"run.stop_when.metric: no training worker measured a mean {self._goal.metric!r} before the optimizer "
                f"step of training step {step} — choose one of {', '.join(self._metrics.means())}"
            )
        self._measured = True
        if weight and self._goal.met_by(total / weight):
            self.reached = True
            log.info("run.stop_when: %s is %.4g, so training step %d is the last", self._goal, total / weight, step)
