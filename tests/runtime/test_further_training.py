"""The home of a critic over real sockets: two replicas that hold one divided model, and the owner that asks them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.comm.message import Buffer
from distflow.comm.outbox import Delivery, delivered
from distflow.data.batch import Batch, Ragged, group_ranges
from distflow.errors import RunStopped
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
    "limits.no_progress_s=10",
)
"""Each group is a micro-batch."""


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
        self.serving = serving
        self.model = Divided("critic", together, self.seen)
        rounds = Rounds({"critic": self.model}, replicas, self.node.board, self.metrics, WAIT_S)
        contexts = build_contexts(session._setting, self.metrics, rounds.models, None, self.tokenizer)
        steps = StepRunner(name, session._setting.me.steps, contexts)
        held = ports.HeldModels(rounds.models, contexts, rounds, session._turns)
        self.training: FurtherTraining = ports.trains_further(session._base, rows, serving, replicas, held, steps)

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
        (batch,) = self.training.receive(0)
        return len(group_ranges(batch))


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


def groups(count: int) -> Batch:
    """With all fields that the critic reads."""
    numbers = [position for position in range(count) for _ in range(ROWS)]
    prompts = Ragged.from_rows([[1, 2]] * len(numbers), torch.int64)
    responses = Ragged.from_rows([[3] * (TOKENS - 2)] * len(numbers), torch.int64)
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
        owner.rows.send(groups(9))
        owner.rows.close("train")

    taken = at_once(*(critic.receive for critic in critics), own)[:2]
    assert sum(taken) == 9
    assert sorted(found) == list(range(9))
    rounds = [Counter(critic.seen)["forward critic"] for critic in critics]
    assert rounds == [max(asked)] * 2, f"for {asked} requests"
    idle = [critic.metrics.drain().get("lockstep/idle_rounds", 0.0) for critic in critics]
    assert idle == [max(asked) - mine for mine in asked]


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
