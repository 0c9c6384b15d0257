"""Rows that clients put: taken in order, once, on the disks of all owners before a client hears of it."""

from __future__ import annotations

import random
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from distflow.comm.client import CLIENT
from distflow.comm.message import Buffer, Message
from distflow.data.fed import RowLog
from distflow.data.files import Row
from distflow.errors import ProtocolError, UserError
from distflow.exchange.feed_thread import FeedThread
from distflow.exchange.prompt_feed import (
    END,
    FEED,
    LINES,
    MOST_ROWS,
    SAY_EVERY_S,
    Ended,
    Fed,
    FeedLinks,
    FeedSettings,
    LogLines,
    PromptFeed,
)
from tests.polling import eventually

AHEAD = 4
MANY = FeedSettings(rows=1000, ahead=AHEAD, used=0)
Reply = Mapping[str, Any]


class Owners:
    """Feeds of some owners and what is between them. `lossy`: messages are lost, doubled and overtaken."""

    def __init__(self, folder: Path, many: int, settings: FeedSettings = MANY, lossy: random.Random | None = None):
        self.folder, self.settings, self.lossy = folder, settings, lossy
        self.now = 0.0
        self.wire: list[tuple[str, Message]] = []
        self.replies: deque[tuple[str, Reply]] = deque()
        self.sizes: list[int] = []
        self.feeds: dict[str, PromptFeed] = {}
        self.begin([f"trainer/{index}" for index in range(many)])

    def begin(self, names: Sequence[str]) -> None:
        """All begin anew, as one term; what was under way is gone."""
        for feed in self.feeds.values():
            feed.log.close()
        self.wire.clear()
        self.feeds = {name: self.feed(name, names) for name in names}

    def feed(self, name: str, names: Sequence[str]) -> PromptFeed:
        def post(to: str, kind: str, body: Mapping[str, Any], payload: Sequence[Buffer]) -> None:
            self.wire.append((to, Message(kind, name, 0, body, [memoryview(part) for part in payload])))

        links = FeedLinks(
            check=check,
            reply=lambda message, body, payload: self.replies.append((message.body["client"], dict(body))),
            post=post,
            came=lambda: None,
            passes_over=self.sizes.append,
        )
        log = RowLog(self.folder / f"{name.replace('/', '-')}.jsonl")
        return PromptFeed(name, names, self.settings, log, links)

    @property
    def first(self) -> PromptFeed:
        return next(iter(self.feeds.values()))

    def turn(self) -> None:
        """Some time passes, and what is under way arrives."""
        self.now += SAY_EVERY_S
        for feed in self.feeds.values():
            feed.tick(self.now)
        for _ in range(20):
            if not self.wire:
                return
            arriving, self.wire = self.wire, []
            for to, message in self._as_it_comes(arriving):
                self.feeds[to].on_message(message, self.now)

    def _as_it_comes(self, messages: list[tuple[str, Message]]) -> list[tuple[str, Message]]:
        if self.lossy is None:
            return messages
        found = [one for one in messages for _ in range(self.lossy.choice((0, 1, 1, 1, 2)))]
        self.lossy.shuffle(found)
        return found

    def put(self, call: int, *numbers: int, client: str = "a", waits: bool = True, sent: bool = True) -> None:
        """A call arrives; without the rows if they were `sent` before."""
        body = msgspec.to_builtins(Fed(client, call, waits))
        payload = [memoryview(b"\n".join(b'{"prompt": "%d"}' % number for number in numbers))] if sent else []
        self.first.on_message(Message(FEED, CLIENT, 0, body, payload), self.now)

    def end(self, call: int, client: str = "a") -> None:
        self.first.on_message(Message(END, CLIENT, 0, msgspec.to_builtins(Ended(client, call))), self.now)

    def answered(self) -> list[Reply]:
        """What clients have heard since it was asked for."""
        return [reply for _, reply in self.heard()]

    def heard(self) -> list[tuple[str, Reply]]:
        """The same, with the client."""
        found = list(self.replies)
        self.replies.clear()
        return found


def check(rows: Sequence[Row]) -> None:
    assert rows, "there is nothing to check at the end"
    for index, row in enumerate(rows):
        if row["prompt"] == "13":
            raise UserError(f"prompt {index} is 13")


def rows(feed: PromptFeed) -> list[int]:
    return [int(feed.log[index]["prompt"]) for index in range(len(feed.log))]


