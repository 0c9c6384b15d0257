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


def answer(number: int, rows: int = 0, end: End = "") -> OwnerAnswer:
    part = Part(OWNER, number, Batch({"x": torch.zeros(rows)}), rows) if rows else None
    return OwnerAnswer(OWNER, 0, number, end, 0, part)


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
