"""What a generating worker does next, whatever its owner sends and whatever weights come."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from distflow.config.schema import Refresh
from distflow.exchange.lease_client import HolderCore
from distflow.exchange.messages import (
    Ack,
    Ask,
    Cancel,
    Closed,
    Finished,
    Grant,
    HandBack,
    Lease,
    Outgoing,
    Refuse,
    Result,
)
from distflow.exchange.rollout_core import Messages, RolloutCore, Turn
from distflow.types import VALIDATION, SampleOutput, Version
from tests.budget import within
from tests.search.lease_scenario import SMALL, prompt_at

ROOT = Path(__file__).resolve().parents[2]
OWNER = "trainer/0"
SIZE = SMALL.samples_per_prompt
LIMITS = replace(SMALL, partial_rollouts=True)


class Bench:
    """A core with an engine of `slots` and weights that the test chooses."""

    def __init__(self, refresh: Refresh = "eager", slots: int = 4 * SIZE) -> None:
        self.holder = HolderCore("rollout/0", 0, [OWNER], LIMITS)
        self.core = RolloutCore(self.holder, refresh)
        self.slots = slots
        self.engine: dict[int, int] = {}
        """Attempt of the lease of each group in the engine, by position."""
        self.loaded: Version | None = Version(0, 0)
        self.newest = 0
        self.now = 0.0
        self.grants = 0
        self.asked: list[int] = []

    def turn(self) -> Turn:
        newer = self.loaded is None or self.newest > self.loaded.number
        free = self.slots - SIZE * len(self.engine)
        turn = self.core.turn(free, self.loaded, self.loaded, newer, self.now)
        self.note(turn.messages.train)
        return turn

    def note(self, messages: Iterable[Outgoing]) -> None:
        self.asked += [item.message.groups for item in messages if isinstance(item.message, Ask)]

    def prepare(self) -> Turn:
        """All turns up to a decode step; returns the last one."""
        turn = self.turn()
        while turn.load or turn.abort:
            assert not turn.start
            assert turn.messages == Messages()
            if turn.load:
                self.loaded = Version(0, self.newest)
            for position in turn.abort:
                del self.engine[position]
            turn = self.turn()
        for lease in turn.start:
            assert lease.position not in self.engine, "started twice"
            self.engine[lease.position] = lease.attempt
        assert SIZE * len(self.engine) <= self.slots
        return turn

    def grant(self, *positions: int, version: int = 0, attempt: int = 1) -> None:
        self.grants += 1
        leases = tuple(lease(position, version, attempt) for position in positions)
        ask = self.holder._walk.number
        self.holder.handle(Grant(OWNER, 0, 0, self.grants, ask, leases), self.now)

    def cancel(self, *positions: int) -> None:
        self.holder.handle(Cancel(OWNER, 0, 0, positions), self.now)

    def finish(self, position: int) -> int:
        """All of a group's samples come out of the engine; returns the groups that its result asks for."""
        del self.engine[position]
        outputs = [SampleOutput(position, sample, (1,), (0.0,), (), "stop") for sample in range(SIZE)]
        assert self.core.collect(outputs[1:]) == []
        (whole,) = self.core.collect(outputs[:1])
        assert [out.sample for out in whole.samples] == list(range(SIZE))
        self.note(self.core.ask(self.slots - SIZE * len(self.engine), self.now).train)
        (item,) = self.holder.finished(position, Version(0, 0), 10, "", self.now)
        assert isinstance(item.message, Result)
        self.holder.handle(Ack(OWNER, 0, 0, (position,)), self.now)
        return item.message.wanted


