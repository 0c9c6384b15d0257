"""A process has one default process group of torch: an engine and a backend that both make it cannot share a worker."""

from __future__ import annotations

from distflow.config.check import Where
from distflow.config.plugins import ENGINES, full_name
from distflow.config.schema import LayoutConfig
from distflow.errors import Problem
from distflow.flow.place import Placement

MAKES_GROUP = (ENGINES["vllm"],)
"""Engines that make it for themselves, whatever else their worker does."""


def grouping_problems(layout: LayoutConfig, placement: Placement, where: Where) -> list[Problem]:
    """Such an engine on a worker that trains in a group: with others, or by a backend that always makes one."""
    pool = layout.pools[placement.training]
    if placement.generating != placement.training or (pool.count == 1 and pool.backend == "torch"):
        return []
    key = f"layout.pools.{placement.training}"
    engines = {f"{key}.engine": pool.engine}
    engines |= {f"{key}.each.{n}.engine": own.engine for n, own in pool.each.items() if own.engine is not None}
    cure = "engine torch or sglang, or a pool of its own for generation, as layout=split has it"
    group = f"the process group that {pool.backend!r} on {pool.count} worker(s) trains in"
    return [
        Problem(where(key), key, f"{engine} cannot share a worker with {group}: each makes torch's default one", cure)
        for key, engine in engines.items()
        if full_name(engine, ENGINES) in MAKES_GROUP
    ]
