"""Groups that an idle training replica takes over from a busy one, with their rows, between two real nodes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs

from distflow.config.schema import LimitsConfig, RunConfig
from distflow.data.batch import Batch, Ragged
from distflow.exchange import steal_core
from distflow.exchange.group_transfer import GROUPS, RETURNED
from distflow.exchange.intake_core import IntakeRule
from distflow.exchange.messages import Ask, Grant, Report, Result
from distflow.exchange.owner import OwnerCore
from distflow.exchange.sample_channel import InboundSamples
from distflow.exchange.steal_core import ASK
from distflow.flow.plan import BatchPlan
from distflow.parts import CostRule
from distflow.runtime.intake import Intake
from distflow.runtime.receiving import Receiving, TrainingLimits
from distflow.types import Version
from tests.runtime.kit import lease_settings, prompt_at
from tests.runtime.test_lockstep import WAIT_S, Replica

NAMES = ("trainer/0", "trainer/1")
OWN = 4
"""Groups that each of them owns of every training step."""
SETTINGS = replace(lease_settings(), ledgers=2, groups_per_ledger=OWN, samples_per_prompt=2, training_steps=2)
BATCH = BatchPlan(
    prompts=2 * OWN,
    samples_per_prompt=2,
    samples=4 * OWN,
    ledgers=2,
    groups_per_ledger=OWN,
    max_staleness=0,
    training_steps=2,
    max_refills=10,
    tokens_per_microbatch=1,
)
LIMITS = TrainingLimits(BATCH, True, RunConfig(training_steps=1), LimitsConfig(no_progress_s=WAIT_S))


def unused(step: str, batch: Batch) -> Batch:
    raise AssertionError(f"{step} is computed when samples arrive, and this flow has no such step")


class Trainer:
    """One replica: its node, its ledger, and a training loop that notes what it is given."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.replica = Replica(number, NAMES, folder, threading.Barrier(2))
        self.node, self.board = self.replica.node, self.replica.node.board
        self.core = OwnerCore(NAMES[number], SETTINGS, [number], prompt_at)
        self.inbound = InboundSamples(self.core, lambda *message: None)
        replicas = self.replica.replicas
        self.intake = Intake(
            self.inbound, self.node, IntakeRule(CostRule(1)), replicas.others, random.Random(f"0/{number}")
        )
        self.receiving = Receiving(self.intake, replicas, LIMITS, self.node, self.replica.metrics, self.account, unused)
        self.trained: list[int] = []
        self.rows: list[list[int]] = []
        self.asks = 0

    def account(self) -> dict[str, object]:
        return {"stop": False, "groups": self.intake.core.groups}

    def lease(self) -> list[int]:
        """All that may be leased now, to one rollout."""
        self.asks += 1
        report = Report("rollout/0", 0, 0, self.asks, (), self.asks - 1, -1)
        out = self.core.handle(Ask(report, self.asks, OWN, park=True, idle=False), 0.0)
        return [one.position for item in out if isinstance(item.message, Grant) for one in item.message.leases]

    def arrive(self, *positions: int) -> None:
        """Their results come in; the tokens of a row say whose they are."""
        with self.board.condition:
            for position in positions:
                row = Ragged.from_rows([[position], [position]], torch.int64)
                spans = Ragged(torch.tensor([[0, self.core.version, 0, 1]] * 2), torch.arange(3))
                batch = Batch(
                    {
                        "group": torch.tensor([position] * 2),
                        "prompt_ids": row,
                        "response_ids": row,
                        "policy_versions": spans,
                    }
                )
                result = Result("rollout/0", 0, 0, position, 1, 100, Version(0, self.core.version), "", 0, (), 0)
                self.inbound.accept([result], batch, 0.0)
            self.board.condition.notify_all()

    def begin(self, step: int) -> list[int]:
        """A training step opens; returns the positions that the replica owns of it."""
        self.receiving.begin(step)
        return self.lease()

    def train(self) -> int:
        """The step that is open; returns how many groups all replicas together say to have trained on."""
        for batch in self.receiving.receive(self.core.version):
            self.trained += dict.fromkeys(batch.dense("group").tolist())
            self.rows += [row.tolist() for row in batch.ragged("response_ids").rows()]
        facts = self.replica.replicas.agree("totals", self.account())
        with self.board.condition:
            self.core.advance(self.core.version + 1, 0.0)
        return sum(int(fact["groups"]) for fact in facts)


@pytest.fixture
def trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Trainer]]:
    monkeypatch.setattr(steal_core, "REPEAT_S", 0.2)
    made = [Trainer(number, tmp_path) for number in range(2)]
    for one in made:
        one.node.start()
    for one in made:
        await_that(one, lambda one=one: all(map(one.node.membership.present, one.replica.replicas.others)))
    yield made
    for one in made:
        one.node.close(orderly=True)


def await_that(trainer: Trainer, ready: Callable[[], bool]) -> None:
    with trainer.board.condition:
        assert trainer.board.condition.wait_for(ready, WAIT_S)


def check(trainers: Sequence[Trainer], counts: Sequence[Future[int]], positions: Sequence[int]) -> None:
    """The step's positions were trained on once, with their own rows, and both replicas agree on that."""
    assert [count.result(WAIT_S) for count in counts] == [2 * OWN] * 2
    assert sorted(position for one in trainers for position in one.trained) == sorted(positions)
    rows = [row for one in trainers for row in one.rows]
    assert sorted(rows) == sorted([position] for position in positions for _ in range(2))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def test_a_group_that_comes_between_an_ask_and_its_repetition_is_not_lost(
    trainers: list[Trainer], pool: ThreadPoolExecutor
) -> None:
    """The busy one's endpoint is late: it reads the ask, has nothing, gets a group, and reads the ask again."""
    busy, idle = trainers
    mine, theirs = busy.begin(0), idle.begin(0)
    on_ask, late = busy.node._handlers[ASK], []
    busy.node.on(ASK, late.append)
    busy.arrive(mine[0])
    idle.arrive(*theirs)
    counts = [pool.submit(idle.train)]
    await_that(busy, lambda: len(late) >= 2)
    counts.append(pool.submit(busy.train))
    await_that(busy, lambda: busy.intake.core.groups == 1)
    with busy.board.condition:
        on_ask(late[0])
        busy.arrive(mine[1])
        for ask in late[1:]:
            on_ask(ask)
        busy.node.on(ASK, on_ask)
    busy.arrive(*mine[2:])
    check(trainers, counts, [*mine, *theirs])


def test_groups_that_cannot_be_read_go_back_and_are_trained_on_by_their_owner(
    trainers: list[Trainer], pool: ThreadPoolExecutor
) -> None:
    busy, idle = trainers
    mine, theirs = busy.begin(0), idle.begin(0)
    on_groups, on_return, returns = idle.node._handlers[GROUPS], busy.node._handlers[RETURNED], []
    idle.node.on(GROUPS, lambda message: on_groups(structs.replace(message, payload=[])))
    busy.node.on(RETURNED, lambda message: returns.append(on_return(message)))
    busy.arrive(*mine)
    idle.arrive(*theirs)
    counts = [pool.submit(idle.train)]
    await_that(busy, lambda: bool(returns))
    counts.append(pool.submit(busy.train))
    check(trainers, counts, [*mine, *theirs])
    assert sorted(busy.trained) == mine