def test_rows_are_taken_while_there_is_room(tmp_path: Path) -> None:
    owners = Owners(tmp_path, 1)
    owners.put(1, *range(6))
    assert owners.answered() == [{"number": 1, "taken": AHEAD}]
    owners.put(2, 4, 5)
    assert owners.answered() == [], "it waits for room"
    assert owners.first.reach(0)
    owners.turn()
    assert owners.answered() == [{"number": 2, "taken": 1}]
    assert rows(owners.first) == [0, 1, 2, 3, 4]
    owners.put(3, 5, waits=False)
    assert owners.answered() == [{"number": 3, "taken": 0}]
    owners.first.reach(3)
    owners.put(3, 5)
    assert owners.answered() == [{"number": 3, "taken": 0}], "what was answered stays so"
    owners.put(4, 5)
    assert owners.answered() == [{"number": 4, "taken": 1}]


def test_a_call_that_waits_can_be_asked_for_and_ended(tmp_path: Path) -> None:
    owners = Owners(tmp_path, 1)
    owners.put(1, *range(AHEAD))
    owners.put(2, 9)
    owners.answered()
    owners.put(2, sent=False)
    assert owners.answered() == []
    owners.put(2, sent=False, waits=False)
    assert owners.answered() == [{"number": 2, "taken": 0}]
    owners.put(1, sent=False)
    assert owners.answered() == [{"number": 1, "taken": AHEAD}]


def test_repeated_calls_are_taken_once(tmp_path: Path) -> None:
    owners = Owners(tmp_path, 1)
    owners.put(1, 0, 1)
    owners.put(1, 0, 1)
    owners.begin(["trainer/0"])
    owners.put(1, 0, 1)
    owners.put(1, sent=False)
    assert owners.answered() == [{"number": 1, "taken": 2}] * 4
    assert rows(owners.first) == [0, 1]
    owners.put(2, sent=False)
    assert owners.answered() == [{"number": 2, "unknown": True}], "it has to be sent again"


def test_a_call_with_a_wrong_row_is_refused_as_a_whole(tmp_path: Path) -> None:
    owners = Owners(tmp_path, 1)
    owners.put(1, 12, 13)
    assert owners.answered() == [{"number": 1, "error": "prompt 1 is 13"}]
    owners.put(2, 12)
    assert owners.answered() == [{"number": 2, "taken": 1}]
    broken = Message(FEED, CLIENT, 0, msgspec.to_builtins(Fed("a", 3, True)), [memoryview(b"{}\n[1]")])
    owners.first.on_message(broken, 0.0)
    (reply,) = owners.answered()
    assert "row 1: expected a JSON object with columns" in reply["error"]
    assert rows(owners.first) == [12]


@pytest.mark.parametrize(
    "data",
    [b"not a line\n", b'{"client": "a", "call": 1, "row": 7}\n', b'{"client": "a", "call": 1, "row": {}, "x": 0}\n'],
)
@pytest.mark.parametrize("anew", [True, False])
def test_lines_of_another_owner_that_are_none_cost_nothing(tmp_path: Path, data: bytes, *, anew: bool) -> None:
    owners = Owners(tmp_path, 2)
    owners.turn()
    owners.put(1, 0, 1)
    owners.turn()
    other = owners.feeds["trainer/1"]
    assert rows(other) == [0, 1]
    good = b'{"client": "a", "call": 2, "row": {"prompt": "2"}}\n'
    body = msgspec.to_builtins(LogLines(0 if anew else 2, anew))
    with pytest.raises(ProtocolError, match="malformed message"):
        other.on_message(Message(LINES, "trainer/0", 0, body, [memoryview(good + data)]), owners.now)
    assert rows(other) == [0, 1]
    owners.put(2, 2)
    owners.turn()
    assert rows(other) == [0, 1, 2]


def test_what_waits_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distflow.exchange.prompt_feed.MOST_BYTES", 100)
    monkeypatch.setattr("distflow.exchange.prompt_feed.WAITING_BYTES", 200)
    owners = Owners(tmp_path, 1)
    owners.put(1, *range(AHEAD), client="first")
    assert owners.answered() == [{"number": 1, "taken": AHEAD}]
    for client in ("a", "b", "c"):
        owners.put(1, *range(100, 104), client=client)
    assert list(owners.first._calls) == ["a", "b"], "of 64 bytes each; there is no room for a third of 100"
    assert not any(call.message.payload for call in owners.first._calls.values())
    owners.put(1, client="c", sent=False)
    assert owners.answered() == [], "it is repeated"
    owners.first.reach(2 * AHEAD)
    owners.turn()
    assert len(owners.answered()) == 2
    owners.put(1, client="c", sent=False)
    assert owners.answered() == [{"number": 1, "unknown": True}]


