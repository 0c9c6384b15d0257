"""Backends that divide a model over the workers of a pool: what the plan must know of them, without importing them."""

from __future__ import annotations

import ast

from distflow.config.check import Where
from distflow.config.plugins import BACKENDS, full_name
from distflow.config.schema import LayoutConfig, PoolConfig, Recipe
from distflow.errors import Problem
from distflow.flow.role_placement import Placement
from distflow.flow.source import find_source
from distflow.flow.structure import Structure
from distflow.flow.zero import stage_of, with_zero


def divides_models(pool: PoolConfig) -> bool:
    """Whether the pool's backend is declared with `lockstep = True` in the body of its class.

    ZeRO below stage 2 divides less, and does without it.
    """
    if stage_of(pool) in (0, 1):
        return False
    node = find_source(full_name(pool.backend, BACKENDS)).node
    return isinstance(node, ast.ClassDef) and any(_says_lockstep(statement) for statement in node.body)


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
