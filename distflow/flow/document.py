"""A worker's own YAML: its own settings, and below a border the recipe it compiles, which worker it is, and where its
peers listen.

`settings` shows what the worker uses. Edits above the border take effect for this worker, and for no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from distflow.config.check import check_numbers, problem_of
from distflow.config.load import recipe_from_mapping
from distflow.config.schema import Recipe, WorkerSettings
from distflow.config.yamlfile import YamlFile, read_yaml, yaml_text
from distflow.errors import Problem, Problems, RecipeError
from distflow.flow.plan import Plan
from distflow.types import WorkerName

FORMAT = 1
EDITED = ("settings", "script")
"""What a person may change; the rest is filled in."""
ABOVE = """\
# Worker {worker}. This part is yours: what it says takes effect for this worker alone.
# `distflow config explain layout.pools.{pool}.KEY` tells what each of the settings means.
"""
GPU = "# On GPUs, `device: auto` and `cuda` are GPU {slot}, and the next ones for an engine on several.\n"
BORDER = """
# {line}
# Filled in: leave it as it is. The recipe must be the same for all workers of the run: they compare it when they meet.
# To change it, or the hosts, write all documents anew.
"""


class WorkerDocument(BaseModel):
    """What one worker starts from."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="constants")

    format: int = Field(default=FORMAT, ge=FORMAT, le=FORMAT)
    worker: str
    """pool/index."""
    run_dir: str
    """Absolute."""
    recipe_source: str
    """The recipe file this came from, for messages."""
    settings: WorkerSettings
    """What the worker uses; other workers ignore it."""
    script: str | None = None
    """File, relative to the document, that runs instead of a newly rendered script."""
    resume: str | None = None
    """Checkpoint folder to resume from."""
    term: int = Field(default=0, ge=0)
    """Incarnation of the training workers' membership."""
    members: list[str] | None = None
    """The training workers of this term, of all homes; None: all of the recipe's."""
    begins: list[list[int]] = []
    """[number, training step] of each term that began since the run was launched."""
    broken_at: float | None = None
    """When the previous term was found to be over, by this machine's monotonic clock; None: there was none."""
    roster: dict[str, str]
    """Address of every worker of this host, and of its agent, by name; of those on other hosts where it is known."""
    host: int = Field(default=0, ge=0)
    """Number of the host and of its agent: this worker's agent is agent/<host>."""
    slot: int | None = Field(default=None, ge=0)
    """Number of this worker's slot on its host, and of its (first) GPU where `device` is `auto` or `cuda`; None: it
    takes the next one after those of the workers before it."""
    address: str | None = None
    """This host's address for workers on other hosts; None: all workers of the run are on one host."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Where the others expect this worker at `address`; None: at a port that the system chooses, as its agent says."""
    placement: dict[str, int] = {}
    """Number of the host of every worker of the run that is not on host 0, by name."""
    sites: dict[str, str] = {}
    """Where the hosts stand that have a site, by number."""
    recipe: Recipe
    """Once read, with this worker's settings entered as `layout.pools.<pool>.each.<index>`."""

    @property
    def site(self) -> str:
        """Where this worker's host stands."""
        return self.sites.get(str(self.host), "")

    def near(self, workers: Iterable[str]) -> frozenset[str]:
        """Those of these workers whose hosts stand where this worker's does."""
        return frozenset(name for name in workers if self.sites.get(str(self.placement.get(name, 0)), "") == self.site)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker runs: the parts of its document that depend on the host."""

    run_dir: Path
    roster: Mapping[str, str]
    host: int = 0
    address: str | None = None
    placement: Mapping[str, int] = field(default_factory=dict)
    sites: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)
    """TCP ports of the workers whose documents are to name one."""
    slots: Mapping[str, int] = field(default_factory=dict)
    """Slots of the workers whose GPUs nobody has counted yet."""


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
    settings = WorkerSettings(
        engine=worker.engine,
        engine_options=dict(worker.engine_options),
        backend_options=dict(worker.backend_options),
        device=worker.device,
        threads=worker.threads,
        slots=worker.slots,
        episodes=worker.episodes,
        sample_memory_mb=worker.sample_memory_mb,
        steps=plan.recipe.layout.pools[name.pool].settings_of(name.index).steps,
        script=worker.script,
        python=worker.python,
    )
    document = WorkerDocument(
        worker=str(name),
        run_dir=str(place.run_dir.resolve()),
        recipe_source=recipe_source,
        settings=settings,
        script=script,
        resume=resume,
        term=term,
        roster=dict(place.roster),
        host=place.host,
        slot=place.slots.get(str(name)),
        address=place.address,
        port=place.ports.get(str(name)),
        placement=dict(place.placement),
        sites=dict(place.sites),
        recipe=_without_idle_pools(plan),
    )
    return document.model_dump(mode="json", by_alias=True)


def _without_idle_pools(plan: Plan) -> Recipe:
    layout = plan.recipe.layout
    pools = {pool.name: layout.pools[pool.name] for pool in plan.pools}
    return plan.recipe.model_copy(update={"layout": layout.model_copy(update={"pools": pools})})


def document_text(document: Mapping[str, Any]) -> str:
    """Return the document as YAML: what a person edits comes first, and a border below it."""
    pool = WorkerName.parse(document["worker"]).pool
    above = yaml_text({key: document[key] for key in EDITED})
    below = yaml_text({key: value for key, value in document.items() if key not in EDITED})
    gpu = "" if document["slot"] is None else GPU.format(slot=document["slot"])
    return ABOVE.format(worker=document["worker"], pool=pool) + gpu + above + BORDER.format(line="-" * 110) + below


def read_worker_document(path: Path) -> WorkerDocument:
    """Read and check a document; raises RecipeError that names file and line."""
    file = read_yaml(path.resolve())
    problems = Problems(lambda key: file.where(tuple(key.split("."))))
    check_numbers(file.value, problems)
    if problems:
        raise RecipeError(problems)
    values = dict(file.value)
    if isinstance(values.get("recipe"), dict):
        values["recipe"] = recipe_from_mapping(values["recipe"], lambda key: file.where(("recipe", *key.split("."))))
    try:
        found = WorkerDocument.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise RecipeError(
            [problem_of(d, lambda key: file.where(tuple(key.split("."))), WorkerDocument) for d in details]
        ) from error
    name = _worker_name(found.worker, found.recipe, file)
    return found.model_copy(update={"recipe": _with_settings(found.recipe, name, found.settings)})


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
