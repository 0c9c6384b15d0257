"""Samples over two real endpoints: whatever gets lost, the owner has every group once."""

import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distflow.comm.endpoint import Endpoint
from distflow.comm.message import Message
from distflow.data.batch import Batch, Ragged
from distflow.errors import ProtocolError
from distflow.exchange.lease_client import HolderCore
from distflow.exchange.messages import Lease
from distflow.exchange.owner import OwnerCore
from distflow.exchange.sample_channel import ArrivedGroup, InboundSamples, OutboundSamples
from distflow.types import SampleOutput, Span, Version
from tests.exchange.lease_asker import Asker
from tests.runtime.kit import HOLDER, OWNER, lease_settings, prompt_at

WAIT_S = 20.0
ROWS = 2


def groups(*positions: int, **columns: torch.Tensor) -> Batch:
    rows = [position for position in positions for _ in range(ROWS)]
    return Batch(
        {
            "group": torch.tensor(rows),
            "prompt_ids": Ragged.from_rows([[1]] * len(rows), torch.int64),
            "response_ids": Ragged.from_rows([[row, row + 1] for row in rows], torch.int64),
            "policy_versions": Ragged(torch.tensor([[0, 0, 0, 2]] * len(rows)), torch.arange(len(rows) + 1)),
            **columns,
        }
    )


