"""What waits for what over a few training steps, as a graph of events; a cycle is a run that would never go on.

Events are those of pools, not of workers: all workers of a pool wait for the same things. Servers of calls answer in
all their waits, and send back what their model's version does not allow yet, so that an answer waits for its request
and for its version alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from distflow.config.schema import Recipe
from distflow.errors import Problems
from distflow.flow.edges import Edge
from distflow.flow.graph import StepNode
from distflow.flow.structure import Structure
from distflow.flow.wiring import wire
from distflow.types import written

WaitGraph = Mapping[str, frozenset[str]]
"""Event to the events that it waits for."""
_FARTHEST = 3
"""A larger staleness adds no other kinds of waits."""


def check_waits(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse a flow on a layout whose pools would wait for one another for ever."""
    bound = recipe.layout.max_staleness
    staleness = _FARTHEST if bound == "unbounded" else min(bound, _FARTHEST)
    cycle = find_cycle(wait_order(structure, wire(structure), staleness))
    if cycle:
        message = f"the run would stand still: {', which waits until '.join(cycle)}"
        problems.add("layout.pools", message, "give the steps in it to one pool")


def find_cycle(graph: WaitGraph) -> list[str]:
    """Events that wait for one another, the first also as the last; empty if there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def wait_order(structure: Structure, edges: Sequence[Edge], staleness: int) -> WaitGraph:
    """The events of as many training steps as can touch one another at this staleness, in policy versions."""
    graph = dict[str, set[str]]()
    for t in range(staleness + 3):
        for event, earlier in _waits(structure, edges, staleness, t):
            graph.setdefault(event, set()).update(earlier)
    return {event: frozenset(name for name in earlier if name in graph) for event, earlier in graph.items()}


def _waits(structure: Structure, edges: Sequence[Edge], staleness: int, t: int) -> Iterator[tuple[str, set[str]]]:
    """Events of training step t with what they wait for; names of events before the first step stand for nothing."""
    yield from _steps(structure, edges, staleness, t)
    home, early = structure.home.name, [node.name for node in structure.before_custody]
    yield _sent(t), {_done(structure.sites[name], name, t) for name in early}
    needed = {_done(structure.sites[node.name], node.name, t) for node in structure.after_custody if not _trains(node)}
    yield _closed(home, t), {_sent(t), _applied(home, t - 1), *needed}
    homes = [pool.name for pool in structure.pools if pool.homes]
    for name in homes:
        # One home is at most one training step ahead of another: they save at the same one.
        behind = {_applied(other, t - 2) for other in homes if other != name}
        own = {_done(name, node.name, t) for node in structure.on(name) if _trains(node)}
        yield _applied(name, t), {_closed(home, t), _applied(name, t - 1), *behind, *own}


def _steps(structure: Structure, edges: Sequence[Edge], staleness: int, t: int) -> Iterator[tuple[str, set[str]]]:
    nodes = (*structure.before_custody, *structure.after_custody)
    calls = {edge.name: edge for edge in edges if edge.kind == "call"}
    for node in nodes:
        pool, call = structure.sites[node.name], calls.get(node.name)
        fields = {
            other.name for other in nodes if other is not node and any(written(f, other.writes) for f in node.reads)
        }
        before = {_done(structure.sites[name], name, t) for name in fields}
        if call is not None and call.when != "before custody":
            before.add(_sent(t))
        yield _done(pool, node.name, t), before | _version(structure, node, call, t, staleness)


def _version(structure: Structure, node: StepNode, call: Edge | None, t: int, staleness: int) -> set[str]:
    """What a step waits for until its model's version is there and it is its pool's turn."""
    home = next((pool.name for pool in structure.pools if node.model in pool.homes), None)
    if node.role == "generate":
        own = next(pool for pool in structure.pools if pool.name == structure.sites[node.name])
        turn = {_applied(own.name, t - 1)} if own.takes_turns else set()
        return turn if home is None else {*turn, _applied(home, t - 1 - staleness)}
    if node not in structure.before_custody and call is None:
        return {_sent(t), _applied(structure.home.name, t - 1)}
    return {_applied(home, t - 1)} if home is not None else set()


def _trains(node: StepNode) -> bool:
    return node.role == "train" and node.model is not None


def _done(pool: str, step: str, t: int) -> str:
    return f"{pool} has run {step} of training step {t + 1}"


def _sent(t: int) -> str:
    return f"the samples of training step {t + 1} have been sent"


def _closed(pool: str, t: int) -> str:
    return f"{pool} has all of training step {t + 1}"


def _applied(pool: str, t: int) -> str:
    return f"{pool} has trained on training step {t + 1}"
