"""Which groups a further model makes, and when: whatever is asked, cancelled, published or lost meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.config.schema import Refresh
from distflow.exchange.call_client import Call
from distflow.exchange.call_messages import CallAnswer, CallNotYet, CallRequest
from distflow.exchange.call_server import CallKey, CallServer
from distflow.exchange.further_core import FurtherCore, FurtherTurn, WantedGroup
from distflow.types import SampleOutput, Span, Version
from tests.budget import within
from tests.exchange.test_calls import CRITIC, VERSIONED, Asking

G = 2
FIRST = Version(0, 0)


def group(key: str, position: int = 0, t: int = 0, least: Version = FIRST) -> WantedGroup:
    return WantedGroup(key, position, G, t, least)


def finished(position: int, version: Version = FIRST) -> list[SampleOutput]:
    spans = (Span(*version, 0, 1),)
    return [SampleOutput(position, number, (1,), (0.0,), spans, "stop") for number in range(G)]


def test_the_oldest_training_step_comes_first_and_waits_for_nobody_who_needs_newer_weights() -> None:
    core = FurtherCore()
    core.ask(group("c", 3, t=2))
    core.ask(group("b", 2, t=1, least=Version(0, 1)))
    core.ask(group("a", 1, t=0))
    assert core.turn(8, Version(0, 0), Version(0, 0), newer=False).start == ["a", "c"]
    assert core.awaited(Version(0, 0)) == Version(0, 1)
    assert core.turn(4, Version(0, 1), Version(0, 1), newer=False).start == ["b"]
    assert core.collect([*finished(1), *finished(3), *finished(2)]) == ["a", "c", "b"]


def test_two_groups_of_one_position_run_one_after_the_other() -> None:
    """Two callers have copies of it: an engine knows samples by position and number."""
    core = FurtherCore()
    core.ask(group("mine", 7))
    core.ask(group("theirs", 7))
    assert core.turn(8, Version(0, 0), Version(0, 0), newer=False).start == ["mine"]
    assert core.turn(6, Version(0, 0), Version(0, 0), newer=False).start == []
    assert core.collect(finished(7)) == ["mine"]
    assert core.turn(8, Version(0, 0), Version(0, 0), newer=False).start == ["theirs"]


def test_what_runs_on_lost_weights_starts_again() -> None:
    core = FurtherCore()
    core.ask(group("a", 1))
    assert core.turn(8, Version(0, 6), Version(0, 6), newer=False).start == ["a"]
    core.begin_term({1: 5})
    assert core.turn(8, Version(0, 6), Version(0, 6), newer=False) == FurtherTurn(abort=[1])
    assert core.collect(finished(1, Version(0, 6))) == [], "of the samples that were aborted"
    assert core.turn(8, Version(0, 6), Version(0, 6), newer=False).start == [], "those weights are gone"
    assert core.awaited(Version(0, 6)) == Version(1, 5)
    assert core.turn(8, Version(0, 6), Version(0, 6), newer=True).load
    assert core.turn(8, Version(1, 5), Version(1, 5), newer=False).start == ["a"]


def test_what_has_tokens_of_lost_weights_starts_again_whatever_was_loaded_since() -> None:
    core = FurtherCore()
    core.ask(group("a", 1))
    core.ask(group("b", 2, least=Version(0, 7)))
    assert core.turn(8, Version(0, 6), Version(0, 6), newer=False).start == ["a"]
    assert core.turn(6, Version(0, 6), Version(0, 6), newer=True).load
    # The weights of the later term are here before anybody has told of it.
    assert core.turn(6, Version(1, 7), Version(1, 7), newer=False).start == ["b"]
    core.begin_term({1: 5})
    assert core.turn(6, Version(1, 7), Version(1, 7), newer=False).abort == [1]
    assert core.turn(6, Version(1, 7), Version(1, 7), newer=False).start == ["a"]
    assert core.collect([*finished(2), *finished(1)]) == ["b", "a"]


def test_weights_that_are_lost_while_they_are_loaded_leave_no_token() -> None:
    core = FurtherCore()
    core.ask(group("a", 1))
    assert core.turn(8, Version(0, 4), Version(0, 4), newer=False).start == ["a"]
    assert core.turn(8, Version(0, 4), Version(0, 4), newer=True).load
    core.begin_term({1: 5})
    assert core.turn(8, Version(0, 6), Version(0, 6), newer=False).abort == [1]
    assert core.turn(8, Version(0, 6), Version(0, 6), newer=False) == FurtherTurn(start=[])
    assert core.turn(8, Version(1, 5), Version(1, 5), newer=False).start == ["a"]


@pytest.mark.parametrize(("refresh", "loads"), [("eager", True), ("when_idle", False), ("at_bound", False)])
def test_newer_weights_are_taken_as_the_layout_says(refresh: Refresh, loads: bool) -> None:
    core = FurtherCore(refresh)
    core.ask(group("a", 1))
    core.turn(8, Version(0, 0), Version(0, 0), newer=False)
    assert core.turn(6, Version(0, 0), Version(0, 0), newer=True).load is loads
    core.ask(group("b", 2, least=Version(0, 1)))
    assert core.turn(6, Version(0, 0), Version(0, 0), newer=True).load is (refresh == "at_bound")
    core.collect(finished(1))
    assert core.something(Version(0, 0), newer=True)


def test_a_worker_that_generates_for_others_takes_weights_before_anybody_can_ask_for_them() -> None:
    """Callers keep what needs version 1 until it is loaded, so at the bound it would wait for them, and they for it."""
    core = FurtherCore("at_bound", for_others=True)
    core.ask(group("a", 1))
    core.ask(group("b", 2))
    assert core.turn(G, FIRST, FIRST, newer=True).start == ["a"], "there is work that needs no newer weights"
    assert not core.turn(0, FIRST, FIRST, newer=True).load
    core.collect(finished(1))
    assert core.turn(G, FIRST, FIRST, newer=True).start == ["b"]
    assert core.turn(0, FIRST, FIRST, newer=True).load
    assert core.something(FIRST, newer=True)
    alone = FurtherCore("at_bound")
    assert not alone.something(FIRST, newer=True), "who leases its groups itself knows what they need"


# -- over calls


def test_any_version_from_the_least_on_may_answer_what_is_generated() -> None:
    asking, need = Asking(CRITIC), Version(0, 3)
    (sent,) = asking.core.ask(Call(VERSIONED, "a", 4, need, 100, 10, at_least=True), 0.0)
    assert isinstance(sent.message, CallRequest)
    server = CallServer()
    (early,) = server.handle("rollout/0", 3, sent.message)
    assert isinstance(early.message, CallNotYet)
    assert asking.core.handle(CRITIC, 0, early.message, 0.0) == [], "kept until it has a version"
    server.version(Version(0, 5))
    (again,) = asking.core.announced(CRITIC, 0, Version(0, 5))
    assert isinstance(again.message, CallRequest)
    assert server.handle("rollout/0", 3, again.message) == []
    (key,) = server.next(0)
    (answer,) = server.done([key], 0.1, {key: Version(0, 6)})
    assert isinstance(answer.message, CallAnswer)
    asking.core.handle(CRITIC, 0, answer.message, 0.2)
    assert asking.answered() == ["a"]


def test_what_lost_weights_have_answered_is_asked_again() -> None:
    asking = Asking(CRITIC)
    (sent,) = asking.core.ask(Call(VERSIONED, "a", 4, Version(0, 3), 100, 10, at_least=True), 0.0)
    asking.core.restarted({1: 5})
    (again,) = asking.answer(sent, Version(0, 6))
    assert (asking.answered(), asking.core.unused) == ([], 1)
    asking.answer(again, Version(1, 5))
    assert asking.answered() == ["a"]


def test_what_is_withdrawn_while_it_is_generated_ends() -> None:
    server = CallServer()
    server.version(Version(0, 3))
    for number, at_least in ((1, True), (2, False)):
        server.handle("rollout/0", 0, CallRequest("solve", number, 0, Version(0, 3), 10, at_least))
    begun = [*server.next(0), *server.next(0)]
    server.withdrawn("rollout/0", 0, [1, 2])
    assert [key.number for key in begun if key in server] == [2], "what computes at once is finished"
    assert CallKey("rollout/0", 0, 1) not in server


# -- random histories


@dataclass
class Engine:
    """Slots, weights that come and go, and the groups in them; each decode step finishes some samples."""

    core: FurtherCore
    slots: int
    rng: random.Random
    loaded: Version | None = None
    newest: Version = FIRST
    begins: dict[int, int] = field(default_factory=dict)
    running: dict[int, tuple[str, list[int]]] = field(default_factory=dict)
    wanted: dict[str, WantedGroup] = field(default_factory=dict)
    whole: Counter[str] = field(default_factory=Counter)
    versions: dict[int, set[Version]] = field(default_factory=dict)
    """Those that the tokens of running groups come from."""
    told: dict[int, int] = field(default_factory=dict)
    """What the core has heard of `begins`, a little later."""

    @property
    def free(self) -> int:
        return self.slots - sum(len(left) for _, left in self.running.values())

    def turn(self) -> None:
        while True:
            before = set(self.running)
            newer = self.loaded is None or self.newest > self.loaded
            turn = self.core.turn(max(0, self.free), self.loaded, self.loaded, newer)
            if turn.load:
                self.loaded = self.newest
            for position in turn.abort:
                # Its last sample may have finished since it was cancelled.
                self.running.pop(position, None)
                self.versions.pop(position, None)
            if not (turn.load or turn.abort):
                break
        for key in turn.start:
            assert isinstance(key, str)
            wanted = self.wanted[key]
            assert wanted.position not in self.running, "two of one position"
            assert self.loaded is not None
            assert self.loaded.meets(wanted.least)
            assert self.loaded.survives(self.told)
            assert self.free >= G or not self.running, "no room"
            self.running[wanted.position], self.versions[wanted.position] = (key, list(range(G))), set()
        assert len(self.running) >= len(before - set(turn.abort))

    def restart(self) -> None:
        """Training goes on behind an earlier training step."""
        term, step = self.newest.term + 1, self.rng.randint(0, self.newest.number)
        self.begins[term], self.newest = step, Version(term, step)

    def hear(self) -> None:
        """The core learns of the terms that have begun; their weights may have come before."""
        self.told = dict(self.begins)
        self.core.begin_term(self.told)

    def decode(self) -> None:
        outputs = []
        used = {}
        for position, (key, left) in list(self.running.items()):
            assert self.loaded is not None, "it was started with some weights"
            self.versions[position].add(self.loaded)
            used[key] = self.versions[position]
            if left and self.rng.random() < 0.5:
                number = left.pop()
                outputs.append(SampleOutput(position, number, (1,), (0.0,), (), "stop"))
            if not left:
                del self.running[position], self.versions[position]
        for key in self.core.collect(outputs):
            assert isinstance(key, str)
            assert key in self.wanted, "it was cancelled"
            assert all(version.survives(self.told) for version in used[key]), "it has tokens of lost weights"
            self.whole[key] += 1


@settings(max_examples=300, derandomize=True)
@given(
    st.lists(st.sampled_from(["ask", "cancel", "publish", "restart", "hear", "turn", "decode"]), max_size=80),
    st.sampled_from(["eager", "when_idle", "at_bound"]),
    st.integers(1, 8),
    st.integers(0, 1 << 20),
)
@within(4, examples=300)
def test_every_group_is_made_once_whatever_happens(events: list[str], refresh: Refresh, slots: int, seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(FurtherCore(refresh), slots, rng)
    core = engine.core
    for count, event in enumerate(events):
        if event == "ask":
            least = Version(engine.newest.term, max(0, engine.newest.number + rng.choice([-1, 0, 1])))
            wanted = group(f"g{count}", rng.randrange(3), rng.randrange(4), least)
            engine.wanted[str(wanted.key)] = wanted
            core.ask(wanted)
        elif event == "cancel" and engine.wanted:
            key = rng.choice(sorted(engine.wanted))
            if not engine.whole[key]:
                del engine.wanted[key]
                core.cancel([key])
        elif event == "publish":
            engine.newest = Version(engine.newest.term, engine.newest.number + 1)
        elif event in ("restart", "hear", "turn", "decode"):
            getattr(engine, event)()
    engine.hear()
    for _ in range(400):
        engine.newest = Version(engine.newest.term, engine.newest.number + 1)
        engine.turn()
        engine.decode()
    assert set(engine.whole) == set(engine.wanted)
    assert set(engine.whole.values()) <= {1}
    assert not core.running
    assert core.queued == 0
