"""CPU time of a message at an owner, by ledgers, parked asks, holders and open groups: no processes or sockets.

    python -m benchmarks owner [--rounds 7] [--seconds 3]

First table: 16 workers with 8 groups each send the same messages to an owner that has more and more of one thing
beside them. Each row is timed on fresh owners in turn with the others; figures are medians, in µs of this thread's CPU
time: of a message, of a group that is looked for and taken (`take`), and of a `tick`, which comes four times a second.
Second table: whole training steps of many holders, everything included, per group.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.messages import Ask, Grant, LeasePrompt, Outgoing, Progress, Report, Result, Running
from distflow.exchange.owner import OwnerCore
from distflow.types import Uid, Version

WORKERS, EACH = 16, 8
KINDS = ("result", "ask", "progress", "take")
IDS = tuple(range(200))
STEP_S = 1e-6
"""Virtual seconds between two messages: nothing is late, and nobody silent."""


@dataclass(frozen=True, slots=True)
class Case:
    """What an owner has: K, open groups, asks that are parked, and in the second table its holders."""

    ledgers: int = 8
    opened: int = 1024
    parked: int = 10
    holders: int = WORKERS


AXES: dict[str, list[Case]] = {
    "own ledgers": [Case(ledgers=k, opened=2048) for k in (8, 64, 256, 1024)],
    "parked asks": [Case(parked=n) for n in (10, 100, 1_000, 10_000)],
    "holders": [Case(opened=10_000 + WORKERS * EACH, holders=n) for n in (16, 100, 1_000, 10_000)],
    "open groups": [Case(opened=n) for n in (128, 1_000, 10_000, 100_000)],
}
STREAMS = [
    Case(8, 128, holders=16),
    Case(8, 1_024, holders=128),
    Case(8, 8_000, holders=1_000),
    Case(8, 80_000, holders=10_000),
    Case(1_024, 2_048, holders=256),
    Case(1_024, 81_920, holders=10_240),
]


class Holder:
    """One worker: says what it holds, and remembers what it is given."""

    def __init__(self, owner: OwnerCore, name: str) -> None:
        self.owner, self.name = owner, name
        self.held: dict[int, None] = {}
        self.reports = self.asks = self.seen = 0

    def _report(self) -> Report:
        self.reports += 1
        return Report(self.name, 0, 0, self.reports, tuple(self.held), self.seen, -1)

    def ask(self, groups: int) -> Ask:
        self.asks += 1
        return Ask(self._report(), self.asks, groups, park=True, idle=False)

    def progress(self) -> Progress:
        return Progress(self._report(), tuple([Running(position, 10, 0) for position in self.held]))

    def result(self, position: int) -> Result:
        del self.held[position]
        return Result(self.name, 0, 0, position, 1, 1000, Version(0, self.owner.version), "", 1, (), 0)

    def hear(self, grant: Grant) -> None:
        self.seen = max(self.seen, grant.number)
        self.held |= dict.fromkeys(lease.position for lease in grant.leases)


class Run:
    """An owner and its holders, with a clock of their own."""

    def __init__(self, case: Case, groups_per_ledger: int, staleness: int, steps: int) -> None:
        settings = LeaseSettings(
            case.ledgers,
            groups_per_ledger,
            EACH,
            staleness,
            steps,
            1 << 50,
            lambda tokens: 1 << 16,
            len(IDS),
            hedging=True,
            message_bytes=1 << 40,
        )
        prompt = lambda position: LeasePrompt(Uid(0, position, position), IDS, "x" * 400, "{}")  # noqa: E731
        self.owner = OwnerCore("trainer/0", settings, range(case.ledgers), prompt)
        self.holders: dict[str, Holder] = {}
        self.now = 0.0

    def join(self, count: int) -> list[Holder]:
        first = len(self.holders)
        new = [Holder(self.owner, f"rollout/{number}") for number in range(first, first + count)]
        self.holders |= {holder.name: holder for holder in new}
        return new

    def hear(self, out: Sequence[Outgoing]) -> list[tuple[Holder, int]]:
        """Grants are delivered; returns who was given what."""
        given = []
        for item in out:
            if isinstance(item.message, Grant):
                holder = self.holders[item.to]
                holder.hear(item.message)
                given += [(holder, lease.position) for lease in item.message.leases]
        return given

    def tick(self) -> None:
        self.hear(self.owner.tick(self.now))

    def take(self) -> list[tuple[Holder, int]]:
        return self.hear(self.owner.take(self.owner.consumable(), self.now))


def messages(case: Case) -> dict[str, list[float]]:
    """µs a message, by kind, of the workers' last training step: nothing is left to lease to those who ask."""
    run = Run(case, case.opened // case.ledgers, 0, 1)
    workers = run.join(WORKERS)
    for holder in workers:
        run.hear(run.owner.handle(holder.ask(EACH), run.now))
    others = run.join(max(1, case.holders - WORKERS))
    rest = case.opened - WORKERS * EACH
    for number, holder in enumerate(others):
        share = rest // len(others) + (number < rest % len(others))
        if share:
            run.hear(run.owner.handle(holder.ask(share), run.now))
    for holder in run.join(case.parked):
        run.owner.handle(holder.ask(1), run.now)
    found = defaultdict(list)
    gc.collect()
    gc.freeze()
    gc.disable()
    for _ in range(EACH):
        for kind in KINDS:
            run.now += STEP_S
            sent = [_message(holder, kind) for holder in workers if kind != "take"]
            found[kind].append(_timed(lambda sent=sent: _deliver(run, sent), WORKERS))
        found["tick"].append(_timed(run.tick, 1))
    gc.enable()
    gc.unfreeze()
    return found


def _message(holder: Holder, kind: str) -> Ask | Progress | Result:
    if kind == "result":
        return holder.result(next(iter(holder.held)))
    return holder.ask(1) if kind == "ask" else holder.progress()


def _deliver(run: Run, sent: Sequence[Ask | Progress | Result]) -> None:
    for message in sent:
        run.owner.handle(message, run.now)
    if not sent:
        run.take()


def _timed(work: Callable[[], object], count: int) -> float:
    began = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began) / 1e3 / count


