"""Idle replicas and busy ones on a network that loses, doubles and reorders."""

from __future__ import annotations

import random
import time

import pytest

from distflow.errors import ProtocolError
from distflow.exchange.group_transfer import GROUPS, KEPT, RETURNED, Send
from distflow.exchange.steal_core import ASK, BACKLOG, MOST_PROBED, PROBE, StealCore

BUDGET_S = 2.0
SEEDS_AT_LEAST = 40


class Replica:
    """Owns groups that arrive one by one, works on one at a time, steals when all it owns for the step is taken."""

    def __init__(self, name: str, peers: list[str], seed: int) -> None:
        self.name = name
        self.arriving: list[int] = []
        self.groups: list[int] = []
        self.stolen: list[int] = []
        self.done: list[int] = []
        self.handed: set[int] = set()
        """Handed over, and neither kept by the requester nor returned."""
        self.contributed = -1
        """The last step of which it said that it has nothing left to do or to hear."""
        self.offline_until = 0.0
        self.core = StealCore(peers, lambda: len(self.groups), self.give, random.Random(seed))

    def begin(self, step: int, arriving: list[int]) -> None:
        left = [*self.groups, *self.stolen, *self.handed]
        assert not left, f"{self.name} has groups of a former step: {left}"
        self.arriving, self.done = list(arriving), []
        self.core.begin(step)

    def give(self, requester: str) -> tuple[int, ...]:
        count = -(-len(self.groups) // (1 + len(self.core.peers)))
        given, self.groups[len(self.groups) - count :] = self.groups[len(self.groups) - count :], []
        self.handed.update(given)
        return tuple(given)

    def take_back(self) -> list[Send]:
        returned = self.core.take_returned()
        assert self.handed.issuperset(returned), "what was kept came back"
        self.handed.difference_update(returned)
        self.groups += returned
        return self.core.offer() if returned else []

    def work(self, now: float) -> list[Send]:
        """A turn of the training loop: own groups first; then what comes back, the account, and what was stolen."""
        if self.groups:
            self.done.append(self.groups.pop(0))
        if self.groups or self.arriving:
            return []
        if self.core.settled:
            self.contributed = self.core.step
        if self.stolen:
            self.done.append(self.stolen.pop())
        return self.core.search(now)


class Pool:
    """Replicas with `steps` training steps of `shares` groups each, on links that lose, double, delay and reorder.

    `late`: how often an endpoint hears nothing for up to 4 s. `reorder`: messages overtake each other, else each link
    is first in, first out. `garbled`: how often stolen groups cannot be read.
    """

    def __init__(
        self,
        shares: list[int],
        seed: int,
        loss: float,
        *,
        late: float = 0.0,
        reorder: bool = True,
        garbled: float = 0.0,
        steps: int = 1,
    ) -> None:
        names = [f"trainer/{i}" for i in range(len(shares))]
        self.shares, self.steps = shares, steps
        self.rng, self.loss, self.late, self.reorder, self.garbled = random.Random(seed), loss, late, reorder, garbled
        self.replicas = {name: Replica(name, [n for n in names if n != name], seed) for name in names}
        self.wire: list[tuple[str, Send]] = []
        self.now = 0.0
        for replica in self.replicas.values():
            self.begin(replica, 0)

    def begin(self, replica: Replica, step: int) -> None:
        first = 1000 * step + sum(self.shares[: list(self.replicas).index(replica.name)])
        replica.begin(step, list(range(first, first + self.shares[list(self.replicas).index(replica.name)])))

    def post(self, sender: str, out: list[Send]) -> None:
        for item in out:
            copies = 0 if self.rng.random() < self.loss else 1 + (self.rng.random() < self.loss)
            self.wire += [(sender, item)] * copies

    def deliver(self) -> None:
        sender, item = picked = self.rng.choice(self.wire)
        if not self.reorder:
            picked = next(one for one in self.wire if (one[0], one[1].to) == (sender, item.to))
            sender, item = picked
        receiver = self.replicas[item.to]
        if receiver.offline_until > self.now:
            return
        self.wire.remove(picked)
        if item.kind == GROUPS and receiver.core.expects(sender, item.body):
            if self.rng.random() < self.garbled:
                self.post(item.to, receiver.core.decline(sender, item.body))
                return
            receiver.stolen += item.positions
            assert self.replicas[sender].handed.issuperset(item.positions), "groups that came back were kept too"
            self.replicas[sender].handed.difference_update(item.positions)
        self.post(item.to, receiver.core.handle(item.kind, sender, item.body, self.now))
        self.post(item.to, receiver.take_back())

    def turn(self) -> None:
        """One thing happens at one replica, and one message arrives."""
        self.now += 0.02
        if self.wire:
            self.deliver()
        replica = self.replicas[self.rng.choice(list(self.replicas))]
        core = replica.core
        self.post(replica.name, core.tick(self.now))
        if replica.arriving and self.rng.random() < 0.3:
            replica.groups.append(replica.arriving.pop(0))
            self.post(replica.name, core.offer())
        if self.rng.random() < 0.2:
            self.post(replica.name, replica.work(self.now))
        if self.rng.random() < self.late:
            replica.offline_until = self.now + self.rng.uniform(0.0, 4.0)
        assert not (core.settled and replica.handed), f"{replica.name} forgot {replica.handed}"

    def run(self) -> list[dict[str, list[int]]]:
        """What each replica worked on, step by step. None goes on before all have done their part."""
        found = []
        for step in range(self.steps):
            done: dict[str, list[int]] = {}
            for _ in range(100_000):
                self.turn()
                if all(replica.contributed >= step for replica in self.replicas.values()):
                    over = [r for name, r in self.replicas.items() if name not in done and not r.stolen]
                    for replica in over[: self.rng.randrange(2)]:
                        done[replica.name] = replica.done
                        self.begin(replica, step + 1)
                if len(done) == len(self.replicas):
                    break
            assert len(done) == len(self.replicas), f"step {step} never ended"
            worked_on = sorted(group for groups in done.values() for group in groups)
            assert worked_on == list(range(1000 * step, 1000 * step + sum(self.shares)))
            found.append(done)
        return found


def run_pool(seed: int) -> None:
    """Everything about it is drawn from the seed."""
    rng = random.Random(seed)
    Pool(
        [rng.choice([0, 0, 1, 2, 3, 8]) for _ in range(rng.randint(2, 5))],
        seed,
        rng.choice([0.0, 0.0, 0.1, 0.4]),
        late=rng.choice([0.0, 0.01, 0.05]),
        reorder=rng.random() < 0.5,
        garbled=rng.choice([0.0, 0.0, 0.2]),
        steps=3,
    ).run()


def test_every_group_is_worked_on_once_in_its_step_whatever_the_network_does() -> None:
    began, seed = time.perf_counter(), 0
    while seed < SEEDS_AT_LEAST or time.perf_counter() - began < BUDGET_S:
        run_pool(seed)
        seed += 1


@pytest.mark.long
def test_every_group_is_worked_on_once_in_its_step_for_many_seeds() -> None:
    for seed in range(3_000):
        run_pool(seed)


def test_the_idle_take_from_the_busy() -> None:
    (done,) = Pool([40, 0, 0, 0], seed=1, loss=0.0).run()
    assert all(len(groups) >= 5 for groups in done.values()), {name: len(groups) for name, groups in done.items()}


def make(backlog: int = 0, peers: tuple[str, ...] = ("trainer/1", "trainer/2")) -> StealCore:
    core = StealCore(peers, lambda: backlog, lambda requester: tuple(range(backlog)), random.Random(0))
    core.begin(5)
    return core


def test_the_larger_backlog_is_asked() -> None:
    core = make()
    assert {item.kind for item in core.search(0.0)} == {PROBE}
    assert core.handle(BACKLOG, "trainer/1", {"step": 5, "groups": 1}, 0.0) == []
    asked = core.handle(BACKLOG, "trainer/2", {"step": 5, "groups": 4}, 0.0)
    assert asked == [Send("trainer/2", ASK, {"step": 5, "number": 1})]


def test_where_no_probed_peer_has_groups_others_are_probed_too() -> None:
    peers = tuple(f"trainer/{number}" for number in range(1, 41))
    core = make(peers=peers)
    probed: list[str] = []
    wave = core.search(0.0)
    while wave:
        assert {item.kind for item in wave} == {PROBE}
        probed += [item.to for item in wave]
        wave = [more for item in wave for more in core.handle(BACKLOG, item.to, {"step": 5, "groups": 0}, 0.0)]
    assert len(probed) == len(set(probed)) == MOST_PROBED, "each once, and not all of many"
    found = core.handle(BACKLOG, probed[-1], {"step": 5, "groups": 2}, 0.5)
    assert found == [Send(probed[-1], ASK, {"step": 5, "number": 1})], "the last ones are heard, too"


def test_a_refused_requester_is_told_of_a_backlog() -> None:
    groups = [0]
    core = StealCore(["trainer/1"], lambda: groups[0], lambda requester: (), random.Random(0))
    core.begin(5)
    assert core.handle(PROBE, "trainer/1", {"step": 5}, 0.0)[0].body["groups"] == 0
    assert core.offer() == []
    groups[0] = 2
    assert core.offer() == [Send("trainer/1", BACKLOG, {"step": 5, "groups": 2})]
    assert core.offer() == []


def test_a_holder_is_unsettled_until_its_groups_are_kept() -> None:
    core = make(backlog=2)
    sent = core.handle(ASK, "trainer/1", {"step": 5, "number": 1}, 0.0)
    assert sent == [Send("trainer/1", GROUPS, {"step": 5, "number": 1}, (0, 1))]
    assert core.handle(ASK, "trainer/1", {"step": 5, "number": 1}, 0.1) == sent
    assert (core.settled, core.owed()) == (False, ("trainer/1",))
    assert core.tick(2.0) == sent
    core.handle(KEPT, "trainer/1", {"number": 1}, 2.1)
    assert core.settled


def test_groups_are_expected_once() -> None:
    core = make(peers=("trainer/1",))
    core.search(0.0)
    core.handle(BACKLOG, "trainer/1", {"step": 5, "groups": 1}, 0.0)
    body = {"step": 5, "number": 1}
    assert core.expects("trainer/1", body)
    assert core.handle(GROUPS, "trainer/1", body, 0.0) == [Send("trainer/1", KEPT, {"number": 1})]
    assert not core.expects("trainer/1", body)


def test_a_refused_ask_stays_refused_and_what_comes_for_it_goes_back() -> None:
    """Its repetition is read after a group has arrived: the requester has given up that ask, and would keep nothing."""
    groups: list[int] = []
    give = lambda requester: (groups.pop(),) if groups else ()  # noqa: E731
    core = StealCore(["trainer/1"], lambda: len(groups), give, random.Random(0))
    core.begin(5)
    ask = {"step": 5, "number": 1}
    refused = {"step": 5, "groups": 0, "refused": 1}
    assert core.handle(ASK, "trainer/1", ask, 0.0) == [Send("trainer/1", BACKLOG, refused)]
    groups.append(7)
    assert core.handle(ASK, "trainer/1", ask, 1.0) == [Send("trainer/1", BACKLOG, {**refused, "groups": 1})]
    assert core.settled


def test_groups_that_are_not_kept_belong_to_the_backlog_again() -> None:
    holder, requester = make(backlog=2), make(peers=("trainer/0",))
    (sent,) = holder.handle(ASK, "trainer/1", {"step": 5, "number": 1}, 0.0)
    assert requester.handle(GROUPS, "trainer/0", sent.body, 0.0) == [Send("trainer/0", RETURNED, {"number": 1})]
    assert holder.handle(RETURNED, "trainer/1", {"number": 1}, 0.0) == []
    assert holder.settled
    assert holder.take_returned() == [0, 1]
    assert holder.take_returned() == []
    assert holder.handle(KEPT, "trainer/1", {"number": 1}, 0.0) == []
    assert holder.handle(ASK, "trainer/1", {"step": 5, "number": 1}, 0.0) == [], "that ask is over"


def test_messages_of_another_step_change_nothing() -> None:
    core = make(backlog=2)
    assert core.handle(ASK, "trainer/1", {"step": 4, "number": 1}, 0.0) == []
    assert core.handle(PROBE, "trainer/1", {"step": 6}, 0.0) == []
    assert core.handle(BACKLOG, "trainer/1", {"step": 4, "groups": 3}, 0.0) == []
    assert core.handle(GROUPS, "trainer/1", {"step": 4, "number": 9}, 0.0) == [
        Send("trainer/1", RETURNED, {"number": 9})
    ]
    assert core.settled


def test_nonsense_is_refused() -> None:
    with pytest.raises(ProtocolError, match="rollout/0 is not a training replica"):
        make().handle(PROBE, "rollout/0", {"step": 5}, 0.0)
    with pytest.raises(ProtocolError, match="malformed steal.ask: Object missing required field `number`"):
        make().handle(ASK, "trainer/1", {"step": 5}, 0.0)
