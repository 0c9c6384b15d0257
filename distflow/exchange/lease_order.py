"""Which of the positions that may be leased goes to which worker: the longest groups first, as far as predicted.

The gate opens positions in the order of the data, and what a training step takes stays in that order; between the two
an owner is free to choose. With `layout.schedule` longest_first whoever asks gets, of the groups of the first training
step that has any left, the one that is predicted to have the longest responses. With skew_aware the owner also looks,
whenever positions open, whether the longest groups should have workers of their own (`tail_split.py`): the first ones
by name, so that all owners choose the same. They get nothing else while they hold something; the others get none of the
tail until it has waited for `report_s`, since those workers may be asking elsewhere.

Positions that were leased before and lost come first of all, the lowest first, and are not in here.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable
from typing import NamedTuple

from distflow.exchange.entry import Entry
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.length_ranker import LengthRanker, recall
from distflow.exchange.messages import Progress, Result
from distflow.exchange.tail_split import DecodeTimes, best_split

_AGAIN_UNTIL = 1024
"""Results after which waiting positions are not predicted anew before the next ones open."""


class WaitingGroup(NamedTuple):
    """A position that may be leased; the last in order is the longest of the first step, of equal ones the lowest."""

    step: int
    """Negative: the training step that will take it, unless groups before it are dropped."""
    length: float
    place: tuple[int, int]
    """Negative k and ledger."""
    entry: Entry

    @classmethod
    def of(cls, entry: Entry) -> WaitingGroup:
        """With its predicted length."""
        return cls(-entry.step, entry.predicted, (-entry.lease.k, -entry.lease.ledger), entry)

    @property
    def waits(self) -> bool:
        """Whether it has not been leased, and has not arrived from a worker that held it in an earlier term."""
        return self.entry.state == "back" and not self.entry.lease.attempt


class Ranked(NamedTuple):
    """Predictions beside what came."""

    groups: int
    recall: float
    """Of the longest 20%."""


class LeaseOrder:
    """The open positions of an owner's ledgers, and what it has seen of lengths and workers."""

    def __init__(self, settings: LeaseSettings) -> None:
        self.isolates = settings.schedule == "skew_aware"
        self.tail_workers = 0
        """How many workers the tail was given to when positions last opened."""
        self._settings = settings
        self._ranker = LengthRanker()
        self._times = DecodeTimes(settings.samples_per_prompt)
        self._waiting: list[WaitingGroup] = []
        self._most_held: dict[str, int] = {}
        """The most groups that each worker was seen to hold."""
        self._threshold = math.inf
        """Groups that are predicted to be longer are the tail."""
        self._tail: frozenset[str] = frozenset()
        self._planned_at: float | None = None
        """None: positions have opened since."""
        self._seen: list[tuple[float, float]] = []
        """Predicted and true lengths of the groups that the open step has taken."""

    # -- what may be leased
    def open(self, entries: Iterable[Entry]) -> None:
        """These positions may be leased from now on."""
        for entry in entries:
            lease = entry.lease
            entry.predicted = self._ranker.predict(lease.uid.prompt, lease.prompt_ids)
            insort(self._waiting, WaitingGroup.of(entry))
            self._planned_at = None

    def pick(self, worker: str, held: int, now: float) -> Entry | None:
        """What this worker, which holds so many groups, gets next; None: nothing for now."""
        if worker not in self._most_held:
            self._most_held[worker], self._planned_at = 0, None
        planned_at = self._plan(now) if self._planned_at is None else self._planned_at
        most, least = math.inf, 0.0
        if worker in self._tail:
            least = self._threshold if held else 0.0
        elif now - planned_at < self._settings.report_s:
            most = self._threshold
        for place in reversed(range(len(self._waiting))):
            if not self._waiting[place].waits:
                del self._waiting[place]
            elif least < self._waiting[place].length <= most:
                return self._waiting.pop(place).entry
        return None

    def keeps_back(self) -> bool:
        """Whether a worker may get something although another one got nothing."""
        return bool(self._tail and self._waiting)

    def _plan(self, now: float) -> float:
        """Decide whether the tail gets workers of its own, as long as no further positions open; returns `now`."""
        self._planned_at, self._threshold, self._tail, self.tail_workers = now, math.inf, frozenset(), 0
        workers = sorted(self._most_held)
        line = self._times.line(max(1, *self._most_held.values()))
        if not self.isolates or line is None or len(workers) < 2:
            return now
        lengths = [waiting.length for waiting in self._waiting if waiting.waits]
        split = best_split(lengths, len(workers), line)
        if split is not None:
            self.tail_workers = split.workers
            self._threshold = sorted(lengths, reverse=True)[split.groups]
            self._tail = frozenset(workers[: split.workers])
        return now

    # -- what is seen
    def arrived(self, entry: Entry, result: Result) -> None:
        """A group has come, or was dropped: its lengths teach."""
        if not result.tokens:
            return
        self._ranker.learn(
            entry.lease.uid.prompt, entry.lease.prompt_ids, result.tokens / self._settings.samples_per_prompt
        )
        learned = self._ranker.learned
        if learned <= _AGAIN_UNTIL and learned & (learned - 1) == 0:
            # Half of what is known is new.
            waiting, self._waiting = self._waiting, []
            self.open(one.entry for one in waiting if one.waits)

    def taken(self, entry: Entry) -> None:
        """The open step takes a group."""
        self._seen.append((entry.predicted, float(entry.tokens)))

    def reported(self, progress: Progress, now: float) -> None:
        """What a worker has of this owner's groups, and how far they are."""
        report = progress.report
        self._most_held[report.worker] = max(len(report.held), self._most_held.get(report.worker, 0))
        self._times.report(report.worker, ((one.position, one.tokens) for one in progress.running), now)

    def left(self, worker: str) -> None:
        """It is lost, or has left."""
        if self._most_held.pop(worker, None) is not None:
            self._times.forget(worker)
            self._planned_at = None

    def take_ranked(self) -> Ranked:
        """How well the groups were ranked that were taken since the last call."""
        seen, self._seen = self._seen, []
        return Ranked(len(seen), recall([one for one, _ in seen], [one for _, one in seen]))
