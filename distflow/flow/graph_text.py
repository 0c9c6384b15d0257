"""The graph of a plan to read: pools, models and edges as lines of its page, and as a Mermaid flowchart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from distflow.flow.adapters import adapter_lines, shares_base
from distflow.flow.edges import VAL_SAMPLES, Edge, EdgeKind
from distflow.flow.lanes import ONE_HOST, Whereabouts, lanes_of
from distflow.flow.memory_fit import table
from distflow.flow.plan import ModelPlan, Plan, PoolPlan

_WAITS: Mapping[EdgeKind, str] = {
    "lease": "{target} for the groups of its training step; {source} for leases, where max_staleness or memory allows "
    "no more",
    "call": "{source} for what comes back, when nothing else is left to do; {target} for nobody",
    "rows": "{target} for the rows of its training step; {source} where that is more than one training step behind",
    "weights": "{target} for the version that its next group or request needs; {source} for nobody",
}
_TAKES_TURNS: Mapping[EdgeKind, str] = {
    "lease": "each of {source}, before it trains, until every owner has its groups of the training step",
    "client": "{source} for clients outside the run",
    "weights": "nobody",
}
"""Of edges whose two ends are one pool."""
_FIELDS_A_LINE = 4


def pool_lines(plan: Plan) -> list[str]:
    """A table of the pools."""
    rows = [[pool.name, str(pool.count), ", ".join(pool.steps), "; ".join(uses(pool))] for pool in plan.pools]
    return table([["pool", "workers", "steps", "models"], *rows])


def model_lines(plan: Plan) -> list[str]:
    """A table of the models, with who reads their weights."""
    rows = [[one.name, one.home or "none: frozen", ", ".join(_readers(plan, one)) or "-"] for one in plan.models]
    lines = table([["model", "home", "read by"], *rows])
    return [*lines, *_sharing(plan), *adapter_lines(plan.recipe.models, plan.trained_models)]


def _sharing(plan: Plan) -> Iterator[str]:
    """Frozen models that are no copies of their own."""
    for pool in plan.pools:
        for name in pool.frozen:
            other = shares_base(plan.recipe.models, pool.homes, plan.trained_models, name)
            if other is not None:
                yield f"{name}: computed by {other} with its adapters off, in {pool.name}: no copy"


def edge_lines(plan: Plan, where: Whereabouts = ONE_HOST) -> list[str]:
    """What crosses on each edge, and who may wait for whom."""
    lines = []
    for edge in plan.edges:
        lines.append(f"{edge.name} ({edge.kind}): {edge.source} -> {edge.target} over {lane_text(plan, edge, where)}")
        lines += [f"  {line}" for line in _contents(edge)]
        lines.append(f"  waits: {waits_of(edge)}")
    return lines


def lane_text(plan: Plan, edge: Edge, where: Whereabouts = ONE_HOST) -> str:
    """How what an edge carries travels, in a few words."""
    return ", ".join(lanes_of(plan, edge, where))


def waits_of(edge: Edge) -> str:
    """Who may wait for whom."""
    if edge.name == VAL_SAMPLES:
        return f"{edge.source} for leases; {edge.target} at the end of the run, for the rounds that are due"
    texts = _TAKES_TURNS if edge.source == edge.target else _WAITS
    return texts[edge.kind].format(source=edge.source, target=edge.target)


def mermaid(plan: Plan) -> str:
    """A flowchart for documents: https://mermaid.js.org/syntax/flowchart.html."""
    names = {pool.name: f"pool{number}" for number, pool in enumerate(plan.pools)}
    lines = ["flowchart LR"]
    for pool in plan.pools:
        text = [f"<b>{pool.name}</b> × {pool.count}", ", ".join(pool.steps), *uses(pool)]
        lines.append(f'    {names[pool.name]}["{"<br/>".join(text)}"]')
    for edge in plan.edges:
        text = [f"{edge.name} ({edge.kind})", *_wrapped(edge.fields), *_wrapped(edge.back, "back: ")]
        begin, end = ("-.", ".->") if edge.kind == "weights" else ("--", "-->")
        lines.append(f'    {names[edge.source]} {begin} "{"<br/>".join(text)}" {end} {names[edge.target]}')
    return "\n".join(lines) + "\n"


def uses(pool: PoolPlan) -> Iterator[str]:
    """What a pool does with models."""
    generates = "validates" if pool.validates else "generates with"
    for verb, models in ((generates, pool.generates), ("home of", pool.homes), ("runs frozen", pool.frozen)):
        if models:
            yield f"{verb} {', '.join(models)}"


def _readers(plan: Plan, model: ModelPlan) -> Iterator[str]:
    """Pools that take its versions, or load it once if it is frozen."""
    if model.home is None:
        yield from model.held_by
    else:
        yield from dict.fromkeys(e.target for e in plan.edges if e.kind == "weights" and e.model == model.name)


def _contents(edge: Edge) -> Iterator[str]:
    if edge.fields:
        yield f"fields: {', '.join(edge.fields)}"
    if edge.back:
        asked = f" (asked {edge.when})" if edge.when else ""
        yield f"back: {', '.join(edge.back)}{asked}"
    yield from (f"{field} is {value} where a worker lacks the step" for field, value in edge.fills.items())


def _wrapped(fields: Sequence[str], before: str = "") -> Iterator[str]:
    for first in range(0, len(fields), _FIELDS_A_LINE):
        yield ("" if first else before) + ", ".join(fields[first : first + _FIELDS_A_LINE])
