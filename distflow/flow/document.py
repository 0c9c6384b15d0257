"""A worker's own YAML: the recipe it compiles, who it is, where its peers listen, and settings of its own.

`settings` shows what the worker uses; edited there, it is used. All other workers are unaffected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from distflow.config.check import problem_of
from distflow.config.load import recipe_from_mapping, recipe_to_mapping
from distflow.config.schema import Recipe, WorkerSettings
from distflow.config.yamlfile import YamlFile, read_yaml, yaml_text
from distflow.errors import Problem, RecipeError
from distflow.flow.plan import Plan
from distflow.types import WorkerName

FORMAT = 1


@dataclass(frozen=True, slots=True)
class WorkerDocument:
    """What one worker starts from."""

    worker: str
    """pool/index."""
    run_dir: str
    """Absolute."""
    recipe_source: str
    """The recipe file this came from, for messages."""
    script: str | None
    """File, relative to the document, that runs instead of a newly rendered script."""
    resume: str | None
    """Checkpoint folder to go on from."""
    term: int
    """Incarnation of the training pool's membership."""
    owners: tuple[str, ...] | None
    """The training workers of this term; None: all of the recipe's."""
    begins: tuple[tuple[int, int], ...]
    """Number and training step of the terms that began since the run was launched."""
    broken_at: float | None
    """When the term before was found to be over, by this machine's monotonic clock; None: no such thing happened."""
    roster: Mapping[str, str]
    """Address of every worker of this host, and of its agent, by name."""
    host: int
    """Number of the host, which is the number of its agent: this worker's agent is agent/<host>."""
    address: str | None
    """This host's address for workers on other hosts; None: all workers of the run are on one host."""
    placement: Mapping[str, int]
    """Number of the host of every worker of the run that is not on host 0, by name."""
    recipe: Recipe
    """With this worker's settings entered as `layout.pools.<pool>.each.<index>`."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker runs: what of its document depends on the host."""

    run_dir: Path
    roster: Mapping[str, str]
    host: int = 0
    address: str | None = None
    placement: Mapping[str, int] = field(default_factory=dict)


class _Schema(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: int = Field(ge=FORMAT, le=FORMAT)
    worker: str
    run_dir: str
    recipe_source: str
    settings: WorkerSettings
    script: str | None = None
    resume: str | None = None
    term: int = Field(default=0, ge=0)
    owners: list[str] | None = None
    begins: list[list[int]] = []
    broken_at: float | None = None
    roster: dict[str, str]
    host: int = Field(default=0, ge=0)
    address: str | None = None
    placement: dict[str, int] = {}
    recipe: dict[str, Any]


def worker_document(
    plan: Plan,
    name: WorkerName,
    place: Place,
    *,
    recipe_source: str,
    script: str | None = None,
    resume: str | None = None,
    term: int = 0,
) -> dict[str, Any]:
    """The document of one worker, as plain data to be written by `document_text`."""
    worker = plan.worker(name)
    pool = plan.recipe.layout.pools[name.pool]
    own = pool.each[str(name.index)] if str(name.index) in pool.each else WorkerSettings()
    settings = {
        "engine": worker.engine,
        "engine_options": dict(worker.engine_options),
        "backend_options": dict(worker.backend_options),
        "device": worker.device,
        "threads": worker.threads,
        "slots": worker.slots,
        "sample_memory_mb": worker.sample_memory_mb,
        "steps": own.steps,
        "script": worker.script,
        "python": worker.python,
    }
    return {
        "format": FORMAT,
        "worker": str(name),
        "run_dir": str(place.run_dir.resolve()),
        "recipe_source": recipe_source,
        "settings": settings,
        "script": script,
        "resume": resume,
        "term": term,
        "owners": None,
        "begins": [],
        "broken_at": None,
        "roster": dict(place.roster),
        "host": place.host,
        "address": place.address,
        "placement": dict(place.placement),
        "recipe": recipe_to_mapping(plan.recipe),
    }


def document_text(document: Mapping[str, Any]) -> str:
    """The document as YAML."""
    return yaml_text(document)


def read_worker_document(path: Path) -> WorkerDocument:
    """Read and check a document; raises RecipeError that names file and line."""
    file = read_yaml(path.resolve())
    try:
        found = _Schema.model_validate(file.value)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise RecipeError(
            [problem_of(d, lambda key: file.where(tuple(key.split("."))), _Schema) for d in details]
        ) from error
    recipe = recipe_from_mapping(found.recipe, lambda key: file.where(("recipe", *key.split("."))))
    name = _worker_name(found.worker, recipe, file)
    return WorkerDocument(
        worker=found.worker,
        run_dir=found.run_dir,
        recipe_source=found.recipe_source,
        script=found.script,
        resume=found.resume,
        term=found.term,
        owners=None if found.owners is None else tuple(found.owners),
        begins=tuple((number, step) for number, step in found.begins),
        broken_at=found.broken_at,
        roster=found.roster,
        host=found.host,
        address=found.address,
        placement=found.placement,
        recipe=_with_settings(recipe, name, found.settings),
    )


def _worker_name(text: str, recipe: Recipe, file: YamlFile) -> WorkerName:
    names = [f"{pool}/{i}" for pool, config in recipe.layout.pools.items() for i in range(config.count)]
    if text not in names:
        problem = Problem(file.where(("worker",)), "worker", f"the recipe has no worker {text!r}", ", ".join(names))
        raise RecipeError([problem])
    return WorkerName.parse(text)


def _with_settings(recipe: Recipe, name: WorkerName, settings: WorkerSettings) -> Recipe:
    layout = recipe.layout
    pool = layout.pools[name.pool]
    pool = pool.model_copy(update={"each": {**pool.each, str(name.index): settings}})
    layout = layout.model_copy(update={"pools": {**layout.pools, name.pool: pool}})
    return recipe.model_copy(update={"layout": layout})
