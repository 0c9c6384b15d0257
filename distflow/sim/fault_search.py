"""The search for faults over all cores that a run has: random scenarios, each of which follows from its seed.

leases     leases, stealing, dealing, terms, by the arithmetic of a recipe
calls      calls of other pools
weights    fetches of versions, from the publisher and from other readers
agents     host agents: what they know of each other, and which term trains
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from distflow.sim.agent_faults import judge_agents
from distflow.sim.call_faults import judge_calls
from distflow.sim.faults import Arithmetic, BrokenPromise, judge, scenario_of
from distflow.sim.weight_faults import judge_weights

Judge = Callable[[int], BrokenPromise | None]
"""Simulates the scenario of a seed, and says what it broke."""
OTHERS: Mapping[str, Judge] = {"calls": judge_calls, "weights": judge_weights, "agents": judge_agents}
CORES = ("leases", *OTHERS)


class SearchedSeed(NamedTuple):
    """One scenario, and what it broke; None: it kept all promises."""

    cores: str
    seed: int
    broken: BrokenPromise | None


def search_cores(arithmetic: Arithmetic, cores: Sequence[str], seeds: Iterable[int]) -> Iterator[SearchedSeed]:
    """Simulate one scenario for each seed, of each of these cores in turn."""
    for number, seed in enumerate(seeds):
        name = cores[number % len(cores)]
        found = judge(seed, scenario_of(arithmetic, seed)) if name == "leases" else OTHERS[name](seed)
        yield SearchedSeed(name, seed, found)
