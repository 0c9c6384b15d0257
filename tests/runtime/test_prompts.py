"""Prompts are read ahead by a thread of their own: bounded, in the order of need, holding nobody up."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distflow.errors import StepError
from distflow.exchange import prompt_reader
from distflow.exchange.messages import LeasePrompt
from distflow.exchange.owner import OwnerCore
from distflow.exchange.prompt_reader import PromptReader
from distflow.runtime.steps import user_code
from distflow.types import Uid
from tests.polling import WAIT_S, eventually
from tests.runtime.kit import HOLDER, OWNER
from tests.runtime.test_channel import Pair, groups

LEDGERS = 2


class Source:
    """Reads when it may, says what it read; position 13 cannot be read."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.may = threading.Semaphore(0)
        self.tokens = 3

    def __call__(self, position: int) -> LeasePrompt:
        assert self.may.acquire(timeout=WAIT_S), f"nobody lets {position} be read"
        self.read.append(position)
        if position == 13:
            raise OSError("the disk is gone")
        return LeasePrompt(Uid(0, position, position), tuple(range(self.tokens)), f"{position}=", "{}")

    def release(self, count: int = 1000) -> None:
        self.may.release(count)


class Reading:
    """A reader, and what it said."""

    def __init__(self, ahead: int) -> None:
        self.source = Source()
        self.arrived = threading.Semaphore(0)
        self.faults: list[Exception] = []
        self.reader = PromptReader(self.source, LEDGERS, ahead, self.tell, self.faults.append)
        self.reader.start()

    def tell(self) -> None:
        assert self.reader.take_news()
        self.arrived.release()

    def get(self, position: int) -> LeasePrompt | None:
        """The prompt, waited for if it has not been read."""
        found = self.reader.prompt_at(position)
        if found is None:
            assert self.arrived.acquire(timeout=WAIT_S)
            found = self.reader.prompt_at(position)
        return found

    def has_read(self, count: int) -> list[int]:
        """What was read, once it is so much, and no more than that."""
        eventually(lambda: len(self.source.read) >= count)
        time.sleep(0.05)
        return self.source.read


@pytest.fixture
def reading() -> Iterator[Callable[[int], Reading]]:
    made: list[Reading] = []

    def make(ahead: int) -> Reading:
        made.append(Reading(ahead))
        return made[-1]

    yield make
    for one in made:
        one.source.release()
        one.reader.close()


def test_what_was_asked_for_is_read_first_then_the_lowest_positions(reading: Callable[[int], Reading]) -> None:
    one = reading(5)
    assert one.reader.prompt_at(6) is None, "it does not wait"
    assert one.reader.prompt_at(1) is None
    assert one.reader.prompt_at(1) is None, "asked for twice, it is read once"
    one.source.release()
    assert one.has_read(5) == [6, 1, 3, 5, 7], "the rest of the ledgers, the lowest first, and no more than five"
    assert one.arrived.acquire(timeout=WAIT_S)
    found = one.reader.prompt_at(1)
    assert found is not None
    assert found.uid.position == 1
    assert one.has_read(6) == [6, 1, 3, 5, 7, 8], "there is room for one more"


def test_what_was_asked_for_is_told_of_before_more_is_read(reading: Callable[[int], Reading]) -> None:
    one = reading(5)
    assert one.reader.prompt_at(0) is None
    one.source.release(1)
    assert one.arrived.acquire(timeout=WAIT_S), "the next one hangs"
    assert one.reader.prompt_at(0) is not None


def test_several_that_were_asked_for_are_told_of_together(reading: Callable[[int], Reading]) -> None:
    one = reading(5)
    assert not one.reader.take_news()
    assert [one.reader.prompt_at(position) for position in (0, 1)] == [None, None]
    one.source.release()
    assert one.arrived.acquire(timeout=WAIT_S)
    assert [one.reader.prompt_at(position) is not None for position in (0, 1)] == [True, True]


def test_every_position_gets_its_own_prompt_whatever_was_read_ahead(reading: Callable[[int], Reading]) -> None:
    one = reading(4)
    one.source.release()
    order = [0, 2, 4, 1, 3, 6, 20, 22, 5, 7, 9, 11]
    assert [one.get(position).uid.position for position in order] == order
    assert one.faults == []


def test_no_ledger_waits_for_room_that_others_take(reading: Callable[[int], Reading]) -> None:
    one = reading(3)
    one.source.release()
    assert one.get(0) is not None
    assert one.has_read(4) == [0, 2, 4, 6], "all room is taken by the other ledger"
    assert one.get(1) is not None
    assert one.get(101) is not None, "so far ahead that nothing in between is needed"