def test_an_end_that_is_late_replaces_no_call(tmp_path: Path) -> None:
    owners = Owners(tmp_path, 1)
    owners.put(1, *range(AHEAD))
    owners.put(3, 4)
    owners.answered()
    owners.end(2)
    owners.first.reach(AHEAD)
    owners.turn()
    assert owners.answered() == [{"number": 3, "taken": 1}]
    assert not owners.first.log.ended


def test_what_cannot_be_read_ends_nothing_and_a_client_hears_of_it(tmp_path: Path) -> None:
    owners, faults = Owners(tmp_path, 2), list[Exception]()
    thread = FeedThread(owners.first, faults.append)
    thread.start()
    body = msgspec.to_builtins(LogLines(0, anew=False))
    thread.put(Message(LINES, "trainer/1", 0, body, [memoryview(b"not a line\n")]))
    thread.put(Message(FEED, CLIENT, 0, {"client": "a", "number": 1, "waits": 3}, []))
    (reply,) = eventually(owners.answered, "an answer")
    assert reply == {"number": 1, "error": "malformed client.feed: Expected `bool`, got `int` - at `$.waits`"}
    thread.close(over=True)
    assert faults == []


def test_what_waits_for_a_slow_disk_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distflow.exchange.feed_thread.WAITING_BYTES", 100)
    owners = Owners(tmp_path, 1)
    thread = FeedThread(owners.first, lambda error: None)
    for call in range(1, 5):
        fed = msgspec.to_builtins(Fed(f"client-{call}", call, waits=True))
        thread.put(Message(FEED, CLIENT, 0, fed, [memoryview(b'{"prompt": "%030d"}' % call)]))
    thread.start()
    replies = eventually(lambda: list(owners.replies) if len(owners.replies) == 2 else None, "two answers")
    assert [client for client, _ in replies] == ["client-1", "client-2"]
    assert rows(owners.first) == [1, 2]
    thread.close(over=True)


def test_more_rows_than_the_recipe_says_are_refused(tmp_path: Path) -> None:
    owners = Owners(tmp_path, 1, FeedSettings(rows=3, ahead=8, used=0))
    owners.put(1, 0, 1)
    owners.put(2, 2, 3)
    taken, refused = owners.answered()
    assert taken["taken"] == 2
    assert refused["error"].startswith("2 rows are put, and 1 of data.with.rows=3 have yet to come")
    assert owners.sizes == []
    owners.put(3, 2)
    assert owners.sizes == [3], "now it is whole"
    assert owners.first.has(100)


def test_the_end_makes_passes_over_what_is_there(tmp_path: Path) -> None:
    owners = Owners(tmp_path, 2)
    owners.end(1)
    owners.turn()
    owners.turn()
    (refused,) = owners.answered()
    assert "nothing to end" in refused["error"]
    owners.put(2, 0, 1, 2)
    owners.turn()
    owners.first.reach(5)
    assert owners.first.waits.endswith("row 4 of 1000")
    owners.end(3)
    owners.end(3)
    owners.turn()
    assert owners.sizes == [3, 3], "at both owners"
    assert all(feed.has(5) and not feed.waits for feed in owners.feeds.values())
    owners.put(4, 3)
    put, *ended, refused = owners.answered()
    assert (put["taken"], len(ended)) == (3, 2)
    assert refused["error"] == "the prompts of this run were ended after 3 rows (Client.end_prompts)"
    owners.begin(list(owners.feeds))
    assert owners.sizes == [3] * 4


def test_a_client_hears_of_rows_once_all_owners_have_them(tmp_path: Path) -> None:
    owners = Owners(tmp_path, 3)
    owners.put(1, 0, 1)
    assert owners.answered() == []
    assert len(owners.first.log) == 0, "one of the others may have more than the first"
    for _ in range(3):
        owners.turn()
    assert owners.answered() == [{"number": 1, "taken": 2}]
    assert [rows(feed) for feed in owners.feeds.values()] == [[0, 1]] * 3
    owners.put(2, 2)
    assert len(owners.first.log) == 3
    assert owners.answered() == [], "none of the others has got it"
    owners.turn()
    assert owners.answered() == [{"number": 2, "taken": 1}]


def test_any_owner_that_waits_makes_room(tmp_path: Path) -> None:
    owners = Owners(tmp_path, 2)
    owners.turn()
    owners.put(1, *range(AHEAD))
    owners.put(2, 4)
    owners.turn()
    assert [reply["number"] for reply in owners.answered()] == [1]
    owners.feeds["trainer/1"].reach(AHEAD)
    owners.turn()
    owners.turn()
    assert [reply["number"] for reply in owners.answered()] == [2]


