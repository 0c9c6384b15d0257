"""Rounds of divided models: replicas in threads, over real sockets, with models that note what is done together."""

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distflow.comm.collective import LOOPBACK, is_lost_member
from distflow.comm.endpoint import Endpoint
from distflow.comm.membership import Identity, Membership
from distflow.config.schema import LimitsConfig
from distflow.data.batch import Batch, Ragged
from distflow.errors import ReplicaLost, RunStopped, UserError
from distflow.runtime.lockstep import GATHER, STEP, Rounds
from distflow.runtime.metrics import MetricStore
from distflow.runtime.node import Node
from distflow.runtime.protocols import TokenScores, TokenValues
from distflow.runtime.replicas import Replicas
from distflow.runtime.waits import WaitBoard
from distflow.runtime.weight_publisher import Canaries
from distflow.testing.fakes import FakeBackend
from distflow.weights.canary import canary_rows

WAIT_S = 20.0
ROW = Ragged.from_rows([[1, 2]], torch.int64)
BATCH = Batch({"prompt_ids": ROW, "response_ids": ROW})


class Divided(FakeBackend):
    """Whatever is collective waits for all replicas, and is written down."""

    lockstep = True

    def __init__(self, name: str, together: threading.Barrier, seen: list[str]) -> None:
        super().__init__()
        self._name = name
        self._all = together
        self._seen = seen
        self.mine = 0

    def _collective(self, what: str) -> None:
        self._seen.append(f"{what} {self._name}")
        self._all.wait(WAIT_S)

    def score(
        self, batch: Batch, *, temperature: float, grad: bool, entropy: bool, candidates: int | Ragged = 0
    ) -> TokenScores:
        self._collective("forward to train" if grad else "forward")
        self.mine += 1
        return super().score(batch, temperature=temperature, grad=grad, entropy=entropy, candidates=candidates)

    def values(self, batch: Batch, *, grad: bool) -> TokenValues:
        self._collective("forward to train" if grad else "forward")
        self.mine += 1
        return super().values(batch, grad=grad)

    def accumulate(self, loss_sum: Tensor) -> None:
        self._collective("backward")

    def idle(self, *, grad: bool) -> None:
        self._collective("forward to train" if grad else "forward")
        if grad:
            self._collective("backward")


class Replica:
    """One of several, with its two models."""

    def __init__(self, number: int, names: Sequence[str], folder: Path, together: threading.Barrier) -> None:
        self.name = names[number]
        roster = {name: f"ipc://{folder}/{name.replace('/', '-')}" for name in (*names, "agent/0")}
        me = Identity(self.name, 0, os.getpid(), 0.0, "digest", {})
        others = [name for name in names if name != self.name]
        self.node = Node(
            Endpoint(self.name, 0, roster, tick_s=0.02),
            Membership(me, others, lambda pid, started: True),
            WaitBoard(),
        )
        self.replicas = Replicas(
            self.name, names, names, self.node, LimitsConfig(connect_s=WAIT_S, no_progress_s=WAIT_S), LOOPBACK
        )
        self.seen: list[str] = []
        self.inner = {name: Divided(name, together, self.seen) for name in ("policy", "reference")}
        self.metrics = MetricStore()
        self.rounds = Rounds(self.inner, self.replicas, self.node.board, self.metrics, WAIT_S)

    def train(self) -> None:
        policy = self.rounds.models["policy"]
        scores = policy.score(BATCH, temperature=1.0, grad=True, entropy=False)
        policy.accumulate(scores.logprobs_BT.sum())

    def refer(self) -> None:
        self.rounds.models["reference"].score(BATCH, temperature=1.0, grad=False, entropy=False)

    def wait(self) -> None:
        """As one that waits for samples: join the others when they call."""
        board = self.node.board
        ready = lambda: True if self.rounds.called else None  # noqa: E731
        board.until(ready, name="samples", peers=(), limit_s=WAIT_S, progress=lambda: 0, even_when_stopping=True)
        self.rounds.answer()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[int], list[Replica]]]:
    made: list[Replica] = []

    def replicas(count: int) -> list[Replica]:
        names, together = [f"trainer/{i}" for i in range(count)], threading.Barrier(count)
        made.extend(Replica(number, names, tmp_path, together) for number in range(count))
        for one in made:
            one.node.start()
        for one in made:
            with one.node.board.condition:
                met = lambda one=one: all(map(one.node.membership.present, one.replicas.others))  # noqa: E731
                assert one.node.board.condition.wait_for(met, WAIT_S)
        return made

    yield replicas
    for one in made:
        one.node.close(orderly=True)


