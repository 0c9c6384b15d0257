"""Dissemination under every order, loss and doubling that a network can think of."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.comm.fact_exchange import MISSING, TOLD, Agreement
from distflow.comm.membership import MemberMessage
from distflow.errors import ProtocolError


class Group:
    """R members on a network that loses, doubles and reorders by a seed."""

    def __init__(self, size: int, seed: int, loss: float) -> None:
        self.names = [f"trainer/{i}" for i in range(size)]
        self.members = {name: Agreement("trainer", name, self.names) for name in self.names}
        self.rng = random.Random(seed)
        self.loss = loss
        self.wire: list[tuple[str, MemberMessage]] = []
        self.now = 0.0
        self.sent = 0

    def post(self, sender: str, out: list[MemberMessage]) -> None:
        for tell in out:
            self.sent += 1
            copies = 0 if self.rng.random() < self.loss else 1 + (self.rng.random() < self.loss)
            self.wire += [(sender, tell)] * copies

    def run(self, rounds: int) -> list[list[list[int]]]:
        """What each member learnt in each round."""
        learnt: dict[str, list[list[int]]] = {name: [] for name in self.names}
        idle = dict.fromkeys(self.names, True)
        here, leaving = list(self.names), set()
        for _ in range(20_000):
            if not here and all(len(found) == rounds for found in learnt.values()):
                return list(learnt.values())
            name = self.rng.choice(here or self.names)
            member = self.members[name]
            if idle[name] and len(learnt[name]) < rounds:
                idle[name] = False
                fact = {"value": 100 * len(learnt[name]) + self.names.index(name)}
                self.post(name, member.contribute(fact, self.now))
            if self.wire and self.rng.random() < 0.7:
                sender, tell = self.wire.pop(self.rng.randrange(len(self.wire)))
                if tell.to in here:
                    self.post(tell.to, self.members[tell.to].handle(tell.kind, sender, tell.body))
            agreed = member.agreed()
            if agreed is not None:
                learnt[name].append([int(fact["value"]) for fact in agreed])
                idle[name] = True
            elif len(learnt[name]) == rounds and name not in leaving:
                leaving.add(name)
                self.post(name, member.leave(self.now))
            elif name in leaving and not set(member.unheard()) & set(here):
                # Gone: nobody can ask it for anything any more.
                here.remove(name)
                continue
            self.now += 0.05
            self.post(name, member.tick(self.now))
        raise AssertionError(f"no agreement: {[(m.round, m.missing()) for m in self.members.values()]}")


@settings(max_examples=60)
@given(size=st.integers(1, 9), seed=st.integers(0, 10_000), loss=st.sampled_from([0.0, 0.1, 0.4]))
def test_every_member_learns_every_fact_of_every_round(size: int, seed: int, loss: float) -> None:
    for found in Group(size, seed, loss).run(rounds=4):
        assert found == [[100 * number + rank for rank in range(size)] for number in range(4)]


@pytest.mark.parametrize(("size", "messages"), [(1, 0), (2, 1), (3, 2), (8, 3), (9, 4), (16, 4)])
def test_a_round_costs_each_member_the_logarithm_of_the_group(size: int, messages: int) -> None:
    group = Group(size, seed=0, loss=0.0)
    for name, member in group.members.items():
        group.post(name, member.contribute({}, 0.0))
    while group.wire:
        sender, tell = group.wire.pop(0)
        group.post(tell.to, group.members[tell.to].handle(tell.kind, sender, tell.body))
    assert group.sent == messages * size
    assert all(member.agreed() is not None for member in group.members.values())


def test_it_says_who_is_missing() -> None:
    member = Agreement("trainer", "trainer/1", ["trainer/0", "trainer/1", "trainer/2"])
    member.contribute({"ready": True}, 0.0)
    assert member.missing() == ("trainer/0", "trainer/2")
    assert member.agreed() is None


def test_a_member_that_asks_is_told_again() -> None:
    member = Agreement("trainer", "trainer/0", ["trainer/0", "trainer/1"])
    told = member.contribute({"x": 1}, 0.0)
    assert member.handle(MISSING, "trainer/1", {"group": "trainer", "round": 1, "stage": 0}) == told
    assert member.handle(MISSING, "trainer/1", {"group": "trainer", "round": 2, "stage": 0}) == []


def test_nonsense_is_refused() -> None:
    member = Agreement("trainer", "trainer/0", ["trainer/0", "trainer/1"])
    with pytest.raises(ProtocolError, match="rollout/0 is not a member of the group of trainer/0, trainer/1"):
        member.handle(TOLD, "rollout/0", {"group": "trainer", "round": 1, "stage": 0, "facts": []})
    with pytest.raises(ProtocolError, match="malformed agreement message: Object missing required field `group`"):
        member.handle(TOLD, "trainer/1", {"stage": 0, "facts": []})
    with pytest.raises(ProtocolError, match="facts of members \\[7\\], which trainer/1 cannot know"):
        member.handle(TOLD, "trainer/1", {"group": "trainer", "round": 1, "stage": 0, "facts": [[7, {}]]})


def test_who_has_not_begun_notices_that_others_have() -> None:
    """By what they tell, or, if that was lost, by their asking for the own fact."""
    names = ["trainer/0", "trainer/1"]
    first, second = (Agreement("trainer", name, names) for name in names)
    assert not second.opened
    (told,) = first.contribute({"value": 0}, 0.0)
    assert not first.opened
    (asked,) = first.tick(10.0)
    assert asked.kind == MISSING
    for lost, heard in ((asked, told), (told, asked)):
        assert lost is not heard
        second = Agreement("trainer", names[1], names)
        second.handle(heard.kind, names[0], heard.body)
        assert second.opened
        second.contribute({"value": 1}, 10.0)
        assert not second.opened
    second.handle(told.kind, names[0], told.body)
    assert second.agreed() is not None
    second.handle(told.kind, names[0], told.body)
    assert not second.opened, "an old message says nothing new"
