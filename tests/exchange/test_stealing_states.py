"""Every state that one holder and one requester can get into, on a network that may do anything.

A message that was ever sent may arrive at any time, any number of times, or never. The holder's groups arrive and are
worked on by itself at any time; either side may send again what was not answered; a transfer may be unreadable. All
states with so many groups and asks are explored, and the same is checked in each: where every group is.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from distflow.exchange.group_transfer import GROUPS, REPEAT_S, Send
from distflow.exchange.steal_core import StealCore

HOLDER, REQUESTER = "trainer/0", "trainer/1"
STATE = [f.name for f in dataclasses.fields(StealCore) if f.name not in ("peers", "backlog", "give", "rng")]


@dataclasses.dataclass
class World:
    """What is not in the cores."""

    arriving: int
    backlog: list[int]
    done: list[int]
    given: list[int]
    kept: list[int]
    sent: dict[str, tuple[str, Send]]


class Explorer:
    def __init__(self, groups: int, asks: int) -> None:
        self.groups, self.asks = groups, asks
        self.world = World(groups, [], [], [], [], {})
        rng = random.Random(0)
        self.holder = StealCore([REQUESTER], lambda: len(self.world.backlog), self.give, rng)
        self.requester = StealCore([HOLDER], lambda: 0, lambda requester: (), rng)
        self.now = 0.0
        for core in (self.holder, self.requester):
            core.begin(0)

    def give(self, requester: str) -> tuple[int, ...]:
        given = self.world.backlog[-1:]
        del self.world.backlog[-1:]
        self.world.given += given
        return tuple(given)

    # -- states
    def save(self) -> tuple[Any, ...]:
        return copy.deepcopy(
            (self.world, *([getattr(c, name) for name in STATE] for c in (self.holder, self.requester)))
        )

    def load(self, saved: tuple[Any, ...]) -> None:
        self.world, *states = copy.deepcopy(saved)
        for core, values in zip((self.holder, self.requester), states, strict=True):
            for name, value in zip(STATE, values, strict=True):
                setattr(core, name, value)

    @staticmethod
    def key(saved: tuple[Any, ...]) -> str:
        """When something was sent makes no difference: whatever repeats may always repeat."""
        world = dataclasses.replace(saved[0], sent={name: None for name in sorted(saved[0].sent)})
        return re.sub(r"(since|sent_at)=[\d.]+", "", repr((world, *saved[1:])))

    # -- what can happen
    def moves(self) -> Iterator[tuple[str, str]]:
        if self.world.arriving:
            yield "arrive", ""
        if self.world.backlog:
            yield "work", ""
        yield "search", ""
        yield from (("tick", name) for name in (HOLDER, REQUESTER))
        yield from (("deliver", name) for name in self.world.sent)
        yield from (("garble", name) for name, (_, item) in self.world.sent.items() if item.kind == GROUPS)

    def do(self, move: str, what: str) -> None:
        self.now += 2 * REPEAT_S
        world = self.world
        match move:
            case "arrive":
                world.arriving -= 1
                world.backlog.append(world.arriving)
                self.post(HOLDER, self.holder.offer())
            case "work":
                world.done.append(world.backlog.pop(0))
            case "search":
                self.post(REQUESTER, self.requester.search(self.now))
            case "tick":
                self.post(what, (self.holder if what == HOLDER else self.requester).tick(self.now))
            case _:
                self.deliver(*world.sent[what], garbled=move == "garble")

    def deliver(self, sender: str, item: Send, *, garbled: bool) -> None:
        core = self.holder if item.to == HOLDER else self.requester
        if item.kind == GROUPS and core.expects(sender, item.body):
            if garbled:
                self.post(item.to, core.decline(sender, item.body))
                return
            self.world.kept += item.positions
        self.post(item.to, core.handle(item.kind, sender, item.body, self.now))
        for position in core.take_returned():
            self.world.given.remove(position)
            self.world.backlog.append(position)

    def post(self, sender: str, out: list[Send]) -> None:
        self.world.sent |= {f"{sender}: {item}": (sender, item) for item in out}

    # -- what must hold
    def check(self) -> None:
        world = self.world
        places = [*range(world.arriving), *world.backlog, *world.done, *world.given]
        assert sorted(places) == list(range(self.groups)), f"lost or doubled: {world}"
        assert set(world.kept) <= set(world.given), f"kept, and back all the same: {world}"
        assert len(set(world.kept)) == len(world.kept), f"kept twice: {world}"
        assert not self.holder.settled or set(world.given) == set(world.kept), f"forgotten: {world}"

    def explore(self) -> int:
        """Look at every state; returns how many there are."""
        start = self.save()
        found, waiting = {self.key(start): 0}, [start]
        settled: list[int] = []
        before: dict[int, set[int]] = defaultdict(set)
        while waiting:
            saved = waiting.pop()
            number = found[self.key(saved)]
            self.load(saved)
            self.check()
            if self.holder.settled:
                settled.append(number)
            for move, what in list(self.moves()):
                self.load(saved)
                self.do(move, what)
                if self.requester.number > self.asks:
                    continue
                state = self.save()
                key = self.key(state)
                if key not in found:
                    found[key] = len(found)
                    waiting.append(state)
                before[found[key]].add(number)
        assert self._leading_to(settled, before) == len(found), "there is a state from which nothing is ever settled"
        return len(found)

    @staticmethod
    def _leading_to(goals: list[int], before: dict[int, set[int]]) -> int:
        seen, waiting = set(goals), list(goals)
        while waiting:
            new = before[waiting.pop()] - seen
            seen |= new
            waiting += new
        return len(seen)


@pytest.mark.parametrize(("groups", "asks"), [(1, 2), pytest.param(2, 3, marks=pytest.mark.long)])
def test_no_state_loses_or_doubles_a_group_and_all_can_be_settled(groups: int, asks: int) -> None:
    assert Explorer(groups, asks).explore() > 100
