"""A search for faults: random scenarios through the cores of a run, and the promises that each must keep.

A scenario follows from its seed and from the recipe's *arithmetic* alone, so that a seed that breaks a promise is all
that is needed to see it again. The instance is small: a few ledgers, groups and training steps; what breaks a protocol
is the order of events, not their number.

    found = judge(7, scenario_of(arithmetic, 7))

Promises: every position is trained on once, in the step that the data order and the drops imply, or dropped once; no
sample is older than the bound; no owner holds more than it may; and a run always comes to its end. Deaths of owners are
terms that begin from the last checkpoint.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from distflow.config.schema import Refresh, Schedule
from distflow.exchange.intake_core import IntakeCall
from distflow.exchange.lease_settings import LeaseSettings
from distflow.sim.event_queue import StuckError
from distflow.sim.scenario import Crash
from tests.search.fault_queue import Fault
from tests.search.lease_network import FaultyNetwork
from tests.search.lease_scenario import FaultRecord, FaultScenario, Leave, Pause, Renewal

HERE = IntakeCall("old_logprobs", in_window=True, here=True)
CALLS = ((), (IntakeCall("reference"),), (IntakeCall("values", in_window=True), IntakeCall("reference"), HERE), (HERE,))
BEGINS_S = 20.0
"""Faults begin within so many seconds."""
LIMIT_S = 10_000.0
"""A run that is not over by then is stuck. One slow worker, with half of its groups dropped, took 3,600 s."""
TOKEN_BYTES = 12
SPAN_BYTES = 64
"""At most, of each token that travels, if every one is of another version."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What a small instance keeps of a recipe."""

    ledgers: int
    groups_per_ledger: int
    samples: int
    owners: int
    workers: int
    staleness: int | None
    hedging: bool
    partial_rollouts: bool
    streamed: bool
    stealing: bool
    dealing: bool
    colocated: bool
    schedule: Schedule = "fifo"
    refresh: Refresh = "eager"


@dataclass(frozen=True, slots=True)
class BrokenPromise:
    """A seed whose scenario did not do what it must."""

    seed: int
    what: str


def judge(seed: int, scenario: FaultScenario, injected: Counter[Fault] | None = None) -> BrokenPromise | None:
    """Simulate a scenario, and say what it broke; `injected`: where to count its faults."""
    return broken_by(seed, lambda: check(scenario, FaultyNetwork(scenario, injected=injected).run()))


def broken_by(seed: int, run: Callable[[], None]) -> BrokenPromise | None:
    """Run and check the scenario of a seed; what it broke, None if nothing. Whatever a core raises is a fault of it."""
    try:
        run()
    except StuckError as stuck:
        return BrokenPromise(seed, str(stuck).splitlines()[0])
    except Exception as error:
        return BrokenPromise(seed, f"{type(error).__name__}: {error}")
    return None


