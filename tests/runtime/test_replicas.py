"""Replicas that meet: all of them make the group, or none, whenever one is asked to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distflow.comm.fact_exchange import TOLD
from distflow.errors import RunStopped
from tests.runtime.test_lockstep import WAIT_S, Replica

Make = Callable[[int], list[Replica]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Replica] = []

    def replicas(count: int) -> list[Replica]:
        names = [f"trainer/{i}" for i in range(count)]
        made.extend(Replica(number, names, tmp_path, threading.Barrier(count)) for number in range(count))
        for one in made:
            one.node.start()
        for one in made:
            with one.node.board.condition:
                met = lambda one=one: all(map(one.node.membership.present, one.replicas.others))  # noqa: E731
                assert one.node.board.condition.wait_for(met, WAIT_S)
        return made

    yield replicas
    for one in made:
        if one.node.facts["state"] != "left":
            one.node.close(orderly=True)


def leave(replica: Replica) -> None:
    """As a worker does that was stopped."""
    replica.replicas.leave()
    replica.node.facts["state"] = "left"
    replica.node.close(orderly=True)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("who", [0, 1])
def test_who_leaves_before_it_has_the_addresses_holds_up_nobody(make: Make, count: int, who: int) -> None:
    """All others know all addresses; the one that leaves has given its own, and heard of none."""
    replicas = make(count)
    leaver, others = replicas[who], [one for number, one in enumerate(replicas) if number != who]
    heard = leaver.node._handlers[TOLD]
    if count == 2:
        leaver.node.on(TOLD, lambda message: None)
    else:
        # With three it also passes on what the third one has to hear; only its last message is kept from it.
        last = replicas[(who - 2) % 3].name
        leaver.node.on(TOLD, lambda message: heard(message) if message.sender != last else None)
    with ThreadPoolExecutor(count) as pool:
        waiting = [pool.submit(one.replicas.connect, "cpu") for one in others]
        leaving = pool.submit(leaver.replicas.connect, "cpu")
        for one in others:
            board = one.node.board
            with board.condition:
                knows = lambda one=one: one.replicas.set._agreement.round == 2  # noqa: E731
                assert board.condition.wait_for(knows, WAIT_S)
        leaver.node.board.stop("asked to stop")
        assert isinstance(leaving.exception(WAIT_S), RunStopped)
        leave(leaver)
        errors = [future.exception(WAIT_S / 2) for future in waiting]
    assert all(isinstance(error, RunStopped) for error in errors), errors


def test_who_is_asked_to_stop_between_the_rounds_says_so_and_all_stop(make: Make) -> None:
    first, second = make(2)
    contribute = second.replicas.set.contribute

    def stopped_first(what: str, fact: dict[str, object]) -> None:
        if "stop" in fact:
            second.node.board.stop("asked to stop")
            fact = {"stop": second.replicas.stopping}
        contribute(what, fact)

    second.replicas.set.contribute = stopped_first
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(one.replicas.connect, "cpu") for one in (first, second)]
        errors = [future.exception(WAIT_S) for future in futures]
    assert all(isinstance(error, RunStopped) for error in errors), errors
