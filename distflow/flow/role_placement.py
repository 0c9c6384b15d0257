"""Placement: which pool runs which step, and where the samples cross from generation to training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distflow.config.schema import LayoutConfig
from distflow.errors import Problems, did_you_mean
from distflow.flow.graph import StepNode
from distflow.types import written


@dataclass(frozen=True, slots=True)
class Placement:
    """One pool generates, one trains (possibly the same); samples cross after the first steps."""

    generating: str
    training: str
    before: tuple[StepNode, ...]
    """Steps up to the crossing, on the generating pool."""
    after: tuple[StepNode, ...]
    """Steps after it, on the training pool."""


def place(steps: Sequence[StepNode], layout: LayoutConfig, problems: Problems) -> Placement | None:
    """Assign every step (in order) to a pool; None if that is impossible, with the reasons in `problems`."""
    _check_names(steps, layout, problems)
    pool_of = {node.name: _pool_for(node, layout, problems) for node in steps}
    generating = _only_pool("generate", steps, pool_of, problems)
    training = _only_pool("train", steps, pool_of, problems)
    if None not in pool_of.values():
        used = [pool for pool in dict.fromkeys(pool_of.values()) if pool is not None]
        for name in layout.pools:
            if name not in used:
                _report_idle(name, used, layout, problems)
    if generating is None or training is None:
        return None
    _refuse_unbuilt(pool_of, generating, training, layout, problems)
    before, after = _split(steps, pool_of, generating, training)
    _check_crossing(before, after, generating, problems)
    return Placement(generating, training, before, after)


def _check_names(steps: Sequence[StepNode], layout: LayoutConfig, problems: Problems) -> None:
    known = {node.name for node in steps}
    for name, pool in layout.pools.items():
        for index, step in enumerate(pool.steps):
            if step not in known and not step.startswith("+"):
                key = f"layout.pools.{name}.steps.{index}"
                cure = did_you_mean(step, known) + "; write a step of the pool's own as +./file.py:name"
                problems.add(key, f"the flow has no step {step!r}", cure)


def _pool_for(node: StepNode, layout: LayoutConfig, problems: Problems) -> str | None:
    named = [name for name, pool in layout.pools.items() if node.name in pool.steps]
    by_role = [name for name, pool in layout.pools.items() if node.role in pool.roles]
    rest = [name for name, pool in layout.pools.items() if "*" in pool.roles]
    takers = named or by_role or rest
    if len(takers) == 1:
        return takers[0]
    if takers:
        message = f"the pools {', '.join(takers)} all take step {node.name!r} (role {node.role!r}); not built yet"
        cure = f"leave {node.role} to one pool and raise its count"
    else:
        message = f"no pool takes the role {node.role!r} (step {node.name!r})"
        cure = f"add {node.role} to the `roles` of a pool, or use roles: ['*']"
    problems.add("layout.pools", message, cure)
    return None


def _report_idle(name: str, used: Sequence[str], layout: LayoutConfig, problems: Problems) -> None:
    """A pool without work: most often an override that sets a pool of another layout."""
    pool = layout.pools[name]
    if pool.roles or pool.steps:
        message, cure = "no step of the flow runs on this pool", "remove it, or give it another role"
    else:
        others = "split and async have rollout and trainer, colocated has worker"
        message = f"the layout gives pool {name} no roles, so no step runs on it"
        cure = f"set it for {', '.join(used)}, or choose another layout: {others}"
    problems.add(f"layout.pools.{name}", message, cure)


def _only_pool(
    role: str, steps: Sequence[StepNode], pool_of: Mapping[str, str | None], problems: Problems
) -> str | None:
    of_role = [node for node in steps if node.role == role]
    pools = list(dict.fromkeys(pool_of[node.name] for node in of_role))
    if not of_role:
        problems.add("flow.steps", f"no step has the role {role!r}", "see recipes/flow/grpo.yaml")
    elif role == "generate" and len(of_role) > 1:
        names = " and ".join(node.name for node in of_role)
        message = f"two steps generate, {names}; this is not built yet"
        problems.add("flow.steps", message, "keep one of them")
        return None
    if len(pools) > 1 and None not in pools:
        message = f"steps of role {role!r} are placed on the pools {', '.join(map(str, pools))}; this is not built yet"
        cure = "place them all on one pool, as the layouts split and colocated do"
        problems.add("layout.pools", message, cure)
        return None
    return pools[0] if pools else None


def _refuse_unbuilt(
    pool_of: Mapping[str, str | None],
    generating: str,
    training: str,
    layout: LayoutConfig,
    problems: Problems,
) -> None:
    for name in dict.fromkeys(pool_of.values()):
        if name not in (generating, training, None):
            key = f"layout.pools.{name}"
            message = "a pool that neither generates nor trains is not built yet"
            cure = f"give its roles to {generating} or {training}, as layout=split does"
            problems.add(key, message, cure)


def _split(
    steps: Sequence[StepNode], pool_of: Mapping[str, str | None], generating: str, training: str
) -> tuple[tuple[StepNode, ...], tuple[StepNode, ...]]:
    if generating != training:
        first = tuple(node for node in steps if pool_of[node.name] == generating)
        return first, tuple(node for node in steps if pool_of[node.name] == training)
    before: list[StepNode] = []
    after: list[StepNode] = []
    for node in steps:
        late = any(written(field, other.writes) for other in after for field in node.reads)
        (before if node.role in ("generate", "score") and not late else after).append(node)
    return tuple(before), tuple(after)


def _check_crossing(before: Sequence[StepNode], after: Sequence[StepNode], generating: str, problems: Problems) -> None:
    for node in before:
        for late in after:
            for field in node.reads:
                if written(field, late.writes):
                    key = f"flow.steps.{node.name}"
                    message = (
                        f"runs on pool {generating!r} and reads {field!r}, which step {late.name!r} writes only after "
                        "the samples have gone to the training pool"
                    )
                    cure = f"add {node.name} to the `steps` of the training pool"
                    problems.add(key, message, cure)