def scenario_of(arithmetic: Arithmetic, seed: int) -> FaultScenario:
    """The scenario of a seed."""
    rng = random.Random(f"{seed}/faults")
    colocated = arithmetic.colocated
    workers, owners = rng.randint(1, max(2, arithmetic.workers)), rng.randint(1, max(2, arithmetic.owners))
    owners = min(owners, arithmetic.ledgers)
    settings = _settings(arithmetic, rng)
    # A colocated pool restarts as a whole: its members neither die nor leave one by one.
    many = 0 if colocated else rng.choice([0, 0, 1, 2, 6])
    renewals = () if colocated or arithmetic.staleness is None else tuple(_renewals(rng, arithmetic))
    scenario = FaultScenario(
        settings,
        owners=owners,
        workers=workers,
        slots=arithmetic.samples * rng.randint(1, 6) + rng.randrange(arithmetic.samples),
        seconds=_long_tail(seed, head_of_line=rng.random() < 0.2),
        slowness=_slow_one(workers, 20.0 if rng.random() < 0.3 else 1.0),
        dropped=_doom(rng.choice([0.0, 0.0, 0.1, 0.3, 0.5]), seed),
        crashes=[_crash(rng, workers) for _ in range(rng.randint(0, many))],
        pauses=[
            Pause(rng.randrange(workers), rng.uniform(0.0, BEGINS_S), rng.uniform(1.0, 40.0))
            for _ in range(rng.choice([0, 0, 1, 3]))
        ],
        leaves=[
            Leave(rng.randrange(1, workers), rng.uniform(0.0, BEGINS_S))
            for _ in range(rng.choice([0, 0, 1, 2]))
            if workers > 1 and not colocated
        ],
        renewals=renewals,
        save_every=rng.choice([1, 1, 2, 3]) if renewals else 1,
        tokens=rng.choice([1, 7, 40]),
        loss=rng.choice([0.0, 0.05, 0.3]),
        duplicates=rng.choice([0.0, 0.3]),
        delay_s=rng.choice([0.001, 0.5, 5.0]),
        colocated=colocated,
        lazy_take=not arithmetic.streamed,
        stealing=arithmetic.stealing,
        dealing=arithmetic.dealing,
        budget=rng.choice([1, 100, 10**6]),
        batch_s=rng.choice([_at_once, _a_while, _first_is_slow]),
        calls=rng.choice(CALLS),
        answer_s=rng.choice([0.0, 4.0]),
        read_s=rng.choice([0.0, 0.0, 3.0]),
        refresh=arithmetic.refresh,
        step_s=rng.choice([0.0, 0.0, 1.0]),
        load_s=rng.choice([0.0, 0.0, 2.0]),
        seed=seed,
        tick_s=0.5,
        limit_s=LIMIT_S,
    )
    return _with_steals(scenario, random.Random(f"{seed}/hands"))


def _with_steals(scenario: FaultScenario, rng: random.Random) -> FaultScenario:
    """In one of three scenarios the first replica is slow, and takes one group at a time; in half of these half of what
    is stolen cannot be read, and so comes back. In the other scenarios replicas hardly ever steal.
    """
    if scenario.lazy_take or not scenario.stealing or scenario.settings.ledgers < 2 or rng.random() >= 1 / 3:
        return scenario
    uneven = replace(scenario, owners=max(2, scenario.owners), budget=1, batch_s=_first_is_slow)
    return replace(uneven, unreadable=rng.choice([0.0, 0.5]))


def _settings(arithmetic: Arithmetic, rng: random.Random) -> LeaseSettings:
    groups, samples = rng.randint(1, arithmetic.groups_per_ledger), arithmetic.samples
    largest = 100 * samples
    return LeaseSettings(
        ledgers=arithmetic.ledgers,
        groups_per_ledger=groups,
        samples_per_prompt=samples,
        max_staleness=arithmetic.staleness,
        training_steps=rng.randint(1, 5),
        memory_bytes=rng.choice([1, 2, 100]) * largest * groups * arithmetic.ledgers,
        group_bytes=lambda prompt_tokens: 25 * samples * prompt_tokens,
        max_prompt_tokens=4,
        max_refills=10**6,
        schedule=arithmetic.schedule,
        announce_closed=arithmetic.colocated,
        hedging=arithmetic.hedging,
        silence_s=rng.choice([1.5, 5.0]),
        partial_rollouts=arithmetic.partial_rollouts,
        message_bytes=rng.choice([1, 1000, 4 << 20]),
    )


def _crash(rng: random.Random, workers: int) -> Crash:
    at, restart_s = rng.uniform(0.0, BEGINS_S), rng.uniform(0.0, BEGINS_S)
    # One worker always comes back; a death that nobody reports is known by the next incarnation alone.
    if workers > 1 and rng.random() < 0.5:
        return Crash(rng.randrange(1, workers), at, rng.choice([None, restart_s]))
    return Crash(rng.randrange(workers), at, restart_s, noticed=rng.random() < 0.5)


def _renewals(rng: random.Random, arithmetic: Arithmetic) -> Iterator[Renewal]:
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        yield Renewal(rng.uniform(0.0, BEGINS_S + 5.0), rng.randint(1, min(4, arithmetic.ledgers)))


def _long_tail(seed: int, *, head_of_line: bool) -> Callable[[int], float]:
    def seconds(position: int) -> float:
        if head_of_line and position == 0:
            return 100.0
        return random.Random(seed * 7919 + position).lognormvariate(0.0, 0.8)

    return seconds


