"""Rows on a network that loses, doubles and reorders, with stray messages of an earlier term: each once, at one end."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.errors import ProtocolError
from distflow.exchange.dealing import DealRule, Offer, ranks
from distflow.exchange.rows_core import LONGEST_RESEND_S, WINDOW_BYTES, RowsReceiver, RowsSender
from distflow.exchange.rows_messages import OutgoingRows, RowsAck, RowsClose, RowsSent, from_wire
from distflow.parts import CostRule, Lengths, unshared

EDGE = "critic_rows"
GROUP_BYTES = WINDOW_BYTES // 3
RULE = DealRule(12, 4, CostRule(8), minibatches=2)


def bytes_of(groups: Collection[int]) -> int:
    """Of the rows of one message; one without groups tells which fields there are."""
    return sum(GROUP_BYTES - group % 3 for group in groups)


class Network:
    """Owners and replicas of a critic, each a program that goes through the training steps as it can."""

    def __init__(
        self, owners: int, critics: int, steps: int, seed: int, loss: float, room: float = 3.0, whole: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        self.loss, self.steps, self.whole = loss, steps, whole
        self.prompts = 12
        self.longest = 5
        self.owners = {f"trainer/{i}": i for i in range(owners)}
        names = [f"critic/{i}" for i in range(critics)]
        self.senders = {name: RowsSender(EDGE, 1, names, 0) for name in self.owners}
        one = GROUP_BYTES * ((12 + max(owners, RULE.minibatches) * (critics - 1)) // critics)
        self.memory = int(room * one)
        self.receivers = {
            name: RowsReceiver(EDGE, 1, list(self.owners), 0, self.memory, one, rank) for rank, name in enumerate(names)
        }
        self.training: dict[str, bool] = dict.fromkeys(names, False)
        self.most_steps = 0
        """Training steps of which one receiver held rows at once."""
        self.wire: list[tuple[str, OutgoingRows]] = []
        self.got: dict[str, dict[int, list[int]]] = {name: defaultdict(list) for name in names}
        self.sent: dict[str, Counter[int]] = {name: Counter() for name in names}
        """Messages with rows for each receiver, by training step, and those of them that have arrived."""
        self.here: dict[str, Counter[int]] = {name: Counter() for name in names}
        self.taken: dict[str, list[tuple[str, dict[int, Offer]]]] = {name: [] for name in names}
        self.now = 0.0
        self.cut_until = 0.0

    def run(self) -> None:
        for _ in range(100_000):
            if all(len(taken) == self.steps + 1 for taken in self.taken.values()):
                return
            for name in self.senders:
                self._own(name)
            for name in self.receivers:
                self._take(name)
            self._deliver()
            self.now += 0.1
        raise AssertionError("the run stands still")

    def _own(self, name: str) -> None:
        sender = self.senders[name]
        if sender.step <= self.steps and not sender.behind(sender.step - 2) and self.rng.random() < 0.3:
            stops = sender.step == self.steps
            groups = self._groups(name, sender.step)
            step = [self._groups(owner, sender.step) for owner in self.owners]
            window = {p: lengths for some in step for p, lengths in some.items()} if self.whole else {}
            for to, dealt in sender.deal(groups, RULE, window).items():
                pieces = [{group: groups[group]} for group in dealt] or [{}]
                for piece in pieces if not stops else ():
                    self.sent[to][sender.step] += 1
                    sender.send(to, piece, bytes_of(piece))
            sender.close("stop" if stops else "train")
        self._post(name, sender.due(self.now))

    def _groups(self, name: str, t: int) -> dict[int, Lengths]:
        first, count = self.owners[name], len(self.owners)
        return {
            position: [(1 + position % self.longest, 0)]
            for position in range(t * self.prompts, (t + 1) * self.prompts)
            if position % count == first
        }

    def _take(self, name: str) -> None:
        receiver = self.receivers[name]
        if self.training[name] and self.rng.random() < 0.1:
            self.training[name] = False
            receiver.release()
            self._post(name, receiver.acks(receiver.senders))
        elif not self.training[name] and not receiver.missing and len(self.taken[name]) <= self.steps:
            self.training[name] = True
            self.taken[name].append(receiver.take())
            t = receiver.taken
            assert self.here[name][t] == self.sent[name][t], "also those without groups"
            self._post(name, receiver.acks(receiver.senders))

    def _post(self, sender: str, out: list[OutgoingRows]) -> None:
        for message in out:
            if self.now >= self.cut_until:
                lost = self.rng.random() < self.loss
                self.wire += [(sender, message)] * (0 if lost else 1 + (self.rng.random() < self.loss))

    def _deliver(self) -> None:
        self.rng.shuffle(self.wire)
        arrived, self.wire = self.wire[: 1 + len(self.wire) // 2], self.wire[1 + len(self.wire) // 2 :]
        for sender, outgoing in arrived:
            message = outgoing.message
            if isinstance(message, RowsAck):
                self.senders[outgoing.to].handle(sender, message)
                continue
            receiver = self.receivers[outgoing.to]
            if receiver.expects(sender, message):
                assert isinstance(message, (RowsSent, RowsClose))
                nbytes = bytes_of(message.groups) if isinstance(message, RowsSent) else 0
                new = receiver.handle(sender, message, nbytes)
                assert receiver.held <= self.memory, "more than is reserved"
                self.most_steps = max(self.most_steps, len(receiver._bytes))
                if new and isinstance(message, RowsSent):
                    self.here[outgoing.to][message.t] += 1
                    self.got[outgoing.to][message.t] += message.groups
                self._post(outgoing.to, receiver.acks([sender], [message.number]))

    def check(self) -> None:
        for t in range(self.steps):
            window = list(range(t * self.prompts, (t + 1) * self.prompts))
            assert sorted(group for got in self.got.values() for group in got[t]) == window, "each once, at one replica"
            where = {position: rank for rank, got in enumerate(self.got.values()) for position in got[t]}
            groups = {position: Offer(where[position], ((1 + position % self.longest, 0),)) for position in window}
            assert all(taken[t] == ("train", groups) for taken in self.taken.values()), "the same list at all of them"
            assert all([*taken[t][1]] == window for taken in self.taken.values()), "in order"
        assert all(taken[-1] == ("stop", {}) for taken in self.taken.values())


@settings(max_examples=40)
@given(
    owners=st.integers(1, 3),
    critics=st.integers(1, 3),
    seed=st.integers(0, 10_000),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    cut=st.booleans(),
    room=st.sampled_from([1.0, 1.2, 1.6, 3.0]),
    whole=st.booleans(),
    prompts=st.sampled_from([3, 12]),
)
def test_every_group_reaches_one_replica_once(
    owners: int, critics: int, seed: int, loss: float, cut: bool, room: float, whole: bool, prompts: int
) -> None:
    """Whatever is lost, with memory for just one training step of the largest groups or for more, and with fewer groups
    than replicas."""
    network = Network(owners, critics, 4, seed, loss, room, whole)
    network.prompts = prompts
    network.cut_until = 10.0 if cut else 0.0
    stray = RowsSender(EDGE, 0, list(network.receivers), 0)
    stray.send("critic/0", {5: ((1, 0),)}, 1)
    stray.close("train")
    network.wire += [("trainer/0", message) for message in stray.due(0.0)]
    network.run()
    network.check()


@pytest.mark.parametrize(("room", "steps"), [(1.0, 1), (3.0, 3)])
def test_what_room_there_is_is_used(room: float, steps: int) -> None:
    """With more than for one training step, rows of the next ones come while one is trained on."""
    found = []
    for seed in range(10):
        network = Network(2, 2, 4, seed, 0.0, room)
        network.longest = 1
        network.run()
        found.append(network.most_steps)
    assert max(found) == steps


def test_what_is_not_acknowledged_is_sent_again_ever_more_rarely() -> None:
    sender = RowsSender(EDGE, 0, ["critic/0"], 0)
    sender.send("critic/0", {0: ((1, 0),)}, 100)
    times = [now / 4 for now in range(200) if sender.due(now / 4)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps[:3] == [1.0, 2.0, 4.0]
    assert max(gaps) == LONGEST_RESEND_S
    assert sender.handle("critic/0", RowsAck(EDGE, 0, (1,), -1, -1, 0)) == [1]
    assert sender.due(1000.0) == []


def test_a_window_of_bytes_is_under_way_at_once() -> None:
    sender = RowsSender(EDGE, 0, ["critic/0", "critic/1"], 0)
    for number in range(4):
        sender.send("critic/0", {number: ((1, 0),)}, WINDOW_BYTES // 2)
    sender.send("critic/1", {9: ((1, 0),)}, 2 * WINDOW_BYTES)
    first = sender.due(0.0)
    assert [(one.to, one.message.number) for one in first] == [("critic/0", 1), ("critic/0", 2), ("critic/1", 1)]
    sender.handle("critic/0", RowsAck(EDGE, 0, (2,), -1, -1, 0))
    assert [one.message.number for one in sender.due(0.1)] == [3]


def test_nobody_is_more_than_a_step_ahead() -> None:
    sender = RowsSender(EDGE, 0, ["critic/0"], 3)
    sender.close("train")
    sender.close("train")
    assert sender.behind(3) == ("critic/0",)
    with pytest.raises(AssertionError, match="more than one training step behind"):
        sender.send("critic/0", {0: ((1, 0),)}, 1)
    receiver = RowsReceiver(EDGE, 0, ["trainer/0"], 3, 0, 0, 1)
    with pytest.raises(ProtocolError, match="of training step 6 from trainer/0: this is 4"):
        receiver.expects("trainer/0", RowsClose(EDGE, 0, 1, 5, ((), ()), "train"))
    with pytest.raises(ProtocolError, match="critic_rows from trainer/0 for 1 replicas: this is number 1, from 0"):
        receiver.expects("trainer/0", RowsClose(EDGE, 0, 1, 3, ((),), "train"))
    with pytest.raises(ProtocolError, match="rollout/0 sends no critic_rows"):
        receiver.expects("rollout/0", RowsClose(EDGE, 0, 1, 3, ((), ()), "train"))
    with pytest.raises(ProtocolError, match=r"malformed rows.close: Invalid enum value 'rest'"):
        from_wire("rows.close", {"edge": "e", "term": 0, "number": 1, "t": 0, "dealt": [[], []], "then": "rest"})


def test_rows_of_a_later_step_wait_for_room_and_those_of_the_next_one_do_not() -> None:
    """Room for 100 bytes, and a training step may take 80 of them."""
    senders = {name: RowsSender(EDGE, 0, ["critic/0"], 0) for name in ("trainer/0", "trainer/1")}
    receiver = RowsReceiver(EDGE, 0, list(senders), 0, 100, 80, 0)

    def said(name: str, now: float) -> list[tuple[str, int]]:
        """What a sender sends, which arrives and is acknowledged."""
        out = senders[name].due(now)
        for item in out:
            assert not isinstance(item.message, RowsAck)
            nbytes = 35 if isinstance(item.message, RowsSent) else 0
            receiver.handle(name, item.message, nbytes)
            hear(receiver.acks([name], [item.message.number]))
        return [(type(item.message).__name__, item.message.t) for item in out if not isinstance(item.message, RowsAck)]

    def hear(acks: list[OutgoingRows]) -> None:
        for ack in acks:
            assert isinstance(ack.message, RowsAck)
            senders[ack.to].handle("critic/0", ack.message)

    for name, sender in senders.items():
        sender.send("critic/0", {int(name[-1]): ((1, 0),)}, 35)
        sender.close("train")
        sender.send("critic/0", {2 + int(name[-1]): ((1, 0),)}, 35)
    assert said("trainer/0", 0.0) == [("RowsSent", 0), ("RowsClose", 0)], "20 bytes are left for step 1, 10 for each"
    assert said("trainer/1", 0.0) == [("RowsSent", 0), ("RowsClose", 0)]
    hear(receiver.acks(list(senders)))
    assert [said(name, 0.0) for name in senders] == [[], []], "30 bytes are left, now that the step is whole"
    assert receiver.take() == ("train", {0: Offer(0, ((1, 0),)), 1: Offer(0, ((1, 0),))})
    hear(receiver.acks(list(senders)))
    assert [said(name, 0.0) for name in senders] == [[], []], "and while it is trained on"
    assert [said(name, 1.0) for name in senders] == [[("RowsClose", 0)]] * 2, "asks again: what was said may be lost"
    receiver.release()
    assert receiver.held == 0
    hear(receiver.acks(list(senders)))
    assert [said(name, 1.0) for name in senders] == [[("RowsSent", 1)]] * 2
    assert receiver.held == 70


def test_groups_that_stream_in_are_dealt_to_all() -> None:
    """Over a whole training step, and also where owners deal one group at a time."""
    sender = RowsSender(EDGE, 0, ["critic/0", "critic/1"], 0)
    assert [sender.deal({position: ((10, 0),)}, RULE, {}) for position in (1, 3, 5)] == [
        {"critic/0": [], "critic/1": [1]},
        {"critic/0": [3], "critic/1": []},
        {"critic/0": [], "critic/1": [5]},
    ]
    sender.close("train")
    assert sender.deal({7: ((10, 0),)}, RULE, {}) == {"critic/0": [], "critic/1": [7]}, (
        "nothing is kept of the last step"
    )
    costs = dict(enumerate([9, 1, 1, 1, 5, 5, 7, 1]))
    sender.close("train")
    shares = sender.deal({position: ((cost, 0),) for position, cost in costs.items()}, RULE, {}).values()
    assert sorted(position for share in shares for position in share) == sorted(costs)
    loads = [sum(costs[position] for position in share) for share in shares]
    assert abs(loads[0] - loads[1]) <= 2


def test_owners_that_know_the_whole_step_deal_it_together() -> None:
    """4 of them and 4 replicas; all compute about as long on each of 4 mini-batches."""
    rng = random.Random(0)
    lengths = {p: unshared(min(9000, 1 + int(rng.lognormvariate(7, 1))) for _ in range(4)) for p in range(256)}
    cost = CostRule(18000, 1 / 9000)
    rule = DealRule(256, 8, cost, minibatches=4, streamed=False, pinned=True)
    names = [f"critic/{i}" for i in range(4)]
    got: dict[str, list[int]] = {name: [] for name in names}
    for owner in range(4):
        mine = {p: n for p, n in lengths.items() if p % 8 % 4 == owner}
        for name, dealt in RowsSender(EDGE, 0, names, 0).deal(mine, rule, lengths).items():
            got[name] += dealt
    assert sorted(p for some in got.values() for p in some) == [*lengths]
    rank = ranks(lengths, 8)
    work = sum(map(cost.cost, lengths.values())) / 4
    loads = [[sum(cost.cost(lengths[p]) for p in some if rank[p] % 4 == m) for some in got.values()] for m in range(4)]
    assert sum(map(max, loads)) <= 1.02 * work
