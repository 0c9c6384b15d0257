"""Random faults among callers and servers: a scenario follows from its seed, and each must keep what a run promises.

Every call is answered once, but for those that were cancelled, and the run comes to its end.
"""

from __future__ import annotations

import random

from distflow.sim.call_network import CallNetwork
from distflow.sim.call_scenario import FROZEN, MIB, VERSIONED, CallRecord, CallScenario, Cut, Withdrawal
from distflow.sim.faults import BrokenPromise, broken_by
from distflow.sim.scenario import Crash, Leave, Pause

BEGINS_S = 20.0
"""Faults begin within so many seconds."""


def judge_calls(seed: int) -> BrokenPromise | None:
    """Simulate the scenario of a seed, and say what it broke."""
    scenario = calls_of(seed)
    return broken_by(seed, lambda: check_calls(scenario, CallNetwork(scenario).run()))


def calls_of(seed: int) -> CallScenario:
    """The scenario of a seed."""
    rng = random.Random(f"{seed}/calls")
    clients, servers, shared = rng.randint(1, 3), rng.randint(1, 5), rng.random() < 0.5
    every = servers if shared else 2 * servers
    first = {0} if shared else {0, servers}  # Of each step: it may be away, but not for good.

    def at() -> float:
        return rng.uniform(0.0, BEGINS_S)

    def some(most: int) -> range:
        return range(rng.choice([0, 0, rng.randint(0, most)]))

    crashes = [
        Crash(rng.randrange(every), at(), rng.choice([None, at()]), rng.random() < 0.5) for _ in some(5)
    ]  # A worker may die while it is dead.
    return CallScenario(
        clients=clients,
        servers=servers,
        shared=shared,
        steps=rng.randint(1, 4),
        groups=rng.randint(1, 8),
        ahead=rng.randint(0, 2),
        largest_bytes=rng.choice([1000, 8 * MIB, 40 * MIB]),
        ahead_bytes=rng.choice([1, 4 * MIB, 100 * MIB]),
        spread=rng.choice([0.0, 1.5]),
        budget=rng.choice([0, 250, 1000]),
        token_s=rng.choice([0.0, 0.001, 0.01]),
        generated=rng.random() < 0.5,
        hasty=rng.random() < 0.5,
        slowness=[rng.choice([1.0, 1.0, 20.0]) for _ in range(servers)],
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
    ).patient()


def check_calls(scenario: CallScenario, record: CallRecord) -> None:
    """Everything that was asked is answered once, but for what was cancelled. Raises AssertionError."""
    asked = {
        (client, step, t, group)
        for client in range(scenario.clients)
        for step in (FROZEN, VERSIONED)
        for t in range(scenario.steps)
        for group in range(scenario.groups)
    }
    others = record.answers.keys() - asked
    assert not others, f"{sorted(others)[:3]} were answered and never asked"
    twice = [call for call, count in record.answers.items() if count > 1]
    assert not twice, f"{twice[:3]} were answered more than once"
    expected = len(asked) - record.cancelled
    assert len(record.answers) == expected, f"{len(record.answers)} calls were answered, {expected} expected"