class Pair:
    """An owner and a holder in this process, each behind a door of its own."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        settings = lease_settings(resend_s=0.1, report_s=0.1, **changes)
        self.settings = settings
        roster = {name: f"ipc://{folder}/{name.replace('/', '-')}" for name in (OWNER, HOLDER)}
        self.ends = {name: Endpoint(name, 0, roster, tick_s=0.02) for name in roster}
        self.changed = threading.Condition()
        self.owner = OwnerCore(OWNER, settings, range(settings.ledgers), prompt_at)
        self.inbound = InboundSamples(self.owner, self.ends[OWNER].send)
        self.holder = HolderCore(HOLDER, 0, [OWNER], settings)
        self.outbound = OutboundSamples(self.holder, self.ends[HOLDER].send)
        self.arrived: list[str] = []
        self.faults: list[BaseException] = []
        self.lose: Callable[[Message], bool] = lambda message: False
        self.now = 0.0

    def take(self, positions: list[int]) -> list[ArrivedGroup]:
        self.inbound.send(self.owner.take(positions, self.now))
        return self.inbound.pop(positions)

    def start(self) -> None:
        sides = {
            OWNER: (
                lambda *heard: self.inbound.on_message(*heard),
                lambda now: self.inbound.send(self.owner.tick(now)),
            ),
            HOLDER: (
                lambda *heard: self.outbound.on_message(*heard),
                lambda now: self.outbound.send(self.holder.tick(now)),
            ),
        }
        for name, (on_message, tick) in sides.items():
            self.ends[name].start(self._door(on_message), self._ticking(tick), self.faults.append)

    def _door(self, handle: Callable[[Message, float], None]) -> Callable[[Message], None]:
        def receive(message: Message) -> None:
            with self.changed:
                self.arrived.append(message.kind)
                if not self.lose(message):
                    handle(message, self.now)
                self.changed.notify_all()

        return receive

    def _ticking(self, tick: Callable[[float], None]) -> Callable[[], None]:
        def run() -> None:
            with self.changed:
                # A clock of our own, twenty times as fast: a resend is due after a few ticks.
                self.now += 0.05
                tick(self.now)
                self.changed.notify_all()

        return run

    def until(self, ready: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: ready() or bool(self.faults), WAIT_S), self.arrived
        assert self.faults == []

    def lease(self, count: int) -> list[int]:
        with self.changed:
            self.outbound.send(self.holder.want(2 * (count - 1), self.now))
        self.until(lambda: len(self.holder.held()) == count)
        with self.changed:
            return [lease.position for lease in self.holder.take_granted()]

    def cut_off(self) -> None:
        """The owner cannot be reached."""
        self.ends[OWNER].close(linger_s=0.1)

    def reach(self) -> None:
        """It can again, at the same address."""
        self.ends[OWNER] = Endpoint(OWNER, 0, self.ends[HOLDER].roster, tick_s=0.02)
        self.ends[OWNER].start(self._door(lambda *heard: self.inbound.on_message(*heard)))
        self.inbound._post = self.ends[OWNER].send

    def restart(self) -> None:
        """The holder dies, which the owner is told, and comes back."""
        with self.changed:
            self.holder = HolderCore(HOLDER, 1, [OWNER], self.settings)
            self.outbound = OutboundSamples(self.holder, self.ends[HOLDER].send)
            self.inbound.send(self.owner.worker_lost(HOLDER, 0, self.now))

    def finish(self, batch: Batch, dropped: dict[int, str] | None = None) -> None:
        with self.changed:
            self.outbound.finish(batch, dropped or {}, self.now)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    made.start()
    yield made
    for end in made.ends.values():
        end.close(linger_s=0.1)


def test_groups_arrive_with_their_rows_and_are_let_go_of(pair: Pair) -> None:
    assert pair.lease(4) == [0, 1, 2, 3]
    pair.finish(groups(2, 0))
    pair.until(lambda: pair.owner.consumable() == [0, 2] and pair.holder.held() == [1, 3])
    with pair.changed:
        taken = pair.take([0, 2])
        assert [group.position for group in taken] == [0, 2]
        assert [row.tolist() for row in taken[1].rows.rows.ragged("response_ids").rows()] == [[2, 3]] * ROWS
        assert {group.worker for group in taken} == {HOLDER}
        assert not pair.outbound._kept


def test_what_has_arrived_reserves_room_for_the_fields_that_it_will_get(pair: Pair) -> None:
    """Those of each of its two response tokens a row, besides the result itself."""
    pair.lease(4)
    reserved = sum(ledger.reserved for ledger in pair.owner.ledgers)
    pair.inbound = InboundSamples(pair.owner, pair.ends[OWNER].send, later_bytes=1000)
    arriving = groups(0)
    pair.finish(arriving)
    pair.until(lambda: pair.owner.consumable() == [0])
    now = sum(ledger.reserved for ledger in pair.owner.ledgers)
    assert now == reserved - pair.settings.group_bytes(0) + arriving.nbytes + 2 * ROWS * 1000


def test_a_drop_is_told_of_too_since_groups_that_came_before_may_be_taken_now() -> None:
    """Two are leased for each of the ledger's steps; the third is ahead of the open step until the first is dropped."""
    settings = lease_settings(ledgers=1, groups_per_ledger=2, max_staleness=1, training_steps=4)
    owner = OwnerCore(OWNER, settings, [0], prompt_at)
    inbound = InboundSamples(owner, lambda *_: None)
    told: list[tuple[list[int], list[int]]] = []
    inbound.on_arrival(lambda lengths: told.append((sorted(lengths), owner.consumable())))
    asker = Asker(owner, HOLDER)
    asker.ask(4)
    inbound.accept([asker.result(2)], groups(2), 0.0)
    inbound.accept([asker.result(0, dropped="zero variance")], None, 0.0)
    assert told == [([], []), ([2], []), ([], [2])]


@pytest.mark.parametrize("kind", ["results", "ack"])
def test_what_is_lost_is_sent_again_and_counted_once(pair: Pair, kind: str) -> None:
    pair.lease(4)
    lost = 2
    pair.lose = lambda message: message.kind == kind and pair.arrived.count(kind) <= lost
    pair.finish(groups(0, 1))
    pair.until(lambda: pair.arrived.count(kind) > lost and pair.holder.held() == [2, 3])
    with pair.changed:
        assert pair.arrived.count("results") > lost
        assert pair.owner.consumable() == [0, 1]
        assert len(pair.take([0, 1])) == 2
        assert not pair.inbound._stored
    pair.finish(groups(2, 3))
    pair.until(lambda: pair.owner.consumable() == [2, 3])


