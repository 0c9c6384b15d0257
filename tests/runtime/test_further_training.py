"""The home of a critic over real sockets: two replicas that hold one divided model, and the owner that asks them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.comm.message import Buffer
from distflow.comm.outbox import Delivery, delivered
from distflow.data.batch import Batch, Ragged, group_ranges, row_lengths
from distflow.data.micro_batches import micro_batches
from distflow.errors import RunStopped
from distflow.exchange.dealing import DealRule
from distflow.flow.memory import MIB
from distflow.parts import CostRule
from distflow.runtime import ports
from distflow.runtime.assembly import build_contexts, build_tokenizer
from distflow.runtime.further_training import FurtherTraining
from distflow.runtime.lockstep import Rounds
from distflow.runtime.session import Session
from distflow.runtime.steps import StepRunner
from tests.messages.receivers import setting_of
from tests.polling import eventually
from tests.runtime.test_lockstep import WAIT_S, Divided, at_once

CRITICS = ("critic/0", "critic/1")
ROWS, TOKENS = 2, 6
SETTINGS = (
    "flow=ppo",
    "layout=critic",
    "layout.pools.trainer.count=1",
    f"batch.tokens_per_microbatch={ROWS * TOKENS}",
    "batch.prompts=16",
    "flow.steps.sample.with.max_new_tokens=200",
    "layout.pools.critic.sample_memory_mb=1",
    "limits.no_progress_s=10",
)
"""Each group is a micro-batch, and rows have little room."""
RULE = DealRule(16, 4, CostRule(ROWS * TOKENS))


class Worker:
    """A worker of the run up to its endpoint, which listens."""

    def __init__(self, name: str, folder: Path) -> None:
        setting = setting_of(name, folder, SETTINGS)
        self.name = name
        self.session = Session(setting, 0)
        self.tokenizer = build_tokenizer(setting)
        self.session._register(self.tokenizer)
        self.node = self.session._node
        self.metrics = self.session._metrics


class Critic(Worker):
    """A replica of the critic's home, whose model notes what is done together."""

    def __init__(self, name: str, folder: Path, together: threading.Barrier) -> None:
        super().__init__(name, folder)
        session, self.seen = self.session, list[str]()
        replicas, serving, rows = session._replicas, session._serving, session._rows_in
        assert replicas is not None
        assert serving is not None
        assert rows is not None
        self.serving, self.rows = serving, rows
        self.model = Divided("critic", together, self.seen)
        rounds = Rounds({"critic": self.model}, replicas, self.node.board, self.metrics, WAIT_S)
        contexts = build_contexts(session._setting, self.metrics, rounds.models, {}, self.tokenizer)
        steps = StepRunner(name, session._setting.me.steps, contexts)
        held = ports.HeldModels(rounds.models, contexts, rounds, session._turns, self.tokenizer)
        publishing = ports.publishes(session._base, held, {})
        ends = ports.FurtherEnds(rows, serving)
        self.training: FurtherTraining = ports.trains_further(session._base, ends, replicas, held, steps, publishing)

    @property
    def asked(self) -> int:
        with self.node.board.condition:
            return len(self.serving._queued)

    def begin(self) -> None:
        """Open the first training step: its version answers from now on."""
        self.steps = self.training.steps()
        assert next(self.steps) == 0

    def receive(self) -> int:
        """The groups of the training step, after it has answered what was asked."""
        return len(group_ranges(self.batch()))

    def batch(self) -> Batch:
        """The rows of the training step."""
        (batch,) = self.training.receive(0)
        return batch


