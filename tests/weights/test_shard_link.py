"""Weights in parts from two trainers to a reader, over Gloo: which memory they are in on their way."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distflow.types import Version
from distflow.weights.manifest import Manifest
from distflow.weights.shards.conductor import ShardConductor
from distflow.weights.shards.copies import PartCopies
from distflow.weights.shards.link import LinkSurroundings, ShardLink
from distflow.weights.transport import NamedTensors
from tests.polling import WAIT_S, Patience
from tests.weights.swarm_kit import SummingPublisher, new_tag

TRAINERS, READER = ("trainer/0", "trainer/1"), "rollout/0"
ROWS, COLUMNS = 301, 70


@dataclass(frozen=True, slots=True)
class Shard:
    """Half of the rows, or nearly so."""

    name: str
    shape: tuple[int, ...]
    start: int
    data: torch.Tensor


def whole(number: int) -> torch.Tensor:
    return torch.full((ROWS, COLUMNS), float(number)) + torch.arange(COLUMNS)


def half(number: int, rank: int) -> list[Shard]:
    begin, end = ((0, 150), (150, ROWS))[rank]
    data = whole(number)[begin:end].reshape(-1)
    return [Shard("embed", (ROWS, COLUMNS), begin * COLUMNS, data)]


def values(parts: Any) -> list[float]:
    return sorted({float(part.data.reshape(-1)[0]) for own in parts.values() for part in own})


class Landing:
    """The reader's engine, which reads what has come when the test says so."""

    def __init__(self) -> None:
        self.free = True
        self.came: list[NamedTensors] = []

    def begin(self, manifest: Manifest) -> None:
        self.free = False

    def end(self, manifest: Manifest, tensors: NamedTensors | None) -> None:
        assert tensors is not None
        self.came.append(tensors)


class Team:
    """Links in one process, and the messages between them."""

    def __init__(self, stack: ExitStack) -> None:
        self.posted: deque[tuple[str, str, str, Mapping[str, Any]]] = deque()
        self.locks = {name: threading.Condition() for name in (*TRAINERS, READER)}
        self.landing, store = Landing(), dist.HashStore()
        self.links = {}
        for name, lock in self.locks.items():
            conductor = ShardConductor("policy", 0, TRAINERS) if name == TRAINERS[0] else None
            self.links[name] = ShardLink("policy", self._surroundings(name, lock, store), conductor)
            stack.callback(self.links[name].close)
            if name in TRAINERS:
                self.links[name].reports_to(TRAINERS[0], 0)
        self.links[READER].lands_at(self.landing)
        self.publisher = SummingPublisher(new_tag(), "policy", 0)
        stack.callback(self.publisher.close)

    def _surroundings(self, me: str, lock: threading.Condition, store: dist.HashStore) -> LinkSurroundings:
        def post(to: str, kind: str, body: Mapping[str, Any]) -> None:
            self.posted.append((me, to, kind, body))

        def readers() -> Sequence[str]:
            return [READER]

        return LinkSurroundings(me, "127.0.0.1", lock, post, lambda _: store, readers, lambda _: None, self._fault)

    def _fault(self, error: BaseException) -> None:
        raise error

    def deliver(self) -> None:
        """What was posted, and the tick of each."""
        while self.posted:
            sender, to, kind, body = self.posted.popleft()
            with self.locks[to]:
                self.links[to].on_message(sender, kind, body)
        for name, link in self.links.items():
            with self.locks[name]:
                link.tick(time.monotonic())

    def until(self, what: str, done: Any) -> None:
        patience = Patience(WAIT_S)
        while not done():
            assert not patience.over, what
            self.deliver()
            time.sleep(0.01)

    def publish(self, number: int) -> None:
        for rank, name in enumerate(TRAINERS):
            self.links[name].keep(Version(0, number), half(number, rank))
        manifest = self.publisher.publish(Version(0, number), [("embed", whole(number))])
        with self.locks[TRAINERS[0]]:
            self.links[TRAINERS[0]].announce(manifest)


@pytest.fixture
def team() -> Iterator[Team]:
    with ExitStack() as stack:
        yield Team(stack)


def test_versions_come_one_after_the_other_into_the_same_memory(team: Team) -> None:
    team.publish(0)
    team.until("a group", lambda: all(link.joined for link in team.links.values()))
    for number in (1, 2, 3):
        team.publish(number)
        team.until(f"version {number}", lambda number=number: len(team.landing.came) == number)
        [(name, tensor)] = team.landing.came[-1]
        assert name == "embed"
        assert torch.equal(tensor, whole(number))
        team.landing.free = True
    assert len({tensors[0][1].data_ptr() for tensors in team.landing.came}) == 1


def test_a_trainers_copies_are_written_again_but_for_the_one_that_is_sent() -> None:
    copies, places = PartCopies(), []
    for number in range(5):
        copy = copies.next()
        copy.fill(half(number, 0))
        copy.version = Version(0, number)
        places.append(copy.memory["embed"])
    assert [version.number for version in copies.versions] == [3, 4]
    assert len({place.data_ptr() for place in places}) == 2
    sent = copies.send(Version(0, 4))
    assert sent is not None
    for number in (5, 6, 7):
        copy = copies.next()
        assert copy is not sent
        copy.fill(half(number, 0))
        copy.version = Version(0, number)
    assert values(sent.parts) == [4.0]
    assert values(copy.parts) == [7.0]
    sent.sending = False
    assert copies.next() is sent
    assert copies.send(Version(0, 4)) is None


def test_what_is_forgotten_is_not_sent_and_its_memory_is_used_again() -> None:
    copies = PartCopies()
    copy = copies.next()
    copy.fill(half(1, 0))
    copy.version, place = Version(0, 1), copy.memory["embed"].data_ptr()
    copies.forget()
    assert copies.versions == []
    assert copies.send(Version(0, 1)) is None
    again = copies.next()
    again.fill(half(2, 0))
    assert again.memory["embed"].data_ptr() == place
    # Another part of the model, as after a restart with other trainers.
    again.fill(half(3, 1))
    assert values(again.parts) == [3.0]
    assert sum(part.data.numel() for part in again.parts["embed"]) == 151 * COLUMNS
