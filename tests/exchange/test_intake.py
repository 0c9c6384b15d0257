"""What a replica takes, when it is enough for a batch, and what it hands to others: on an owner without a network."""

from __future__ import annotations

import ast
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.exchange.deal_core import DealCore
from distflow.exchange.dealing import DealRule
from distflow.exchange.group_transfer import GROUPS, KEPT, RETURNED, Send
from distflow.exchange.intake_core import IntakeCall, IntakeCore, IntakeRule, Take
from distflow.exchange.messages import Ask, Grant, Report, Result
from distflow.exchange.owner import OwnerCore
from distflow.exchange.steal_core import ASK
from distflow.parts import CostRule, unshared
from distflow.types import Version
from tests.budget import within
from tests.search.lease_network import FaultyNetwork
from tests.search.lease_scenario import SMALL, FaultScenario, prompt_at

ROOT = Path(__file__).resolve().parents[2]
GROUP_BYTES = 400


class Replica:
    """An owner of all ledgers, one rollout that leases all it can, and the core between them."""

    def __init__(
        self, rule: IntakeRule, others: tuple[str, ...] = (), dealing: DealCore | None = None, **changes: object
    ) -> None:
        self.limits = replace(SMALL, group_bytes=lambda tokens: GROUP_BYTES, **{"memory_bytes": 10**6, **changes})
        self.owner = OwnerCore("trainer/0", self.limits, range(self.limits.ledgers), prompt_at)
        self.core = IntakeCore(self.owner, rule, others, random.Random(0), dealing)
        self.core.begin(0)
        self.asks = 0
        self.held: set[int] = set()

    def lease(self) -> list[int]:
        self.asks += 1
        report = Report("rollout/0", 0, 0, self.asks, tuple(self.held), self.asks - 1, -1)
        out = self.owner.handle(Ask(report, self.asks, 1000, park=True, idle=False), 0.0)
        new = [one.position for item in out if isinstance(item.message, Grant) for one in item.message.leases]
        self.held.update(new)
        return new

    def arrive(self, groups: dict[int, tuple[int, ...]], dropped: str = "") -> None:
        version = self.owner.version
        for position in groups:
            result = Result("rollout/0", 0, 0, position, 1, 100, Version(0, version), dropped, 0, (), 0)
            self.owner.handle(result, 0.0)
            self.held.discard(position)
        if not dropped:
            self.core.arrived({position: unshared(tokens) for position, tokens in groups.items()})

    def take(self) -> Take | None:
        return self.core.take(0.0)

    @property
    def reserved(self) -> int:
        return sum(ledger.reserved for ledger in self.owner.ledgers)


def take(taken: Take | None) -> tuple[list[int], bool, bool]:
    assert taken is not None
    return [*taken.positions], taken.train, taken.over


def test_groups_are_taken_as_they_arrive_and_trained_on_once_they_fill_a_batch() -> None:
    replica = Replica(IntakeRule(CostRule(8)))
    assert replica.lease() == [*range(8)]
    assert replica.take() is None
    replica.arrive({1: (1, 2)})
    assert take(replica.take()) == ([1], False, False)
    replica.arrive({0: (1, 1), 2: (1, 1)})
    assert take(replica.take()) == ([0, 2], True, False)
    replica.arrive({position: (1, 1) for position in (3, 4, 5, 6)})
    assert take(replica.take()) == ([3, 4, 5, 6], True, False)
    replica.arrive({7: (1, 1)})
    assert take(replica.take()) == ([7], True, True)
    assert replica.core.groups == 8


def test_a_whole_set_is_taken_at_once_in_order_and_stays_reserved_until_the_step_is_over() -> None:
    """So leases of the next step wait for memory: what is kept for several updates is really there."""
    replica = Replica(IntakeRule(CostRule(1), streamed=False), max_staleness=1, memory_bytes=8 * GROUP_BYTES)
    assert replica.lease() == [*range(8)]
    replica.arrive({position: (1,) for position in reversed(range(1, 8))})
    assert replica.take() is None
    replica.arrive({0: (1,)})
    assert take(replica.take()) == ([*range(8)], True, True)
    assert (replica.reserved, replica.lease()) == (8 * 100, [*range(8, 12)])
    replica.owner.advance(1, 0.0)
    assert (replica.reserved, replica.lease()) == (4 * GROUP_BYTES, [*range(12, 16)])


