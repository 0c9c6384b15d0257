"""The plan, as data: what every worker does, and the arithmetic they share. `planner.py` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distflow.config.schema import Recipe
from distflow.flow.edges import Edge
from distflow.types import Role, Scope, WorkerName


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step as one worker runs it."""

    name: str
    call: str
    """module:name, or /path/file.py:name."""
    role: Role
    scope: Scope
    model: str | None
    settings: Mapping[str, Any]
    """Literal defaults of the function and what the recipe gives."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker."""

    name: WorkerName
    roles: tuple[Role, ...]
    """Of its steps, in flow order."""
    steps: tuple[StepPlan, ...]
    engine: str | None
    """None where nothing is generated."""
    engine_options: Mapping[str, Any]
    backend: str | None
    """None where no model is trained or run frozen."""
    backend_options: Mapping[str, Any]
    device: str
    threads: int
    slots: int
    sample_memory_mb: int
    offload: bool
    """Generating and training take turns on the device."""
    script: str | None
    """A script file of the user's, instead of the rendered one."""
    python: str | None
    """The interpreter that executes it; None: that of whoever starts it."""
    models: tuple[str, ...]
    """Held by backends."""
    generates: str | None
    """The model it generates with."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The arithmetic of one training step."""

    prompts: int
    samples_per_prompt: int
    samples: int
    """prompts · samples_per_prompt."""
    ledgers: int
    groups_per_ledger: int
    """b: groups that a ledger feeds to each training step."""
    max_staleness: int | None
    """In policy versions; None: unbounded."""
    training_steps: int
    max_refills: int
    tokens_per_microbatch: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Of the whole run."""

    recipe: Recipe
    """With the models that the flow implies filled in."""
    run_name: str
    batch: BatchPlan
    workers: tuple[WorkerPlan, ...]
    edges: tuple[Edge, ...]
    owners: tuple[str, ...]
    """Names of the training workers that own ledgers: owner number j mod R has ledger j."""
    primary: str
    """The model that generates and is trained."""
    trained_models: tuple[str, ...]
    steps: tuple[StepPlan, ...]
    """The flow's steps in order, without workers' own."""
    crossing: int
    """How many of them run before the samples cross to the training pool."""
    streamed: bool
    """False if a train step needs the whole batch at once: micro-batches then wait until it has arrived."""
    code: Mapping[str, str]
    """Source text of the files that define the steps and the functions they are given, by step or step.setting."""
    digest: str
    notes: tuple[str, ...]
    dump_fields: tuple[str, ...] = ()
    """Of the rollout dumps, besides the standard ones; may hold patterns."""
    warnings: tuple[str, ...] = ()
    """Notes on what is likely to be a mistake: shown at the launch, too."""

    def worker(self, name: WorkerName) -> WorkerPlan:
        """One worker; raises LookupError for a name that the layout does not have."""
        for worker in self.workers:
            if worker.name == name:
                return worker
        raise LookupError(f"there is no worker {name}; this layout has {', '.join(str(w.name) for w in self.workers)}")

    def edge(self, name: str) -> Edge:
        """One edge; raises LookupError."""
        for edge in self.edges:
            if edge.name == name:
                return edge
        raise LookupError(f"there is no edge {name!r}; this flow has {', '.join(e.name for e in self.edges)}")

    @property
    def generate_step(self) -> StepPlan:
        """The flow's generate step."""
        return next(step for step in self.steps if step.role == "generate")

    @property
    def owner_plan(self) -> WorkerPlan:
        """The first owner; all owners have the same settings for samples."""
        return self.worker(WorkerName.parse(self.owners[0]))