def test_whoever_is_first_gets_what_the_others_have(tmp_path: Path) -> None:
    owners = Owners(tmp_path, 2)
    owners.turn()
    owners.put(1, 0, 1, 2)
    owners.turn()
    (tmp_path / "trainer-0.jsonl").unlink()
    owners.begin(["trainer/0", "trainer/1"])
    owners.put(2, 3)
    for _ in range(4):
        owners.turn()
    assert [rows(feed) for feed in owners.feeds.values()] == [[0, 1, 2, 3]] * 2


def test_an_owner_with_other_rows_takes_those_of_the_one_that_has_more(tmp_path: Path) -> None:
    other = Owners(tmp_path / "other", 1)
    other.put(1, 7, 8, client="b")
    owners = Owners(tmp_path / "here", 1)
    owners.put(1, 0, 1, 2)
    owners.answered()
    shutil.copy(tmp_path / "other" / "trainer-0.jsonl", tmp_path / "here" / "trainer-1.jsonl")
    owners.begin(["trainer/0", "trainer/1"])
    for _ in range(4):
        owners.turn()
    assert [rows(feed) for feed in owners.feeds.values()] == [[0, 1, 2]] * 2


def test_white_space_in_a_row_is_no_end_of_a_line(tmp_path: Path) -> None:
    owners = Owners(tmp_path, 2)
    owners.turn()
    body = msgspec.to_builtins(Fed("a", 1, True))
    owners.first.on_message(
        Message(FEED, CLIENT, 0, body, [memoryview(b'{"prompt":\r"1"}\n{"prompt": "2"}')]), owners.now
    )
    owners.turn()
    assert [rows(feed) for feed in owners.feeds.values()] == [[1, 2]] * 2


def test_rows_that_a_checkpoint_has_used_have_to_be_there(tmp_path: Path) -> None:
    owners = Owners(tmp_path, 1, FeedSettings(rows=9, ahead=4, used=12))
    with pytest.raises(UserError, match=r"trainer-0.jsonl has 0 rows .* has trained on 12 prompt positions"):
        owners.turn()


@pytest.mark.parametrize("payload", [[b"x", b"y"], [b"{}\n" * MOST_ROWS]])
def test_malformed_messages_are_refused(tmp_path: Path, payload: list[bytes]) -> None:
    owners = Owners(tmp_path, 1)
    body = msgspec.to_builtins(Fed("a", 1, True))
    with pytest.raises(ProtocolError, match="expected 1|expected one"):
        owners.first.on_message(Message(FEED, CLIENT, 0, body, [memoryview(part) for part in payload]), 0.0)


class Putting:
    """A client that puts rows of its own, repeats what was not answered, and notes what was taken."""

    def __init__(self, name: str) -> None:
        self.name, self.call = name, 1
        self.left: list[int] = []
        self.taken: list[int] = []

    def put(self, owners: Owners, draw: random.Random) -> None:
        self.left = self.left or [next(NUMBERS) for _ in range(draw.randint(1, 6))]
        owners.put(self.call, *self.left, client=self.name, sent=draw.random() < 0.8)

    def hear(self, reply: Reply) -> None:
        if reply["number"] == self.call and "taken" in reply:
            self.taken += self.left[: reply["taken"]]
            self.left = self.left[reply["taken"] :]
            self.call += 1


NUMBERS = count(100)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_or_taken_twice_whatever_happens(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    owners = Owners(tmp_path, 3, lossy=draw)
    names, clients = list(owners.feeds), {name: Putting(name) for name in "ab"}
    for _ in range(150):
        match draw.randrange(12):
            case 0:
                draw.shuffle(names)
                owners.begin(names)
            case 1 | 2:
                owners.feeds[draw.choice(names)].reach(len(owners.first.log) + draw.randrange(3))
            case _:
                clients[draw.choice("ab")].put(owners, draw)
                owners.turn()
        for name, reply in owners.heard():
            clients[name].hear(reply)
        for feed in owners.feeds.values():
            there = rows(feed)
            for client in clients.values():
                assert [row for row in there if row in client.taken] == client.taken, "everywhere, in its order, once"
    owners.lossy = None
    for _ in range(6):
        owners.turn()
    logs = [rows(feed) for feed in owners.feeds.values()]
    assert logs[0] == logs[1] == logs[2]
    assert len(set(logs[0])) == len(logs[0]), "each once"
    assert all(client.taken for client in clients.values())