def test_what_clients_write_is_awaited_and_not_asked_for() -> None:
    calls = (IntakeCall("reference"), IntakeCall("labels", outside=True))
    replica = Replica(IntakeRule(CostRule(1), calls=calls), max_staleness=1)
    replica.lease()
    assert replica.core.outside() is None
    replica.arrive({position: (1,) for position in (0, 1, 9)})
    assert replica.core.wants_calls() == [("reference", 0), ("reference", 1), ("reference", 9)]
    assert replica.core.outside() == ("labels", 2), "9 is of the next step"
    replica.core.answered(0, "reference")
    assert replica.take() is None
    replica.core.answered(0, "labels")
    assert take(replica.take()) == ([0], True, False)
    assert replica.core.outside() == ("labels", 1)


def test_only_groups_with_all_answers_are_taken() -> None:
    calls = (IntakeCall("reference"), IntakeCall("values", in_window=True))
    replica = Replica(IntakeRule(CostRule(1), calls=calls), max_staleness=1)
    replica.lease()
    replica.arrive({position: (1,) for position in (0, 9)})
    assert replica.core.wants_calls() == [("reference", 0), ("reference", 9), ("values", 0)], "9 is of the next step"
    assert replica.core.wants_calls() == []
    replica.core.answered(0, "values")
    assert replica.take() is None
    replica.core.answered(0, "reference")
    assert take(replica.take()) == ([0], True, False)
    replica.arrive({1: (1,)}, dropped="dull")
    assert replica.core.wants_calls() == [("values", 9)], "a drop has moved it into the open window"


def test_a_whole_set_waits_for_its_answers() -> None:
    replica = Replica(IntakeRule(CostRule(1), streamed=False, calls=(IntakeCall("reference"),)))
    replica.lease()
    replica.arrive({position: (1,) for position in range(8)})
    for edge, position in replica.core.wants_calls():
        assert replica.take() is None
        replica.core.answered(position, edge)
    assert take(replica.take()) == ([*range(8)], True, True)


def test_a_replica_whose_groups_are_all_there_awaits_those_of_the_others() -> None:
    dealing = DealCore("trainer/0", ["trainer/0", "trainer/1"], DealRule(16, 2, CostRule(budget=100)))
    replica = Replica(IntakeRule(CostRule(100)), dealing=dealing)
    dealing.begin(0)
    replica.lease()
    replica.arrive({position: (1,) for position in range(7)})
    assert not replica.core.awaits_others, "a sample of its own is missing"
    replica.arrive({7: (1,)})
    replica.core.heard([replica.core.news(), []], 0.0)
    assert replica.core.awaits_others
    assert replica.take() is None
    replica.core.heard([[], [(position, [(1, 0)]) for position in range(8, 16)]], 0.0)
    assert not replica.core.awaits_others


def test_what_a_replica_computes_itself_fills_micro_batches_until_the_last_of_the_step() -> None:
    calls = tuple(IntakeCall(name, in_window=True, here=True) for name in ("old_logprobs", "values"))
    replica = Replica(IntakeRule(CostRule(4), streamed=False, calls=calls), max_staleness=1)
    replica.lease()
    replica.arrive({position: (1, 1) for position in (0, 9)})
    assert replica.core.wants_calls() == [], "nobody else is asked"
    assert replica.core.wants_here() is None, "9 is of the next step, and 0 fills no micro-batch"
    replica.arrive({1: (1, 1), 2: (1, 1)})
    assert replica.core.wants_here() == ("old_logprobs", [0, 1])
    assert replica.core.wants_here() == ("values", [0, 1])
    assert replica.core.wants_here() is None
    replica.arrive({position: (1, 1) for position in (3, 4, 5, 6, 7)})
    computed = [(0, "old_logprobs"), (1, "old_logprobs"), (0, "values"), (1, "values")]
    while (wanted := replica.core.wants_here()) is not None:
        assert replica.take() is None, "the set is there, and not all of it is complete"
        computed += [(position, wanted[0]) for position in wanted[1]]
    assert sorted(computed) == [(position, call.edge) for position in range(8) for call in calls]
    for position, edge in computed:
        assert replica.take() is None
        replica.core.answered(position, edge)
    assert take(replica.take()) == ([*range(8)], True, True)


