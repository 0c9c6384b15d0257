"""Who is in the group that moves weights in parts, and which version goes to whom."""

from __future__ import annotations

from typing import Any

import pytest

from distflow.errors import UserError
from distflow.types import Version
from distflow.weights.manifest import Manifest, TensorEntry
from distflow.weights.shards.conductor import AGAIN_S, FORM_S, SETTLE_S, SILENT_S, WAIT_S, ShardConductor, ShardMessage
from distflow.weights.shards.messages import GO, GROUP, HeldRange, ShardReport

TRAINERS, READERS = ("trainer/0", "trainer/1"), ("rollout/0", "rollout/1")
ROWS = 6
FLOAT = "torch.float32"


def manifest(number: int) -> Manifest:
    entries = (TensorEntry("embed", FLOAT, (ROWS, 2), 0, ROWS * 8),)
    return Manifest("policy", Version(1, number), "/dev/shm/distflow-r-1", ROWS * 8, entries, (0,))


def held(rank: int, name: str = "embed", dtype: str = FLOAT) -> tuple[HeldRange, ...]:
    """Three rows each."""
    return (HeldRange(name, dtype, (ROWS, 2), rank * ROWS, ROWS),)


class Members:
    """All members, and a clock."""

    def __init__(self) -> None:
        self.core = ShardConductor("policy", 1, TRAINERS)
        self.now = 100.0
        self.present: list[str] = []
        self.sent: list[ShardMessage] = []

    def take(self, out: list[ShardMessage]) -> list[ShardMessage]:
        self.sent += out
        return out

    def tick(self, after_s: float = 0.0) -> list[ShardMessage]:
        self.now += after_s
        return self.take(self.core.tick(self.present, self.now))

    def report(self, name: str, epoch: int = -1, **given: Any) -> list[ShardMessage]:
        trains = name in TRAINERS
        given = {"free": not trains, "held": held(TRAINERS.index(name)) if trains else (), **given}
        return self.take(self.core.report(name, ShardReport("policy", 1, epoch, **given), self.now))

    def announce(self, number: int) -> list[ShardMessage]:
        return self.take(self.core.announce(manifest(number), self.now))

    def begin(self, *readers: str) -> list[ShardMessage]:
        for name in TRAINERS:
            self.report(name)
        self.announce(0)
        self.present = list(readers)
        self.tick()
        return self.tick(SETTLE_S)

    def form(self, *readers: str) -> None:
        self.begin(*readers)
        for name in (*TRAINERS, *readers):
            self.report(name, self.core.epoch)


@pytest.fixture
def members() -> Members:
    return Members()


def kinds(out: list[ShardMessage]) -> list[tuple[str, str]]:
    return [(message.to, message.kind) for message in out]


def targets(out: list[ShardMessage]) -> set[tuple[str, ...]]:
    return {tuple(message.body["targets"]) for message in out}


def test_a_group_is_of_all_trainers_and_of_the_readers_that_came_within_a_moment(members: Members) -> None:
    assert kinds(members.begin(*READERS)) == [(name, GROUP) for name in (*TRAINERS, *READERS)]
    assert members.core.members == ()
    for name in (*TRAINERS, *READERS):
        members.report(name, 0)
    assert members.core.members == (*TRAINERS, *READERS)


def test_a_version_goes_to_all_once_every_trainer_has_a_copy(members: Members) -> None:
    members.form(*READERS)
    assert members.announce(1) == []
    assert members.report(TRAINERS[0], 0, numbers=(1,)) == []
    out = members.report(TRAINERS[1], 0, numbers=(1,))
    assert kinds(out) == [(name, GO) for name in (*TRAINERS, *READERS)]
    assert targets(out) == {READERS}
    assert members.tick(5.0) == [], "once"


