"""What `distflow simulate --faults` prints of a search: for people, or as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, get_args

from distflow.sim.event_queue import Fault
from distflow.sim.fault_layouts import FaultLayouts, shown_layouts
from distflow.sim.fault_search import SearchedCores
from distflow.sim.faults import BrokenPromise
from distflow.sim.notes import counted

Again = Callable[[str, int], str]
"""The command that repeats the scenario of some cores and a seed alone."""


def found_line(cores: str, broken: BrokenPromise, again: Again) -> str:
    """A promise that was broken."""
    return f"{cores}, seed {broken.seed}: {broken.what}\n  repeat it with: {again(cores, broken.seed)}"


def page(found: Mapping[str, SearchedCores], layouts: FaultLayouts, lacking: Mapping[str, str]) -> list[str]:
    """What came of each kind of cores, and which were not searched, and why."""
    lines, small = [], shown_layouts(layouts)
    for name, one in found.items():
        lines += [f"{name}: {_layouts(name, one)}; {_kept(one)}", f"  the recipe's layout: {small[name]}"]
        if one.injected:
            lines.append(f"  injected: {shown_faults(one.injected)}")
    return [*lines, *(f"{name}: not searched, for {why}" for name, why in lacking.items())]


def shown_faults(injected: Counter[Fault]) -> str:
    """`crashes 3, cuts 1`."""
    return ", ".join(f"{what.replace('_', ' ')} {number:,}" for what, number in _ordered(injected).items())


def last_line(found: Mapping[str, SearchedCores], first: int) -> str:
    """What came of all; `first`: the first seed."""
    scenarios = sum(one.scenarios for one in found.values())
    if not scenarios:
        return "interrupted before the first scenario was over"
    broken = sum(len(one.broken) for one in found.values())
    each = ", ".join(f"{one.scenarios} of {name}" for name, one in found.items())
    kept = f"{broken} broke a promise" if broken else "all promises were kept"
    return f"{counted(scenarios, 'scenario')} ({each}), seeds {first} to {first + scenarios - 1}: {kept}"


def data(
    found: Mapping[str, SearchedCores], layouts: FaultLayouts, lacking: Mapping[str, str], again: Again
) -> dict[str, Any]:
    """For programs."""
    small = shown_layouts(layouts)
    return {
        "scenarios": {name: one.scenarios for name, one in found.items()},
        "own_layout": {name: one.own for name, one in found.items()},
        "layouts": {name: small[name] for name in found},
        "injected": {name: _ordered(one.injected) for name, one in found.items()},
        "broken": [
            {"cores": name, "seed": broken.seed, "what": broken.what, "again": again(name, broken.seed)}
            for name, one in found.items()
            for broken in one.broken
        ],
        "not_searched": dict(lacking),
    }


def _layouts(name: str, one: SearchedCores) -> str:
    if name == "leases":
        return f"{counted(one.scenarios, 'scenario')} with the recipe's layout"
    return f"{counted(one.scenarios, 'scenario')}, {one.own} with the recipe's layout and {one.others} with random ones"


def _kept(one: SearchedCores) -> str:
    if not one.broken:
        return "all promises were kept"
    return f"{len(one.broken)} broke a promise, seeds {', '.join(str(broken.seed) for broken in one.broken)}"


def _ordered(injected: Counter[Fault]) -> dict[Fault, int]:
    """Those that there were, always in the same order."""
    return {what: injected[what] for what in get_args(Fault) if injected[what]}
