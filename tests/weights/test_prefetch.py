"""Weights that are fetched while generation goes on."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec import structs

from distflow.errors import ChecksumError, Overtaken
from distflow.types import Version
from distflow.weights.in_place import InPlace
from distflow.weights.manifest import Manifest
from distflow.weights.prefetch import Stage
from distflow.weights.receiver import WeightInbox
from distflow.weights.segments.shm import ShmReader
from tests.polling import WAIT_S, eventually
from tests.weights.swarm_kit import Host, new_reader, weights


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


class FakeEngine:
    """Records what it was given."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.value = -1.0

    def begin_update(self, version: Version) -> None:
        self.events.append(f"begin {version.number}")

    def update(self, tensors: Any) -> None:
        self.value = float(dict(tensors)["embed"][0])

    def end_update(self) -> None:
        self.events.append("end")


class SlowReader:
    """A reader whose fetches end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.may_end = threading.Semaphore(0)
        self.ends_with: Exception | None = None
        self.gone = False
        self.released = 0

    def fetch(self, manifest: Manifest, superseded: Callable[[], bool] = lambda: False) -> Any:
        self.begun.append(manifest.version.number)
        assert self.may_end.acquire(timeout=WAIT_S)
        if self.ends_with is not None:
            raise self.ends_with
        return weights(manifest.version.number, 4)

    def hold(self, manifest: Manifest) -> bool:
        held, self.gone = not self.gone, False
        return held

    def release(self) -> None:
        self.released += 1

    def close(self) -> None:
        self.may_end.release()


def announced(number: int, term: int = 0) -> Manifest:
    return Manifest("policy", Version(term, number), "", 0, (), ())


def test_weights_are_staged_while_generation_goes_on() -> None:
    reader, ready = SlowReader(), threading.Event()
    inbox, engine = WeightInbox(Stage(reader, ready.set)), FakeEngine()
    inbox.announce(announced(1))
    eventually(lambda: reader.begun, "the fetch")
    assert not inbox.waiting, "announced is not there yet: generation goes on"
    assert engine.events == []
    for number in (2, 3):
        inbox.announce(announced(number))
    reader.may_end.release()
    assert ready.wait(WAIT_S)
    assert inbox.waiting
    assert inbox.newest == Version(0, 3)
    inbox.load(engine)
    assert (inbox.loaded, engine.value) == (Version(0, 1), 1.0), "older than the newest, newer than what was loaded"
    assert not inbox.waiting
    reader.may_end.release()
    eventually(lambda: inbox.waiting, "the newest")
    inbox.load(engine)
    assert inbox.loaded == Version(0, 3)
    assert reader.begun == [1, 3], "newest wins"
    assert engine.events == ["begin 1", "end", "begin 3", "end"]
    inbox.close()


def test_what_lies_ready_is_not_overwritten_before_it_is_loaded() -> None:
    reader = SlowReader()
    inbox, engine = WeightInbox(Stage(reader, lambda: None)), FakeEngine()
    inbox.announce(announced(1))
    reader.may_end.release()
    eventually(lambda: inbox.waiting, "ready")
    inbox.announce(announced(2))
    reader.may_end.release()
    assert reader.begun == [1]
    inbox.load(engine)
    eventually(lambda: inbox.waiting, "the next")
    assert reader.begun == [1, 2]
    inbox.close()


def test_what_lies_ready_for_long_may_have_to_be_fetched_again() -> None:
    """Others needed its memory: the engine goes on with what it has until the newest one is there."""
    reader = SlowReader()
    inbox, engine = WeightInbox(Stage(reader, lambda: None)), FakeEngine()
    inbox.announce(announced(1))
    reader.may_end.release()
    eventually(lambda: inbox.waiting, "ready")
    inbox.announce(announced(2))
    reader.gone = True
    inbox.load(engine)
    assert engine.events == []
    reader.may_end.release()
    eventually(lambda: inbox.waiting, "the newest")
    inbox.load(engine)
    assert (reader.begun, inbox.loaded, reader.released) == ([1, 2], Version(0, 2), 1)
    inbox.close()


def test_weights_of_an_abandoned_lineage_are_not_loaded_once_a_term_begins() -> None:
    """Whether they lie ready, are being fetched, or are announced late; what survives is loaded as before."""
    for behind in (3, 4):
        for ready in (True, False):
            reader, engine = SlowReader(), FakeEngine()
            inbox = WeightInbox(Stage(reader, lambda: None))
            inbox.announce(announced(4))
            eventually(lambda reader=reader: reader.begun == [4], "the fetch")
            if ready:
                reader.may_end.release()
                eventually(lambda inbox=inbox: inbox.waiting, "ready")
            inbox.begin_term(1, {1: behind})
            reader.may_end.release()
            inbox.announce(announced(5))
            inbox.announce(announced(behind, term=1))
            if behind == 4:
                eventually(lambda inbox=inbox: inbox.waiting, "what survives")
                inbox.load(engine)
                assert inbox.loaded == Version(0, 4)
            reader.may_end.release()
            eventually(lambda inbox=inbox: inbox.waiting, "those of the new term")
            inbox.load(engine)
            assert inbox.loaded == Version(1, behind)
            assert engine.events == ["begin 4", "end"] * (behind == 4) + [f"begin {behind}", "end"]
            inbox.close()


def test_a_term_that_begins_just_before_the_load_leaves_the_engine_alone() -> None:
    reader, engine = SlowReader(), FakeEngine()
    for link in (InPlace(ShmReader()), Stage(reader, lambda: None)):
        inbox = WeightInbox(link)
        inbox.announce(announced(4))
        reader.may_end.release()
        eventually(lambda inbox=inbox: inbox.waiting, "ready")
        inbox.begin_term(1, {1: 3})
        assert not inbox.waiting
        inbox.load(engine)
        assert (inbox.loaded, engine.events) == (None, [])
        inbox.close()


def test_a_failed_fetch_of_abandoned_weights_is_no_fault() -> None:
    reader, engine = SlowReader(), FakeEngine()
    inbox = WeightInbox(Stage(reader, lambda: None))
    inbox.announce(announced(4))
    eventually(lambda: reader.begun == [4], "the fetch")
    inbox.begin_term(1, {1: 3})
    reader.ends_with = ChecksumError("their publisher is gone")
    reader.may_end.release()
    inbox.announce(announced(3, term=1))
    eventually(lambda: reader.begun == [4, 3], "the next fetch")
    reader.ends_with = None
    reader.may_end.release()
    eventually(lambda: inbox.waiting, "those of the new term")
    inbox.load(engine)
    assert inbox.loaded == Version(1, 3)
    inbox.close()


def test_an_overtaken_fetch_waits_for_the_next_and_a_fault_is_raised_by_load() -> None:
    reader, engine = SlowReader(), FakeEngine()
    inbox = WeightInbox(Stage(reader, lambda: None))
    reader.ends_with = Overtaken("overwritten")
    inbox.announce(announced(1))
    reader.may_end.release()
    eventually(lambda: reader.begun == [1], "the first fetch")
    inbox.announce(announced(2))
    eventually(lambda: reader.begun == [1, 2], "the second fetch")
    assert not inbox.waiting
    reader.ends_with = ChecksumError("wrong three times over")
    reader.may_end.release()
    eventually(lambda: inbox.waiting, "the fault")
    with pytest.raises(ChecksumError, match="wrong three times over"):
        inbox.load(engine)
    assert engine.events == []
    inbox.close()


def test_a_staged_swarm_follows_a_quick_publisher_and_closes_in_the_middle(host: Host) -> None:
    inbox, engine = WeightInbox(Stage(new_reader(), lambda: None)), FakeEngine()
    seen = []
    deadline = time.monotonic() + WAIT_S
    for number in range(100_000):
        inbox.announce(host.publish(number))
        if inbox.waiting:
            inbox.load(engine)
            seen.append(engine.value)
        if len(seen) == 5 or time.monotonic() > deadline:
            break
    assert len(seen) == 5
    assert seen == sorted(set(seen))
    inbox.close()


def test_when_the_publisher_here_is_gone_for_good_weights_come_over_the_network() -> None:
    reader, engine = SlowReader(), FakeEngine()
    inbox = WeightInbox(InPlace(ShmReader()), lambda manifest: Stage(reader, lambda: None))
    inbox.announce(announced(1))
    assert reader.begun == []
    inbox.announce(structs.replace(announced(2), place="tcp://10.0.0.2:1", digests=b"x" * 16))
    reader.may_end.release()
    eventually(lambda: inbox.waiting, "the version of another host's publisher")
    inbox.load(engine)
    assert (reader.begun, inbox.loaded) == ([2], Version(0, 2))
    inbox.close()
