"""Samples and failures of score steps, counted over all workers that run them, whoever dies."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from collections.abc import Mapping

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.exchange.facts import JUDGED, JUDGED_BY_ALL
from distflow.exchange.tally import Counts, Tallies, Tally


class Workers:
    """Some that judge and some that own, each of whom hears all others."""

    def __init__(self, services: int, owners: int) -> None:
        self.names = [f"reward/{n}" for n in range(services)] + [f"trainer/{n}" for n in range(owners)]
        self.lives = dict.fromkeys(self.names, 0)
        self.all = {name: self.new(name) for name in self.names}

    def new(self, name: str) -> Tallies:
        return Tallies(owner=name.startswith("trainer"))

    def restart(self, name: str) -> None:
        self.lives[name] += 1
        self.all[name] = self.new(name)

    def beat(self, name: str, *hearers: str) -> None:
        """Its facts travel."""
        facts: Mapping[str, object] = msgpack.unpackb(msgpack.packb(self.all[name].facts()))
        for other in hearers or self.names:
            # Services do not hear each other.
            if other != name and "trainer" in other + name:
                self.all[other].hear(name, self.lives[name], facts)

    def settle(self) -> None:
        for name in [*self.names, *self.names]:
            self.beat(name)

    def judge(self, name: str, judged: int, failed: int) -> None:
        self.all[name].of("reward").add(judged, failed)

    def seen(self) -> set[tuple[int, int]]:
        return {one.of("reward").by_all() for one in self.all.values()}


def test_a_step_by_hand_counts_alone() -> None:
    tally = Tally()
    tally.add(10, 2)
    tally.add(5, 0)
    assert tally.own == tally.by_all() == (15, 2)


def test_a_worker_does_not_judge_before_it_hears_of_all() -> None:
    """Its own may be the few that fail."""
    heard = [Counts(), Counts(40, 0), Counts(240, 40)]
    tally = Tally(lambda: heard[0])
    tally.add(120, 40)
    for _ in range(2):
        assert tally.too_many(0.1) == ""
        del heard[0]
    assert tally.too_many(0.1) == "40 of 240 samples"


def test_all_workers_see_what_all_have_judged() -> None:
    workers = Workers(2, 2)
    workers.judge("reward/0", 90, 9)
    assert workers.all["reward/0"].of("reward").by_all() == (0, 0), "nobody has said what the others have"
    workers.judge("reward/1", 110, 0)
    workers.judge("trainer/1", 3, 1)
    workers.settle()
    assert workers.seen() == {(203, 10)}


def test_the_newest_samples_of_all_workers_are_told_apart() -> None:
    workers = Workers(2, 1)
    tally = workers.all["reward/0"].of("reward")
    for _ in range(20):
        workers.judge("reward/0", 50, 0)
        workers.judge("reward/1", 50, 10)
        workers.settle()
        tally.note()
    assert tally.by_all() == (2000, 200)
    assert tally.recent == (1000, 100)
    for _ in range(10):
        workers.judge("reward/0", 100, 0)
        workers.settle()
        tally.note()
    assert tally.recent == (1000, 0)


def test_an_owner_that_was_restarted_counts_anew() -> None:
    counts = [Counts(5000, 40), Counts(5100, 45), Counts(200, 10), Counts(300, 10)]
    tally = Tally(lambda: counts.pop(0))
    found = []
    for _ in range(4):
        tally.note()
        found.append(tally.recent)
    assert found == [(0, 0), (100, 5), (0, 0), (100, 0)]


@pytest.mark.parametrize(("earlier", "failed"), [(50_000, 100), (1200, 900), (0, 0)])
def test_a_worker_that_starts_late_judges_by_what_it_has_seen(earlier: int, failed: int) -> None:
    workers = Workers(2, 1)
    workers.judge("reward/0", earlier, failed)
    workers.settle()
    workers.restart("reward/1")
    tally = workers.all["reward/1"].of("reward")
    workers.judge("reward/1", 20, 18)
    assert not tally.too_many(0.5), "it has not heard of anyone"
    for _ in range(25):
        workers.settle()
        tally.note()
        workers.judge("reward/1", 20, 18)
    workers.settle()
    tally.note()
    assert tally.recent == (520, 468)
    assert tally.too_many(0.5) == "468 of 520 samples"
    assert tally.too_many(0.95) == ""


def test_all_of_the_first_samples_are_too_many() -> None:
    tally = Tally()
    tally.add(15, 15)
    assert tally.too_many(0.9) == ""
    tally.add(1, 1)
    assert tally.too_many(0.9) == "all of the first 16 samples"
    assert tally.too_many(1.0) == ""


def test_steps_are_counted_apart() -> None:
    workers = Workers(1, 1)
    workers.judge("reward/0", 10, 5)
    workers.all["reward/0"].of("length").add(7, 0)
    workers.settle()
    assert workers.all["trainer/0"].facts()[JUDGED_BY_ALL] == {"reward": (10, 5), "length": (7, 0)}
    assert workers.all["reward/0"].of("length").by_all() == (7, 0)


def test_what_a_dead_worker_has_said_is_counted() -> None:
    workers = Workers(2, 1)
    for name in ("reward/0", "reward/1", "reward/0"):
        workers.judge(name, 50, 4)
        workers.settle()
        workers.restart(name)
    workers.settle()
    assert workers.seen() == {(150, 12)}


def test_of_several_owners_one_that_was_restarted_knows_least() -> None:
    workers = Workers(2, 2)
    workers.judge("reward/0", 50, 4)
    workers.settle()
    workers.restart("reward/0")
    workers.restart("trainer/1")
    workers.judge("reward/1", 10, 1)
    workers.settle()
    assert workers.all["trainer/1"].facts()[JUDGED_BY_ALL] == {"reward": (10, 1)}
    assert workers.seen() == {(60, 5)}


def test_what_only_an_owner_that_was_restarted_had_counted_is_forgotten_by_all() -> None:
    workers = Workers(2, 2)
    workers.judge("trainer/0", 8, 1)
    workers.beat("trainer/0", "reward/1")
    workers.restart("trainer/0")
    workers.settle()
    assert workers.seen() == {(0, 0)}


def test_others_are_heard_on_one_thread_while_another_counts() -> None:
    """Owners come, are restarted and go, and a worker looks how many have failed all the while."""
    tallies = Tallies(owner=True)
    tally, ended = tallies.of("reward"), threading.Event()
    said = [{JUDGED: {"reward": (9, 1)}, JUDGED_BY_ALL: {"reward": (9, 1)}}, {}]

    def hear() -> None:
        for life in itertools.takewhile(lambda _: not ended.is_set(), itertools.count()):
            for name in range(20):
                tallies.hear(f"trainer/{name}", life, said[life % 2])

    hearing, interval = threading.Thread(target=hear), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    hearing.start()
    try:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            tally.add(1, 0)
            assert tally.too_many(0.5) == ""
            assert tallies.facts()
    finally:
        ended.set()
        hearing.join(10.0)
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("facts", [{}, {"state": "serving", "load": 7}])
def test_who_judges_nothing_says_nothing(facts: Mapping[str, object]) -> None:
    tallies = Tallies(owner=True)
    tallies.hear("reward/0", 0, facts)
    assert tallies.facts() == {}


EVENTS = st.lists(st.tuples(st.sampled_from(["judge", "beat", "die"]), st.integers(0, 4)), max_size=60)


@given(EVENTS, st.integers(0, 2**20))
def test_however_beats_travel_no_sample_counts_twice_and_none_of_a_living_worker_is_missing(
    events: list[tuple[str, int]], seed: int
) -> None:
    workers, rng = Workers(3, 2), random.Random(seed)
    judged, alive = 0, dict.fromkeys(workers.names, 0)
    for kind, number in events:
        name = workers.names[number]
        if kind == "judge":
            workers.judge(name, 8, 1)
            judged, alive[name] = judged + 8, alive[name] + 8
        elif kind == "beat":
            workers.beat(name, *(other for other in workers.names if rng.random() < 0.5))
        else:
            workers.restart(name)
            alive[name] = 0
        for one in workers.all.values():
            assert one.of("reward").by_all().judged <= judged
    workers.settle()
    (seen,) = {counts.judged for counts in (one.of("reward").by_all() for one in workers.all.values())}
    assert sum(alive.values()) <= seen <= judged
