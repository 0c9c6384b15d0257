"""Random faults among the agents of hosts: a scenario follows from its seed.

All that live have the same reports in the end, only the dead are silent, and no host is ever taken to have heard what
it has not (one of ten); or never do two terms train at once, and where nothing was killed and all hear each other
again, one trains.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import partial

from tests.search import agent_mesh
from tests.search.agent_terms import EVENTS, LAYOUTS, World
from tests.search.fault_queue import Fault
from tests.search.lease_faults import BrokenPromise, broken_by

MESHES = 0.1
"""Share of the scenarios that are about what agents know."""
MOST_TRAINERS = 5
MOST_TERM_HOSTS = 5
"""Where terms are decided; where reports are, as many as the layout has."""
SETTLES_S = 120


@dataclass(frozen=True, slots=True)
class AgentLayout:
    """Which hosts have agents, and what is trained there."""

    hosts: int
    """With agents, at most."""
    owners: int
    """Workers that train the primary model."""
    others: int
    """That train further ones."""
    training_hosts: int
    """On which these are, at most."""
    shrinks: bool
    renews: bool
    """Whether there may be another term."""


def judge_agents(
    seed: int, layout: AgentLayout | None = None, injected: Counter[Fault] | None = None
) -> BrokenPromise | None:
    """Simulate the scenario of a seed, with this layout or any, and say what it broke; `injected`: where to count."""
    rng, injected = random.Random(f"{seed}/agents"), Counter() if injected is None else injected
    if rng.random() < MESHES or (layout is not None and not layout.renews):
        hosts = agent_mesh.HOSTS if layout is None else layout.hosts
        return broken_by(seed, partial(_check_mesh, rng, hosts, injected))
    return broken_by(seed, partial(_check_terms, rng, layout, injected))


def _check_mesh(rng: random.Random, hosts: int, injected: Counter[Fault]) -> None:
    events = [(rng.choice(agent_mesh.EVENTS), rng.randrange(64), rng.randrange(7)) for _ in range(rng.randrange(9))]
    agent_mesh.check_events(rng.randrange(10_000), rng.choice([0.0, 0.1]), events, hosts, injected)


def _check_terms(rng: random.Random, layout: AgentLayout | None, injected: Counter[Fault]) -> None:
    harmless, world = _world(rng, layout, injected)
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


def _world(rng: random.Random, layout: AgentLayout | None, injected: Counter[Fault]) -> tuple[bool, World]:
    """Whether nothing is killed in it, and the hosts."""
    if layout is None:
        homes, harmless = rng.choice(LAYOUTS), rng.random() < 0.5
        critics = 0 if harmless else min(rng.randrange(3), len(homes) - 1)
        shrinks = harmless or rng.random() < 0.5
        return harmless, World(homes, shrinks=shrinks, seed=rng.randrange(10_000), critics=critics, injected=injected)
    harmless, workers = rng.random() < 0.5, layout.owners + layout.others
    hosts = rng.randint(1, min(workers, layout.training_hosts))
    homes = sorted([*range(hosts), *(rng.randrange(hosts) for _ in range(workers - hosts))])
    every = rng.randint(hosts, max(hosts, min(MOST_TERM_HOSTS, layout.hosts)))
    seed = rng.randrange(10_000)
    return harmless, World(
        homes, hosts=every, shrinks=layout.shrinks, seed=seed, critics=layout.others, injected=injected
    )