def at_once(*programs: Callable[[], Any]) -> list[Any]:
    """What each gives or raises, in threads of their own."""
    with ThreadPoolExecutor(len(programs)) as pool:
        futures = [pool.submit(program) for program in programs]
        return [future.exception(WAIT_S) or future.result() for future in futures]


def program(replica: Replica, work: Sequence[str]) -> Callable[[], None]:
    def run() -> None:
        for item in work:
            {"train": replica.train, "refer": replica.refer}[item]()
        replica.rounds.meet(STEP)

    return run


def check_in_step(replicas: Sequence[Replica], work: Sequence[Sequence[str]]) -> None:
    assert all(replica.seen == replicas[0].seen for replica in replicas)
    for replica, items in zip(replicas, work, strict=True):
        assert replica.inner["policy"].mine == items.count("train")
        assert replica.inner["reference"].mine == items.count("refer")


def test_replicas_with_more_and_less_to_do(make: Callable[[int], list[Replica]]) -> None:
    replicas = make(3)
    work = [["refer", "train", "train", "train"], ["refer", "train"], []]
    assert at_once(*map(program, replicas, work)) == [None] * 3
    check_in_step(replicas, work)
    idle = [replica.metrics.drain().get("lockstep/idle_rounds", 0.0) for replica in replicas]
    rounds = sum(what.startswith("forward") for what in replicas[0].seen)
    assert idle == [rounds - 4, rounds - 2, rounds]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_each_has_to_do_all_do_the_same(make: Callable[[int], list[Replica]], seed: int) -> None:
    rng = random.Random(seed)
    replicas = make(2 + seed % 3)
    for _ in range(3):
        work = [rng.choices(["refer", "train"], k=rng.randrange(5)) for _ in replicas]
        before = [(one.inner["policy"].mine, one.inner["reference"].mine) for one in replicas]
        assert at_once(*map(program, replicas, work)) == [None] * len(replicas)
        assert all(replica.seen == replicas[0].seen for replica in replicas)
        for one, items, (trained, referred) in zip(replicas, work, before, strict=True):
            assert one.inner["policy"].mine - trained == items.count("train")
            assert one.inner["reference"].mine - referred == items.count("refer")


def test_a_canary_is_one_forward_of_all_also_when_one_is_to_stop(make: Callable[[int], list[Replica]]) -> None:
    """Nothing is agreed on for it: a stop there would come between a step and the number of its version."""
    replicas = make(2)
    with replicas[1].node.board.condition:
        replicas[1].node.board.stop("asked to")
    canaries = Canaries(canary_rows(13, 20), "float32")
    found = at_once(*(lambda one=one: canaries.compute(one.rounds.models["policy"]) for one in replicas))
    assert found[0] == found[1]
    assert [one.seen for one in replicas] == [["forward policy"]] * 2
    assert sum(map(len, found[0].logprobs)) == 72


def test_who_waits_for_samples_joins_when_called(make: Callable[[int], list[Replica]]) -> None:
    first, second = make(2)

    def waiting() -> None:
        second.wait()
        second.wait()
        second.train()
        second.rounds.meet(STEP)

    assert at_once(program(first, ["refer", "train"]), waiting) == [None, None]
    check_in_step([first, second], [["refer", "train"], ["train"]])


