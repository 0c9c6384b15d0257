"""Several threads at once: what one of them goes through, another one changes."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distflow.comm.client import RequestClient
from distflow.comm.kept_process import KeptProcess
from distflow.comm.membership import Identity, Membership
from distflow.types import Version
from distflow.weights.in_place import InPlace
from distflow.weights.manifest import Manifest
from tests.runtime.kit import make_node

HAMMERED_S = 0.4


@pytest.fixture(autouse=True)
def turns() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def side_by_side(*acts: Callable[[], object], once: bool = False) -> None:
    """Call each on a thread of its own, again and again, or once; raises what one of them raises."""
    ends, raised, ready = time.monotonic() + HAMMERED_S, list[Exception](), list[None]()

    def call(act: Callable[[], object]) -> None:
        ready.append(None)
        while len(ready) < len(acts):
            pass  # a barrier would let them go one after another
        try:
            act()
            while not (once or raised) and time.monotonic() < ends:
                act()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=call, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def changing(table: dict[str, Any]) -> Callable[[], None]:
    """What adds an entry to a table of many, and takes it away the next time."""
    table.update({f"own {number}": [] for number in range(200)})

    def change() -> None:
        if table.pop("one more", None) is None:
            table["one more"] = []

    return change


def test_facts_are_added_while_they_are_told() -> None:
    me = Identity("trainer/0", 0, 1, 0.0, "same", {})
    membership, facts = Membership(me, ["rollout/0"], lambda pid, started: True), dict[str, Any]()
    now = [0.0]

    def tick() -> None:
        now[0] += 10.0
        membership.tick(now[0], 0, facts)

    side_by_side(tick, changing(facts))


def test_status_is_asked_for_while_a_worker_is_built(tmp_path: Path) -> None:
    node = make_node("trainer/0", [], tmp_path)
    node.start()
    change = changing(node.status_rows)
    with RequestClient(node.endpoint.roster["trainer/0"]) as client:

        def ask() -> None:
            assert (row := client.ask("status", {}, 10.0)) is not None, node.board.failure
            assert row["name"] == "trainer/0"

        try:
            side_by_side(ask, change)
        finally:
            node.close(orderly=False)


def test_a_process_is_killed_once_by_many(tmp_path: Path) -> None:
    for number in range(3):
        process = KeptProcess("tests.comm.kept_children:finishes", [], "distflow test", tmp_path / f"{number}.log")
        side_by_side(*[process.kill] * 16, once=True)
        process.close()
        assert process.ended


class Memory:
    """Nothing is wrong with what lies here."""

    def fetch(self, manifest: Manifest) -> list[object]:
        return []

    def intact(self, manifest: Manifest) -> bool:
        return True

    def doubt(self, manifest: Manifest) -> None: ...

    def begin_term(self, term: int) -> None: ...

    def close(self) -> None: ...


class Engine:
    def begin_update(self, version: Version) -> None: ...

    def update(self, tensors: object) -> None: ...

    def end_update(self) -> None: ...


def test_a_version_that_is_fetched_again_does_not_replace_a_newer_one() -> None:
    older, newer = (Manifest("policy", Version(0, number), "", 0, (), ()) for number in (1, 2))
    ends = time.monotonic() + HAMMERED_S
    while time.monotonic() < ends:
        readers = [InPlace(Memory()) for _ in range(200)]
        side_by_side(
            lambda readers=readers: [reader.again(older) for reader in readers],
            lambda readers=readers: [reader.offer(newer) for reader in readers],
            once=True,
        )
        assert [reader.refresh(Engine()) for reader in readers] == [newer] * len(readers)
