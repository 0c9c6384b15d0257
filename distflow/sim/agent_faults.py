"""Random faults among the agents of hosts: a scenario follows from its seed.

All that live have the same reports in the end, only the dead are silent, and no host is ever taken to have heard what
it has not (one of ten); or never do two terms train at once, and where nothing was killed and all hear each other
again, one trains.
"""

from __future__ import annotations

import random

from distflow.sim import agent_mesh
from distflow.sim.agent_terms import EVENTS, LAYOUTS, World
from distflow.sim.faults import BrokenPromise, broken_by

MESHES = 0.1
"""Share of the scenarios that are about what agents know."""
SETTLES_S = 120


def judge_agents(seed: int) -> BrokenPromise | None:
    """Simulate the scenario of a seed, and say what it broke."""
    rng = random.Random(f"{seed}/agents")
    check = _check_mesh if rng.random() < MESHES else _check_terms
    return broken_by(seed, lambda: check(rng))


def _check_mesh(rng: random.Random) -> None:
    events = [(rng.choice(agent_mesh.EVENTS), rng.randrange(64), rng.randrange(7)) for _ in range(rng.randrange(9))]
    agent_mesh.check_events(rng.randrange(10_000), rng.choice([0.0, 0.1]), events)


def _check_terms(rng: random.Random) -> None:
    layout, harmless = rng.choice(LAYOUTS), rng.random() < 0.5
    critics = 0 if harmless else min(rng.randrange(3), len(layout) - 1)
    world = World(layout, shrinks=harmless or rng.random() < 0.5, seed=rng.randrange(10_000), critics=critics)
    for _ in range(rng.randrange(15)):
        kind, where, number = rng.choice(EVENTS), rng.randrange(8), rng.randrange(256)
        if not (harmless and kind in ("crash", "kill")):
            world.happens(kind, where, number)
            world.check()
    if harmless:
        world.happens("heal", 0, 0)
        before = len(world.commits)
        for _ in range(SETTLES_S):
            world.second()
        # A pool that was told to keep only workers that are out of reach has stopped the run, with that reason.
        trains = len(world.commits) > before or any(agent.stopped for agent in world.agents)
        assert trains, f"nothing trains: {[agent.pool.term.reason for agent in world.agents]}"
        world.check()
