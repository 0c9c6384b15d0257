"""What the last bits of a run depend on besides its recipe: kernels round as processor, PyTorch and threads have it."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from distflow.flow.plan import Plan

KEY = "arithmetic"
"""In what a training worker saves of itself in a checkpoint."""
OF_MACHINE = ("processor", "PyTorch")
"""What the machine decides, not the recipe."""
_VECTORS = ("avx2", "avx512f", "avx512_bf16", "amx_tile")
"""Features of a processor by which libraries choose their kernels."""


def arithmetic(plan: Plan) -> dict[str, Any]:
    """Of the workers of a plan, on this machine."""
    threads = {pool: sorted({w.threads for w in plan.workers if w.name.pool == pool}) for pool in _pools(plan)}
    return {
        **dict(zip(OF_MACHINE, (processor(), metadata.version("torch")), strict=True)),
        "training workers": len(plan.owners),
        **{f"threads of {pool}": " or ".join(map(str, counts)) for pool, counts in threads.items()},
    }


def departures(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two of them, a line each."""
    for name in sorted(was.keys() & now.keys()):
        if was[name] != now[name]:
            yield f"run.deterministic: {name} was {was[name]}, is {now[name]}: from here on the last bits may differ"


def processor() -> str:
    """The type of this machine's processor, and those of its features that matter."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found: dict[str, str] = {}
    for name, _, value in (line.partition(":") for line in lines):
        found.setdefault(name.strip(), value.strip())
    features = [name for name in _VECTORS if name in found.get("flags", "").split()]
    return " ".join([found.get("model name", platform.machine()), *features])


def _pools(plan: Plan) -> list[str]:
    return list(dict.fromkeys(worker.name.pool for worker in plan.workers))