class Owner(Worker):
    """It asks for the values of groups, and deals them."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        assert self.session._asking is not None
        self.calls = self.session._asking
        (self.rows,) = self.session._rows_out.values()

    def ask(self, groups: Batch) -> None:
        with self.node.board.condition:
            for position, group in group_ranges(groups).items():
                self.calls.ask("values", position, group, 0)

    def answered(self) -> list[int]:
        with self.node.board.condition:
            return [position for position, _ in self.calls.take("values")]


def groups(count: int, tokens: int = TOKENS) -> Batch:
    """With all fields that the critic reads."""
    return groups_of([tokens] * count)


def groups_of(tokens: Sequence[int]) -> Batch:
    """The same; `tokens` of the rows of each group."""
    count, lengths = len(tokens), [n for n in tokens for _ in range(ROWS)]
    numbers = [position for position in range(count) for _ in range(ROWS)]
    prompts = Ragged.from_rows([[1, 2]] * len(numbers), torch.int64)
    responses = Ragged.from_rows([[3] * (n - 2) for n in lengths], torch.int64)
    values = responses.like(torch.zeros(len(responses.values)))
    return Batch(
        {
            "group": torch.tensor(numbers),
            "uid": torch.tensor([[0, number, number] for number in numbers]),
            "sample": torch.tensor([0, 1] * count),
            "prompt_ids": prompts,
            "response_ids": responses,
            "response_mask": responses.like(torch.ones(len(responses.values), dtype=torch.bool)),
            "values": values,
            "return": values,
        }
    )


@pytest.fixture
def home(tmp_path: Path) -> Iterator[tuple[Owner, list[Critic]]]:
    together = threading.Barrier(len(CRITICS))
    owner = Owner("trainer/0", tmp_path)
    critics = [Critic(name, tmp_path, together) for name in CRITICS]
    workers: Sequence[Worker] = [owner, *critics]
    for worker in workers:
        worker.node.start()
    for worker in workers:
        others = [other.name for other in workers if other is not worker]
        with worker.node.board.condition:
            met = lambda worker=worker, others=others: all(map(worker.node.membership.present, others))  # noqa: E731
            assert worker.node.board.condition.wait_for(met, WAIT_S)
    for critic in critics:
        critic.begin()
    yield owner, critics
    for worker in workers:
        worker.node.close(orderly=True)


def test_a_round_has_requests_of_every_replica_that_has_some(home: tuple[Owner, list[Critic]]) -> None:
    owner, critics = home
    owner.ask(groups(9))
    eventually(lambda: sum(critic.asked for critic in critics) == 9, "the requests")
    asked = [critic.asked for critic in critics]
    found: list[int] = []

    def own() -> None:
        eventually(lambda: found.extend(owner.answered()) or len(found) == 9, "the answers")
        owner.rows.send(groups(9), RULE, {})
        owner.rows.close("train")

    taken = at_once(*(critic.receive for critic in critics), own)[:2]
    assert sum(taken) == 9
    assert sorted(found) == list(range(9))
    rounds = [Counter(critic.seen)["forward critic"] for critic in critics]
    assert rounds == [max(asked)] * 2, f"for {asked} requests"
    idle = [critic.metrics.drain().get("lockstep/idle_rounds", 0.0) for critic in critics]
    assert idle == [max(asked) - mine for mine in asked]


@pytest.mark.parametrize("whole", [False, True], ids=["streaming", "whole"])
def test_the_rounds_of_a_step_take_all_replicas_equally_long(home: tuple[Owner, list[Critic]], whole: bool) -> None:
    """Each as long as its largest micro-batch: those of one number cost about the same, wherever rows come from."""
    owner, critics = home
    budget = 2 * ROWS * 40
    lengths = [40, 4, 4, 4, 20, 20, 16, 12, 8, 8, 8, 8, 4, 4, 4, 4]
    rule = replace(critics[0].training._parts.dealing, cost=CostRule(budget))
    for critic in critics:
        critic.training._parts = replace(critic.training._parts, dealing=rule)

    def own() -> None:
        owner.rows.send(groups_of(lengths), rule, {p: [(n, 0)] * ROWS for p, n in enumerate(lengths)} if whole else {})
        owner.rows.close("train")

    found: list[Batch] = at_once(*(critic.batch for critic in critics), own)[:2]
    assert sorted(p for batch in found for p in group_ranges(batch)) == list(range(16))
    parts = [[int(row_lengths(part).sum()) for _, part in micro_batches(batch, budget)] for batch in found]
    rounds = sum(map(max, zip_longest(*parts, fillvalue=0)))
    assert rounds <= 1.1 * ROWS * sum(lengths) / 2, f"{parts}"


def test_all_stop_behind_the_rounds_that_some_still_want(home: tuple[Owner, list[Critic]]) -> None:
    """One has a request, and has yet to hear that it is not wanted any more."""
    owner, critics = home
    owner.ask(groups(1))
    eventually(lambda: any(critic.asked for critic in critics), "the request")
    asked = next(critic.name for critic in critics if critic.asked)
    send, lost = owner.node.endpoint.send, threading.Event()

    def late(to: str, kind: str, body: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> Delivery:
        if to == asked and kind == "rows.close" and not lost.is_set():
            lost.set()
            return delivered()
        return send(to, kind, body, payload)

    owner.node.endpoint.send = late  # type: ignore[method-assign]
    owner.rows.close("stop")
    programs: list[Callable[[], int]] = [critic.receive for critic in critics]
    assert [type(error) for error in at_once(*programs)] == [RunStopped] * 2
    assert lost.is_set()


@pytest.mark.parametrize("rows", [0, 1], ids=["all of none", "a part"])
def test_a_replica_without_groups_waits_for_what_was_sent_before_the_close(
    home: tuple[Owner, list[Critic]], rows: int
) -> None:
    """One group for two replicas: the other one learns from a batch without rows which fields it has none of."""
    owner, critics = home
    send, lost = owner.node.endpoint.send, list[str]()

    def late(to: str, kind: str, body: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> Delivery:
        if kind == "rows" and len(body["groups"]) == rows and not lost:
            lost.append(to)
            return delivered()
        return send(to, kind, body, payload)

    owner.node.endpoint.send = late  # type: ignore[method-assign]
    owner.rows.send(groups(1), RULE, {})
    owner.rows.close("train")
    found: list[Batch] = at_once(*(critic.batch for critic in critics))
    assert lost, "something is sent again"
    assert sorted(len(batch) for batch in found) == [0, ROWS]
    assert found[0].columns.keys() == found[1].columns.keys()
    for critic in critics:
        assert not critic.rows._kept
        with critic.node.board.condition:
            critic.rows.release()
        assert critic.rows.held == 0


def test_owners_do_not_wait_for_the_last_words_of_a_replica_that_has_left(home: tuple[Owner, list[Critic]]) -> None:
    """Nobody says again what it has taken: it would not have left before."""
    owner, critics = home

    def mute(critic: Critic) -> None:
        send = critic.node.endpoint.send

        def lossy(to: str, kind: str, body: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> Delivery:
            return delivered() if kind == "rows.ack" else send(to, kind, body, payload)

        critic.node.endpoint.send = lossy  # type: ignore[method-assign]

    mute(critics[1])
    owner.rows.close("stop")
    assert [type(error) for error in at_once(*(critic.receive for critic in critics))] == [RunStopped] * 2
    critics[1].node.close(orderly=True)
    owner.rows.settle()
    with owner.node.board.condition:
        assert not owner.rows._core._receivers["critic/1"].kept, "nothing is kept for it"


def test_rows_that_have_no_room_wait_at_their_owner_and_hold_nobody_up(home: tuple[Owner, list[Critic]]) -> None:
    """There is room for one training step, and a little of the next one."""
    owner, critics = home
    steps, sent = 4, groups(16, tokens=2600)

    def own() -> None:
        for _ in range(steps):
            owner.rows.send(sent, RULE, {})
            owner.rows.close("train")
        owner.rows.settle()

    def posted(to: str, t: int) -> bool:
        """Whether the rows of the step after t are dealt, and all that were sent have arrived."""
        with owner.node.board.condition:
            core = owner.rows._core
            kept = core._receivers[to].kept.values()
            return core.step > min(t + 1, steps - 1) and not any(one.sent and one.nbytes for one in kept)

    def train(critic: Critic) -> list[int]:
        held, taken = [], 0
        for t in islice(chain([0], critic.steps), steps):
            (batch,) = critic.training.receive(t)
            taken += len(group_ranges(batch))
            eventually(lambda t=t: posted(critic.name, t), "what has room")
            held.append(critic.rows.held)
        assert taken == steps * 8
        return held

    one = critics[0].rows._core._step_bytes
    for held in at_once(*(partial(train, critic) for critic in critics), own)[:2]:
        assert all(0.7 * one < nbytes <= MIB for nbytes in held), f"{held}, of steps of at most {one}"
        assert max(held[:-1]) > held[-1], "a little of the next one"
