"""Calls a step as a worker does: planned from its declaration, by the step runner, with a small real model."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from distflow.config.schema import StepConfig
from distflow.data.batch import Batch
from distflow.errors import DistflowError, Problems, StepError, UserError
from distflow.flow.graph import StepNode, read_step
from distflow.flow.plan import StepPlan
from distflow.flow.resolve import find_named
from distflow.flow.structure import lacking_settings
from distflow.runtime.protocols import BackendSpec
from distflow.runtime.steps import StepContext, StepRunner, split
from distflow.testing.plugins.batches import TOKENIZER, changed_in_place, copied
from distflow.testing.plugins.subjects import Subject
from distflow.testing.tiny import tiny_model
from distflow.workers.backends.torch_backend import TorchBackend

NAME, MODEL, WORKER = "mine", "policy", "worker/0"
_WHERE = re.compile(r"(^|\n)step 'mine' \(.*?\) on worker/0:? ?")
_UIDS = re.compile(r", training step 1, with uids .* in hand$")


class WatchedBackend(TorchBackend):
    """Notes what is wrong with a loss before its backward pass would fail without a word about the cause."""

    accumulated = 0

    def accumulate(self, loss_sum: Tensor) -> None:
        """Raises UserError for what is no loss."""
        if not isinstance(loss_sum, Tensor) or loss_sum.dim():
            shown = list(loss_sum.shape) if isinstance(loss_sum, Tensor) else type(loss_sum).__name__
            raise UserError(f"ctx.backend.accumulate got {shown}; expected one number, the sum of the loss")
        if not loss_sum.requires_grad:
            raise UserError("the loss has no gradient: nothing in it depends on terms.logprobs (is it detached?)")
        if not bool(loss_sum.isfinite()):
            raise UserError(f"the loss is {loss_sum.item()}")
        self.accumulated += 1
        super().accumulate(loss_sum)


class _Models(Mapping[str, WatchedBackend]):
    """The step's model, built when it asks for it."""

    def __init__(self, head: str, *, trained: bool) -> None:
        self._head = head
        self._trained = trained
        self.built: WatchedBackend | None = None

    def __getitem__(self, name: str) -> WatchedBackend:
        if name != MODEL:
            raise KeyError(name)
        if self.built is None:
            model = tiny_model(dtype="float32", head=self._head, tokenizer=TOKENIZER.spec)
            self.built = WatchedBackend(BackendSpec(model, "cpu", self._trained, 0, 10, {}))
        return self.built

    def __iter__(self) -> Iterator[str]:
        return iter([MODEL])

    def __len__(self) -> int:
        return 1


@dataclass(slots=True)
class StepOutcome:
    """What came of a call."""

    context: StepContext
    result: Batch | None = None
    """None if it failed."""
    error: str = ""
    """The user's frames first."""
    refused: bool = False
    """It failed with a UserError, which says itself what to do."""
    in_place: list[str] = field(default_factory=list)
    """Fields of its batch that it changed in place."""
    warnings: list[str] = field(default_factory=list)

    @property
    def backend(self) -> WatchedBackend | None:
        """The model, if the step has asked for it."""
        models = self.context.models
        assert isinstance(models, _Models), "given below"
        return models.built

    @property
    def denominator(self) -> float:
        """By what the runtime would divide the gradient."""
        return self.context.fixed_denominators.get(MODEL) or self.context.denominators.get(MODEL, 0.0)


class Trial:
    """A step under test. Raises UserError if no run would accept it with these settings."""

    def __init__(self, subject: Subject) -> None:
        call, settings = subject.step()
        self.source = find_named(subject.call).text
        problems = Problems(lambda key: "")
        config = StepConfig.model_validate({"call": call, "with": settings, "model": MODEL})
        node = read_step(NAME, config, NAME, problems)
        for message, hint in () if node is None else lacking_settings(node.declaration.spec, node.settings):
            problems.add(NAME, message, hint)
        if problems or node is None:
            raise UserError("\n".join(_told(problem.key, problem.message, problem.hint) for problem in problems))
        self.plan = _plan(node, call)
        self.keeps_state = node.declaration.keeps_state
        self._head = node.declaration.head or "tokens"
        self._runner: StepRunner

    @cached_property
    def imported(self) -> StepRunner:
        """Import the step; raises DistflowError if that fails or it does not fit its declaration."""
        return StepRunner(WORKER, [self.plan], {})

    def context(self, samples: int = 4, gather: Callable[[Tensor], list[Tensor]] | None = None) -> StepContext:
        """A new context, as at the beginning of a run."""
        whole = self.plan.scope == "batch"
        return StepContext(
            NAME,
            worker=WORKER,
            seed=3,
            samples_per_prompt=samples,
            models=_Models(self._head, trained=self.plan.role == "train"),
            model=MODEL,
            reads=self.plan.reads,
            tokenizer=TOKENIZER,
            gather=gather or ((lambda tensor: [tensor]) if whole else None),
        )

    def call(self, batch: Batch, context: StepContext | None = None) -> StepOutcome:
        """One call, with a new context unless one is given."""
        outcome = StepOutcome(self.context() if context is None else context)
        given, heard = copied(batch), _Heard()
        log = logging.getLogger("distflow")
        log.addHandler(heard)
        try:
            outcome.result = StepRunner(WORKER, [self.plan], {NAME: outcome.context}).call(NAME, given)
        except DistflowError as error:
            outcome.error, outcome.refused = told(error), isinstance(error, UserError)
        finally:
            log.removeHandler(heard)
        outcome.in_place = changed_in_place(batch, given)
        outcome.warnings = [_WHERE.sub(r"\1it ", line) for line in heard.lines]
        return outcome


class _Heard(logging.Handler):
    """Keeps what is logged meanwhile."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


def told(error: DistflowError) -> str:
    """What a step raised, without the words that only a run has use for."""
    if isinstance(error, StepError):
        frames, what = split(error)
        return _WHERE.sub(r"\1", frames or what).rstrip()
    return _WHERE.sub(r"\1", str(error))


def complaint_about_state(state: Mapping[str, Any]) -> str:
    """Why what a step keeps cannot be saved in checkpoints; empty if it can."""
    try:
        back = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        return str(error)
    changed = [key for key, value in state.items() if back.get(key) != value]
    return f"{changed[0]!r} comes back from a checkpoint as another value" if changed else ""


def _told(key: str, message: str, hint: str) -> str:
    setting = key.partition(".with.")[2]
    return f"{f'setting {setting}: ' if setting else ''}{message}{f' — {hint}' if hint else ''}"


def _plan(node: StepNode, call: str) -> StepPlan:
    spec = node.declaration.spec
    about = (node.settings, (*node.reads, *node.reads_if_there), node.writes, node.may_write, spec.environment)
    return StepPlan(NAME, call, spec.role, spec.scope, MODEL, *about)
