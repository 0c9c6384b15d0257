"""Idle replicas and busy ones on a network that loses, doubles and reorders."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.errors import ProtocolError
from distflow.exchange.stealing import ASK, BACKLOG, LOOT, PROBE, THANKS, Send, StealCore


class Replica:
    """Has groups, works on one at a time, steals when it has none."""

    def __init__(self, name: str, peers: list[str], groups: list[int], seed: int) -> None:
        self.name = name
        self.groups = groups
        self.done: list[int] = []
        self.loot: list[int] = []
        self.core = StealCore(peers, lambda: len(self.groups), self.give, random.Random(seed))
        self.core.begin(3)

    def give(self, thief: str) -> tuple[int, ...]:
        count = -(-len(self.groups) // (1 + len(self.core.peers)))
        given, self.groups[len(self.groups) - count :] = self.groups[len(self.groups) - count :], []
        return tuple(given)

    def work(self, now: float) -> list[Send]:
        if self.groups or self.loot:
            self.done.append(self.groups.pop(0) if self.groups else self.loot.pop())
            return []
        return self.core.hunt(now)


class Pool:
    def __init__(self, shares: list[int], seed: int, loss: float) -> None:
        names = [f"trainer/{i}" for i in range(len(shares))]
        self.total = sum(shares)
        numbers = iter(range(self.total))
        self.replicas = {
            name: Replica(name, [n for n in names if n != name], [next(numbers) for _ in range(share)], seed)
            for name, share in zip(names, shares, strict=True)
        }
        self.rng, self.loss = random.Random(seed), loss
        self.wire: list[tuple[str, Send]] = []
        self.now = 0.0

    def post(self, sender: str, out: list[Send]) -> None:
        for item in out:
            copies = 0 if self.rng.random() < self.loss else 1 + (self.rng.random() < self.loss)
            self.wire += [(sender, item)] * copies

    def deliver(self) -> None:
        sender, item = self.wire.pop(self.rng.randrange(len(self.wire)))
        receiver = self.replicas[item.to]
        if item.kind == LOOT and receiver.core.expects(sender, item.body):
            receiver.loot += item.positions
        self.post(item.to, receiver.core.handle(item.kind, sender, item.body, self.now))

    def run(self) -> dict[str, list[int]]:
        for _ in range(50_000):
            if sum(len(r.done) for r in self.replicas.values()) == self.total and self.settled:
                return {name: replica.done for name, replica in self.replicas.items()}
            self.now += 0.02
            if self.wire:
                self.deliver()
            name = self.rng.choice(list(self.replicas))
            replica = self.replicas[name]
            self.post(name, replica.core.tick(self.now))
            if self.rng.random() < 0.2:
                self.post(name, replica.work(self.now))
        raise AssertionError("not all groups were worked on")

    @property
    def settled(self) -> bool:
        return all(replica.core.settled for replica in self.replicas.values())


@settings(max_examples=60, deadline=None)
@given(
    shares=st.lists(st.integers(0, 12), min_size=2, max_size=6),
    seed=st.integers(0, 10_000),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
)
def test_every_group_is_worked_on_once(shares: list[int], seed: int, loss: float) -> None:
    done = Pool(shares, seed, loss).run()
    assert sorted(group for groups in done.values() for group in groups) == list(range(sum(shares)))


def test_the_idle_take_from_the_busy() -> None:
    done = Pool([40, 0, 0, 0], seed=1, loss=0.0).run()
    assert all(len(groups) >= 5 for groups in done.values()), {name: len(groups) for name, groups in done.items()}


def make(backlog: int = 0, peers: tuple[str, ...] = ("trainer/1", "trainer/2")) -> StealCore:
    core = StealCore(peers, lambda: backlog, lambda thief: tuple(range(backlog)), random.Random(0))
    core.begin(5)
    return core


def test_the_larger_backlog_is_asked() -> None:
    core = make()
    assert {item.kind for item in core.hunt(0.0)} == {PROBE}
    assert core.handle(BACKLOG, "trainer/1", {"step": 5, "groups": 1}, 0.0) == []
    asked = core.handle(BACKLOG, "trainer/2", {"step": 5, "groups": 4}, 0.0)
    assert asked == [Send("trainer/2", ASK, {"step": 5, "number": 1})]


def test_who_was_turned_away_is_told_of_a_backlog() -> None:
    groups = [0]
    core = StealCore(["trainer/1"], lambda: groups[0], lambda thief: (), random.Random(0))
    core.begin(5)
    assert core.handle(PROBE, "trainer/1", {"step": 5}, 0.0)[0].body["groups"] == 0
    assert core.offer() == []
    groups[0] = 2
    assert core.offer() == [Send("trainer/1", BACKLOG, {"step": 5, "groups": 2})]
    assert core.offer() == []


def test_a_victim_is_unsettled_until_it_is_thanked() -> None:
    core = make(backlog=2)
    loot = core.handle(ASK, "trainer/1", {"step": 5, "number": 1}, 0.0)
    assert loot == [Send("trainer/1", LOOT, {"step": 5, "number": 1}, (0, 1))]
    assert core.handle(ASK, "trainer/1", {"step": 5, "number": 1}, 0.1) == loot
    assert (core.settled, core.owed()) == (False, ("trainer/1",))
    assert core.tick(2.0) == loot
    core.handle(THANKS, "trainer/1", {"number": 1}, 2.1)
    assert core.settled


def test_loot_is_expected_once() -> None:
    core = make(peers=("trainer/1",))
    core.hunt(0.0)
    core.handle(BACKLOG, "trainer/1", {"step": 5, "groups": 1}, 0.0)
    body = {"step": 5, "number": 1}
    assert core.expects("trainer/1", body)
    assert core.handle(LOOT, "trainer/1", body, 0.0) == [Send("trainer/1", THANKS, {"number": 1})]
    assert not core.expects("trainer/1", body)


def test_messages_of_another_step_change_nothing() -> None:
    core = make(backlog=2)
    assert core.handle(ASK, "trainer/1", {"step": 4, "number": 1}, 0.0) == []
    assert core.handle(PROBE, "trainer/1", {"step": 6}, 0.0) == []
    assert core.handle(LOOT, "trainer/1", {"step": 4, "number": 9}, 0.0)[0].kind == THANKS
    assert core.settled


def test_nonsense_is_refused() -> None:
    with pytest.raises(ProtocolError, match="rollout/0 is no training replica"):
        make().handle(PROBE, "rollout/0", {"step": 5}, 0.0)
    with pytest.raises(ProtocolError, match="whose 'number' is missing or no whole number"):
        make().handle(ASK, "trainer/1", {"step": 5}, 0.0)