def _doom(rate: float, seed: int) -> Callable[[int], str]:
    def dropped(position: int) -> str:
        return "zero variance" if rate and random.Random(seed * 100_003 + position).random() < rate else ""

    return dropped


def _slow_one(workers: int, factor: float) -> Callable[[int], float]:
    return lambda number: factor if number == workers - 1 else 1.0


def _at_once(_replica: int) -> float:
    return 0.0


def _a_while(_replica: int) -> float:
    return 0.7


def _first_is_slow(replica: int) -> float:
    return 3.0 * (replica == 0)


# -- promises
def expected_steps(scenario: FaultScenario) -> dict[int, set[int]]:
    """The first b positions of each ledger that are not dropped, and the next b, and so on."""
    limits = scenario.settings
    steps: dict[int, set[int]] = {step: set() for step in range(limits.training_steps)}
    for ledger in range(limits.ledgers):
        accepted = (p for p in range(ledger, 10**9, limits.ledgers) if not scenario.dropped(p))
        for step in steps.values():
            step.update(islice(accepted, limits.groups_per_ledger))
    return steps


def check_steps(scenario: FaultScenario, trained: dict[int, set[int]]) -> None:
    """Each step trained on what it had to; without a bound it is open which step takes a group."""
    expected = expected_steps(scenario)
    if scenario.settings.max_staleness is not None:
        assert trained == expected, f"trained on {trained}, not {expected}"
        return
    sizes = {step: len(taken) for step, taken in trained.items()}
    assert sizes == {step: len(groups) for step, groups in expected.items()}, f"steps of {sizes} groups"
    assert set().union(*trained.values()) == set().union(*expected.values()), "other positions than the first"


def check(scenario: FaultScenario, record: FaultRecord) -> None:
    """All promises, of a run that has ended. Raises AssertionError for one that is broken."""
    limits = scenario.settings
    check_steps(scenario, record.trained)
    assert limits.max_staleness is None or max(record.lags) <= limits.max_staleness, f"lags {dict(record.lags)}"
    assert min(record.lags) >= 0, f"lags {dict(record.lags)}"
    trained = set().union(*record.trained.values())
    assert not trained & record.dropped.keys(), f"{trained & record.dropped.keys()} are dropped and trained on"
    _check_snapshot(limits, record, trained)
    assert record.peak_bytes <= limits.memory_bytes, f"{record.peak_bytes} bytes reserved of {limits.memory_bytes}"
    group = 200 + limits.samples_per_prompt * scenario.tokens * (TOKEN_BYTES + SPAN_BYTES)
    most = 1000 + 2 * limits.message_bytes + group
    assert record.largest_message <= most, f"a message of {record.largest_message} bytes, at most {most} expected"


def _check_snapshot(limits: LeaseSettings, record: FaultRecord, trained: set[int]) -> None:
    terminal = trained | record.dropped.keys()
    parts = record.snapshot["ledgers"]
    assert isinstance(parts, list), "a snapshot lists its ledgers"
    for part in parts:
        below = {limits.position_of(part["ledger"], k) for k in range(part["frontier"])}
        assert part["trained"] == [], "nothing lies ahead at the end"
        ahead = {limits.position_of(part["ledger"], k) for k, _ in part["dropped"]}
        own = {p for p in terminal if limits.ledger_of(p) == part["ledger"]}
        assert below | ahead == own, f"ledger {part['ledger']}: {below | ahead} in the record, {own} seen"


def variants() -> list[Arithmetic]:
    """Arithmetics of many kinds, for those who have no recipe in mind."""
    split = Arithmetic(4, 3, 4, 4, 5, 0, True, True, True, True, False, False)
    changes: list[Arithmetic] = []
    for staleness in (0, 1, 2, None):
        one = replace(split, staleness=staleness)
        changes += [one, replace(one, hedging=False, partial_rollouts=False), replace(one, stealing=False)]
        changes += [replace(one, dealing=True, stealing=False), replace(one, streamed=False, dealing=True)]
        changes += [replace(one, colocated=True), replace(one, colocated=True, streamed=False, dealing=True)]
    return changes
