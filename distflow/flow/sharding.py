"""Backends that divide a model over the workers of a pool: what the plan must know of them, without importing them.

The ZeRO stage of a pool is one option of one backend, with a key of its own because everybody changes it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from distflow.config.check import Where
from distflow.config.plugins import BACKENDS, full_name
from distflow.config.schema import LayoutConfig, PoolConfig
from distflow.errors import Problem
from distflow.flow.resolve import find_source
from distflow.flow.role_placement import Placement

_OPTION = "zero"


def zero_problems(layout: LayoutConfig, where: Where) -> list[Problem]:
    """A stage for a backend that has none, or two stages that differ."""
    problems = []
    for name, pool in layout.pools.items():
        key = f"layout.pools.{name}.zero"
        if pool.zero is None:
            continue
        if pool.backend not in ("deepspeed", BACKENDS["deepspeed"]):
            message = f"backend {pool.backend!r} has no ZeRO stages"
            problems.append(Problem(where(key), key, message, "add backend: deepspeed, or remove it"))
        spelled = {f"layout.pools.{name}": pool.backend_options}
        spelled |= {f"layout.pools.{name}.each.{i}": own.backend_options or {} for i, own in pool.each.items()}
        for at, options in spelled.items():
            if _OPTION in options and options[_OPTION] != pool.zero:
                message = f"{pool.zero}, and {at}.backend_options.zero is {options[_OPTION]!r}"
                problems.append(Problem(where(key), key, message, "keep one of them"))
    return problems


def stage_of(pool: PoolConfig) -> int | None:
    """The stage that a pool of backend deepspeed spells out."""
    options = with_zero(pool.backend_options, pool)
    deepspeed = pool.backend in ("deepspeed", BACKENDS["deepspeed"])
    return options[_OPTION] if deepspeed and _OPTION in options else None


def with_zero(options: Mapping[str, Any], pool: PoolConfig) -> Mapping[str, Any]:
    """The options as the backend gets them."""
    return options if pool.zero is None else {**options, _OPTION: pool.zero}


def divides_models(pool: PoolConfig) -> bool:
    """Whether the pool's backend is declared with `lockstep = True` in the body of its class.

    ZeRO below stage 2 divides less, and does without it.
    """
    if stage_of(pool) in (0, 1):
        return False
    node = find_source(full_name(pool.backend, BACKENDS)).node
    return isinstance(node, ast.ClassDef) and any(_says_lockstep(statement) for statement in node.body)


def divided_notes(layout: LayoutConfig, placement: Placement) -> list[str]:
    """What a reader of the plan should know."""
    pool = layout.pools[placement.training]
    if not divides_models(pool):
        return []
    alone = "" if pool.count == 1 else ", which take part in every forward and backward; none takes samples of another"
    return [f"backend {pool.backend!r} divides models over the {pool.count} worker(s) of {placement.training!r}{alone}"]


def _says_lockstep(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign(targets=[ast.Name(id="lockstep")], value=ast.Constant(value=True)):
            return True
        case ast.AnnAssign(target=ast.Name(id="lockstep"), value=ast.Constant(value=True)):
            return True
    return False
