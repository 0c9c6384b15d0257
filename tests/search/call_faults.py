"""Random faults among callers and servers: a scenario follows from its seed, and each must keep what a run promises.

Every call is answered once, but for those that were cancelled, and the run comes to its end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distflow.sim.scenario import Crash
from tests.search.call_network import CallNetwork
from tests.search.call_scenario import MIB, CallRecord, CallScenario, Cut, Withdrawal
from tests.search.fault_queue import Fault
from tests.search.lease_faults import BrokenPromise, broken_by
from tests.search.lease_scenario import Leave, Pause

MOST_CALLERS, MOST_SERVERS, MOST_AHEAD = 3, 5, 2
BEGINS_S = 20.0
"""Faults begin within so many seconds."""


@dataclass(frozen=True, slots=True)
class CallLayout:
    """Who asks whom."""

    clients: int
    servers: int
    """Of a step that needs no version of a trained model; 0: none is called."""
    homes: int
    """Of one that does; 0: none is called."""
    shared: bool
    """Whether these are the same workers."""
    generated: bool
    """Whether the latter generates."""
    ahead: int
    """Training steps for which calls are asked before their turn."""


def judge_calls(
    seed: int, layouts: Sequence[CallLayout] = (), injected: Counter[Fault] | None = None
) -> BrokenPromise | None:
    """Simulate the scenario of a seed, and say what it broke; `injected`: where to count its faults."""
    scenario = calls_of(seed, layouts)
    return broken_by(seed, lambda: check_calls(scenario, CallNetwork(scenario, injected).run()))


def calls_of(seed: int, layouts: Sequence[CallLayout] = ()) -> CallScenario:
    """The scenario of a seed, with one of these layouts, or any."""
    rng = random.Random(f"{seed}/calls")
    clients, servers, shared = rng.randint(1, MOST_CALLERS), rng.randint(1, MOST_SERVERS), rng.random() < 0.5
    homes, own = servers, random.Random(f"{seed}/layout").choice(layouts) if layouts else None
    if own is not None:
        clients, servers, homes, shared = own.clients, own.servers, own.homes, own.shared
    every = servers if shared else servers + homes
    first = {0} if shared else {0, servers % every}  # Of each step: it may be away, but not for good.

    def at() -> float:
        return rng.uniform(0.0, BEGINS_S)

    def some(most: int) -> range:
        return range(rng.choice([0, 0, rng.randint(0, most)]))

    crashes = [
        Crash(rng.randrange(every), at(), rng.choice([None, at()]), rng.random() < 0.5) for _ in some(5)
    ]  # A worker may die while it is dead.
    scenario = CallScenario(
        clients=clients,
        servers=servers,
        homes=homes,
        shared=shared,
        steps=rng.randint(1, 4),
        groups=rng.randint(1, 8),
        ahead=rng.randint(0, MOST_AHEAD),
        largest_bytes=rng.choice([1000, 8 * MIB, 40 * MIB]),
        ahead_bytes=rng.choice([1, 4 * MIB, 100 * MIB]),
        spread=rng.choice([0.0, 1.5]),
        budget=rng.choice([0, 250, 1000]),
        token_s=rng.choice([0.0, 0.001, 0.01]),
        generated=rng.random() < 0.5,
        hasty=rng.random() < 0.5,
        slowness=[rng.choice([1.0, 1.0, 20.0]) for _ in range(servers or homes)],
        crashes=[crash for crash in crashes if crash.restart_s is not None or crash.worker not in first],
        pauses=[Pause(rng.randrange(every), at(), rng.uniform(1.0, 40.0)) for _ in some(3)],
        leaves=[leave for leave in (Leave(rng.randrange(every), at()) for _ in some(2)) if leave.worker not in first],
        cuts=[Cut(rng.randrange(clients), rng.randrange(every), at(), rng.uniform(1.0, 60.0)) for _ in some(3)],
        joins=[at() for _ in some(2)],
        client_crashes=[Crash(rng.randrange(clients), at(), at(), rng.random() < 0.5) for _ in some(2)],
        client_pauses=[Pause(rng.randrange(clients), at(), at()) for _ in some(2)],
        cancels=[Withdrawal(rng.randrange(clients), at()) for _ in some(4)],
        renewals=[at() for _ in some(2)],
        loss=rng.choice([0.0, 0.05, 0.3]),
        duplicates=rng.choice([0.0, 0.3]),
        delay_s=rng.choice([0.001, 0.5, 5.0]),
        seed=seed,
    )
    return (scenario if own is None else replace(scenario, ahead=own.ahead, generated=own.generated)).patient()


def check_calls(scenario: CallScenario, record: CallRecord) -> None:
    """Everything that was asked is answered once, but for what was cancelled. Raises AssertionError."""
    asked = {
        (client, step, t, group)
        for client in range(scenario.clients)
        for step in scenario.called
        for t in range(scenario.steps)
        for group in range(scenario.groups)
    }
    others = record.answers.keys() - asked
    assert not others, f"{sorted(others)[:3]} were answered and never asked"
    twice = [call for call, count in record.answers.items() if count > 1]
    assert not twice, f"{twice[:3]} were answered more than once"
    expected = len(asked) - record.cancelled
    assert len(record.answers) == expected, f"{len(record.answers)} calls were answered, {expected} expected"
