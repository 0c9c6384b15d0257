"""Sites: which pool runs which step, and which steps run before custody of the samples passes to the owners."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from distflow.config.paths import layouts_with, shipped_steps
from distflow.config.schema import LayoutConfig
from distflow.errors import Problems, did_you_mean, nearest
from distflow.flow.graph import StepNode
from distflow.flow.model_roles import Models
from distflow.flow.plan import PoolPlan
from distflow.types import written

VALIDATE = "validate"
"""The role of a pool."""


def find_sites(
    steps: Sequence[StepNode], names: Collection[str], layout: LayoutConfig, problems: Problems
) -> dict[str, str]:
    """The pool of each step by name; steps without a pool are reported, and so are pools without a role.

    `names`: of all steps of the flow, also those that are left out.
    """
    _check_names(names, layout, problems)
    at_home = [node for node in steps if _runs_at_home(node, steps, layout)]
    owned = [node for node in steps if node.role in ("read", "client")]
    others = [node for node in steps if node not in at_home and node not in owned]
    sites = {node.name: pool for node in others if (pool := _pool_for(node, layout, problems)) is not None}
    for node in at_home:
        home = find_home(steps, sites, str(node.model))
        if home is not None:
            sites[node.name] = home
    for node in owned:
        # Who owns the samples reads them, and gives them to clients.
        home = find_home(steps, sites, "")
        if home is not None:
            sites[node.name] = home
    if len(sites) == len(steps):
        for name in layout.pools:
            if name not in sites.values() and not (layout.pools[name].roles or layout.pools[name].steps):
                _report_idle(name, list(dict.fromkeys(sites.values())), problems)
    return sites


def _runs_at_home(node: StepNode, steps: Sequence[StepNode], layout: LayoutConfig) -> bool:
    """Whether a step goes where its model is trained: it then computes with the newest version."""
    trained = any(other.role == "train" and other.model == node.model for other in steps)
    named = any(node.name in pool.steps for pool in layout.pools.values())
    return node.role == "forward" and node.model is not None and trained and not named


def find_home(steps: Sequence[StepNode], sites: Mapping[str, str], model: str) -> str | None:
    """The pool of the train step of a model; if no step trains it, that of any train step; None if there is none."""
    training = [node for node in steps if node.role == "train" and node.name in sites]
    own = [node for node in training if node.model == model]
    return next((sites[node.name] for node in (*own, *training)), None)


def steps_before_custody(
    steps: Sequence[StepNode], sites: Mapping[str, str], primary: str, home: str
) -> tuple[StepNode, ...]:
    """The steps that run, or are asked for, before the owners get the samples, in order.

    These are all steps of a pool that only generates. A home that generates too leaves to the owner's side what reads a
    field that is only written there. Score steps elsewhere are asked for by the generating pool.
    """
    rollouts = generating_pools(steps, sites, primary)
    before: list[StepNode] = []
    after: list[StepNode] = []
    for node in steps:
        if node.name not in sites:
            continue
        pool = sites[node.name]
        if pool == home:
            late = any(written(field, other.writes) for other in after for field in node.reads)
            early = node.role == "read" or (home in rollouts and node.role in ("generate", "score") and not late)
        else:
            early = pool in rollouts or node.role in ("generate", "score")
        (before if early else after).append(node)
    return tuple(before)


def generating_pools(steps: Sequence[StepNode], sites: Mapping[str, str], model: str) -> list[str]:
    """The pools that generate with a model."""
    nodes = (node for node in steps if node.role == "generate" and node.model == model and node.name in sites)
    return list(dict.fromkeys(sites[node.name] for node in nodes))


def plan_pools(
    steps: Sequence[StepNode], sites: Mapping[str, str], models: Models, layout: LayoutConfig
) -> tuple[PoolPlan, ...]:
    """The pools that have work: first those that generate, then homes, then services."""
    placed = [node for node in steps if node.name in sites]
    first = [*_with_role("generate", placed), *_with_role("train", placed), *placed]
    return tuple(_pool(name, placed, sites, models, layout) for name in dict.fromkeys(sites[n.name] for n in first))


def find_validating(layout: LayoutConfig, problems: Problems) -> str | None:
    """The pool that generates for validation only; None if there is none."""
    found = [name for name, pool in layout.pools.items() if VALIDATE in pool.roles]
    for name in found:
        pool = layout.pools[name]
        if pool.roles != [VALIDATE] or any(not step.startswith("+") for step in pool.steps):
            message = "a pool for validation does nothing else: it runs what the generating pool runs"
            problems.add(f"layout.pools.{name}", message, "roles: [validate], and no steps of the flow")
    for name in found[1:]:
        message = f"pool {found[0]!r} has the role {VALIDATE!r} already"
        problems.add(f"layout.pools.{name}.roles", message, f"raise layout.pools.{found[0]}.count instead")
    return found[0] if found else None


def validating_pool(name: str, steps: Sequence[StepNode], layout: LayoutConfig) -> PoolPlan:
    """Generates for validation, and runs the `steps` of the pool that generates for training."""
    return PoolPlan(
        name=name,
        count=layout.pools[name].count,
        steps=tuple(node.name for node in steps),
        generates=tuple(node.model for node in _with_role("generate", steps) if node.model is not None),
        homes=(),
        frozen=tuple(dict.fromkeys(n.model for n in steps if n.role != "generate" and n.model is not None)),
        validates=True,
    )


def _with_role(role: str, steps: Iterable[StepNode]) -> list[StepNode]:
    return [node for node in steps if node.role == role]


def _pool(
    name: str, steps: Sequence[StepNode], sites: Mapping[str, str], models: Models, layout: LayoutConfig
) -> PoolPlan:
    here = [node for node in steps if sites[node.name] == name]
    homes = {node.model: None for node in _with_role("train", here) if node.model is not None}
    held = {node.model: None for node in here if node.role != "generate" and node.model is not None}
    return PoolPlan(
        name=name,
        count=layout.pools[name].count,
        steps=tuple(node.name for node in here),
        generates=tuple(node.model for node in _with_role("generate", here) if node.model is not None),
        homes=tuple(model for model in models.trained if model in homes),
        frozen=tuple(model for model in held if model not in homes),
    )


def _check_names(known: Collection[str], layout: LayoutConfig, problems: Problems) -> None:
    for name, pool in layout.pools.items():
        for index, step in enumerate(pool.steps):
            if step not in known and not step.startswith("+") and step not in shipped_steps():
                key = f"layout.pools.{name}.steps.{index}"
                hint = did_you_mean(step, known) + "; write a step of the pool's own as +./file.py:name"
                problems.add(key, f"the flow has no step {step!r}", hint)


def _pool_for(node: StepNode, layout: LayoutConfig, problems: Problems) -> str | None:
    named = [name for name, pool in layout.pools.items() if node.name in pool.steps]
    by_role = [name for name, pool in layout.pools.items() if node.role in pool.roles]
    rest = [name for name, pool in layout.pools.items() if "*" in pool.roles]
    takers = named or by_role or rest
    if len(takers) == 1:
        return takers[0]
    if takers:
        message = f"the pools {', '.join(takers)} all take step {node.name!r} (role {node.role!r})"
        hint = f"write `steps: [{node.name}]` in one of them, or leave {node.role} to it and raise its count"
    else:
        message = f"no pool takes the role {node.role!r} (step {node.name!r})"
        hint = f"add {node.role} to the `roles` of a pool, or use roles: ['*']"
    keys = [f"layout.pools.{name}{key}" for name in layout.pools for key in ("", ".roles", ".steps")]
    others = (*keys, *problems.where.removed("layout.pools"), f"flow.steps.{node.name}")
    problems.add("layout.pools", message, hint, others=others)
    return None


def _report_idle(name: str, used: Sequence[str], problems: Problems) -> None:
    """A pool without work: most often an override that sets a pool of another layout."""
    having = " or ".join(f"layout={layout}" for layout in layouts_with(name))
    others = f"{having} has it" if having else "split and async have rollout and trainer, colocated has worker"
    message = f"the layout gives pool {name} no roles, so no step runs on it"
    close = nearest(name, used)
    hint = f"set it for {', '.join(used)}, or choose another layout: {others}"
    hint = hint if close is None else f"did you mean {close!r}? Otherwise {hint}"
    key = f"layout.pools.{name}"
    emptied = problems.where.newest([key, f"{key}.steps", f"{key}.roles"])
    problems.add(emptied, message, hint if emptied == key else "remove it, or name the steps that the pool takes")