def test_what_is_read_ahead_is_bounded_in_bytes(
    reading: Callable[[int], Reading], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_reader, "AHEAD_BYTES", 1 << 20)
    one = reading(1000)
    one.source.tokens = 10_000
    one.source.release()
    assert one.get(0) is not None
    assert len(one.has_read(4)) == 4, "three of 400 KB lie here"


def test_a_prompt_that_cannot_be_read_is_a_fault_when_it_is_needed(reading: Callable[[int], Reading]) -> None:
    one = reading(100)
    one.source.release()
    assert one.get(9) is not None
    eventually(lambda: 13 in one.source.read)
    assert one.faults == [], "the run may end before it gets there"
    assert one.get(11) is not None
    assert one.faults == []
    assert one.reader.prompt_at(13) is None
    assert [str(fault) for fault in one.faults] == ["the disk is gone"]
    assert one.get(0) is not None, "others can still be read"


def test_a_data_source_that_exits_is_a_fault_too() -> None:
    with (
        pytest.raises(StepError, match=r"in test_a_data_source(.|\n)*SystemExit: 3\ndata source few"),
        user_code("data source few"),
    ):
        sys.exit(3)


def test_a_fault_of_the_reader_itself_ends_the_wait_for_it() -> None:
    faults: list[Exception] = []
    reader = PromptReader(lambda position: 1 / 0, LEDGERS, 4, lambda: faults.append(KeyError("arrived")), faults.append)
    reader.start()
    assert reader.prompt_at(0) is None
    eventually(lambda: len(faults) == 1)
    reader.close()

    def broken() -> None:
        raise RuntimeError("told nobody")

    source = Source()
    source.release()
    reader = PromptReader(source, LEDGERS, 4, broken, faults.append)
    reader.start()
    assert reader.prompt_at(0) is None
    eventually(lambda: [type(fault) for fault in faults] == [KeyError, RuntimeError])
    reader.close()


def test_a_source_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    """Nothing can be leased while it does, but results are taken, asks answered and reports read, over real sockets."""
    pair = Pair(tmp_path)
    source = Source()

    def arrived() -> None:
        assert reader.take_news()
        with pair.changed:
            pair.inbound.send(pair.owner.prompts_arrived(pair.now))

    reader = PromptReader(source, pair.settings.ledgers, 4, arrived, pair.faults.append)
    pair.owner = pair.inbound.core = OwnerCore(OWNER, pair.settings, range(2), reader.prompt_at)
    reader.start()
    pair.start()
    source.release(2)
    leased: list[int] = []

    def first_leased() -> bool:
        pair.outbound.send(pair.holder.want(2 * (1 - len(leased)), pair.now))
        leased.extend(lease.position for lease in pair.holder.take_granted())
        return len(leased) == 2

    pair.until(first_leased)
    assert leased == [0, 1], "they have been read; the next one hangs"
    with pair.changed:
        pair.outbound.send(pair.holder.want(4, pair.now))
        pair.arrived.clear()
    pair.finish(groups(0, 1))
    pair.until(lambda: pair.owner.consumable() == [0, 1] and pair.holder.held() == [])
    pair.until(lambda: "refuse" in pair.arrived)
    with pair.changed:
        assert pair.holder.take_granted() == []
        assert pair.holder.asking() is not None
    assert len(source.read) == 2
    source.release()
    pair.until(lambda: bool(pair.holder.held()))
    with pair.changed:
        assert [lease.position for lease in pair.holder.take_granted()] == [2, 3][: len(pair.holder.held())]
        assert {holder.name for holder in pair.owner.holders()} == {HOLDER}
    reader.close()
    for end in pair.ends.values():
        end.close(linger_s=0.1)


def test_prompts_that_are_not_there_yet_hold_nothing_up_that_is(reading: Callable[[int], Reading]) -> None:
    there = {0, 1}
    one = reading(2)
    read, one.reader._read = one.source, lambda position: one.source(position) if position in there else None
    read.release()
    assert one.reader.prompt_at(5) is None, "asked for first, and not there"
    assert one.get(0) is not None
    assert one.get(1) is not None
    assert one.has_read(2) == [0, 1]
    there.update(range(6))
    one.reader.more()
    assert one.arrived.acquire(timeout=WAIT_S)
    assert one.reader.prompt_at(5) is not None
    assert read.read[2] == 5, "what was asked for, before what follows"
