"""What a client sends of the prompts that it puts, and that a run waits for one that puts some."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from distflow.client import Client
from distflow.client.feeding import REPEAT_S, FeedCall, Feeding
from distflow.errors import UserError
from distflow.exchange.prompt_feed import FEED, MOST_ROWS, Fed
from tests.client.shop import Shop, write_record
from tests.polling import eventually


class Owner:
    """Answers the calls of a client in turn; notes the rows that it got."""

    def __init__(self, *answers: Mapping[str, Any] | None) -> None:
        self.answers = list(answers)
        self.got: list[list[int]] = []

    def __call__(self, call: FeedCall) -> Mapping[str, Any] | None:
        sent = call.sends(1, time.monotonic())
        assert sent is not None
        self.got.append([json.loads(row)["prompt"] for row in b"".join(map(bytes, sent[1])).split(b"\n") if row])
        return call.answer(self.answers.pop(0))


def rows(count: int) -> list[dict[str, int]]:
    return [{"prompt": number} for number in range(count)]


def test_what_was_not_taken_is_sent_again() -> None:
    owner = Owner({"taken": 2}, {"taken": 1})
    feeding = Feeding("a", owner)
    assert not feeding.feeds
    assert feeding.put(rows(3), None) == 3
    assert owner.got == [[0, 1, 2], [2]]
    assert feeding.feeds
    assert feeding.put([], None) == 0


@pytest.mark.parametrize("last", [None, {"over": True}, {"taken": 0}])
def test_fewer_are_taken_at_the_end_of_the_run_or_of_the_time(last: Mapping[str, Any] | None) -> None:
    assert Feeding("a", Owner({"taken": 2}, last)).put(rows(3), 1.0) == 2


def test_a_refusal_is_raised() -> None:
    with pytest.raises(UserError, match="prompt 0 is no prompt"):
        Feeding("a", Owner({"error": "prompt 0 is no prompt"})).put(rows(1), None)


def test_after_the_end_the_client_puts_no_more() -> None:
    feeding = Feeding("a", Owner({"taken": 1}, {"taken": 0}))
    feeding.put(rows(1), None)
    feeding.end()
    assert not feeding.feeds


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"prompt": 1}, "text"], "row 1 is a str; expected a mapping such as"),
        ([{"prompt": {1, 2}}], "row 0 is no JSON: Object of type set"),
        ([{"prompt": float("nan")}], "row 0 is no JSON: Out of range float"),
        ([{"prompt": 1}] * (MOST_ROWS + 1), f"at most {MOST_ROWS} rows .* put them in several calls"),
        ([{"prompt": "x" * (17 << 20)}], "put them in several calls"),
    ],
)
def test_what_cannot_be_sent_is_refused_here(given: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Feeding("a", Owner()).put(given, None)


def test_the_rows_of_a_call_are_sent_once_unless_the_owner_lacks_them() -> None:
    def fed(number: int, waits: bool) -> msgspec.Struct:
        return Fed("a", number, waits)

    call = FeedCall(FEED, fed, (b"{}",), 1e6)
    first = call.sends(3, 0.0)
    assert first == ({"client": "a", "number": 3, "waits": True}, (b"{}",))
    assert call.sends(3, REPEAT_S / 2) is None
    assert call.sends(3, REPEAT_S) == ({"client": "a", "number": 3, "waits": True}, ())
    assert call.answer({"number": 3, "unknown": True}) is None
    assert call.sends(3, REPEAT_S) == first
    late = FeedCall(FEED, fed, (b"{}",), 0.0).sends(4, time.monotonic() + 1)
    assert late == ({"client": "a", "number": 4, "waits": False}, (b"{}",))


@pytest.mark.parametrize("feeds", [True, False])
def test_a_run_waits_for_prompts_while_a_client_is_there_that_puts_some(tmp_path: Path, feeds: bool) -> None:
    shop = Shop(tmp_path).open()
    try:
        write_record(tmp_path, [shop])
        asks = 0

        def lacks() -> str:
            nonlocal asks
            asks += 1
            return "prompts"

        before, shop.core.lacks = shop.core.progress_count, lacks
        with Client(tmp_path) as client:
            client._feeding.feeds = feeds
            client._say_alive_at = 0.0
            alive = time.monotonic()
            eventually(lambda: client._say_alive_at > alive and (asks > 0 or not feeds))
        assert (shop.core.progress_count > before) == feeds
    finally:
        shop.close()
