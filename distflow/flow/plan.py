"""The plan, as data: a graph of pools, models and edges, the workers and their arithmetic.

`planner.py` makes it, with the digest of `digest.py`.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distflow.config.data_schema import DataConfig
from distflow.config.schema import MaskTruncated, Recipe, Schedule
from distflow.flow.edges import Edge, EdgeKind, End
from distflow.flow.step import reserved_tokens, response_tokens, sample_tokens
from distflow.types import Role, Scope, WorkerName, prefixed


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool of the layout that has work."""

    name: str
    count: int
    """Workers. May change while the run goes on, unless the pool trains."""
    steps: tuple[str, ...]
    """Shared steps that run here."""
    generates: tuple[str, ...]
    """The models that it generates with."""
    homes: tuple[str, ...]
    """Models that it trains: it is their home."""
    frozen: tuple[str, ...]
    """Models that it computes with and does not train."""
    validates: bool = False
    """Whether it generates for validation only."""

    @property
    def members(self) -> tuple[str, ...]:
        """The names of its workers."""
        return tuple(f"{self.name}/{index}" for index in range(self.count))

    @property
    def takes_turns(self) -> bool:
        """Whether it generates and trains, in turn."""
        return bool(self.generates and self.homes)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model that a step uses."""

    name: str
    home: str | None
    """The pool that trains it; None: it is frozen."""
    generated_by: tuple[str, ...]
    """Pools that generate with it."""
    held_by: tuple[str, ...]
    """Other pools than its home that compute with it."""


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
    may_write: tuple[str, ...] = ()
    """Fields that it writes sometimes, beside those."""
    environment: tuple[str, ...] | None = None
    """Of a generate step: what its environment allows; None: it has none."""
    prefix: str = ""
    """What precedes the names of its fields: all names here are those in the flow."""
    weighed: bool = False
    """Of a generate step: another step computes with the log-probs of its samples, not for metrics alone."""

    @property
    def generates_further(self) -> bool:
        """Whether it generates with a further model, from prompts that other steps write."""
        return self.role == "generate" and bool(self.prefix)

    def own(self, fields: Iterable[str]) -> tuple[str, ...]:
        """These fields by the names that the step itself knows them by."""
        return tuple(field.removeprefix(f"{self.prefix}/") if self.prefix else field for field in fields)

    def as_it_sees(self) -> StepPlan:
        """The same with the names that the step itself knows its fields by."""
        reads, writes, may_write = map(self.own, (self.reads, self.writes, self.may_write))
        return dataclasses.replace(self, reads=reads, writes=writes, may_write=may_write)

    def allows(self, what: str) -> bool:
        """Whether its samples may be treated so (`replay`, `repeatable`): without an environment, always."""
        return self.environment is None or what in self.environment


@dataclass(frozen=True, slots=True)
class Port:
    """One end of an edge at one worker."""

    edge: str
    kind: EdgeKind
    end: End
    peer: str
    """The pool at the other end."""
    model: str | None = None
    """Whose versions, or which one a step uses."""
    steps: tuple[str, ...] = ()
    """call: the one that is asked for or answered."""


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
    episodes: int
    """Samples under way at most, decoding or not."""
    environments: str
    """Where generate steps run: `thread` or `process`."""
    sample_memory_mb: int
    offload: bool
    """Generating and training take turns on the device."""
    script: str | None
    """A script file of the user's, instead of the rendered one."""
    python: str | None
    """The Python that runs it; None: the one that starts it."""
    models: tuple[str, ...]
    """Held by backends."""
    generates: tuple[str, ...]
    """The models it generates with, each by an engine of its own."""
    ports: tuple[Port, ...] = ()
    """In the order of the edges."""

    def port(self, end: End) -> list[Port]:
        """Its ports of one kind."""
        return [port for port in self.ports if port.end == end]


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
    minibatches: int = 1
    """M: parts of a training step, with an optimizer step each."""
    epochs: int = 1
    """E: passes over its samples."""
    target_kl: float | None = None
    critic_warmup: int = 0
    mask_truncated: MaskTruncated | None = None
    """What becomes of responses that were cut off; None: nothing."""
    schedule: Schedule = "fifo"
    """fifo under run.deterministic, too."""

    @property
    def updates(self) -> int:
        """Optimizer steps of each trained model in a training step."""
        return self.minibatches * self.epochs


