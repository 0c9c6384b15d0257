"""Backends that divide a model over the workers of a pool: what the plan must know of them, without importing them.

The ZeRO stage of a pool is one option of one backend, with a key of its own because everybody changes it.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from distflow.config.plugins import BACKENDS, full_name
from distflow.config.schema import LayoutConfig, PoolConfig
from distflow.errors import Problems
from distflow.flow.plan import PoolPlan
from distflow.flow.resolve import find_source

_OPTION = "zero"


def check_zero(layout: LayoutConfig, problems: Problems) -> None:
    """Refuse a stage for a backend without stages, and two stages that differ."""
    for name, pool in layout.pools.items():
        key = f"layout.pools.{name}.zero"
        if pool.zero is None:
            continue
        if pool.backend not in ("deepspeed", BACKENDS["deepspeed"]):
            problems.add(key, f"backend {pool.backend!r} has no ZeRO stages", "add backend: deepspeed, or remove it")
        spelled = {f"layout.pools.{name}": pool.backend_options}
        spelled |= {f"layout.pools.{name}.each.{i}": own.backend_options or {} for i, own in pool.each.items()}
        for at, options in spelled.items():
            if _OPTION in options and options[_OPTION] != pool.zero:
                message = f"{pool.zero}, and {at}.backend_options.zero is {options[_OPTION]!r}"
                problems.add(key, message, "keep one of them")


def divides_models(pool: PoolConfig) -> bool:
    """Whether the pool's backend is declared with `lockstep = True` in the body of its class.

    ZeRO below stage 2 divides less and does not need it.
    """
    options = pool.backend_options_of()
    if pool.backend in ("deepspeed", BACKENDS["deepspeed"]) and _OPTION in options and options[_OPTION] in (0, 1):
        return False
    node = find_source(full_name(pool.backend, BACKENDS)).node
    return isinstance(node, ast.ClassDef) and any(_says_lockstep(statement) for statement in node.body)


def divided_notes(layout: LayoutConfig, pools: Sequence[PoolPlan]) -> list[str]:
    """A note for the plan's page, where models are divided."""
    notes = []
    for name in (planned.name for planned in pools if planned.homes):
        pool = layout.pools[name]
        if divides_models(pool):
            all_join = ", which all take part in every forward and backward, and deal their samples by cost"
            note = f"backend {pool.backend!r} divides models over the {pool.count} worker(s) of {name!r}"
            notes.append(note + ("" if pool.count == 1 else all_join))
    return notes


def _says_lockstep(statement: ast.stmt) -> bool:
    match statement:
        case (
            ast.Assign(targets=[ast.Name(id="lockstep")], value=ast.Constant(value=True))
            | ast.AnnAssign(target=ast.Name(id="lockstep"), value=ast.Constant(value=True))
        ):
            return True
    return False
