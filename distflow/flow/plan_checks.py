"""Checks of a whole plan, as one table: each takes a recipe with its structure and adds the problems that it finds.

Checks marked `always` run on every recipe. Those marked `if sound` need known names and values that fit together, so
they run only while no problem has been found: what could not be looked up has been reported already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from distflow.config.plugins import BACKENDS, ENGINES, LIBRARIES, full_name
from distflow.config.schema import PoolConfig, Recipe
from distflow.errors import Problems, did_you_mean
from distflow.flow.adapters import check_adapters, check_quantized
from distflow.flow.data_check import check_difficulty, check_fed
from distflow.flow.deterministic import check_deterministic
from distflow.flow.gpus import check_shared_gpus
from distflow.flow.memory import check_sample_memory
from distflow.flow.plan import PoolPlan
from distflow.flow.plugin_options import check_options, check_sampling
from distflow.flow.sharding import divides_models
from distflow.flow.structure import Structure
from distflow.flow.training_fit import check_optimizers
from distflow.flow.validation import check_goals, check_validation
from distflow.flow.wait_order import check_waits
from distflow.flow.weight_link import check_weight_link
from distflow.types import written

Check = Callable[[Recipe, Structure, Problems], None]
_STAGE = 2
"""ZeRO stage of backend deepspeed where its options name none."""


def check_plan(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Add everything that is wrong, in the order of the table."""
    for check, when in CHECKS:
        if when == "always" or not problems:
            check(recipe, structure, problems)


