"""The layout of a run whose pools have changed size since its launch.

A worker's name stays with the host where it first ran: there its files are, and its incarnations are counted. So a pool
may have workers 0, 2 and 3. Its recipe says 3, how many there are; the documents of its workers say 4, so that they
plan for each of these names (`span`), and list those that train (`members`).

Nothing here decides: who trains in a term is agreed on by the host agents (`distflow/cluster/term_vote.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from distflow.types import WorkerName

NONE: Mapping[str, int] = {}


def span(names: Iterable[str]) -> dict[str, int]:
    """By pool, how many names there are up to the highest of these."""
    found: dict[str, int] = {}
    for name in map(WorkerName.parse, names):
        found[name.pool] = max(found.get(name.pool, 0), name.index + 1)
    return found


def sizes(names: Iterable[str]) -> dict[str, int]:
    """By pool, how many of these names it has."""
    found: dict[str, int] = {}
    for name in map(WorkerName.parse, names):
        found[name.pool] = found.get(name.pool, 0) + 1
    return found


def resized(recipe: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, Any]:
    """A resolved recipe with other numbers of workers in some pools."""
    found = copy.deepcopy(dict(recipe))
    pools = found["layout"]["pools"]
    for pool, count in counts.items():
        pools[pool] = {**(pools[pool] or {}), "count": count}
    return found


def renewed(
    document: Mapping[str, Any], members: Mapping[str, int], memory: Mapping[str, int] = NONE
) -> dict[str, Any]:
    """A worker's document for a term with these training workers, by name with their hosts.

    `memory`: MiB that each worker of a pool must be able to reserve for samples, where that may have changed.
    """
    found = copy.deepcopy(dict(document))
    own, pools = WorkerName.parse(found["worker"]), found["recipe"]["layout"]["pools"]
    covers = span([*members, found["worker"]])
    for pool in (pool for pool in pools if pool in covers):
        pools[pool]["count"] = covers[pool] if pool in span(members) else max(covers[pool], pools[pool]["count"])
    elsewhere = {name: host for name, host in found["placement"].items() if WorkerName.parse(name).pool not in covers}
    found["placement"] = elsewhere | {name: host for name, host in members.items() if host}
    found["members"] = list(members)
    if own.pool in memory:
        settings = found["settings"]
        settings["sample_memory_mb"] = max(settings["sample_memory_mb"] or 0, memory[own.pool])
    return found
