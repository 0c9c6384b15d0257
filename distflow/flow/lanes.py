"""How what an edge carries travels: decided by each pair of workers, so by the layout and never part of the digest.

Example: rollout/0 and trainer/0 on host a, rollout/1 on host b: the edge `samples` from rollout to trainer takes "shm"
and "zmq"; the weights go by "shm" to rollout/0 and by "tcp" to the host of rollout/1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from distflow.flow.edges import Edge
from distflow.flow.plan import Plan

LaneName = Literal["inproc", "shm", "zmq", "tcp", "gloo"]
"""inproc: one process, nothing is encoded; shm: one host, what is large lies in shared memory; zmq: between hosts; tcp:
chunks of weights for a host without a worker that trains the model, whose workers then share them by shm; gloo: weights
from each that trains them, its part (`weights.link: collective`); what does not come so takes the other lanes."""
ONE_HOST: Mapping[str, int] = {}
"""No worker is known to be on another host than the first."""


def lanes_of(plan: Plan, edge: Edge, host_of: Mapping[str, int] = ONE_HOST) -> tuple[LaneName, ...]:
    """The lanes that an edge takes between its workers; `host_of` by name, those it lacks are on host 0."""
    if edge.kind == "client":
        return ("zmq",)
    pools = {pool.name: pool.members for pool in plan.pools}
    sources, targets = pools[edge.source], pools[edge.target]
    sources_on, targets_on = _by_host(sources, host_of), _by_host(targets, host_of)
    if edge.kind == "weights":
        readers = set(targets) - set(sources)
        found: dict[LaneName, bool] = {
            "inproc": len(readers) < len(targets),
            "shm": any(host_of.get(name, 0) in sources_on for name in readers),
            "tcp": any(host_of.get(name, 0) not in sources_on for name in readers),
            "gloo": edge.target in parts_readers(plan, str(edge.model)),
        }
    else:
        found = {
            "inproc": not set(sources).isdisjoint(targets),
            "shm": any(len(sources_on[host] | targets_on[host]) > 1 for host in sources_on.keys() & targets_on.keys()),
            "zmq": len(sources_on.keys() | targets_on.keys()) > 1,
        }
    return tuple(lane for lane, taken in found.items() if taken)


def parts_readers(plan: Plan, model: str) -> tuple[str, ...]:
    """The pools to whose workers those that train a model send its weights in parts."""
    if plan.recipe.weights.link != "collective" or plan.home_of(model).count < 2:
        return ()
    edges = (edge for edge in plan.edges if edge.kind == "weights" and edge.model == model)
    return tuple(edge.target for edge in edges if edge.source != edge.target and not plan.pool(edge.target).validates)


def _by_host(names: tuple[str, ...], host_of: Mapping[str, int]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for name in names:
        found.setdefault(host_of.get(name, 0), set()).add(name)
    return found