def test_a_gather_waits_for_the_rounds_before_it(make: Callable[[int], list[Replica]]) -> None:
    first, second = make(2)

    def busy() -> list[Tensor]:
        first.refer()
        first.refer()
        found = first.rounds.gather(torch.tensor([1.0]))
        first.train()
        first.rounds.meet(STEP)
        return found

    def quick() -> list[Tensor]:
        found = second.rounds.gather(torch.tensor([2.0, 3.0]))
        second.rounds.meet(STEP)
        return found

    for found in at_once(busy, quick):
        assert [part.tolist() for part in found] == [[1.0], [2.0, 3.0]]
    assert first.seen == second.seen


def test_different_points_are_a_fault_that_is_named(make: Callable[[int], list[Replica]]) -> None:
    first, second = make(2)
    found = at_once(lambda: first.rounds.meet(STEP), lambda: second.rounds.meet(GATHER))
    assert all("different points: ['the optimizer step', 'a gather']" in str(error) for error in found)


def test_all_stop_behind_the_same_round(make: Callable[[int], list[Replica]]) -> None:
    replicas = make(3)
    replicas[1].node.board.stop("enough")
    found = at_once(*[program(replica, ["train"] * 5) for replica in replicas[:2]], replicas[2].wait)
    assert [type(error) for error in found] == [RunStopped] * 3
    assert "enough" in str(found[1])
    assert all(replica.seen == [] for replica in replicas)


def test_a_stop_wakes_who_only_answers(make: Callable[[int], list[Replica]]) -> None:
    """Both are through but for the third, which waits for samples that never come."""
    replicas = make(3)
    through = [lambda one=one: one.rounds.meet(STEP) for one in replicas[:2]]

    def waiting() -> None:
        replicas[2].wait()
        replicas[0].node.board.stop("enough")
        while True:
            replicas[2].wait()

    assert [type(error) for error in at_once(*through, waiting)] == [RunStopped] * 3


def test_an_unfinished_round_is_refused(make: Callable[[int], list[Replica]]) -> None:
    (alone,) = make(1)
    policy, reference = alone.rounds.models["policy"], alone.rounds.models["reference"]
    with pytest.raises(UserError, match=r"accumulate of model 'policy' without a score\(grad=True\)"):
        policy.accumulate(torch.zeros(()))
    policy.score(BATCH, temperature=1.0, grad=True, entropy=False)
    for model in (policy, reference):
        with pytest.raises(UserError, match=r"after score\(grad=True\) of model 'policy' without accumulate"):
            model.score(BATCH, temperature=1.0, grad=model is policy, entropy=False)
    with pytest.raises(UserError, match="the optimizer step after"):
        alone.rounds.meet(STEP)
    policy.accumulate(torch.zeros(()))
    alone.rounds.meet(STEP)


def test_one_replica_sends_nothing(make: Callable[[int], list[Replica]]) -> None:
    (alone,) = make(1)
    program(alone, ["refer", "train", "train"])()
    assert alone.replicas._agreement.round == 0
    assert alone.seen == ["forward reference", *["forward to train policy", "backward policy"] * 2]


def test_a_replica_lost_in_a_round_is_no_fault_of_the_step(make: Callable[[int], list[Replica]]) -> None:
    first, _ = make(2)
    gloo = "[/somewhere/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"
    lost = pytest.raises(ReplicaLost, match=r"a training replica was lost in a forward: .*closed by peer")
    with lost, first.rounds.together("a forward"):
        raise RuntimeError(gloo)
    with pytest.raises(RuntimeError, match="shapes"), first.rounds.together("a forward"):
        raise RuntimeError("shapes do not fit")
    assert not is_lost_member(RuntimeError("out of memory"))


def test_a_wait_inside_a_library_is_shown(make: Callable[[int], list[Replica]]) -> None:
    first, _ = make(2)
    with first.rounds.together("a forward of model 'policy'"):
        (wait,) = first.node.board.waits()
    assert wait["name"] == "a forward of model 'policy', computed with the other training replicas"
    assert wait["peers"] == ["trainer/1"]
    assert first.node.board.waits() == []