def test_a_version_waits_for_the_transfer_before_it_and_only_the_newest_is_sent(members: Members) -> None:
    members.form(*READERS)
    members.announce(1)
    for name in TRAINERS:
        members.report(name, 0, numbers=(1,))
    for number in (2, 3):
        members.announce(number)
        for name in TRAINERS:
            assert members.report(name, 0, numbers=(number - 1, number)) == []
    for name in READERS:
        assert members.report(name, 0, done=1) == []
    members.report(TRAINERS[0], 0, done=1, numbers=(2, 3))
    out = members.report(TRAINERS[1], 0, done=1, numbers=(2, 3))
    assert {message.body["manifest"]["version"][1] for message in out} == {3}


def test_a_reader_that_is_not_free_is_waited_for_shortly_and_then_left_out(members: Members) -> None:
    members.form(*READERS)
    members.report(READERS[1], 0, free=False)
    members.announce(1)
    for name in TRAINERS:
        assert members.report(name, 0, numbers=(1,)) == []
    out = members.tick(2 * WAIT_S)
    assert kinds(out) == [(name, GO) for name in (*TRAINERS, READERS[0])]
    assert targets(out) == {READERS[:1]}


def test_a_reader_that_is_lost_is_left_out_of_the_next_group_and_one_that_comes_is_taken_in(members: Members) -> None:
    members.form(*READERS)
    assert members.core.lost(READERS[1], members.now) == []
    assert members.core.members == ()
    members.present = [READERS[0]]
    members.tick()
    assert kinds(members.tick(SETTLE_S)) == [(name, GROUP) for name in (*TRAINERS, READERS[0])]
    for name in (*TRAINERS, READERS[0]):
        members.report(name, 1)
    assert members.core.members == (*TRAINERS, READERS[0])
    members.present = list(READERS)
    assert members.tick() == []
    assert kinds(members.tick(SETTLE_S)) == [(name, GROUP) for name in (*TRAINERS, *READERS)]
    assert members.core.epoch == 2


def test_a_group_that_is_not_made_in_time_is_made_later_without_the_silent_one(members: Members) -> None:
    members.begin(*READERS)
    members.now += 2 * FORM_S + 0.1
    for name in (*TRAINERS, READERS[0]):
        members.report(name)
    assert members.core.epoch == 0
    members.now += AGAIN_S[0]
    out = members.tick(SILENT_S)
    assert kinds(out) == [(name, GROUP) for name in (*TRAINERS, READERS[0])]


def test_a_member_that_has_left_the_group_ends_it_and_each_failure_puts_the_next_off(members: Members) -> None:
    waits = []
    members.form(*READERS)
    for _ in range(3):
        members.report(READERS[0])
        assert members.core.members == ()
        epoch, began = members.core.epoch, members.now
        while members.core.epoch == epoch:
            members.tick(0.25)
        waits.append(members.now - began)
        for name in (*TRAINERS, *READERS):
            members.report(name, members.core.epoch)
        assert members.core.members == (*TRAINERS, *READERS)
    assert waits == [1.0, 2.0, 4.0]


def test_reports_of_another_term_count_for_nothing(members: Members) -> None:
    members.begin(*READERS)
    for name in (*TRAINERS, *READERS):
        assert members.core.report(name, ShardReport("policy", 0, 0), members.now) == []
    assert members.core.members == ()


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"name": "fused"}, "nobody has .* of 'embed'"),
        ({"dtype": "torch.float64"}, "'embed' is held as torch.float64 .* and published as torch.float32"),
    ],
)
def test_what_is_published_in_other_tensors_than_trainers_hold_ends_the_run(
    members: Members, wrong: dict[str, str], what: str
) -> None:
    members.announce(0)
    members.report(TRAINERS[0])
    members.report(TRAINERS[1], held=held(1, **wrong))
    members.present = list(READERS)
    members.tick()
    with pytest.raises(UserError, match=f"weights.link: collective: .*{what}.* set weights.link to auto"):
        members.tick(SETTLE_S)
