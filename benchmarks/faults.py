"""A long search for faults: scenarios by the thousand, of all kinds of layouts, and each seed that breaks a promise.

    python -m benchmarks.faults leases --seed 0 --count 10000       # leases, stealing, dealing, terms, weights
    python -m benchmarks.faults calls --seed 0 --count 10000        # calls of other pools
    python -m benchmarks.faults agents --seed 0 --count 10000       # host agents: reports, silence, terms of training
    python -m benchmarks.faults weights --seed 0 --count 10000      # fetches of versions of weights

A scenario follows from its seed. It takes 0.05 to 0.2 s of one core, so run it with `nice` and in the
background. Every 500 scenarios it says how far it is.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

from distflow.config.schema import Schedule
from distflow.sim.faults import Arithmetic, BrokenPromise, broken_by, judge, scenario_of, variants
from distflow.sim.weight_faults import judge_weights
from distflow.testing.call_faults import judge_calls
from tests.launch import meshes, terms

EVERY, COLLECT = 500, 100


def kinds() -> list[Arithmetic]:
    """All layouts, under all schedules of leases that they allow."""
    return [
        replace(kind, schedule=schedule)
        for schedule in get_args(Schedule)
        for kind in variants()
        if schedule == "fifo" or kind.staleness is not None
    ]


def judge_leases(seed: int) -> BrokenPromise | None:
    """The scenario of a seed, of one kind after the other."""
    every = kinds()
    return judge(seed, scenario_of(every[seed % len(every)], seed))


def judge_agents(seed: int) -> BrokenPromise | None:
    """Host agents under random events: what they know of each other (one seed of ten), or the terms they agree on."""
    rng = random.Random(f"{seed}/agents")
    return broken_by(seed, lambda: _check_terms(rng) if seed % 10 else _check_mesh(rng))


def _check_mesh(rng: random.Random) -> None:
    events = [(rng.choice(meshes.EVENTS), rng.randrange(64), rng.randrange(7)) for _ in range(rng.randrange(9))]
    meshes.check_events(rng.randrange(10_000), rng.choice([0.0, 0.1]), events)


def _check_terms(rng: random.Random) -> None:
    """Never two terms that train; where nothing was killed and all hear each other again, one does, or the run ends."""
    layout, harmless = rng.choice(terms.LAYOUTS), rng.random() < 0.5
    critics = 0 if harmless else min(rng.randrange(3), len(layout) - 1)
    world = terms.World(layout, shrinks=harmless or rng.random() < 0.5, seed=rng.randrange(10_000), critics=critics)
    for _ in range(rng.randrange(15)):
        kind, where, number = rng.choice(terms.EVENTS), rng.randrange(8), rng.randrange(256)
        if not (harmless and kind in ("crash", "kill")):
            world.happens(kind, where, number)
            world.check()
    if harmless:
        world.happens("heal", 0, 0)
        before = len(world.commits)
        for _ in range(120):
            world.second()
        # A pool that was told to keep only workers that are out of reach has stopped the run, with that reason.
        trains = len(world.commits) > before or any(agent.stopped for agent in world.agents)
        assert trains, f"nothing trains: {[agent.pool.term.reason for agent in world.agents]}"
        world.check()


JUDGES: dict[str, Callable[[int], BrokenPromise | None]] = {
    "leases": judge_leases,
    "calls": judge_calls,
    "agents": judge_agents,
    "weights": judge_weights,
}


def main() -> int:
    """Search; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=JUDGES)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--count", type=int, default=10_000)
    args = parser.parse_args()
    judged, broken, began = JUDGES[args.what], 0, time.monotonic()
    # Looking for cycles again and again costs more than the cycles do.
    gc.disable()
    for number, seed in enumerate(range(args.seed, args.seed + args.count), start=1):
        found = judged(seed)
        if found is not None:
            broken += 1
            print(f"seed {seed}: {found.what}", flush=True)
        if number % COLLECT == 0:
            gc.collect()
        if number % EVERY == 0 or number == args.count:
            cpu, wall = time.process_time(), time.monotonic() - began
            print(f"{number} scenarios, {broken} broke a promise; {cpu:.0f} s of a core, {wall:.0f} s", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
