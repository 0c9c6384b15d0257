"""Random faults where weights are fetched: a scenario follows from its seed, and each must keep what a run promises.

No reader ends a fetch with wrong or torn bytes, or goes back to an older version; every reader that lives has the
newest version in the end, and none waits longer than it may; who sends wrong bytes is left alone; a reader gives up
only what did not come; and where nothing goes wrong and all keep up, a version is sent about once to each site, and
whole only as long as one of its readers has none before, or where what has changed is not served.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distflow.flow.sizes import CHAINED
from distflow.sim.scenario import Crash
from distflow.weights.manifest import CHUNK_BYTES
from tests.search.fault_queue import Fault
from tests.search.lease_faults import BrokenPromise, broken_by
from tests.search.lease_scenario import Pause
from tests.search.swarm_network import SwarmNetwork
from tests.search.weight_scenario import ClockJump, Damage, LinkCut, WeightRecord, WeightScenario

BEGINS_S = 30.0
"""Faults begin within so many seconds."""
LONGEST_S = 40.0
"""One lasts at most so long; a process may stand still for three times that."""
MOST_READERS = 6
UPLINK = 1.25
"""Times the model that a publisher sends to a site while nothing goes wrong."""


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Who reads a model that others train."""

    readers: int
    """Hosts that fetch it."""
    deltas: bool
    """Whether what has changed is served."""
    in_step: bool
    """Whether the trainer cannot go on without them (`max_staleness` 0)."""


def judge_weights(
    seed: int, layouts: Sequence[WeightLayout] = (), injected: Counter[Fault] | None = None
) -> BrokenPromise | None:
    """Simulate the scenario of a seed, and say what it broke; `injected`: where to count its faults."""
    scenario = weights_of(seed, layouts)
    return broken_by(seed, lambda: check_weights(scenario, SwarmNetwork(scenario, injected).run()))


def weights_of(seed: int, layouts: Sequence[WeightLayout] = ()) -> WeightScenario:
    """The scenario of a seed, with one of these layouts, or any.

    In one of four nothing goes wrong, in one of ten the publisher is gone at last.
    """
    rng = random.Random(f"{seed}/weights")
    own = random.Random(f"{seed}/layout").choice(layouts) if layouts else None
    readers, chunks = rng.randint(1, MOST_READERS), rng.choice([1, 3, 8, 20])
    if own is not None:
        readers = own.readers
    scenario = WeightScenario(
        joins=[0.0, *(rng.choice([0.0, 0.0, rng.uniform(0.0, BEGINS_S)]) for _ in range(readers - 1))],
        chunks=chunks,
        last_bytes=rng.choice([1, CHUNK_BYTES]),
        delta_bytes=_delta_bytes(chunks, random.Random(f"{seed}/deltas"), None if own is None else own.deltas),
        publishes=sorted(rng.uniform(0.0, BEGINS_S) for _ in range(rng.choice([0, 1, 2, 6, 30 if chunks < 20 else 6]))),
        in_step=rng.random() < 0.5 or (own is not None and own.in_step),
        copy_s=rng.choice([0.01, 1.0]),
        describe_s=rng.choice([0.01, 1.0]),
        sites=[rng.choice(["", "far"]) for _ in range(readers)] if rng.random() < 0.3 else (),
        outside=frozenset(n for n in range(2, readers + 1) if rng.random() < 0.1),
        rates=[CHUNK_BYTES * rng.choice([2.0, 10.0, 1000.0]) for _ in range(readers + 1)],
        delay_s=rng.choice([0.001, 0.05, 0.3]),
        no_progress_s=rng.choice([30.0, 100.0, 100.0]),
        calm_at=BEGINS_S,
        seed=seed,
    )
    kind = rng.random()
    if kind < 0.25:
        return scenario
    return _with_faults(scenario, rng) if kind < 0.9 else _orphaned(_with_faults(scenario, rng), rng)


def _delta_bytes(chunks: int, rng: random.Random, deltas: bool | None) -> int:
    """Half of the scenarios have deltas if nobody says it, of which between one and more than a dozen are kept."""
    some = rng.random() < 0.5 if deltas is None else deltas
    return int(chunks * CHUNK_BYTES * rng.choice([0.02, 0.1, 0.3, 0.5])) if some else 0


def _orphaned(scenario: WeightScenario, rng: random.Random) -> WeightScenario:
    """The publisher is gone for good; all readers stay, and pass on what they have."""
    return replace(
        scenario,
        joins=[0.0 for _ in scenario.joins],
        outside=frozenset(),
        crashes=[Crash(0, rng.uniform(0.0, 2.0) if rng.random() < 0.5 else rng.uniform(0.0, BEGINS_S), None)],
        damages=(),
        liars=frozenset(),
        no_progress_s=100.0,
    )


def _with_faults(scenario: WeightScenario, rng: random.Random) -> WeightScenario:
    hosts = 1 + len(scenario.joins)

    def at() -> float:
        return rng.uniform(0.0, BEGINS_S)

    def some(most: int) -> range:
        return range(rng.choice([0, 0, rng.randint(0, most)]))

    return replace(
        scenario,
        crashes=[_crash(rng, rng.randrange(hosts), at()) for _ in some(4)],
        pauses=[Pause(rng.randrange(hosts), at(), rng.uniform(0.5, rng.choice([1, 3]) * LONGEST_S)) for _ in some(3)],
        cuts=[
            LinkCut((one, rng.choice([n for n in range(hosts) if n != one])), at(), rng.uniform(0.2, LONGEST_S), reset)
            for one, reset in ((rng.randrange(hosts), rng.random() < 0.5) for _ in some(4))
        ],
        jumps=[ClockJump(rng.randrange(hosts), at(), rng.choice([1.0, 100.0])) for _ in some(2)],
        damages=[Damage(rng.randrange(1, hosts), at()) for _ in some(3)],
        liars=frozenset(n for n in range(1, hosts) if rng.random() < 0.15) if rng.random() < 0.3 else frozenset(),
        wrong=rng.choice([0.0, 0.0, 0.02, 0.3]),
        calm_at=BEGINS_S + 3 * LONGEST_S,
    )


def _crash(rng: random.Random, host: int, at: float) -> Crash:
    # The publisher always comes back: without it nothing is promised.
    restart_s = rng.uniform(0.0, LONGEST_S - 5.0)
    return Crash(host, at, restart_s if host == 0 else rng.choice([None, restart_s]), noticed=rng.random() < 0.7)


def check_weights(scenario: WeightScenario, record: WeightRecord) -> None:
    """What can be seen only at the end. Raises AssertionError."""
    for host, versions in record.versions.items():
        assert all(version in record.published for version in versions), f"host {host} has {versions}"
    if scenario.faultless and scenario.in_step:
        size = (scenario.chunks - 1) * CHUNK_BYTES + scenario.last_bytes
        for (content, site), sent in record.sent.items():
            whole = size if content.base < 0 else scenario.delta_bytes
            # What goes to one that passes nothing on is dealt to others all the same.
            most = UPLINK * whole * (1 + sum(scenario.site(n) == site for n in scenario.outside))
            assert sent <= most, f"{content} was sent {sent / whole:.2f} times to site {site!r}"
        if 0 < scenario.delta_bytes <= CHAINED * size and not any(scenario.joins):
            late = [content for content, _ in record.sent if content.base < 0 and content.number > 1]
            assert not late, f"{late} were sent whole, though all had the version before"