def lease(position: int, version: int, attempt: int) -> Lease:
    prompt, ledgers = prompt_at(position), SMALL.ledgers
    place = (position % ledgers, position // ledgers, attempt, 0)
    return Lease(prompt.uid, *place, prompt.prompt_ids, prompt.prompt_text, prompt.task, version, 0)


@settings(max_examples=200, derandomize=True)
@given(st.integers(0, 2**20), st.sampled_from(["eager", "when_idle", "at_bound"]), st.integers(1, 4))
@within(4, examples=200)
def test_groups_start_once_in_order_on_weights_that_they_may_have(seed: int, refresh: Refresh, groups: int) -> None:
    """Grants, cancellations, positions granted anew and versions in any order; at last everything has been started."""
    rng, bench = random.Random(seed), Bench(refresh, slots=groups * SIZE)
    held: dict[int, tuple[int, int]] = {}
    for attempt in range(1, 60):
        event = rng.random()
        if event < 0.35:
            position, least = rng.randrange(12), rng.randint(0, bench.newest + 1)
            if position not in held:
                held[position] = least, attempt
                bench.grant(position, version=least, attempt=attempt)
        elif event < 0.5 and held:
            position = rng.choice(sorted(held))
            del held[position]
            bench.cancel(position)
        elif event < 0.65:
            bench.newest += 1
        elif bench.engine and event < 0.8:
            position = rng.choice(sorted(bench.engine))
            if held.get(position, (0, 0))[1] == bench.engine[position]:
                held.pop(position)
                bench.finish(position)
        else:
            started = bench.prepare().start
            assert [item.position for item in started] == sorted(item.position for item in started)
            assert all(bench.loaded is not None and item.min_version <= bench.loaded.number for item in started)
            assert {position: held[position][1] for position in bench.engine} == bench.engine, (
                "cancelled ones have left"
            )
        bench.now += rng.random()
    bench.newest += 1
    for _ in range(30):
        bench.prepare()
        for position in sorted(bench.engine):
            held.pop(position)
            bench.finish(position)
    assert held == {}


def test_a_turn_that_aborts_comes_before_the_start_of_what_was_granted_anew() -> None:
    bench = Bench()
    bench.prepare()
    bench.grant(0, 1)
    assert [item.position for item in bench.prepare().start] == [0, 1]
    bench.cancel(0)
    bench.grant(0, attempt=2)
    assert bench.turn() == Turn(abort=[0])
    del bench.engine[0]
    assert [(item.position, item.attempt) for item in bench.turn().start] == [(0, 2)]


def test_weights_are_taken_once_between_two_decode_steps() -> None:
    """Else a publisher that is faster than the engine would keep it from decoding."""
    bench = Bench()
    bench.newest = 1
    assert bench.turn() == Turn(load=True)
    assert not bench.turn().load
    assert bench.turn() == Turn(load=True)


def test_room_that_comes_with_results_is_asked_for_before_they_are_sent() -> None:
    bench = Bench(slots=SIZE)
    bench.prepare()
    bench.grant(0)
    bench.prepare()
    assert bench.asked == [2, 1], "one group is asked for ahead"
    assert bench.finish(0) == 2


def test_what_is_done_of_a_group_is_handed_back_with_what_runs() -> None:
    bench = Bench()
    bench.prepare()
    bench.grant(0)
    bench.prepare()
    done = SampleOutput(0, 1, (7, 8), (0.0, 0.0), (), "stop")
    running = SampleOutput(0, 0, (7,), (0.0,), (), "abort")
    assert bench.core.collect([done]) == []
    sent = [item.message for item in bench.core.hand_back([running], 1.0).train]
    (message,) = [message for message in sent if isinstance(message, HandBack)]
    assert {piece.sample: len(piece.token_ids) // 4 for piece in message.pieces} == {0: 1, 1: 2}
    assert not bench.core.released
    bench.cancel(0)
    assert bench.core.released


@pytest.mark.parametrize("place", ["distflow/sim", "tests/runtime/kit.py"])
def test_the_rules_are_written_once(place: str) -> None:
    """Simulator and test kit neither ask for leases nor hand them to an engine by rules of their own."""
    folder = ROOT / place
    text = "\n".join(path.read_text() for path in (folder.rglob("*.py") if folder.is_dir() else [folder]))
    assert re.search(r"RolloutCore|RolloutLoop", text)
    assert not re.findall(r"\.(?:want|take_granted|take_cancelled)\(|min_version", text)


def test_a_group_that_is_larger_than_the_engine_starts_when_it_is_empty() -> None:
    """Some of its samples wait there for a slot; all other groups wait for the whole of it."""
    bench = Bench(slots=SIZE - 1)
    assert bench.turn().messages.train, "it asks for a group"
    bench.grant(0, 1)
    assert [lease.position for lease in bench.turn().start] == [0]
    bench.engine[0] = 1
    assert not bench.turn().start
    bench.finish(0)
    assert [lease.position for lease in bench.turn().start] == [1]


@pytest.mark.parametrize("refresh", ["eager", "at_bound"])
def test_an_idle_worker_asks_again_if_its_leases_are_taken_back_before_it_looked(refresh: Refresh) -> None:
    """Nothing else may come: the owner believes that this worker asked for no more than it was given."""
    bench = Bench(refresh)
    bench.prepare()
    assert len(bench.asked) == 1
    assert not bench.core.something(bench.loaded, newer=False), "an ask is in flight"
    bench.grant(0)
    bench.cancel(0)
    assert bench.core.something(bench.loaded, newer=False)
    bench.prepare()
    assert len(bench.asked) == 2
    assert not bench.core.something(bench.loaded, newer=False)


ROUNDS = (2, 4)
VAL_SIZE = 2


class ValBench(Bench):
    """The same with validation of versions 2 and 4, in groups of another size."""

    def __init__(self, refresh: Refresh = "eager", slots: int = 4 * SIZE) -> None:
        super().__init__(refresh, slots)
        limits = replace(
            LIMITS,
            ledgers=1,
            groups_per_ledger=9,
            samples_per_prompt=VAL_SIZE,
            kind="val",
            versions=ROUNDS,
            training_steps=2,
        )
        self.val = HolderCore("rollout/0", 0, [OWNER], limits)
        self.core = RolloutCore(self.holder, refresh, self.val)

    def grant_val(self, *numbers: int, version: int) -> None:
        """Of the single ledger of validation."""
        leases = []
        for number in numbers:
            one = lease(0, version, 1)
            leases.append(
                structs.replace(one, uid=one.uid._replace(position=VALIDATION + number), ledger=0, k=number, kind="val")
            )
        self.grants += 1
        self.val.handle(Grant(OWNER, 0, 0, self.grants, self.val._walk.number, tuple(leases)), self.now)

    def park_val(self) -> None:
        """The owner has nothing to validate for now."""
        self.val.handle(Refuse(OWNER, 0, 0, self.val._walk.number, self.val._walk.park), self.now)

    def loads(self) -> bool:
        """Whether weights are taken before or behind the next decode step."""
        return self.turn().load or self.turn().load


def test_validation_starts_before_training() -> None:
    bench = ValBench(slots=2 * VAL_SIZE + SIZE)
    bench.newest, bench.loaded = 2, Version(0, 2)
    bench.turn()
    bench.grant(0, 1)
    bench.grant_val(0, 1, version=2)
    started = bench.turn().start
    assert [item.position for item in started] == [VALIDATION, VALIDATION + 1, 0]
    outputs = [SampleOutput(VALIDATION, sample, (1,), (0.0,), (), "stop") for sample in range(VAL_SIZE)]
    (whole,) = bench.core.collect(outputs)
    assert len(whole.samples) == VAL_SIZE


@pytest.mark.parametrize("refresh", ["eager", "when_idle", "at_bound"])
def test_all_of_a_round_is_measured_on_one_version(refresh: Refresh) -> None:
    """Newer weights wait until what measures these has finished, and until no more of it is to come."""
    bench = ValBench(refresh)
    bench.loaded, bench.newest = Version(0, 1), 1
    bench.turn()
    bench.grant_val(0, version=2)
    bench.newest = 2
    assert bench.loads(), "what is due needs them"
    bench.loaded, bench.newest = Version(0, 2), 3
    assert [item.position for item in bench.turn().start] == [VALIDATION]
    assert not bench.loads(), "it runs"
    bench.core.collect([SampleOutput(VALIDATION, sample, (1,), (0.0,), (), "stop") for sample in range(VAL_SIZE)])
    bench.turn()
    assert not bench.loads(), "the ask for more is not answered"
    bench.park_val()
    assert bench.loads() == (refresh != "at_bound")


def test_a_grant_that_was_not_taken_yet_keeps_its_version() -> None:
    """It has come between two looks, when nothing of the round ran."""
    bench = ValBench()
    bench.loaded, bench.newest = Version(0, 2), 2
    bench.turn()
    bench.grant_val(0, version=2)
    bench.newest = 3
    assert [item.position for item in bench.turn().start] == [VALIDATION]
    assert not bench.loads()


def test_leases_of_the_next_round_end_the_one_before() -> None:
    bench = ValBench()
    bench.loaded, bench.newest = Version(0, 2), 2
    bench.turn()
    bench.grant_val(9, version=4)
    bench.newest = 4
    assert bench.loads(), "nothing more of version 2 is to come"


def test_no_answer_about_validation_keeps_weights_back_where_none_is_due() -> None:
    bench = ValBench()
    bench.loaded, bench.newest = Version(0, 1), 1
    bench.turn()
    assert bench.val.asking() is not None
    bench.newest = 2
    assert bench.loads()


def test_a_colocated_worker_trains_when_what_is_due_is_validated() -> None:
    bench = ValBench()
    bench.core.until(1)
    bench.holder.handle(Closed(OWNER, 0, 1), 0.0)
    assert bench.core.over, "version 1 is not validated"
    bench.core.until(2)
    bench.holder.handle(Closed(OWNER, 0, 2), 0.0)
    assert not bench.core.over
    bench.val.handle(Closed(OWNER, 0, 0), 0.0)
    assert bench.core.over
    bench.core.until(4, only_validation=True)
    assert not bench.core.over
    bench.newest, bench.loaded = 4, Version(0, 4)
    bench.turn()
    bench.grant(5)
    assert not bench.turn().start, "training is done"
    bench.grant_val(9, version=4)
    assert [item.position for item in bench.turn().start] == [VALIDATION + 9]
    bench.val.handle(Closed(OWNER, 0, 1), 0.0)
    assert bench.core.over


def test_the_run_is_over_when_validation_is() -> None:
    bench = ValBench()
    bench.turn()
    bench.holder.handle(Finished(OWNER, 0), 0.0)
    assert not bench.core.over
    assert bench.core.reason(bench.loaded)[0] == "the end of validation"
    bench.val.handle(Finished(OWNER, 0), 0.0)
    assert bench.core.over


def test_all_leases_of_a_worker_that_leaves_go_back() -> None:
    bench = ValBench()
    bench.newest, bench.loaded = 2, Version(0, 2)
    bench.turn()
    bench.grant(0)
    bench.grant_val(0, 1, version=2)
    bench.turn()
    out = bench.core.hand_back([], 0.0)
    assert [[m.message.positions for m in some if isinstance(m.message, HandBack)] for some in out] == [
        [(0,)],
        [(VALIDATION, VALIDATION + 1)],
    ]
    assert not bench.core.released
    bench.holder.handle(Ack(OWNER, 0, 0, (0,)), 0.0)
    assert not bench.core.released
    bench.val.handle(Ack(OWNER, 0, 0, (VALIDATION, VALIDATION + 1)), 0.0)
    assert bench.core.released