def test_only_complete_groups_are_given_away_and_those_that_come_back_are_trained_on_here() -> None:
    replica = Replica(IntakeRule(CostRule(10**6), calls=(IntakeCall("reference"),)), ("trainer/1",))
    replica.lease()
    replica.arrive({position: (1,) for position in range(8)})
    replica.core.wants_calls()
    for position in range(4):
        replica.core.answered(position, "reference")
    out = replica.core.handle(ASK, "trainer/1", {"step": 0, "number": 1}, 0.0)
    assert [item.positions for item in out if isinstance(item, Send) and item.kind == GROUPS] == [(3, 2)]
    for position in range(4, 8):
        replica.core.answered(position, "reference")
    assert take(replica.take()) == ([0, 1, 4, 5, 6, 7], True, True)
    assert replica.core.rest() is None, "nothing is said before it is known who trains on them"
    replica.core.handle(RETURNED, "trainer/1", {"number": 1}, 0.0)
    assert take(replica.core.rest()) == ([3, 2], True, False)
    report = replica.core.rest()
    assert report is not None
    assert report.report
    assert (replica.core.groups, replica.core.rest(), replica.core.forget()) == (8, None, [])


def test_rows_of_groups_that_others_have_kept_are_forgotten_after_the_step() -> None:
    replica = Replica(IntakeRule(CostRule(10**6)), ("trainer/1",))
    replica.lease()
    replica.arrive({position: (1,) for position in range(8)})
    replica.core.handle(ASK, "trainer/1", {"step": 0, "number": 1}, 0.0)
    replica.core.handle(KEPT, "trainer/1", {"number": 1}, 0.0)
    assert take(replica.take()) == ([0, 1, 2, 3], True, True)
    assert (replica.core.groups, replica.reserved) == (4, 0)
    assert replica.core.forget() == [4, 5, 6, 7]
    assert replica.core.forget() == []


@settings(max_examples=60, derandomize=True)
@given(st.integers(0, 2**20), st.sampled_from([0.0, 0.2]), st.sampled_from([0.0, 2.0]))
@within(3, examples=60)
def test_replicas_that_steal_train_on_everything_once(seed: int, loss: float, answer_s: float) -> None:
    """One is slower than the other, which takes from it."""
    limits = replace(SMALL, groups_per_ledger=6, memory_bytes=10**6, max_staleness=1)
    scenario = FaultScenario(
        limits,
        owners=2,
        workers=2,
        slots=96,
        seconds=lambda position: 3.0 * random.Random(seed + position).random(),
        stealing=True,
        batch_s=lambda number: 1.0 if number else 4.0,
        calls=(IntakeCall("reference"),),
        answer_s=answer_s,
        loss=loss,
        duplicates=loss,
        seed=seed,
    )
    record = FaultyNetwork(scenario).run()
    assert [len(record.trained[step]) for step in range(3)] == [24] * 3
    assert record.moved > 0


def test_a_simulated_replica_steals_as_often_as_it_is_idle() -> None:
    """One group after another, as the budget says: of 12 of its own, a slow one computes fewer than half."""
    limits = replace(SMALL, groups_per_ledger=6, memory_bytes=10**6, training_steps=1)
    scenario = FaultScenario(
        limits,
        owners=2,
        workers=2,
        slots=96,
        seconds=lambda _: 1.0,
        stealing=True,
        batch_s=lambda number: 0.1 if number else 4.0,
    )
    assert FaultyNetwork(scenario).run().moved > 6


@pytest.mark.parametrize("lazy", [False, True])
def test_memory_for_three_steps_reaches_a_lag_of_two(lazy: bool) -> None:
    """What a step has kept is free once it is over: otherwise nothing could be leased ahead any more."""
    limits = replace(SMALL, max_staleness=2, training_steps=8, memory_bytes=3 * 8 * 400)
    record = FaultyNetwork(FaultScenario(limits, workers=2, slots=96, lazy_take=lazy)).run()
    assert max(record.lags) == 2
    assert record.peak_bytes <= limits.memory_bytes


def test_the_simulator_takes_by_the_core_and_has_no_copy_of_it() -> None:
    for path in sorted((ROOT / "distflow" / "sim").glob("*.py")):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        deciding = {call.attr for call in calls if isinstance(call, ast.Attribute)} & {"set_complete", "step_complete"}
        assert not deciding, f"{path.name} decides when groups are taken"
    trainer = (ROOT / "distflow" / "sim" / "trainer.py").read_text()
    assert "from distflow.exchange.intake_core import IntakeCore" in trainer
