"""How a server of a step takes its requests: what it joins, what it puts off, and what it gives back."""

from __future__ import annotations

from distflow.exchange.call_messages import (
    CallAnswer,
    CallNotYet,
    CallRequest,
    CallReturned,
    OutgoingCall,
)
from distflow.exchange.call_server import CallKey, CallServer
from distflow.types import Version
from tests.search.call_scenario import FROZEN, VERSIONED


def request(number: int, t: int = 0, version: Version | None = None, **more: object) -> CallRequest:
    fields = {"step": FROZEN if version is None else VERSIONED, "tokens": 100, **more}
    return CallRequest(number=number, t=t, version=version, **fields)  # type: ignore[arg-type]


def key(number: int, client: str = "trainer/0", incarnation: int = 0) -> CallKey:
    return CallKey(client, incarnation, number)


def test_requests_of_one_training_step_are_joined_up_to_the_budget() -> None:
    server = CallServer()
    for number, t in enumerate([1, 0, 1, 0, 0]):
        server.handle(f"trainer/{number % 2}", 0, request(number, t))
    server.handle("trainer/0", 0, request(9, 0, tokens=1000))
    assert [one.number for one in server.next(250)] == [1, 3]
    assert [one.number for one in server.next(250)] == [4]
    assert [one.number for one in server.next(250)] == [9], "alone, although it is larger"
    assert [one.number for one in server.next(0)] == [0]
    assert server.next(250) == [key(2)]
    assert server.next(250) == []


def test_requests_of_different_steps_or_versions_are_not_joined() -> None:
    server = CallServer()
    server.version(Version(0, 3))
    for number, version in enumerate([None, Version(0, 3), None, Version(0, 3)]):
        server.handle("trainer/0", 0, request(number, 3, version))
    assert server.next(1000) == [key(0), key(2)]
    assert server.next(1000) == [key(1), key(3)]


def test_a_number_that_is_here_is_not_begun_again_and_an_answered_one_may_be() -> None:
    server = CallServer()
    for _ in range(2):
        assert server.handle("trainer/0", 0, request(1)) == []
    assert server.next(0) == [key(1)]
    server.handle("trainer/0", 0, request(1))
    assert (server.next(0), server.load) == ([], 100)
    assert server.done([key(1)], 0.25) == [OutgoingCall("trainer/0", CallAnswer(0, 1, None, 0, 100, 250))]
    server.handle("trainer/0", 0, request(1))
    assert server.next(0) == [key(1)]


def test_a_request_for_another_version_is_never_kept() -> None:
    server = CallServer()
    needs = request(1, 3, Version(0, 3))
    assert server.handle("trainer/0", 2, needs) == [OutgoingCall("trainer/0", CallNotYet(2, (1,), None, 0))]
    # It may keep it until then.
    assert server.version(Version(0, 3)) == [OutgoingCall("trainer/0", CallNotYet(2, (), Version(0, 3), 0))]
    assert server.handle("trainer/0", 2, needs) == []
    assert server.handle("trainer/0", 2, request(2)) == []
    has = Version(0, 4)
    assert server.version(has) == [OutgoingCall("trainer/0", CallNotYet(2, (1,), has, 100))]
    assert server.next(1000) == [key(2, incarnation=2)]


def test_what_is_withdrawn_is_not_begun() -> None:
    server = CallServer()
    for number in range(4):
        server.handle("trainer/0", 1, request(number))
    begun = server.next(100)
    server.withdrawn("trainer/0", 1, (0, 2, 9))
    server.withdrawn("trainer/0", 0, (3,))
    server.withdrawn("trainer/1", 1, (3,))
    assert server.load == 300, "what is begun goes on; nothing of others is dropped"
    assert len(server.done(begun, 0.1)) == 1
    assert server.next(1000) == [key(1, incarnation=1), key(3, incarnation=1)]


def test_a_server_that_drains_finishes_what_it_began_and_returns_the_rest() -> None:
    server = CallServer()
    for number in range(4):
        server.handle("trainer/0", 0, request(number))
    assert len(server.next(200)) == 2
    assert server.drain() == [OutgoingCall("trainer/0", CallReturned(0, (2, 3), 200))]
    assert server.handle("trainer/1", 5, request(7)) == [OutgoingCall("trainer/1", CallReturned(5, (7,), 200))]
    assert (server.next(200), server.drained) == ([], False)
    assert len(server.done([key(0), key(1)], 1.0)) == 2
    assert server.drained


def test_who_is_gone_is_not_answered() -> None:
    server = CallServer()
    for number in range(3):
        server.handle("trainer/0", 0, request(number))
    server.handle("trainer/1", 0, request(0))
    begun = server.next(100)
    server.client_lost("trainer/0", 0)
    assert (server.done(begun, 1.0), server.load, begun[0] in server) == ([], 100, False)
    server.handle("trainer/1", 1, request(0, tokens=7))
    assert server.load == 7, "it was restarted, as its message tells"
    assert server.handle("trainer/1", 0, request(5)) == []
    assert server.load == 7, "a message of before"


# -- both
