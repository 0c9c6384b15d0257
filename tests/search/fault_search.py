"""The search for faults over all cores that a run has: random scenarios, each of which follows from its seed.

leases     leases, stealing, dealing, terms
calls      calls of other pools
weights    fetches of versions, from the publisher and from other readers
agents     host agents: what they know of each other, and which term trains

Without a recipe the scenarios have layouts of all kinds. With one, half of those of calls, weights and agents have its
own, the others any: runs are scaled, and few workers have few faults. Which half a seed is of follows from it, too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, get_args

from distflow.config.schema import Schedule
from tests.search.agent_faults import judge_agents
from tests.search.call_faults import judge_calls
from tests.search.fault_layouts import FaultLayouts
from tests.search.fault_queue import Fault
from tests.search.lease_faults import BrokenPromise, judge, scenario_of, variants
from tests.search.weight_faults import judge_weights

Judge = Callable[[int, FaultLayouts | None, Counter[Fault]], BrokenPromise | None]
"""Simulates the scenario of a seed, with the layouts of a recipe or any, counts its faults, and says what it broke."""
OWN = 0.5
"""Share of the scenarios that have the recipe's own layout."""
KINDS = [
    replace(kind, schedule=schedule)
    for schedule in get_args(Schedule)
    for kind in variants()
    if schedule == "fifo" or kind.staleness is not None
]
"""Arithmetics of leases of all kinds, under all schedules that they allow."""


def _leases(seed: int, layouts: FaultLayouts | None, injected: Counter[Fault]) -> BrokenPromise | None:
    # Not by the seed modulo their number: of cores in turn each has seeds of one remainder alone.
    arithmetic = random.Random(f"{seed}/kind").choice(KINDS) if layouts is None else layouts.leases
    assert arithmetic is not None, "this recipe has no leases"
    return judge(seed, scenario_of(arithmetic, seed), injected)


def _calls(seed: int, layouts: FaultLayouts | None, injected: Counter[Fault]) -> BrokenPromise | None:
    return judge_calls(seed, () if layouts is None else layouts.calls, injected)


def _weights(seed: int, layouts: FaultLayouts | None, injected: Counter[Fault]) -> BrokenPromise | None:
    return judge_weights(seed, () if layouts is None else layouts.weights, injected)


def _agents(seed: int, layouts: FaultLayouts | None, injected: Counter[Fault]) -> BrokenPromise | None:
    return judge_agents(seed, None if layouts is None else layouts.agents, injected)


JUDGES: Mapping[str, Judge] = {"leases": _leases, "calls": _calls, "weights": _weights, "agents": _agents}
CORES = tuple(JUDGES)


class SearchedSeed(NamedTuple):
    """One scenario, and what came of it."""

    cores: str
    seed: int
    own: bool
    """Whether it had the recipe's layout."""
    injected: Counter[Fault]
    broken: BrokenPromise | None
    """None: it kept all promises."""


@dataclass(slots=True)
class SearchedCores:
    """What came of all scenarios of some cores."""

    own: int = 0
    """With the recipe's layout."""
    others: int = 0
    injected: Counter[Fault] = field(default_factory=Counter)
    broken: list[BrokenPromise] = field(default_factory=list)

    @property
    def scenarios(self) -> int:
        """That were simulated."""
        return self.own + self.others

    def add(self, one: SearchedSeed) -> None:
        """Count a scenario."""
        self.own += one.own
        self.others += not one.own
        self.injected += one.injected
        if one.broken is not None:
            self.broken.append(one.broken)


def search_cores(layouts: FaultLayouts | None, cores: Sequence[str], seeds: Iterable[int]) -> Iterator[SearchedSeed]:
    """Simulate one scenario for each seed, of each of these cores in turn; `layouts`: of a recipe."""
    for number, seed in enumerate(seeds):
        name, injected = cores[number % len(cores)], Counter[Fault]()
        own = layouts is not None and (name == "leases" or random.Random(f"{seed}/own").random() < OWN)
        broken = JUDGES[name](seed, layouts if own else None, injected)
        yield SearchedSeed(name, seed, own, injected, broken)
