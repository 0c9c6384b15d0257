"""What a client asks its owners for, and what it makes of their answers."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from distflow.client.reading import REPEAT_S, ConsumerReading, OwnerAnswer, Part
from distflow.data.batch import Batch
from distflow.exchange.consumer_types import End

OWNER = "trainer/0"


@pytest.fixture
def reading() -> ConsumerReading:
    numbers = count(1)
    found = ConsumerReading("a", "reader", ["x"], [OWNER], lambda: next(numbers), lossless=False)
    found.want(1, 0)
    return found


def answer(number: int, rows: int = 0, end: End = "", owner: str = OWNER, incarnation: int = 0) -> OwnerAnswer:
    part = Part(owner, number, Batch({"x": torch.zeros(rows)}), rows) if rows else None
    return OwnerAnswer(owner, incarnation, number, end, 0, part)


def test_an_ask_that_counts_no_longer_is_followed_by_another(reading: ConsumerReading) -> None:
    ((_, first),) = reading.asks(0.0)
    ((_, again),) = reading.asks(REPEAT_S)
    assert [(ask.number, ask.again) for ask in (first, again)] == [(1, False), (1, True)]
    reading.answered(answer(1, end="void"))
    ((_, other),) = reading.asks(REPEAT_S)
    assert (other.number, other.again) == (2, False)
    reading.answered(answer(1, rows=1))
    assert reading.take() is None, "that is not claimed any more"


def test_what_was_given_back_is_asked_for_although_all_had_been_read(reading: ConsumerReading) -> None:
    reading.asks(0.0)
    reading.answered(answer(1, end="over"))
    assert reading.over
    reading.gave_back(OWNER)
    assert not reading.over
    assert [ask.number for _, ask in reading.asks(0.0)] == [2]


def test_one_owner_that_keeps_no_more_is_enough_to_do_with_what_is_there() -> None:
    numbers = count(1)
    reading = ConsumerReading("a", "reader", ["x"], [OWNER, "trainer/1"], lambda: next(numbers), lossless=True)
    reading.want(100, 0)
    reading.asks(0.0)
    reading.answered(answer(1, rows=8))
    assert [(ask.number, ask.holds) for _, ask in reading.asks(0.0)] == [(3, True), (2, True)]
    reading.answered(answer(2, rows=4, owner="trainer/1"))
    assert reading.take() is None
    reading.asks(0.0)
    reading.answered(answer(3, end="full"))
    taken = reading.take()
    assert taken is not None
    assert [part.batch.rows for part in taken] == [8, 4]
    reading.want(100, 0)
    assert [(owner, ask.holds) for owner, ask in reading.asks(0.0)] == [(OWNER, False), ("trainer/1", False)]


def test_an_owner_is_asked_again_where_nothing_is_left_of_what_has_filled_it() -> None:
    numbers = count(1)
    reading = ConsumerReading("a", "reader", ["x"], [OWNER, "trainer/1"], lambda: next(numbers), lossless=True)
    reading.want(100, 0)
    reading.asks(0.0)
    reading.answered(answer(2, rows=4, owner="trainer/1"))
    reading.asks(0.0)
    reading.heard("trainer/1", 1)
    reading.answered(answer(1, end="full"))
    assert reading.take() is None
    assert (OWNER, False) in [(owner, ask.holds) for owner, ask in reading.asks(0.0)]