def test_an_owner_that_was_cut_off_finds_one_copy_of_each_group(pair: Pair) -> None:
    """Their payload takes memory once, however often they would have been sent again, and no old copies go first."""
    pair.lease(4)
    pair.cut_off()
    pair.finish(groups(0, 1))
    pair.finish(groups(2))
    held = pair.holder._links[0].held
    pair.until(lambda: min(held[position].wait for position in (0, 1, 2)) > 3.0)
    pair.arrived.clear()
    pair.reach()
    pair.until(lambda: pair.owner.consumable() == [0, 1, 2] and pair.holder.held() == [3])
    # As they were finished; or all in one, if what was sent first was lost with the connection.
    assert pair.arrived.count("results") in (1, 2)
    assert pair.outbound._kept == {}


def test_groups_for_which_there_was_no_room_are_sent_as_soon_as_there_is(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.lease(4)
    monkeypatch.setattr("distflow.exchange.sample_channel.MESSAGE_BYTES", 1)
    monkeypatch.setattr("distflow.comm.outbox.QUEUE_BYTES", 1000)
    pair.cut_off()
    pair.finish(groups(0, 1, 2, 3))
    pair.until(lambda: pair.ends[HOLDER].traffic.dropped > 0)
    began = pair.now
    pair.reach()
    pair.until(lambda: pair.owner.consumable() == [0, 1, 2, 3] and pair.holder.held() == [])
    assert pair.arrived.count("results") >= 4, "a message each"
    assert pair.now - began < 20.0, "without the pauses that follow upon a copy"


def test_groups_with_different_fields_may_be_sent_again_together(pair: Pair) -> None:
    """Both wait for their acknowledgement when they are due again, and one lacks a part of the reward."""
    pair.lease(4)
    pair.lose = lambda message: message.kind == "results" and pair.arrived.count("results") <= 2
    with pair.changed:
        pair.outbound.finish(groups(0), {}, pair.now)
        pair.outbound.finish(groups(1, **{"rewards/bonus": torch.ones(ROWS)}), {}, pair.now)
    pair.until(lambda: pair.owner.consumable() == [0, 1])
    with pair.changed:
        first, second = pair.take([0, 1])
        assert "rewards/bonus" not in first.rows.batch
        assert second.rows.rows.dense("rewards/bonus").tolist() == [1.0] * ROWS


def test_dropped_groups_travel_without_rows_and_are_replaced(pair: Pair) -> None:
    assert pair.lease(4) == [0, 1, 2, 3]
    pair.finish(groups(0, 1), {0: "too dull"})
    pair.until(lambda: pair.owner.consumable() == [1] and pair.holder.held() == [2, 3])
    assert pair.lease(3) == [4], "the next position of ledger 0"


def test_more_tokens_than_any_message_holds_come_back_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample of 8 groups has 20,000 tokens: 3.7 MiB in all, where no header may be above 64 KiB."""
    monkeypatch.setattr("distflow.comm.message.MAX_HEADER_BYTES", 64 << 10)
    large: dict[str, Any] = {"groups_per_ledger": 4, "memory_bytes": 64 << 20, "group_bytes": lambda prompt: 1 << 20}
    pair = Pair(tmp_path, partial_rollouts=True, message_bytes=1 << 20, **large)
    pair.start()
    tokens, logprobs = tuple(array("i", range(20_000))), (-0.5,) * 20_000
    spans = (Span(0, 0, 0, 20_000),)
    positions = pair.lease(8)
    with pair.changed:
        for position in positions:
            pair.holder.report(position, ROWS * 20_000, 0)
            pair.holder.produced(SampleOutput(position, i, tokens, logprobs, spans, "abort") for i in range(ROWS))

    def all_kept() -> bool:
        entries = [pair.owner.ledgers.entry(position) for position in positions]
        return all(entry.kept is not None and entry.kept.tokens == ROWS * 20_000 for entry in entries)

    pair.until(all_kept)
    pair.restart()
    again: list[Lease] = []

    def all_granted() -> bool:
        pair.outbound.send(pair.holder.want(ROWS * (7 - len(again)), pair.now))
        again.extend(pair.holder.take_granted())
        return len(again) == 8

    pair.until(all_granted)
    assert pair.arrived.count("grant") >= 4, "one before the restart, and more than two behind it"
    assert [lease.position for lease in again] == positions
    assert all(sample.token_ids == tokens for lease in again for sample in lease.begun)
    assert {len(lease.begun) for lease in again} == {ROWS}
    for end in pair.ends.values():
        end.close(linger_s=0.1)


def test_a_holder_that_takes_leave_frees_its_leases(pair: Pair) -> None:
    pair.lease(4)
    with pair.changed:
        pair.outbound.send(pair.holder.leave())
    pair.until(lambda: pair.owner.all_left)
    with pair.changed:
        assert pair.owner.open_leases() == [] or {lease.workers for lease in pair.owner.open_leases()} == {()}


@pytest.mark.parametrize(
    "body, payload, message",
    [
        ({}, [], "malformed results: Object missing required field `results`"),
        ({"results": 7, "batch": None}, [], "malformed results: Expected `array`, got `int`"),
        (
            {"results": [[1, 2]], "batch": None},
            [],
            r"results: Expected `object`, got `array` - at `\$.results\[0\]`",
        ),
        ({"results": [], "batch": {"rows": 0, "columns": b"\x90"}}, [], "results with 0 payload frames; expected 1"),
        ({"results": [], "batch": {"rows": 1, "columns": b"\x91\x91\xa1x"}}, [b"abc"], "column"),
    ],
)
def test_malformed_results_are_refused(pair: Pair, body: dict, payload: list[bytes], message: str) -> None:
    frames = [memoryview(part) for part in payload]
    with pytest.raises(ProtocolError, match=message):
        pair.inbound.on_message(Message("results", HOLDER, 0, body, frames), 0.0)


def test_a_result_without_its_rows_is_refused_and_can_still_come(pair: Pair) -> None:
    pair.lease(4)
    with pair.changed:
        out = pair.holder.finished(0, Version(0, 0), 8, "", pair.now)
        results = [item.message for item in out]
        with pytest.raises(ProtocolError, match="rollout/0 sent a result for position 0 without its rows"):
            pair.inbound.accept(results, None, pair.now)
        assert pair.owner.consumable() == []
        pair.inbound.accept(results, groups(0), pair.now)
        assert pair.owner.consumable() == [0]


def test_a_result_without_its_rows_keeps_no_other_one_from_being_used(pair: Pair) -> None:
    told: list[list[int]] = []
    pair.lease(4)
    with pair.changed:
        pair.inbound.on_arrival(lambda lengths: told.append(list(lengths)))
        out = [
            *pair.holder.finished(0, Version(0, 0), 8, "", pair.now),
            *pair.holder.finished(1, Version(0, 0), 8, "", 0),
        ]
        results = [item.message for item in out]
        with pytest.raises(ProtocolError, match="for position 0 without its rows"):
            pair.inbound.accept(results, groups(1), pair.now)
        assert pair.owner.consumable() == [1]
        assert told[-1] == [1]


def test_groups_count_by_the_bytes_that_they_have(pair: Pair) -> None:
    pair.lease(4)
    with pair.changed:
        (out,) = pair.holder.finished(0, Version(0, 0), 1, "", pair.now)
        batch = groups(0)
        pair.inbound.accept([out.message], batch, pair.now)
        assert pair.owner.ledgers.entry(0).reserved == batch.nbytes > 1


def test_rows_of_a_group_that_lie_apart_are_refused(pair: Pair) -> None:
    pair.lease(4)
    with pair.changed:
        results = [out.message for n in (0, 1) for out in pair.holder.finished(n, Version(0, 0), 8, "", pair.now)]
        both = groups(0, 1)
        apart = both.select([*range(0, both.rows, 2), *range(1, both.rows, 2)])
        with pytest.raises(ProtocolError, match="the rows of a group do not lie side by side"):
            pair.inbound.accept(results, apart, pair.now)
        assert pair.owner.consumable() == []
