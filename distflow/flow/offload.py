"""`offload: true` of a pool: refused where nothing takes turns on the device, or something cannot leave it."""

from __future__ import annotations

from collections.abc import Iterator

from distflow.config.check import Where
from distflow.config.plugins import BACKENDS, full_name
from distflow.config.schema import PoolConfig, Recipe
from distflow.errors import Problem
from distflow.flow.structure import Structure
from distflow.flow.zero import with_zero

_STAGE = 2
"""Of backend deepspeed, where its options do not say."""


def offload_problems(recipe: Recipe, structure: Structure, where: Where) -> list[Problem]:
    """Of all pools that ask for it; engines and backends must be known."""
    problems = []
    for name, pool in recipe.layout.pools.items():
        if pool.offload:
            for message, cure in _complaints(name, pool, structure):
                key = f"layout.pools.{name}.offload"
                problems.append(Problem(where(key), key, message, cure))
    return problems


def _complaints(name: str, pool: PoolConfig, structure: Structure) -> Iterator[tuple[str, str]]:
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
        yield from _deepspeed(pool, structure)


def _deepspeed(pool: PoolConfig, structure: Structure) -> Iterator[tuple[str, str]]:
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