def stream(case: Case, seconds: float) -> tuple[float, float]:
    """Whole training steps: µs a group, and ms a tick. Every holder reports twice a virtual second."""
    run = Run(case, case.opened // case.ledgers // 2, 1, 10**6)
    going: deque[tuple[Holder, int]] = deque()
    holders = deque(run.join(case.holders))
    for holder in holders:
        going += run.hear(run.owner.handle(holder.ask(EACH), run.now))
    for holder in holders:
        run.hear(run.owner.handle(holder.progress(), run.now))
    groups, spent, ticks = 0, 0.0, [0.0]
    next_tick = 0.25
    deadline = time.thread_time() + seconds
    while going and time.thread_time() < deadline:
        holder, position = going.popleft()
        if position not in holder.held:
            continue
        run.now += 0.5 / case.holders
        holders.rotate(-1)
        sent = [holder.result(position), holder.ask(1), holders[0].progress()]
        spent += _timed(lambda sent=sent: going.extend(_step(run, sent)), 1)
        groups += 1
        if run.now >= next_tick:
            next_tick = run.now + 0.25
            ticks.append(_timed(run.tick, 1) / 1e3)
    return spent / groups, statistics.median(ticks)


def _step(run: Run, sent: Sequence[Ask | Progress | Result]) -> list[tuple[Holder, int]]:
    given = []
    for message in sent:
        given += run.hear(run.owner.handle(message, run.now))
    given += run.take()
    if run.owner.step_complete():
        given += run.hear(run.owner.advance(run.owner.version + 1, run.now))
    return given


def main() -> int:
    """Two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    found: dict[Case, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for case in [case for cases in AXES.values() for case in cases]:
            times = found.setdefault(case, defaultdict(list))
            for kind, values in messages(case).items():
                times[kind].append(statistics.median(values))
    print("| more and more | how many | " + " | ".join(KINDS) + " | tick | all four | of the first row |")
    print("| --- " * (len(KINDS) + 5) + "|")
    for axis, cases in AXES.items():
        first = 0.0
        for case in cases:
            times = {kind: statistics.median(values) for kind, values in found[case].items()}
            whole = sum(times[kind] for kind in KINDS)
            first = first or whole
            columns = " | ".join(f"{times[kind]:.1f}" for kind in (*KINDS, "tick"))
            print(f"| {axis} | {_size(axis, case):,} | {columns} | {whole:.1f} | {whole / first:.2f} |")
    print("\n| ledgers | holders | open groups | µs a group | ms a tick |\n| --- | --- | --- | --- | --- |")
    for case in STREAMS:
        group, tick = stream(case, options.seconds)
        print(f"| {case.ledgers:,} | {case.holders:,} | {case.opened:,} | {group:.1f} | {tick:.2f} |", flush=True)
    return 0


def _size(axis: str, case: Case) -> int:
    sizes = {"own ledgers": case.ledgers, "parked asks": case.parked, "holders": case.holders}
    return sizes.get(axis, case.opened)
