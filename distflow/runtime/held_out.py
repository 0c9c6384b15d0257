"""Validation where samples are read from the data: what training would measure on rows that are held out.

Between two training steps all replicas run the flow's own steps, each over its share of these rows. Contexts and models
are apart from those of training: nothing has a gradient or is accumulated, and what steps measure, or keep in their
state, is not training's. Each replica's measures are then one line, of means with their weights, and the lines of all
merge as those of a training step do: so no figure depends on how many replicas there are, or on micro-batches.

The rows are cut into parts as large as a training step, after each of which the replicas agree on whether to stop. If a
step looks at a whole batch, all rows are one part, which it looks at together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor

from distflow.comm.fact_exchange import Fact
from distflow.data.batch import Batch, Ragged, group_ranges
from distflow.data.fields import with_fields
from distflow.errors import UserError
from distflow.exchange.messages import LeasePrompt
from distflow.exchange.own_samples import samples_of
from distflow.log import logger
from distflow.metrics.merge import merge_step
from distflow.runtime.assembly import Setting
from distflow.runtime.calls import Calls
from distflow.runtime.lockstep import VALIDATED, Rounds
from distflow.runtime.metrics import TIMING, MetricStore, MetricWriter
from distflow.runtime.node import Node
from distflow.runtime.protocols import Backend, Tokenizer, TokenScores, TokenValues, TrainedScorer
from distflow.runtime.replicas import Replicas
from distflow.runtime.steps import ServedContext, StepContext, StepRunner, user_code
from distflow.runtime.validation import every_prompt, judged_metrics, note_scores
from distflow.types import VAL, VALIDATION, Uid

log = logger(__name__)

TIME = f"{TIMING}validation"
OF_ACTOR = "actor/"
"""Left out of the names of metrics: `actor/loss` is `val/loss`."""
TOLD = (f"{VAL}loss", f"{VAL}preference/accuracy")
"""Told in the log, where there are such metrics."""
_OF_WORKERS = (TIMING, "perf/")
"""What the names of metrics begin with that say nothing about rows."""


@dataclass(frozen=True, slots=True)
class HeldOutParts:
    """What it works with, all of the training side of one replica."""

    setting: Setting
    node: Node
    replicas: Replicas
    contexts: Mapping[str, StepContext]
    writer: MetricWriter
    metrics: MetricStore
    rounds: Rounds | None
    """Only where models are divided over the replicas."""
    calls: Calls | None
    """Only where other pools run steps."""


class HeldOut:
    """Every replica has one, and calls it at the same points. Raises UserError if there are no rows."""

    def __init__(self, parts: HeldOutParts, tokenizer: Tokenizer) -> None:
        setting = parts.setting
        plan, me = setting.plan, setting.me
        assert plan.val is not None, "without validation, nothing is built"
        self._parts = parts
        self._plan = plan.val
        self._board = parts.node.board
        self._where = f"validation data {plan.val.data.shown} on {me.name}"
        with user_code(self._where):
            found = every_prompt(setting, plan.val.data, tokenizer, self._where)
            self._places = list(islice(found, plan.val.prompts))
        here = [step for step in plan.steps if step.name in plan.home.steps and step != plan.reads]
        self._steps = [step.name for step in here]
        self._asked = [port.edge for port in me.port("asks")]
        together = any(step.scope == "batch" for step in here)
        self._part = len(self._places) if together else plan.batch.prompts
        if together and len(self._places) < parts.replicas.size:
            raise UserError(
                f"{self._where}: {len(self._places)} rows for {parts.replicas.size} training workers, which look at "
                "them together: each must have one — more rows, or fewer workers"
            )
        self._store = MetricStore(parts.metrics.trace)
        # Each micro-batch is a sign of progress, by which others wait.
        parts.node.count_work(lambda: self._store.recorded)
        self._contexts: dict[str, StepContext] = {}
        self._runner = StepRunner(str(me.name), me.steps, self._contexts, self._store)
        self._judged = judged_metrics(setting.recipe.run)
        self.scores: dict[str, dict[int, float]] = {metric: {} for metric in self._judged.values()}
        """What checkpoints are kept for, and what may end the run, by metric and version."""

    def measure(self, version: int) -> None:
        """Measure these weights, if that is due; raises RunStopped, on all replicas alike, if one is asked to stop."""
        if version not in self._plan.versions:
            return
        parts, begun = self._parts, time.perf_counter()
        parts.node.facts |= {"state": "validating"}
        # No update of a training step is under way.
        parts.replicas.finishes_step = False
        self._open(version)
        with nullcontext() if parts.rounds is None else parts.rounds.apart():
            for first in range(0, len(self._places), self._part):
                rows = range(first, min(first + self._part, len(self._places)))
                self._compute(rows[parts.replicas.rank :: parts.replicas.size], version)
                self._meet("a part of the validation", {})
            line = {name: value for name, value in self._store.drain().items() if not name.startswith(_OF_WORKERS)}
            facts = self._meet("the validation", {"line": {**line, TIME: time.perf_counter() - begun}})
        self._write(version, merge_step([fact["line"] for fact in facts]))

    # -- details

    def _open(self, version: int) -> None:
        """Contexts as those of training are now, but for what they change."""
        for name, context in self._parts.contexts.items():
            self._contexts[name] = replace(
                context,
                training_step=version,
                policy_version=version,
                update_epoch=0,
                rests=False,
                moved=[0.0, 0.0],
                metrics=self._store,
                state={} if isinstance(context, ServedContext) else deepcopy(context.state),
                models={model: without_gradient(backend) for model, backend in context.models.items()},
                denominators={},
                fixed_denominators={},
            )

    def _compute(self, rows: Sequence[int], version: int) -> None:
        """Run all steps over these rows; nothing more of them once this replica is asked to stop."""
        if not rows:
            return
        batch: Batch | None = self._read(rows, version)
        for step in self._asked:
            batch = None if batch is None else self._ask(step, batch, version)
        if batch is None:
            return
        with torch.no_grad():
            for step in self._steps:
                batch = self._runner.call(step, batch)

    def _read(self, rows: Sequence[int], version: int) -> Batch:
        prompts, responses = [], {}
        for row in rows:
            order, place = self._places[row]
            with user_code(f"{self._where}, at row {row}"):
                prompt = order.prompt(place)
            uid = Uid(version, row, VALIDATION + row)
            prompts.append(LeasePrompt(uid, prompt.token_ids, prompt.text, prompt.task))
            responses[uid.position] = prompt.responses
        return samples_of(prompts, responses)

    def _ask(self, step: str, batch: Batch, version: int) -> Batch | None:
        """The batch with what another pool writes for it; None if this replica is asked to stop meanwhile."""
        parts, calls, answers = self._parts, self._parts.calls, dict[int, Batch]()
        assert calls is not None, f"{step!r} is asked for, so there is a port for it"
        groups = group_ranges(batch)

        def ready() -> bool | None:
            answers.update(calls.take(step))
            return len(answers) == len(groups) or parts.replicas.stopping or None

        with self._board.condition:
            for position, rows in groups.items():
                calls.ask(step, position, rows, version)
        self._board.until(
            ready,
            name=f"answers of {step!r} about validation",
            peers=lambda: (calls.waiting() or ("", ()))[1],
            limit_s=parts.setting.recipe.limits.no_progress_s,
            progress=lambda: (len(answers), parts.node.membership.news),
            even_when_stopping=parts.replicas.set.size > 1,
        )
        if len(answers) < len(groups):
            with self._board.condition:
                calls.cancel([(step, position) for position in groups])
            return None
        return with_fields(batch, Batch.concat([answers[position] for position in groups]).columns)

    def _meet(self, what: str, fact: Fact) -> list[Fact]:
        """Exchange facts with the other replicas, once all have come here."""
        parts = self._parts
        if parts.replicas.set.size == 1:
            self._board.raise_if_over()
        if parts.rounds is not None:
            parts.rounds.meet(VALIDATED)
        facts = parts.replicas.agree(what, {**fact, "stop": parts.replicas.stopping})
        parts.replicas.stop_together(facts)
        return facts

    def _write(self, version: int, values: Mapping[str, float]) -> None:
        parts, setting = self._parts, self._parts.setting
        measured = {VAL + name.removeprefix(OF_ACTOR): value for name, value in values.items() if name != TIME}
        named = {**measured, f"{VAL}prompts": float(len(self._places))}
        note_scores(self.scores, self._judged, version, named)
        if parts.replicas.rank == 0:
            parts.writer.write(version, setting.document.term, {**named, TIME: values[TIME]}, measured=False)
            shown = ", ".join(f"{name} {named[name]:.4f}" for name in TOLD if name in named)
            log.info("validation after training step %d: %s", version, shown or f"{len(named)} metrics")


class _WithoutGradient:
    """A backend of training as it is used on rows that are not trained on; all else of it is as it was."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def score(
        self, batch: Batch, *, temperature: float, grad: bool, entropy: bool, candidates: int | Ragged = 0
    ) -> TokenScores:
        """Log-probs of the response tokens."""
        return self._inner.score(batch, temperature=temperature, grad=False, entropy=entropy, candidates=candidates)

    def values(self, batch: Batch, *, grad: bool) -> TokenValues:
        """Values of the states before them."""
        return self._inner.values(batch, grad=False)

    def accumulate(self, loss_sum: Tensor) -> None:
        """Nothing is trained."""


class _ScorerWithoutGradient(_WithoutGradient):
    """The same of a reward model, that it is known for one."""

    _inner: Any

    def longest_text(self) -> int | None:
        """Tokens of the longest text that the model takes; None: not known."""
        longest: int | None = self._inner.longest_text()
        return longest

    def encode(self, prompt: str, response: str) -> list[int]:
        """Token ids of a prompt and a response."""
        ids: list[int] = self._inner.encode(prompt, response)
        return ids

    def score_texts(self, rows: Sequence[Sequence[int]], *, tokens: int) -> Tensor:
        """One number for each row."""
        scores: Tensor = self._inner.score_texts(rows, tokens=tokens)
        return scores

    def rate_texts(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """One number for each row, all at once."""
        with torch.no_grad():
            scores: Tensor = self._inner.rate_texts(rows)
        return scores


def without_gradient(backend: Backend) -> Backend:
    """A backend that scores as this one does, and accumulates nothing."""
    made = _ScorerWithoutGradient if isinstance(backend, TrainedScorer) else _WithoutGradient
    return cast(Backend, made(backend))
