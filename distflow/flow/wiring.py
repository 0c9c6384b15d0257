"""Infers the edges of the plan from what its steps read and write, and where they run: one function for each kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from distflow.flow.edges import DUMPED, ENDS, SAMPLES, VAL_SAMPLES, Asked, Edge, of_further_models
from distflow.flow.graph import StepNode
from distflow.flow.plan import Port
from distflow.flow.structure import Structure
from distflow.types import A_TOKEN, LOGGED, REWARD_PARTS, SEQUENCE, TOKENS, is_logged, is_reward_part, prefixed, written

_REWARDS = f"{REWARD_PARTS}*"
_DESCRIBED = ("reward", "score", "finish_reason")
"""Of the samples that a policy is trained on, what metrics show besides what its update reads."""
_IDENTITY = ("uid", "sample", SEQUENCE)
"""What a failing step names its rows by, and which of them are one sample: goes wherever a step runs."""


def wire(structure: Structure, dumped: Sequence[str] = ()) -> tuple[Edge, ...]:
    """All edges. `dumped`: further fields that owners write to disk."""
    edges = (
        *_leases(structure, dumped),
        *_calls(structure),
        *_clients(structure),
        *_rows(structure),
        *_weights(structure),
    )
    widths = structure.widths
    return tuple(
        replace(edge, widths={name: widths[name] for name in (*edge.fields, *edge.back) if name in widths})
        for edge in edges
    )


def ports_of(pool: str, edges: Sequence[Edge]) -> tuple[Port, ...]:
    """The ends of edges at each worker of a pool."""
    ports = []
    for edge in edges:
        for end, at, peer in zip(ENDS[edge.kind], (edge.source, edge.target), (edge.target, edge.source), strict=True):
            if at == pool:
                steps = edge.steps if edge.kind == "call" else ()
                ports.append(Port(edge.name, edge.kind, end, peer, edge.model, steps))
    return tuple(dict.fromkeys(ports))


def _leases(structure: Structure, dumped: Sequence[str]) -> Iterator[Edge]:
    """Pools that generate with the primary model lease from its home, and send the samples there."""
    before, private = structure.before_custody, structure.private.fills
    there = [*dict.fromkeys(field for node in before for field in node.writes), *private]
    read = {field for node in structure.after_custody for field in node.reads}
    wanted = {*read, *DUMPED, *(field for field in there if written(field, dumped) or _meant(field, dumped))}
    wanted |= {*of_further_models(DUMPED, before), *(field for field in there if is_reward_part(field))}
    fields = [field for field in there if field in wanted]
    fields += [field for field in sorted(read) if field not in fields and written(field, there)]
    fields += [prefixed(_REWARDS, node.prefix) for node in before if node.role == "score"]
    fields += [field for node in before for field in node.may_write if is_logged(field)]
    # Of those that are left out the reason is known by that.
    fields += [prefixed(f"{LOGGED}*", node.prefix) for node in before if node.settings.get("on_error") == "zero"]
    for pool in structure.pools:
        if structure.models.primary in pool.generates:
            yield Edge(
                name=VAL_SAMPLES if pool.validates else SAMPLES,
                kind="lease",
                source=pool.name,
                target=structure.home.name,
                fields=tuple(dict.fromkeys(fields)),
                fills={field: value for field, value in private.items() if written(field, fields)},
                steps=tuple(node.name for node in before),
                compares=any(node.role == "train" and "group" in node.reads for node in structure.steps),
                baseline=any("baseline" in node.writes for node in structure.steps),
            )


def _meant(pattern: str, names: Sequence[str]) -> bool:
    """Whether a step that writes by a pattern may write one of these."""
    return any(written(name, [pattern]) for name in names)


def _calls(structure: Structure) -> Iterator[Edge]:
    """Whoever has the samples asks the pool that runs a step, if that is another one."""
    rollouts = [pool.name for pool in structure.pools if structure.models.primary in pool.generates]
    for node in structure.before_custody if rollouts else ():
        if structure.sites[node.name] not in rollouts:
            askers = [pool.name for pool in structure.pools if pool.name == structure.rollout.name or pool.validates]
            yield from (_call(structure, node, asker, "before custody") for asker in askers)
    for node in structure.after_custody:
        if structure.sites[node.name] != structure.home.name and node.role != "train":
            in_window = node.model in structure.models.trained
            yield _call(structure, node, structure.home.name, "in window" if in_window else "on arrival")


def _call(structure: Structure, node: StepNode, asker: str, when: Asked) -> Edge:
    trained, generates = node.model in structure.models.trained, node.role == "generate"
    # Whoever runs the step must be able to see whether it writes one value for each of them.
    a_token = any(written(prefixed(field, node.prefix), node.writes) for field in A_TOKEN)
    lengths = [prefixed(TOKENS, node.prefix)] if a_token and not generates else []
    groups = _known(["group"], structure) if node.declaration.spec.scope == "group" else []
    return Edge(
        name=node.name,
        kind="call",
        source=asker,
        target=structure.sites[node.name],
        fields=tuple(dict.fromkeys((*_known(_IDENTITY, structure), *groups, *node.reads, *lengths))),
        back=(*node.writes, *node.may_write),
        model=node.model,
        steps=(node.name,),
        when=when,
        version="" if node.model is None else "at least" if generates else "exact" if trained else "frozen",
    )


def _clients(structure: Structure) -> Iterator[Edge]:
    """Owners wait for what clients write about the samples that have arrived."""
    home = structure.home.name
    for node in structure.after_custody:
        if node.role == "client":
            yield Edge(
                name=node.name,
                kind="client",
                source=home,
                target=home,
                fields=node.reads,
                back=node.writes,
                steps=(node.name,),
                when="on arrival",
            )


def _rows(structure: Structure) -> Iterator[Edge]:
    """Owners deal the rows that further models are trained on to the home of these."""
    for pool in structure.pools:
        if not pool.homes or pool.name == structure.home.name:
            continue
        nodes = [node for node in structure.on(pool.name) if node.role == "train"]
        read = [*_known([SEQUENCE], structure), *(field for node in nodes for field in node.reads)]
        read += [field for node in nodes for field in _described(node, structure)]
        yield Edge(
            name=f"{pool.homes[0]}_rows",
            kind="rows",
            source=structure.home.name,
            target=pool.name,
            fields=tuple(dict.fromkeys(read)),
            model=pool.homes[0] if len(pool.homes) == 1 else None,
            steps=tuple(node.name for node in nodes),
        )


def _described(node: StepNode, structure: Structure) -> list[str]:
    """What the metrics of a further policy's update show of its samples."""
    if not node.prefix or prefixed("advantage", node.prefix) not in node.reads:
        return []
    return _known([prefixed(field, node.prefix) for field in _DESCRIBED], structure)


def _known(names: Sequence[str], structure: Structure) -> list[str]:
    """Those of these fields that samples have when the owners get them."""
    return [name for name in names if any(name in node.writes for node in structure.before_custody)]


def _weights(structure: Structure) -> Iterator[Edge]:
    """A model's home gives each version to all that generate, and to others that compute, with it."""
    for home in structure.pools:
        for model in home.homes:
            for pool in structure.pools:
                if model in pool.generates:
                    yield Edge(model, "weights", home.name, pool.name, model=model, reader="engine")
                if model in pool.frozen:
                    yield Edge(model, "weights", home.name, pool.name, model=model, reader="forward")
