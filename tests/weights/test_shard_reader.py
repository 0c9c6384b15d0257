"""A reader that takes versions which come in parts, and others as they are announced."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from distflow.types import Version
from distflow.weights.manifest import Manifest
from distflow.weights.receiver import WeightInbox
from distflow.weights.shards.reader import HOLD_S, ShardedReader


def manifest(number: int, term: int = 0) -> Manifest:
    return Manifest("policy", Version(term, number), "/dev/shm/distflow-r-1", 0, (), ())


class Engine:
    """Records what it was given."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def begin_update(self, version: Version) -> None:
        self.numbers.append(version.number)

    def update(self, tensors: Any) -> None:
        """In parts there is a tensor."""
        self.in_parts = bool(tensors)

    def end_update(self) -> None:
        """Nothing."""


class Announced:
    """The reader for what does not come in parts: all that is offered is ready when the test says so."""

    chunks = 0

    def __init__(self) -> None:
        self.offered: list[int] = []
        self.overtaken: Version | None = None
        self.ready: Manifest | None = None

    @property
    def waiting(self) -> bool:
        return self.ready is not None

    def reads(self, manifest: Manifest) -> bool:
        return True

    def offer(self, manifest: Manifest) -> None:
        self.offered.append(manifest.version.number)
        self.ready = manifest

    def refresh(self, engine: Engine) -> Manifest | None:
        found, self.ready = self.ready, None
        if found is not None:
            engine.begin_update(found.version)
            engine.update([])
        return found

    def again(self, manifest: Manifest) -> None:
        self.offer(manifest)

    def begin_term(self, term: int, begins: Mapping[int, int]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Reading:
    """A reader, what it reads by, and the worker around it."""

    def __init__(self) -> None:
        self.joined, self.freed = True, 0
        self.lock = threading.Condition()
        self.other, self.engine = Announced(), Engine()
        self.reader = ShardedReader(self.other, self.lock, lambda: self.joined, self._arrived, self._freed)
        self.inbox = WeightInbox(self.reader)

    def _arrived(self, manifest: Manifest) -> None:
        self.inbox.announce(manifest)

    def _freed(self) -> None:
        self.freed += 1

    def announce(self, number: int) -> None:
        with self.lock:
            self.inbox.announce(manifest(number))

    def comes(self, number: int, *, well: bool = True, term: int = 0) -> None:
        with self.lock:
            self.reader.begin(manifest(number, term))
            assert not self.reader.free
            self.reader.end(manifest(number, term), [("embed", torch.ones(1))] if well else None)

    def look(self, after_s: float) -> None:
        with self.lock:
            self.reader.look(time.monotonic() + after_s)

    def load(self) -> int | None:
        self.inbox.load(self.engine)
        return None if self.inbox.loaded is None else self.inbox.loaded.number


@pytest.fixture
def reading() -> Reading:
    return Reading()


@pytest.mark.parametrize("announced_first", [True, False])
def test_a_version_that_comes_in_parts_is_not_read_as_announced(reading: Reading, announced_first: bool) -> None:
    if announced_first:
        reading.announce(1)
    reading.comes(1)
    reading.announce(1)
    assert reading.inbox.waiting
    assert reading.load() == 1
    assert reading.engine.in_parts
    assert reading.other.offered == []
    assert not reading.inbox.waiting
    assert reading.reader.free
    assert reading.freed == 1


def test_an_announced_version_is_read_as_such_when_it_does_not_come_soon(reading: Reading) -> None:
    reading.announce(1)
    reading.look(HOLD_S / 2)
    assert reading.other.offered == []
    reading.look(HOLD_S + 1)
    assert reading.other.offered == [1]
    assert not reading.reader.free, "an older version must not be loaded over a newer one"
    assert reading.load() == 1
    assert reading.reader.free


def test_versions_that_come_fast_do_not_put_each_other_off(reading: Reading) -> None:
    reading.announce(1)
    began = time.monotonic()
    reading.announce(2)
    with reading.lock:
        reading.reader.look(began + HOLD_S)
    assert reading.other.offered == [2]


def test_without_a_group_everything_is_read_as_announced(reading: Reading) -> None:
    reading.announce(1)
    reading.joined = False
    reading.look(0)
    reading.announce(2)
    assert reading.other.offered == [1, 2]


def test_what_has_not_come_well_is_read_as_announced(reading: Reading) -> None:
    reading.announce(1)
    reading.comes(1, well=False)
    assert reading.other.offered == [1]
    assert reading.load() == 1
    assert not reading.engine.in_parts


def test_the_version_after_the_one_that_comes_waits_for_its_turn(reading: Reading) -> None:
    with reading.lock:
        reading.reader.begin(manifest(1))
    reading.announce(2)
    with reading.lock:
        reading.reader.end(manifest(1), [("embed", torch.ones(1))])
    assert reading.load() == 1
    assert reading.other.offered == []
    reading.comes(2)
    assert reading.load() == 2
    assert reading.engine.numbers == [1, 2]


def test_what_comes_while_a_version_is_read_as_announced_is_let_go(reading: Reading) -> None:
    reading.announce(1)
    with reading.lock:
        reading.reader.begin(manifest(0))
    reading.look(HOLD_S + 1)
    with reading.lock:
        reading.reader.end(manifest(0), [("embed", torch.ones(1))])
    assert reading.load() == 1
    assert reading.engine.numbers == [1]


def test_a_version_that_does_not_survive_a_restart_is_not_loaded(reading: Reading) -> None:
    reading.comes(5)
    with reading.lock:
        reading.inbox.begin_term(1, {1: 3})
    assert not reading.inbox.waiting
    reading.comes(4)
    assert not reading.inbox.waiting
    reading.comes(4, term=1)
    assert reading.load() == 4


def test_after_a_version_that_did_not_come_none_waits_until_one_comes_again(reading: Reading) -> None:
    reading.announce(1)
    reading.look(HOLD_S + 1)
    assert reading.load() == 1
    reading.announce(2)
    assert reading.other.offered == [1, 2]
    assert reading.load() == 2
    reading.comes(2)
    assert not reading.inbox.waiting, "the engine has it"
    reading.announce(3)
    assert reading.other.offered == [1, 2]
    reading.comes(3)
    assert reading.load() == 3
    assert reading.engine.numbers == [1, 2, 3]
