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

from distflow.config.schema import Refresh
from distflow.exchange.lease_client import HolderCore
from distflow.exchange.messages import Ack, Ask, Cancel, Grant, HandBack, Lease, Outgoing, Result
from distflow.exchange.rollout_core import RolloutCore, Turn
from distflow.testing.lease_network import SMALL, prompt_at
from distflow.types import SampleOutput, Version
from tests.budget import within

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
        self.note(turn.messages)
        return turn

    def note(self, messages: Iterable[Outgoing]) -> None:
        self.asked += [item.message.groups for item in messages if isinstance(item.message, Ask)]

    def prepare(self) -> Turn:
        """All turns up to a decode step; returns the last one."""
        turn = self.turn()
        while turn.load or turn.abort:
            assert not turn.start
            assert not turn.messages
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
        self.note(self.core.ask(self.slots - SIZE * len(self.engine), self.now))
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
    sent = [item.message for item in bench.core.hand_back([running], 1.0)]
    (message,) = [message for message in sent if isinstance(message, HandBack)]
    assert {piece.sample: len(piece.token_ids) // 4 for piece in message.pieces} == {0: 1, 1: 2}
    assert not bench.core.released
    bench.cancel(0)
    assert bench.core.released


@pytest.mark.parametrize("place", ["distflow/testing", "tests/runtime/kit.py"])
def test_the_rules_are_written_once(place: str) -> None:
    """The test kits drive the core, and neither ask for leases nor hand them to an engine by rules of their own."""
    folder = ROOT / place
    text = "\n".join(path.read_text() for path in (folder.rglob("*.py") if folder.is_dir() else [folder]))
    assert re.search(r"RolloutCore|RolloutLoop", text)
    assert not re.findall(r"\.(?:want|take_granted|take_cancelled)\(|min_version", text)


def test_a_group_that_is_larger_than_the_engine_starts_when_it_is_empty() -> None:
    """Some of its samples wait there for a slot; all other groups wait for the whole of it."""
    bench = Bench(slots=SIZE - 1)
    assert bench.turn().messages, "it asks for a group"
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
