"""How what an edge carries travels: decided by each pair of workers, so by the layout and never part of the digest.

Example: rollout/0 and trainer/0 on host a, rollout/1 on host b: the edge `samples` from rollout to trainer takes "shm"
and "zmq"; the weights go by "shm" to rollout/0 and by "tcp" to the host of rollout/1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from distflow.flow.edges import Edge
from distflow.flow.plan import Plan

LaneName = Literal["inproc", "shm", "zmq", "zstd", "tcp", "gloo", "nixl"]
"""inproc: one process, nothing is encoded; shm: one host, what is large lies in shared memory; zmq: between hosts;
zstd: between hosts of different sites, compressed; tcp: chunks of weights for a host without a worker that trains the
model, whose workers then share them by shm; gloo: weights from each that trains them, its part (`weights.link:
collective`); nixl: such a host reads them in the publisher's memory (`weights.link: nixl`); what does not come so takes
the other lanes."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """On which host each worker of a plan is, and where that stands."""

    hosts: Mapping[str, int] = field(default_factory=dict)
    """Numbers of hosts, by name of the worker; those that it lacks are on host 0."""
    sites: Mapping[int, str] = field(default_factory=dict)
    """Of hosts that have one, by number."""

    def host(self, worker: str) -> int:
        """The host of a worker."""
        return self.hosts.get(worker, 0)

    def site(self, host: int) -> str:
        """Where a host stands."""
        return self.sites.get(host, "")


ONE_HOST = Whereabouts()
"""No worker is known to be on another host than the first."""


def lanes_of(plan: Plan, edge: Edge, where: Whereabouts = ONE_HOST) -> tuple[LaneName, ...]:
    """The lanes that an edge takes between its workers."""
    if edge.kind == "client":
        return ("zmq",)
    pools = {pool.name: pool.members for pool in plan.pools}
    sources, targets = pools[edge.source], pools[edge.target]
    sources_on, targets_on = _by_host(sources, where), _by_host(targets, where)
    if edge.kind == "weights":
        readers = set(targets) - set(sources)
        found: dict[LaneName, bool] = {
            "inproc": len(readers) < len(targets),
            "shm": any(where.host(name) in sources_on for name in readers),
            "tcp": any(where.host(name) not in sources_on for name in readers),
            "gloo": edge.target in parts_readers(plan, str(edge.model)),
        }
        found["nixl"] = found["tcp"] and plan.recipe.weights.link == "nixl"
    else:
        apart = [(a, b) for a in sources_on for b in targets_on if a != b]
        found = {
            "inproc": not set(sources).isdisjoint(targets),
            "shm": any(len(sources_on[host] | targets_on[host]) > 1 for host in sources_on.keys() & targets_on.keys()),
            "zmq": any(where.site(a) == where.site(b) for a, b in apart),
            "zstd": any(where.site(a) != where.site(b) for a, b in apart),
        }
    return tuple(lane for lane, taken in found.items() if taken)


def parts_readers(plan: Plan, model: str) -> tuple[str, ...]:
    """The pools to whose workers those that train a model send its weights in parts."""
    if plan.recipe.weights.link != "collective" or plan.home_of(model).count < 2:
        return ()
    edges = (edge for edge in plan.edges if edge.kind == "weights" and edge.model == model)
    return tuple(edge.target for edge in edges if edge.source != edge.target and not plan.pool(edge.target).validates)


def nixl_pools(plan: Plan, model: str) -> tuple[str, ...]:
    """The pools whose workers have a process with NIXL if they are on several hosts: the model's home, then readers."""
    edges = [edge for edge in plan.edges if edge.kind == "weights" and edge.model == model]
    reading = tuple(edge.target for edge in edges if edge.source != edge.target)
    return (plan.home_of(model).name, *reading) if plan.recipe.weights.link == "nixl" and reading else ()


def _by_host(names: tuple[str, ...], where: Whereabouts) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for name in names:
        found.setdefault(where.host(name), set()).add(name)
    return found