def check_ledgers(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse fewer ledgers than training workers; not in the table, since a worker's own recipe may name more."""
    owners = structure.home.count
    if recipe.batch.ledgers < owners:
        message = f"{recipe.batch.ledgers} ledgers are too few for {owners} training workers"
        hint = f"batch.ledgers={owners} or more, or fewer workers in pool {structure.home.name!r}"
        problems.add("batch.ledgers", message, hint, others=(f"layout.pools.{structure.home.name}.count",))


def check_warmup(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse training steps in which nothing would be trained."""
    policies = {structure.models.primary, *(node.model for node in structure.steps if node.role == "generate")}
    if recipe.batch.critic_warmup and policies.issuperset(structure.models.trained):
        problems.add("batch.critic_warmup", "this flow trains no critic", "0, or flow=ppo")


def check_read_batch(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse, where samples are read from the data, to stop by how far a policy has moved from the one that sampled."""
    if structure.reads is not None and recipe.batch.target_kl is not None:
        message = f"step {structure.reads.name!r} reads the samples from the data: no policy has sampled them"
        problems.add("batch.target_kl", message, "remove it")


def check_refresh(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse to refresh weights at a staleness bound that does not exist."""
    if recipe.layout.max_staleness == "unbounded" and recipe.layout.schedule != "fifo":
        message = (
            f"{recipe.layout.schedule} would change what is trained on: when layout.max_staleness is unbounded, groups "
            "are trained in order of arrival"
        )
        hint = "layout.max_staleness=1, or another bound; or layout.schedule=fifo"
        problems.add("layout.schedule", message, hint, others=("layout.max_staleness",))
    if recipe.layout.max_staleness == "unbounded" and recipe.layout.refresh == "at_bound":
        message = "at_bound never takes newer weights when layout.max_staleness is unbounded"
        hint = "layout.refresh=eager or when_idle, or a bound"
        problems.add("layout.refresh", message, hint, others=("layout.max_staleness",))


def check_shrinking(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse to shrink a pool of one worker."""
    if recipe.layout.on_failure != "shrink":
        return
    for pool in structure.pools:
        if pool.homes and pool.count == 1:
            message = f"shrink continues without a training worker, and pool {pool.name!r} has only one"
            count = f"layout.pools.{pool.name}.count"
            problems.add("layout.on_failure", message, f"on_failure: restart, or {count}=2 or more", others=(count,))


def check_grouping(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse an engine and a backend that both create torch's default process group: a process has only one.

    That is such an engine on a worker that trains in a group, with others or by a backend that always creates one.
    """
    for planned in structure.pools:
        pool = recipe.layout.pools[planned.name]
        if planned.takes_turns and (pool.count > 1 or pool.backend != "torch"):
            _check_engines(f"layout.pools.{planned.name}", pool, problems)


def _check_engines(pool_key: str, pool: PoolConfig, problems: Problems) -> None:
    hint = "engine torch or sglang, or a pool of its own for generation, as in layout=split"
    group = f"the process group that {pool.backend!r} on {pool.count} worker(s) trains in"
    for key, engine in _engines(pool_key, pool):
        library = LIBRARIES.get(full_name(engine, ENGINES))
        if library is not None and library.makes_group:
            message = f"{engine} cannot share a worker with {group}: each creates torch's default one"
            problems.add(key, message, hint, others=(f"{pool_key}.backend", f"{pool_key}.count"))


def _engines(pool_key: str, pool: PoolConfig) -> Iterator[tuple[str, str]]:
    """The engines of a pool and of single workers of it, each with its key."""
    yield f"{pool_key}.engine", pool.engine
    for index, own in pool.each.items():
        if own.engine is not None:
            yield f"{pool_key}.each.{index}.engine", own.engine


def check_several_engines(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse several models on engines of which a process can have only one."""
    for planned in structure.pools:
        if len(planned.generates) < 2:
            continue
        for key, engine in _engines(f"layout.pools.{planned.name}", recipe.layout.pools[planned.name]):
            library = LIBRARIES.get(full_name(engine, ENGINES))
            if library is not None and library.one_a_process:
                message = f"{engine} with {' and '.join(planned.generates)} in one worker is not built yet"
                problems.add(key, message, "engine torch, or a pool of its own for each model")


def check_environments(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse a process for episodes where there are none."""
    for planned in structure.pools:
        if recipe.layout.pools[planned.name].environments == "process" and not planned.generates:
            message = f"pool {planned.name!r} generates nothing, so it has no episodes"
            problems.add(
                f"layout.pools.{planned.name}.environments", message, "remove it, or set it on a pool that does"
            )


def check_offload(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse `offload` on pools whose device is not shared by two sides, or where something cannot leave it."""
    for planned in structure.pools:
        pool = recipe.layout.pools[planned.name]
        if pool.offload:
            for message, hint in _offload_complaints(planned, pool, structure):
                key = f"layout.pools.{planned.name}"
                problems.add(f"{key}.offload", message, hint, others=(f"{key}.zero", f"{key}.backend", f"{key}.roles"))


def _offload_complaints(planned: PoolPlan, pool: PoolConfig, structure: Structure) -> Iterator[tuple[str, str]]:
    if not planned.takes_turns:
        yield (
            f"pool {planned.name!r} does not both generate and train, so nothing takes turns on its devices",
            "remove it, or give all roles to one pool, as in layout=colocated",
        )
        return
    models = " and ".join(planned.generates)
    if len(planned.generates) > 1:
        yield f"it generates with {models}: not built yet for several engines", "a pool of its own for one of them"
    elif structure.models.primary not in planned.generates:
        yield f"it generates with {models}, a further model: not built yet", "remove it, or a pool that only generates"
    here = [node for node in structure.on(planned.name) if node in structure.before_custody]
    for node in (*here, *structure.private.all):
        if node.model is not None and node.role != "generate":
            yield (
                f"step {node.name!r} uses model {node.model!r} while the worker generates, when models are offloaded",
                "use a step of the role forward instead, or remove offload",
            )
    if full_name(pool.backend, BACKENDS) == BACKENDS["deepspeed"]:
        yield from _deepspeed_offload(planned, pool, structure)


def _deepspeed_offload(planned: PoolPlan, pool: PoolConfig, structure: Structure) -> Iterator[tuple[str, str]]:
    options = {"zero": _STAGE, "offload_optimizer": False, **pool.backend_options_of()}
    half = [name for name in planned.homes if structure.models.configs[name].dtype == "bfloat16"]
    if options["zero"] == 3 and planned.frozen:
        yield (
            f"backend 'deepspeed' cannot offload {planned.frozen[0]!r}, which is frozen, in ZeRO stage 3",
            "zero: 2, or fsdp",
        )
    if options["zero"] == 1 and half:
        yield f"backend 'deepspeed' cannot offload {half[0]!r} in ZeRO stage 1 with bfloat16", "zero: 2, or fsdp"
    if options["offload_optimizer"] is True:
        yield (
            "backend_options.offload_optimizer keeps moments and masters in the CPU's memory all the time",
            "keep one of the two",
        )


def check_dumps(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse fields in `run.dump_fields` that no step writes."""
    steps = (*structure.steps, *structure.unread, *structure.private.all)
    known = [field for node in steps for field in (*node.writes, *node.may_write)]
    for name in recipe.run.dump_fields or ():
        if not written(name, known) and not any(written(field, [name]) for field in known):
            problems.add("run.dump_fields", f"no step of the flow writes {name!r}", did_you_mean(name, set(known)))


def check_sharding(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse backends that divide models on a pool that does not train, or with options that differ by worker."""
    for planned in structure.pools:
        pool = recipe.layout.pools[planned.name]
        held = [node.name for node in structure.on(planned.name) if node.role != "generate" and node.model is not None]
        if not held or not divides_models(pool):
            continue
        for name in (*planned.frozen, *planned.homes):
            if structure.models.configs[name].head == "score":
                message = f"{pool.backend!r} cannot hold {name!r}, whose head is score"
                hint = "backend: torch, or give its step to another pool"
                problems.add(f"layout.pools.{planned.name}.backend", message, hint)
        if planned.homes:
            _check_same_options(planned.name, pool, problems)
        else:
            message = f"{pool.backend!r} divides models over training workers, and this pool runs {', '.join(held)}"
            hint = f"backend: torch, or give the step to pool {structure.home.name!r}"
            problems.add(f"layout.pools.{planned.name}.backend", message, hint)


def _check_same_options(name: str, pool: PoolConfig, problems: Problems) -> None:
    for index, own in pool.each.items():
        # A worker's own document spells out every option.
        if pool.backend_options_of(own) != pool.backend_options_of():
            key = f"layout.pools.{name}.each.{index}.backend_options"
            message = f"the workers that {pool.backend!r} divides a model over need the same options"
            problems.add(key, message, "set backend_options of the pool")


CHECKS: tuple[tuple[Check, Literal["always", "if sound"]], ...] = (
    (check_refresh, "always"),
    (check_warmup, "always"),
    (check_read_batch, "always"),
    (check_shrinking, "always"),
    (check_deterministic, "always"),
    (check_optimizers, "always"),
    (check_adapters, "if sound"),
    (check_quantized, "if sound"),
    (check_sharding, "if sound"),
    (check_options, "if sound"),
    (check_sampling, "if sound"),
    (check_grouping, "if sound"),
    (check_several_engines, "if sound"),
    (check_environments, "if sound"),
    (check_offload, "if sound"),
    (check_dumps, "always"),
    (check_shared_gpus, "if sound"),
    (check_sample_memory, "always"),
    (check_waits, "if sound"),
    (check_validation, "always"),
    (check_difficulty, "always"),
    (check_fed, "always"),
    (check_goals, "always"),
    (check_weight_link, "if sound"),
)
