"""Checks of a whole plan, as one table: each takes a recipe with its structure and returns problems by key.

Checks marked `always` run on every recipe. Those marked `if sound` need known names and values that fit together, so
they run only while no problem has been found: what could not be looked up has been reported already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from distflow.config.check import Where
from distflow.config.plugins import BACKENDS, ENGINES, full_name
from distflow.config.schema import PoolConfig, Recipe
from distflow.errors import Problem, did_you_mean
from distflow.flow.deterministic import deterministic_problems
from distflow.flow.gpus import shared_gpu_problems
from distflow.flow.memory import memory_problems
from distflow.flow.plugin_options import option_problems
from distflow.flow.sharding import divides_models, with_zero
from distflow.flow.structure import Structure
from distflow.types import written

Check = Callable[[Recipe, Structure, Where], list[Problem]]
MAKES_GROUP = (ENGINES["vllm"],)
"""Engines that make it for themselves, whatever else their worker does."""
_STAGE = 2
"""Of backend deepspeed, where its options do not say."""


def plan_problems(recipe: Recipe, structure: Structure, where: Where, *, sound: bool) -> list[Problem]:
    """All that is wrong, in the order of the table. `sound`: nothing was found to be wrong before."""
    problems: list[Problem] = []
    for check, looks in CHECKS:
        if looks == "always" or (sound and not problems):
            problems += check(recipe, structure, where)
    return problems


def ledger_problems(recipe: Recipe, structure: Structure, where: Where) -> list[Problem]:
    """Fewer ledgers than training workers."""
    owners = recipe.layout.pools[structure.placement.training].count
    if recipe.batch.ledgers >= owners:
        return []
    message = f"{recipe.batch.ledgers} ledgers are too few for {owners} training workers"
    return [Problem(where("batch.ledgers"), "batch.ledgers", message, f"at least {owners}")]


def asynchrony_problems(recipe: Recipe, structure: Structure, where: Where) -> list[Problem]:
    """A bound that is waited for, and is not there."""
    if recipe.layout.max_staleness != "unbounded":
        return []
    if recipe.layout.refresh != "at_bound":
        return []
    message = "at_bound never takes newer weights when layout.max_staleness is unbounded"
    return [Problem(where("layout.refresh"), "layout.refresh", message, "eager or when_idle, or a bound")]


def shrinking_problems(recipe: Recipe, structure: Structure, where: Where) -> list[Problem]:
    """A pool of one that is to go on without a worker."""
    pool = structure.placement.training
    if recipe.layout.on_failure != "shrink" or recipe.layout.pools[pool].count > 1:
        return []
    message = f"shrink goes on without a training worker, and pool {pool!r} has only one"
    cure = f"restart, or layout.pools.{pool}.count=2 or more"
    return [Problem(where("layout.on_failure"), "layout.on_failure", message, cure)]


def grouping_problems(recipe: Recipe, structure: Structure, where: Where) -> list[Problem]:
    """An engine and a backend that both make torch's default process group: a process has one.

    Such an engine on a worker that trains in a group: with others, or by a backend that always makes one.
    """
    layout, placement = recipe.layout, structure.placement
    pool = layout.pools[placement.training]
    if placement.generating != placement.training or (pool.count == 1 and pool.backend == "torch"):
        return []
    key = f"layout.pools.{placement.training}"
    engines = {f"{key}.engine": pool.engine}
    engines |= {f"{key}.each.{n}.engine": own.engine for n, own in pool.each.items() if own.engine is not None}
    cure = "engine torch or sglang, or a pool of its own for generation, as layout=split has it"
    group = f"the process group that {pool.backend!r} on {pool.count} worker(s) trains in"
    return [
        Problem(where(key), key, f"{engine} cannot share a worker with {group}: each makes torch's default one", cure)
        for key, engine in engines.items()
        if full_name(engine, ENGINES) in MAKES_GROUP
    ]


def offload_problems(recipe: Recipe, structure: Structure, where: Where) -> list[Problem]:
    """Pools that ask to be offloaded where nothing takes turns on the device, or something cannot leave it."""
    problems = []
    for name, pool in recipe.layout.pools.items():
        if pool.offload:
            for message, cure in _offload_complaints(name, pool, structure):
                key = f"layout.pools.{name}.offload"
                problems.append(Problem(where(key), key, message, cure))
    return problems


def _offload_complaints(name: str, pool: PoolConfig, structure: Structure) -> Iterator[tuple[str, str]]:
    placement = structure.placement
    if not name == placement.generating == placement.training:
        yield (
            f"pool {name!r} does not both generate and train, so nothing takes turns on its devices",
            "remove it, or give all roles to one pool, as layout=colocated does",
        )
        return
    own = [node for nodes in structure.private.by_worker.values() for node in nodes]
    for node in (*placement.before, *own):
        if node.model is not None and node.role != "generate":
            yield (
                f"step {node.name!r} uses model {node.model!r} while the worker generates, and then models are away",
                "let a step of the role forward do it, or remove offload",
            )
    if full_name(pool.backend, BACKENDS) == BACKENDS["deepspeed"]:
        yield from _deepspeed_offload(pool, structure)


def _deepspeed_offload(pool: PoolConfig, structure: Structure) -> Iterator[tuple[str, str]]:
    options = {"zero": _STAGE, "offload_optimizer": False, **with_zero(pool.backend_options, pool)}
    models = structure.models
    frozen = [n.model for n in structure.placement.after if n.model is not None and n.model not in models.trained]
    half = [name for name in models.trained if models.configs[name].dtype == "bfloat16"]
    if options["zero"] == 3 and frozen:
        yield f"backend 'deepspeed' cannot move {frozen[0]!r}, which is frozen, in ZeRO stage 3", "zero: 2, or fsdp"
    if options["zero"] == 1 and half:
        yield f"backend 'deepspeed' cannot move {half[0]!r} in ZeRO stage 1 with bfloat16", "zero: 2, or fsdp"
    if options["offload_optimizer"] is True:
        yield (
            "backend_options.offload_optimizer keeps moments and masters in the CPU's memory all the time",
            "keep one of the two",
        )


def dump_problems(recipe: Recipe, structure: Structure, where: Where) -> list[Problem]:
    """Fields that are to be dumped and that no step writes."""
    key = "run.dump_fields"
    steps = (*structure.steps, *structure.private.all)
    known = [field for node in steps for field in node.writes]
    return [
        Problem(where(key), key, f"no step of the flow writes {name!r}", did_you_mean(name, set(known)))
        for name in recipe.run.dump_fields or ()
        if not written(name, known) and not any(written(field, [name]) for field in known)
    ]


def divided_problems(recipe: Recipe, structure: Structure, where: Where) -> list[Problem]:
    """Such a backend on a pool that does not train, or with other options on some of its workers."""
    layout, placement = recipe.layout, structure.placement
    problems = []
    held = [node.name for node in placement.before if node.role in ("forward", "train")]
    generating = layout.pools[placement.generating]
    if held and placement.generating != placement.training and divides_models(generating):
        key = f"layout.pools.{placement.generating}.backend"
        message = f"{generating.backend!r} divides models over training workers, and this pool runs {', '.join(held)}"
        cure = f"backend: torch, or give the step to pool {placement.training!r}"
        problems.append(Problem(where(key), key, message, cure))
    training = layout.pools[placement.training]
    if divides_models(training):
        shared = with_zero(training.backend_options, training)
        for index, own in training.each.items():
            # A worker's own document spells out all that it gets.
            if own.backend_options is not None and with_zero(own.backend_options, training) != shared:
                key = f"layout.pools.{placement.training}.each.{index}.backend_options"
                message = f"the workers that {training.backend!r} divides a model over need the same options"
                problems.append(Problem(where(key), key, message, "set backend_options of the pool"))
    return problems


CHECKS: tuple[tuple[Check, Literal["always", "if sound"]], ...] = (
    (ledger_problems, "always"),
    (asynchrony_problems, "always"),
    (shrinking_problems, "always"),
    (deterministic_problems, "always"),
    (divided_problems, "if sound"),
    (option_problems, "if sound"),
    (grouping_problems, "if sound"),
    (offload_problems, "if sound"),
    (dump_problems, "always"),
    (shared_gpu_problems, "if sound"),
    (memory_problems, "always"),
)