@dataclass(frozen=True, slots=True)
class ValPlan:
    """Validation, whose groups are leased by the first owner to the workers that generate with the primary model."""

    versions: tuple[int, ...]
    """Those that are validated, rising."""
    data: DataConfig
    prompts: int | None
    """The first so many; None: all that there are."""
    samples_per_prompt: int
    settings: Mapping[str, Any]
    """Of the generate step."""

    @property
    def response_tokens(self) -> int:
        """Tokens behind the prompt of the longest sequence."""
        return int(response_tokens(self.settings))

    @property
    def sample_tokens(self) -> int:
        """Tokens behind the prompt of the data in all sequences of the largest sample."""
        return sample_tokens(self.settings)

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest prompt and response."""
        return self.data.max_prompt_tokens + self.response_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a whole run."""

    recipe: Recipe
    """The recipe, with the models that the flow implies filled in."""
    run_name: str
    batch: BatchPlan
    workers: tuple[WorkerPlan, ...]
    edges: tuple[Edge, ...]
    pools: tuple[PoolPlan, ...]
    models: tuple[ModelPlan, ...]
    primary: str
    """The model that is trained, and generates where any does; its home owns the ledgers."""
    steps: tuple[StepPlan, ...]
    """The flow's steps in order, without workers' own."""
    streamed: bool
    """False if training waits for the whole batch: a step needs it at once, it is trained on several times, or the run
    is deterministic."""
    on_arrival: tuple[str, ...]
    """Steps that owners compute as samples arrive, although training waits for the whole batch."""
    later_bytes: int
    """Bytes that owners reserve for each response token besides its result, for fields that it gets there."""
    code: Mapping[str, str]
    """Source text of the files that define steps, the functions they are given, and data sources (`plan_code`)."""
    digest: str
    notes: tuple[str, ...]
    dump_fields: tuple[str, ...] = ()
    """Further fields of the rollout dumps; may hold patterns."""
    val: ValPlan | None = None
    warnings: tuple[str, ...] = ()
    """Notes on likely mistakes, which are also shown at the launch."""
    missing: tuple[str, ...] = ()
    """Notes on models and data that this machine lacks, where it need not have them."""

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

    def pool(self, name: str) -> PoolPlan:
        """One pool that has work; raises LookupError."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise LookupError(f"there is no pool {name!r}; this plan has {', '.join(pool.name for pool in self.pools)}")

    def serves(self, pool: str) -> bool:
        """Whether a pool answers calls and does nothing else."""
        found = next((one for one in self.pools if one.name == pool), None)
        return found is not None and self.primary not in found.generates and not found.homes

    @property
    def validating(self) -> PoolPlan | None:
        """The pool that generates for validation only, if there is one."""
        return next((pool for pool in self.pools if pool.validates), None)

    @property
    def generating_pools(self) -> tuple[PoolPlan, ...]:
        """The pools that generate with the primary model for training."""
        return tuple(pool for pool in self.pools if self.primary in pool.generates and not pool.validates)

    @property
    def home(self) -> PoolPlan:
        """The home of the primary model."""
        return next(pool for pool in self.pools if self.primary in pool.homes)

    def home_of(self, model: str) -> PoolPlan:
        """The pool that trains a model; raises LookupError for one that is frozen."""
        for pool in self.pools:
            if model in pool.homes:
                return pool
        raise LookupError(f"no pool trains {model!r}")

    @property
    def generating(self) -> tuple[str, ...]:
        """The models that are generated with, the primary one first: all are trained."""
        return tuple(str(step.model) for step in self.generate_steps)

    @property
    def owners(self) -> tuple[str, ...]:
        """Names of the R training workers that own ledgers: owner number j mod R has ledger j."""
        return self.home.members

    @property
    def members(self) -> tuple[str, ...]:
        """Names of all workers that train: the owners, then those of further homes. They restart and save together."""
        others = (name for pool in self.pools if pool.homes and pool != self.home for name in pool.members)
        return (*self.owners, *others)

    @property
    def trained_models(self) -> tuple[str, ...]:
        """The models that have a home, in the order of their train steps."""
        return tuple(model.name for model in self.models if model.home is not None)

    def metrics_of(self, model: str) -> str:
        """What the names of a trained model's metrics begin with: actor, critic (the first one), or its own name."""
        if model == self.primary:
            return "actor"
        critics = [name for name in self.trained_models if self.recipe.models[name].head == "value"]
        return "critic" if critics[:1] == [model] else model

    @property
    def origin(self) -> StepPlan:
        """The step that makes the samples of the primary model: generates them, or reads them from the data."""
        return next(step for step in self.steps if step.role in ("generate", "read") and not step.prefix)

    @property
    def reads(self) -> StepPlan | None:
        """That step, if it reads them."""
        return self.origin if self.origin.role == "read" else None

    @property
    def generate_step(self) -> StepPlan:
        """The generate step of the primary model."""
        return next(step for step in self.steps if step.role == "generate" and not step.prefix)

    @property
    def further_generation(self) -> tuple[StepPlan, ...]:
        """The generate steps of further models."""
        return tuple(step for step in self.steps if step.generates_further)

    def generate_step_of(self, model: str) -> StepPlan:
        """The one that generates with a model; raises LookupError if none does."""
        for step in self.steps:
            if step.role == "generate" and step.model == model:
                return step
        raise LookupError(f"no step generates with {model!r}")

    @property
    def response_tokens(self) -> int:
        """Tokens behind the prompt of the data of the longest sample: its response, with those of an environment, and
        prompts and responses of further models."""
        making = (self.origin, *self.further_generation)
        return reserved_tokens([step.settings for step in making], self.recipe.data.max_prompt_tokens)

    def has_baseline(self, prefix: str) -> bool:
        """Tell whether a sample of each group that is not trained on is the baseline of the others."""
        return any(prefixed("baseline", prefix) in step.writes for step in self.steps)

    def compares_samples(self, prefix: str) -> bool:
        """Tell whether advantages compare the samples of a prompt with each other, of those that have this prefix."""
        field = prefixed("advantage", prefix)
        beside = {"group", prefixed("baseline", prefix)}
        several = self.recipe.batch.samples_per_prompt > 1
        return several and any(field in step.writes and beside & {*step.reads} for step in self.steps)

    @property
    def generate_steps(self) -> tuple[StepPlan, ...]:
        """That of the primary model, then those of further ones; none where samples are read from the data."""
        return () if self.reads else (self.generate_step, *self.further_generation)

    def longest_sample(self, model: str) -> int:
        """Tokens of the longest prompt and response of a model that generates, or of the primary one."""
        made_by = self.origin if model == self.primary else self.generate_step_of(model)
        return self.recipe.data.max_prompt_tokens + int(response_tokens(made_by.settings))

    def engine_tokens(self, model: str) -> int:
        """The same of all that its engine generates, validation included."""
        validated = self.val is not None and model == self.primary
        return max(self.longest_sample(model), self.val.longest_sample if validated and self.val is not None else 0)

    @property
    def owner_plan(self) -> WorkerPlan:
        """The plan of the first owner."""
        return self.worker(WorkerName.parse(self.owners[0]))


NO_SITES: Mapping[int, str] = {}


def leaders_of(workers: Iterable[str], host_of: Mapping[str, int]) -> dict[int, str]:
    """The first of these workers on each host that has one; workers missing from `host_of` are on host 0."""
    leaders: dict[int, str] = {}
    for worker in workers:
        leaders.setdefault(host_of.get(worker, 0), worker)
    return leaders


def publisher_for(host: int, leaders: Mapping[int, str], site: str = "", sites: Mapping[int, str] = NO_SITES) -> str:
    """The training worker that publishes weights for a host: its own (shared memory), else one of the others in turn
    (over the network).

    `site`: where the host stands, `sites`: where the others do that have a site. Hosts of a site without a training
    worker all read from the same one, so that a version enters their site once.
    """
    if host in leaders:
        return leaders[host]
    numbers = sorted(leaders)
    near = [number for number in numbers if sites.get(number, "") == site]
    if near:
        return leaders[near[host % len(near)]]
    return leaders[numbers[zlib.crc32(site.encode()) % len(numbers)]]
