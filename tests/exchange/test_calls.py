"""Who is asked for a step, what is held back, and what counts as its answer."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from distflow.exchange.call_client import Call, CallClient
from distflow.exchange.call_messages import (
    CallAnswer,
    CallNotYet,
    CallRequest,
    CallReturned,
    CallWithdrawn,
    OutgoingCall,
)
from distflow.types import Version
from tests.search.call_network import CallNetwork
from tests.search.call_scenario import FROZEN, MIB, VERSIONED, CallRecord, CallScenario
from tests.search.lease_scenario import Leave, Pause

POOLS = {FROZEN: "reference", VERSIONED: "critic"}
A, B, CRITIC = "reference/0", "reference/1", "critic/0"


class Asking:
    """A caller whose time the test moves on; servers are heard all the time unless they are suspended."""

    def __init__(self, *servers: str, ahead_bytes: int = 8 * MIB, seed: int = 0) -> None:
        self.core = CallClient(3, POOLS, ahead_bytes, random.Random(seed))
        self.now = 0.0
        self.suspended: set[str] = set()
        self.servers = servers
        for server in servers:
            assert self.core.server(server, 0, present=True, load=0, now=0.0) == []

    def ask(
        self, key: str, t: int = 0, need: Version | None = None, nbytes: int = 1000, tokens: int = 10
    ) -> list[OutgoingCall]:
        step = FROZEN if need is None else VERSIONED
        return self.core.ask(Call(step, key, t, need, nbytes, tokens), self.now)

    def answer(
        self, sent: OutgoingCall, version: Version | None = None, load: int = 0, took: float = 0.001
    ) -> list[OutgoingCall]:
        """It was computed alone, in `took` seconds."""
        assert isinstance(sent.message, CallRequest)
        answer = CallAnswer(3, sent.message.number, version, load, sent.message.tokens, round(1000 * took))
        return self.core.handle(sent.to, 0, answer, self.now)

    def busy(self, server: str, tokens: int) -> list[OutgoingCall]:
        """A server says how much it has to do."""
        return self.core.server(server, 0, present=True, load=tokens, now=self.now)

    def not_yet(self, sent: OutgoingCall, has: Version | None) -> list[OutgoingCall]:
        assert isinstance(sent.message, CallRequest)
        return self.core.handle(sent.to, 0, CallNotYet(3, (sent.message.number,), has, 0), self.now)

    def passes(self, seconds: float) -> list[OutgoingCall]:
        """What is sent meanwhile."""
        out: list[OutgoingCall] = []
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            for server in self.servers:
                if server not in self.suspended:
                    self.core.heard(server, self.now)
            out += self.core.tick(self.now)
        return out

    def answered(self) -> list[object]:
        return [key for key, _ in self.core.take_answered()]


def numbers(out: Sequence[OutgoingCall]) -> list[tuple[str, int]]:
    """Which requests went where."""
    return [(item.to, item.message.number) for item in out if isinstance(item.message, CallRequest)]


# -- the caller


def test_the_first_answer_counts() -> None:
    asking = Asking(A)
    (sent,) = asking.ask("a")
    assert asking.core.waiting() == ("answers of 'reference'", (A,))
    asking.answer(sent)
    assert asking.answered() == ["a"]
    asking.answer(sent)
    assert (asking.answered(), asking.core.unused, asking.core.waiting()) == ([], 1, None)


def test_an_answer_for_an_earlier_incarnation_of_the_caller_is_none() -> None:
    """It has asked for something else under that number."""
    asking = Asking(A)
    (sent,) = asking.ask("a")
    assert isinstance(sent.message, CallRequest)
    asking.core.handle(A, 0, CallAnswer(2, sent.message.number, None, 0, 10, 1), 0.0)
    assert asking.answered() == []
    asking.answer(sent)
    assert asking.answered() == ["a"]


@pytest.mark.parametrize("other", [Version(0, 6), Version(1, 7), Version(0, 8), None])
def test_an_answer_of_another_version_than_asked_is_thrown_away(other: Version | None) -> None:
    asking = Asking(CRITIC)
    asking.core.announced(CRITIC, 0, Version(0, 7))
    (sent,) = asking.ask("a", 7, Version(0, 7))
    asking.answer(sent, other)
    assert (asking.answered(), asking.core.unused) == ([], 1)
    asking.answer(sent, Version(0, 7))
    assert asking.answered() == ["a"]


def test_not_yet_is_asked_again_when_the_version_is_announced_and_by_no_timer() -> None:
    asking = Asking(CRITIC)
    (sent,) = asking.ask("a", 7, Version(0, 7))
    assert asking.not_yet(sent, Version(0, 6)) == []
    assert asking.core.waiting() == ("version 7 for 'values'", (CRITIC,))
    assert asking.passes(300.0) == []
    assert asking.core.announced(CRITIC, 0, Version(0, 6)) == []
    assert numbers(asking.core.announced(CRITIC, 0, Version(0, 7))) == numbers([sent])


def test_nobody_waits_for_a_worker_that_joins_to_generate() -> None:
    """It says that it has no version yet, perhaps for minutes, while the others could go on."""
    asking = Asking(CRITIC, "critic/1")
    asking.core.announced(CRITIC, 0, Version(0, 6))
    for number in range(8):
        call = Call(VERSIONED, f"{number}", 7, Version(0, 6), 1000, 10, at_least=True)
        (sent,) = asking.core.ask(call, 0.0)
        if sent.to == "critic/1":
            (sent,) = asking.not_yet(sent, None)
        assert sent.to == CRITIC
    asking.core.announced("critic/1", 0, Version(0, 5))
    late = Call(VERSIONED, "late", 7, Version(0, 6), 1000, 10, at_least=True)
    assert asking.core.ask(late, 0.0) == [], "all take a version together"


def test_what_waits_for_a_version_is_sent_once_all_servers_that_are_heard_have_it() -> None:
    """They take it together, and each its part: else the first to say so would get everything."""
    asking = Asking(CRITIC, "critic/1", "critic/2")
    for server in asking.servers:
        asking.core.announced(server, 0, Version(0, 6))
    for group in range(12):
        assert asking.ask(f"{group}", 7, Version(0, 7)) == []
    asking.suspended = {"critic/2"}
    assert asking.core.announced(CRITIC, 0, Version(0, 7)) == []
    assert asking.core.waiting() == ("version 7 for 'values'", ("critic/1", "critic/2"))
    assert asking.passes(3.0) == [], "critic/2 is silent by now"
    counts = Counter(to for to, _ in numbers(asking.core.announced("critic/1", 0, Version(0, 7))))
    assert counts == {CRITIC: 6, "critic/1": 6}


def test_an_announcement_that_was_overtaken_is_no_news() -> None:
    asking = Asking(CRITIC)
    for number in (7, 6):
        asking.core.announced(CRITIC, 0, Version(0, number))
    assert len(asking.ask("a", 7, Version(0, 7))) == 1
    asking.core.server(CRITIC, 1, present=True, load=0, now=0.0)
    asking.core.announced(CRITIC, 1, Version(0, 6))
    assert asking.core.announced(CRITIC, 0, Version(0, 7)) == [], "of an earlier incarnation"
    assert asking.core.waiting() == ("version 7 for 'values'", (CRITIC,))


def test_requests_that_wait_for_a_version_leave_room_for_those_that_do_not() -> None:
    """They are not in flight: else requests for t + 1 would fill what t needs."""
    asking = Asking(CRITIC)
    asking.core.announced(CRITIC, 0, Version(0, 0))
    for group in range(40):
        assert asking.ask(f"next {group}", 1, Version(0, 1), 4 * MIB) == []
    sent = [item for group in range(8) for item in asking.ask(f"now {group}", 0, Version(0, 0), 4 * MIB)]
    assert len(sent) == 8
    for item in sent:
        asking.answer(item, Version(0, 0))
    assert asking.answered() == [f"now {group}" for group in range(8)]
    assert numbers(asking.core.announced(CRITIC, 0, Version(0, 1))) == [(CRITIC, number) for number in range(1, 9)]


def test_the_oldest_training_step_fits_however_much_is_under_way_for_later_ones() -> None:
    asking = Asking(A, ahead_bytes=1 << 40)
    asking.ask("small", 0, None, 1)
    ahead = [item for group in range(20) for item in asking.ask(f"later {group}", 1, None, 4 * MIB)]
    assert len(ahead) == 3, "half of the bytes are for the oldest step"
    now = [item for group in range(20) for item in asking.ask(f"now {group}", 0, None, 4 * MIB)]
    assert len(now) == 4
    for item in now:
        asking.answer(item)
    assert len(asking.answered()) == 4


def test_a_training_step_older_than_all_under_way_is_not_held_back() -> None:
    """It has come later than the others, which were the oldest then."""
    asking = Asking(A)
    assert len([item for group in range(20) for item in asking.ask(f"later {group}", 1, None, 4 * MIB)]) == 8
    assert len([item for group in range(20) for item in asking.ask(f"now {group}", 0, None, 4 * MIB)]) == 1


def test_of_later_training_steps_a_server_has_no_more_than_it_computes_soon() -> None:
    asking = Asking(A, B, ahead_bytes=10 * MIB)
    asking.ask("now", 0, None, 1 * MIB)
    ahead = [item for group in range(20) for item in asking.ask(f"later {group}", 1, None, 4 * MIB)]
    assert Counter(item.to for item in ahead) == {A: 2, B: 2}
    (sent,) = asking.answer(ahead[0])
    assert sent.to == ahead[0].to


@pytest.mark.parametrize("nbytes", [3 * MIB, 12 * MIB, 40 * MIB])
def test_however_large_the_requests_of_later_training_steps_are_all_servers_work(nbytes: int) -> None:
    servers = [f"reference/{number}" for number in range(8)]
    asking = Asking(*servers, CRITIC, ahead_bytes=MIB)
    asking.ask("now", 0, Version(0, 0))
    ahead = [item for group in range(40) for item in asking.ask(f"later {group}", 1, None, nbytes)]
    assert sorted(item.to for item in ahead) == servers
    for _ in range(32):
        (more,) = asking.answer(ahead.pop(0))
        ahead.append(more)
    assert sorted(item.to for item in ahead) == servers


def test_training_steps_are_sent_in_their_order() -> None:
    asking = Asking(A)
    (first,) = asking.ask("large", 1, None, 40 * MIB)
    for t in (3, 1, 2, 1):
        assert asking.ask(f"{t} {asking.now}", t, None, 30 * MIB) == []
        asking.now += 0.1
    order = []
    sent = asking.answer(first)
    while sent:
        (item,) = sent
        assert isinstance(item.message, CallRequest)
        order.append(item.message.t)
        sent = asking.answer(item)
    assert order == [1, 1, 2, 3]


def test_what_is_cancelled_is_free_at_once() -> None:
    asking = Asking(A)
    (sent,) = asking.ask("a", 0, None, 30 * MIB)
    assert asking.ask("b", 0, None, 30 * MIB) == []
    withdrawn, later = asking.core.cancel(["a", "of nobody"])
    assert withdrawn == OutgoingCall(A, CallWithdrawn((1,)))
    assert numbers([later]) == [(A, 2)]
    asking.answer(sent)
    assert (asking.answered(), asking.core.unused) == ([], 1)


def test_what_is_asked_anew_for_a_later_term_waits_for_its_version() -> None:
    asking = Asking(A, CRITIC)
    asking.core.announced(CRITIC, 0, Version(0, 7))
    (frozen,) = asking.ask("frozen", 7)
    (old,) = asking.ask("open", 7, Version(0, 7))
    asking.core.cancel(["open"])
    asking.answer(old, Version(0, 7))
    asking.answer(frozen)
    assert asking.answered() == ["frozen"]
    assert asking.ask("open", 7, Version(1, 7)) == []
    (again,) = asking.core.announced(CRITIC, 0, Version(1, 7))
    asking.answer(again, Version(1, 7))
    assert asking.answered() == ["open"]


def test_what_a_lost_server_had_is_asked_elsewhere() -> None:
    asking = Asking(A)
    (sent,) = asking.ask("a")
    asking.core.server(A, 0, present=False, load=0, now=0.0)
    assert asking.core.waiting() == ("a worker of pool 'reference', which runs 'reference'", ())
    assert asking.core.server(A, 0, present=True, load=0, now=0.0) == [sent], "it was cut off for a while"
    assert [item.to for item in asking.core.server(A, 1, present=True, load=0, now=0.0)] == [A], "it came anew"
    assert asking.core.server(A, 0, present=True, load=0, now=0.0) == [], "news of an earlier one that was overtaken"
    asking.core.server(A, 1, present=False, load=0, now=0.0)
    assert [item.to for item in asking.core.server(B, 0, present=True, load=0, now=0.0)] == [B]


def test_a_server_that_drains_is_asked_no_more() -> None:
    asking = Asking(A)
    (sent,) = asking.ask("a")
    assert isinstance(sent.message, CallRequest)
    assert asking.core.handle(A, 0, CallReturned(3, (sent.message.number,), 0), 0.0) == []
    assert asking.ask("b") == []
    assert numbers(asking.core.server(B, 0, present=True, load=0, now=0.0)) == [(B, 1), (B, 2)]


def measured(asking: Asking, *took: float, tokens: int = 10) -> None:
    """Each server has answered, and taken so long for so many tokens."""
    assert len(took) == len(asking.servers)
    left = dict(zip(asking.servers, took, strict=True))
    number = 0
    while left:
        number += 1
        (sent,) = asking.ask(f"before {number}", tokens=tokens)
        asking.answer(sent, took=left.pop(sent.to, took[asking.servers.index(sent.to)]))
    asking.answered()


def test_a_request_is_copied_once_another_server_would_have_answered_long_ago() -> None:
    asking = Asking(A, B, "reference/2")
    measured(asking, 0.75, 0.75, 0.75)
    (sent,) = asking.ask("a")
    assert asking.passes(2.0) == [], "three times as long as it takes is late"
    (copy,) = asking.passes(0.5)
    assert copy.to != sent.to
    assert copy.message == sent.message
    assert isinstance(sent.message, CallRequest)
    assert len(asking.passes(2.0)) == 0, "two have it"
    assert asking.answer(copy) == [OutgoingCall(sent.to, CallWithdrawn((sent.message.number,)))]
    assert asking.answered() == ["a"]
    assert asking.passes(100.0) == []


def test_a_long_request_is_not_late_for_being_long() -> None:
    """It takes its time in proportion to its tokens, and so it would elsewhere."""
    asking = Asking(A, B)
    measured(asking, 0.5, 0.5)
    (long,) = asking.ask("long", tokens=100)
    assert asking.passes(14.75) == []
    (copy,) = asking.passes(0.25)
    assert copy.to != long.to, "three times 5 s"


def test_no_copy_goes_to_a_server_that_is_busy() -> None:
    """What all of them have much of takes long everywhere; one that has done its part helps."""
    asking = Asking(A, B)
    measured(asking, 0.5, 0.5)
    asking.busy(B, 200)
    (sent,) = asking.ask("a")
    assert sent.to == A
    assert [item for item in asking.passes(30.0) if item.to == B] == [], "it has 10 s to do before"
    copies = asking.busy(B, 20) + asking.passes(0.25)
    assert [item.to for item in copies] == [B], "a second to do is little after half a minute"


def test_what_others_have_given_a_server_is_known_of_its_heartbeats() -> None:
    asking = Asking(A, B)
    measured(asking, 0.5, 0.5)
    asking.busy(B, 1000)
    asking.ask("a")
    assert [item.to for item in asking.passes(1.5)] == []
    asking.busy(B, 0)
    assert [item.to for item in asking.passes(0.25)] == [B]


def test_an_idle_server_is_given_only_as_much_as_it_does_soon() -> None:
    """Each copy is something to do for it, and the next one waits behind."""
    asking = Asking(A, B)
    measured(asking, 1.0, 1.0)
    asking.busy(B, 1000)
    sent = [item for number in range(9) for item in asking.ask(f"{number}")]
    assert {item.to for item in sent} == {A}
    asking.passes(2.0)
    asking.busy(B, 0)
    assert [item.to for item in asking.passes(1.0)] == [B], "three seconds for what takes one"
    assert [item.to for item in asking.passes(3.0) if item.to == B] == [B], "and six where it is the second"


def test_a_slow_server_is_measured_against_a_fast_one() -> None:
    """What is usual for it is no reason to wait for it while a faster one is idle."""
    asking = Asking(A, B)
    measured(asking, 10.0, 0.1)
    asking.busy(B, 1000)
    (sent,) = asking.ask("a")
    assert sent.to == A
    asking.busy(B, 0)
    assert [item.to for item in asking.passes(1.0)] == [B]


def test_a_server_that_came_anew_is_measured_anew() -> None:
    asking = Asking(A, B)
    measured(asking, 0.1, 60.0)
    asking.core.server(B, 1, present=True, load=1000, now=asking.now)
    (sent,) = asking.ask("a")
    assert sent.to == A
    asking.core.server(B, 1, present=True, load=0, now=asking.now)
    copies = [item.to for item in asking.passes(100.0) if item.to == B]
    assert len(copies) == 1, "as the others, as far as is known: at most three times the longest"


def test_where_nothing_is_known_yet_only_an_idle_server_helps_and_late() -> None:
    """The first answer may take long: its cost is unknown."""
    asking = Asking(A, B)
    asking.busy(B, 10)
    asking.ask("a")
    assert {item.to for item in asking.passes(30.0)} == {A}
    asking.busy(B, 0)
    assert [item.to for item in asking.passes(0.25)] == [B]
    fresh = Asking(A, B)
    (sent,) = fresh.ask("a")
    assert {item.to for item in fresh.passes(9.75)} <= {sent.to}
    assert [item.to for item in fresh.passes(0.5) if item.to != sent.to] != []


def test_how_long_is_usual_is_known_of_each_step() -> None:
    """Rewards take no time: a forward that takes its own is not slow."""
    asking = Asking(A, CRITIC, "critic/1")
    for server in (CRITIC, "critic/1"):
        asking.core.announced(server, 0, Version(0, 7))
    for number in range(5):
        (sent,) = asking.ask(f"values {number}", 7, Version(0, 7))
        asking.answer(sent, Version(0, 7), took=0.75)
    for number in range(100):
        asking.answer(asking.ask(f"{number}", 7)[0])
    asking.ask("values", 7, Version(0, 7))
    assert asking.passes(2.0) == []
    assert len(asking.passes(0.25)) == 1


def test_what_may_be_lost_is_sent_again_to_those_that_are_heard() -> None:
    asking = Asking(A, B)
    measured(asking, 0.1, 0.1)
    asking.ask("a")
    (copy,) = asking.passes(1.0)
    asking.suspended.add(A if copy.to == B else B)
    assert {item.to for item in asking.passes(100.0)} == {copy.to}


def test_a_suspended_server_is_not_waited_for() -> None:
    """Its requests are copied as soon as it is silent, however long answers usually take; nothing new goes there."""
    asking = Asking(A, B)
    measured(asking, 5.0, 5.0)
    sent = [item for number in range(20) for item in asking.ask(f"{number}")]
    there = [item.message for item in sent if item.to == A]
    assert len(there) >= 8
    asking.suspended.add(A)
    assert asking.passes(2.0) == []
    copies = asking.passes(0.25)
    assert [(item.to, item.message) for item in copies] == [(B, message) for message in reversed(there)]
    assert [item.to for number in range(20, 30) for item in asking.ask(f"{number}")] == [B] * 10


def test_who_was_suspended_itself_does_not_take_the_others_for_silent() -> None:
    asking = Asking(A, B)
    for number in range(20):
        asking.ask(f"{number}")
    asking.now += 600.0
    asking.core.heard(A, asking.now)
    assert asking.core.tick(asking.now) == []


def test_where_there_is_no_other_server_a_lost_request_is_sent_again_less_and_less_often() -> None:
    asking = Asking(A)
    asking.ask("a")
    times = []
    for _ in range(int(200 / 0.25)):
        times += [asking.now for _ in asking.passes(0.25)]
    assert [round(b - a) for a, b in zip([0.0, *times], times, strict=False)] == [5, 10, 20, 40, 40, 40, 40]


def test_what_waits_in_a_long_queue_is_not_sent_again_before_it_is_late() -> None:
    """It would travel every half minute, with its rows. Once the server has nothing to do it must have been lost."""
    asking = Asking(A)
    measured(asking, 1.0)
    asking.ask("a")
    asking.busy(A, 1000)
    assert asking.passes(250.0) == [], "100 s of others before it"
    asking.busy(A, 0)
    assert [item.to for item in asking.passes(0.25)] == [A]


# -- balance


@pytest.mark.parametrize("seed", range(20))
def test_of_two_random_servers_the_less_loaded_is_asked(seed: int) -> None:
    """Of 400 requests for 8 servers, each gets 50 ± 4; a random choice alone would miss that by about 15."""
    asking = Asking(*[f"reference/{number}" for number in range(8)], seed=seed)
    counts = Counter(item.to for number in range(400) for item in asking.ask(f"{number}"))
    assert max(counts.values()) <= 54
    assert min(counts.values()) >= 46


@pytest.mark.parametrize("seed", range(5))
def test_what_servers_report_of_the_requests_of_others_counts(seed: int) -> None:
    asking = Asking(A, B, seed=seed)
    asking.busy(A, 2_000)
    assert {item.to for number in range(100) for item in asking.ask(f"{number}")} == {B}
    asking.busy(B, 4_000)
    assert {item.to for number in range(100, 150) for item in asking.ask(f"{number}")} == {A}


# -- whole runs

QUIET = CallScenario(servers=2, groups=20, ahead=0, steps=2)


def test_a_suspended_server_does_not_hold_its_callers_up() -> None:
    paused = replace(QUIET, pauses=[Pause(1, 1.2, 1000.0), Pause(3, 1.2, 1000.0)])
    assert CallNetwork(paused).run().seconds < CallNetwork(QUIET).run().seconds + 10


def test_scaling_down_under_load_computes_nothing_twice() -> None:
    scenario = replace(QUIET, clients=3, token_s=0.002, leaves=[Leave(1, 0.9), Leave(3, 0.9)])
    record = CallNetwork(scenario).run()
    assert record.returned > 10
    assert sum(record.computed.values()) == len(record.answers) == 2 * 2 * 20 * 3
    assert record.unused == 0


def test_a_server_that_joins_takes_its_part() -> None:
    record = CallNetwork(replace(QUIET, servers=1, clients=3, token_s=0.002, joins=[2.0])).run()
    assert record.computed["reference/1"] > 0.2 * record.computed["reference/0"]


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_waited_for_a_version_are_shared_by_all_who_take_it(seed: int) -> None:
    record = CallNetwork(replace(QUIET, ahead=1, steps=4, delay_s=0.3, seed=seed)).run()
    assert min(record.computed[f"values/{number}"] for number in range(2)) > 0.4 * 4 * 20


def test_requests_are_joined_over_callers() -> None:
    record = CallNetwork(replace(QUIET, clients=3, token_s=0.002)).run()
    assert max(record.joined) == 400
    assert len(record.joined) < 0.5 * len(record.answers)


def computed(record: CallRecord) -> int:
    return sum(record.computed.values())


@pytest.mark.parametrize("seed", range(4))
def test_long_requests_and_long_queues_are_no_reason_for_copies(seed: int) -> None:
    """Answers take from a tenth of a second to half a minute, by their lengths and by what is before them."""
    scenario = replace(QUIET, clients=3, servers=3, token_s=0.005, spread=1.5, budget=0, seed=seed)
    record = CallNetwork(scenario).run()
    assert record.seconds > 50
    assert computed(record) <= 1.1 * len(record.answers)


@pytest.mark.parametrize("seed", range(4))
def test_servers_that_have_done_their_part_help_a_slow_one(seed: int) -> None:
    quick = replace(QUIET, clients=2, token_s=0.002, seed=seed)
    slow = replace(quick, slowness=[1.0, 50.0, 1.0, 50.0])
    record = CallNetwork(slow).run()
    assert record.seconds < CallNetwork(quick).run().seconds + 20, "alone, it takes 10 s for one request"
    assert record.unused > 0
    assert computed(record) < 1.5 * len(record.answers)


def test_large_requests_take_no_longer_than_small_ones() -> None:
    """Whatever is ahead of its turn: all servers compute them, each one or more at a time."""
    small = replace(QUIET, servers=8, groups=40, ahead=3, steps=4, token_s=0.01, ahead_bytes=MIB, largest_bytes=1000)
    large = CallNetwork(replace(small, largest_bytes=40 * MIB)).run()
    assert large.seconds < 1.1 * CallNetwork(small).run().seconds
