"""What an owner does for a message does not depend on how much is open: instructions are counted, not seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

import pytest

from distflow.exchange.messages import Running
from distflow.exchange.owner import OwnerCore
from tests.exchange.lease_asker import Asker, granted, new_owner
from tests.search.lease_scenario import SMALL

EACH = 4
LIMITS = replace(
    SMALL,
    training_steps=1,
    memory_bytes=1 << 40,
    hedging=True,
    hedge_s=0.0,
    report_s=0.0,
    silence_s=1e9,
    announce_closed=True,
)


class Counter:
    """Counts the instructions of Python code."""

    def __init__(self) -> None:
        self.instructions = 0

    def trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.instructions += event == "opcode"
        return self.trace

    @contextmanager
    def counting(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(before)


def instructions(*, ledgers: int = 8, opened: int = 1_024, parked: int = 4, holders: int = 4) -> int:
    """Of the messages of one worker (and looks of the training loop), with all this beside it."""
    owner = new_owner(replace(LIMITS, ledgers=ledgers, groups_per_ledger=opened // ledgers))
    worker = Asker(owner, "rollout/0")
    held = [lease.position for lease in granted(worker.ask(EACH))]
    for number in range(holders):
        Asker(owner, f"holder/{number}").ask(-(-(opened - EACH) // holders))
    for number in range(parked):
        Asker(owner, f"parked/{number}").ask(1)
    owner.tick(1.0)
    return _count(owner, worker, held)


def _count(owner: OwnerCore, worker: Asker, held: list[int]) -> int:
    counter = Counter()
    while held:
        with counter.counting():
            worker.progress([Running(position, 5, 0) for position in held], seen=1, now=1.0)
            worker.ask(1, held=held, seen=1, now=1.0)
            owner.handle(worker.result(held.pop(0)), 1.0)
            owner.take(owner.consumable(), 1.0)
            owner.tick(1.0)
    return counter.instructions


@pytest.mark.parametrize(
    "more", [{"ledgers": 512}, {"parked": 1_000}, {"holders": 1_000, "opened": 8_000}, {"opened": 8_000}], ids=str
)
def test_a_message_costs_the_same_beside_more_of_everything(more: dict[str, int]) -> None:
    assert instructions(**more) <= 1.3 * instructions()
