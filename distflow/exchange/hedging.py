"""Which open groups are copied to a second worker: those of silent holders, and slow ones while a worker is idle.

An open group has *live* holders, which have been heard from lately, and silent ones. Without a live holder it is
*stranded*: any asking worker gets a copy. With one live holder a nearly idle worker gets a copy where the group

- *waits*: it has not been started, though its holder is known to run weights that are new enough for it; or
- is *late*: it was leased much longer ago than groups usually take, and the holder takes much longer than others, or is
  not known to have such weights. What takes long because it is long would take as long anywhere, and is not copied.

With two live holders it is not copied again. Silent holders keep their lease: they may come back, and the first
complete result counts.

Only the heaps, which find the longest leased group first, grow with the number of open groups.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count

from distflow.exchange.entry import Entry
from distflow.exchange.holder_table import Peer, Peers, PendingGrant
from distflow.exchange.lease_settings import LeaseSettings

_SMOOTHING = 0.05
_SLOW = 2.0
"""Multiple of the usual duration after which a group counts as slow, and from which its holder does."""
_LEAST = 64
"""Smaller heaps are not cleaned up."""
NEVER = float("inf")

EntryOf = Callable[[int], Entry | None]


class CopyCandidates:
    """The groups that may be copied, as of the last `look`."""

    def __init__(self, settings: LeaseSettings) -> None:
        self.usual_s: float | None = None
        """Smoothed time from lease to arrival; None before the first result."""
        self._usual_of: dict[str, float] = {}
        """The same of single holders."""
        self._keeps_up: set[str] = set()
        """Holders that took about as long as others, by their last results."""
        self._runs: dict[str, int] = {}
        """The newest weights on which a holder has started a group."""
        self._settings = settings
        self._silent: set[str] = set()
        self._stranded = _ByAge(lambda entry: self._live(entry) == 0)
        self._late = _ByAge(lambda entry: self._live(entry) == 1 and self._may_be_late(entry))
        self._waiting = _ByAge(lambda entry: self._live(entry) == 1 and self._waits(entry))

    def arrived(self, entry: Entry, by: Peer | None, entry_of: EntryOf, now: float) -> None:
        """Record that a result has arrived, and from which holder."""
        seconds = now - entry.leased_at
        self.usual_s = _smoothed(self.usual_s, seconds)
        if by is None or len(entry.holders) > 1:
            return  # When a copy was begun is not known.
        self._usual_of[by.name] = _smoothed(self._usual_of.get(by.name), seconds)
        if len(self._usual_of) > 1 and self._usual_of[by.name] < _SLOW * self.usual_s:
            self._keeps_up.add(by.name)
        elif by.name in self._keeps_up:
            self._keeps_up.remove(by.name)
            self._note_all(by, entry_of)

    def note(self, entry: Entry | None) -> None:
        """The holders of an entry have changed, or one of them has started it."""
        if entry is None or entry.state != "open" or not self._settings.hedging:
            return
        live = self._live(entry)
        if live == 0:
            self._stranded.add(entry)
        elif live == 1:
            (self._waiting if self._waits(entry) else self._late).add(entry)

    def started(self, entry: Entry, holder: Peer, version: int, entry_of: EntryOf) -> None:
        """A holder has reported for the first time that it runs a group, and on which weights it was begun."""
        entry.started = True
        if version > self._runs.get(holder.name, -1):
            self._runs[holder.name] = version
            self._note_all(holder, entry_of)
        self.note(entry)

    def heard(self, peer: Peer, entry_of: EntryOf) -> None:
        """A holder has reported and is no longer silent."""
        if peer.name in self._silent:
            self._silent.remove(peer.name)
            self._note_all(peer, entry_of)

    def look(self, peers: Peers, entry_of: EntryOf, now: float) -> None:
        """Update which holders are silent and which groups are slow. Asks of silent workers are dropped."""
        if not self._settings.hedging:
            return
        silent = {peer.name: peer for peer in peers.silent(now - self._settings.silence_s)}
        fallen = silent.keys() - self._silent
        self._silent = set(silent)
        for peer in silent.values():
            # It could not work on what it is granted; when it comes back it asks again.
            peers.unpark(peer)
            if peer.name in fallen:
                self._note_all(peer, entry_of)
        slow_s = NEVER if self.usual_s is None else max(self._settings.hedge_s, _SLOW * self.usual_s)
        self._stranded.look(now, 0.0)
        self._late.look(now, slow_s)
        # By then a report would have said that the group runs.
        self._waiting.look(now, self._settings.hedge_s + self._settings.report_s)

    def stranded(self, peers: Peers) -> list[PendingGrant]:
        """Copies for any worker that asks."""
        return self._deal((self._stranded,), peers.parked)

    def slow(self, peers: Peers) -> list[PendingGrant]:
        """Copies for nearly idle workers."""
        return self._deal((self._late, self._waiting), peers.idle) if self._settings.copies_slow else []

    def _deal(self, heaps: Sequence[_ByAge], peers: Iterable[Peer]) -> list[PendingGrant]:
        """One copy of each entry for a worker that does not hold it, evenly distributed, longest leased first."""
        if all([heap.due() is None for heap in heaps]):
            return []
        takers = _Takers(peers, self._settings.message_bytes)
        seen: set[int] = set()
        left: list[Entry] = []
        while takers.any and (entry := _oldest(heaps)) is not None:
            if entry.lease.position not in seen and not takers.give(entry):
                left.append(entry)
            seen.add(entry.lease.position)
        for entry in left:
            self.note(entry)
        return takers.shares

    def _live(self, entry: Entry) -> int:
        return sum(name not in self._silent for name in entry.holders) if self._silent else len(entry.holders)

    def _holder(self, entry: Entry) -> str:
        """The live holder of an entry that has just one."""
        return next(name for name in entry.holders if name not in self._silent)

    def _may_be_late(self, entry: Entry) -> bool:
        """Whether that holder takes longer than others, as far as is known, or lacks the weights."""
        return self._holder(entry) not in self._keeps_up if entry.started else not self._waits(entry)

    def _waits(self, entry: Entry) -> bool:
        """Whether that holder could run the group, and does not."""
        return not entry.started and self._runs.get(self._holder(entry), -1) >= entry.lease.min_version

    def _note_all(self, peer: Peer, entry_of: EntryOf) -> None:
        for position in peer.granted_by:
            self.note(entry_of(position))


def _smoothed(before: float | None, seconds: float) -> float:
    return seconds if before is None else before + _SMOOTHING * (seconds - before)


class _ByAge:
    """Open entries that are `wanted`, longest leased first. Others are removed when they come up."""

    def __init__(self, wanted: Callable[[Entry], bool]) -> None:
        self._wanted = wanted
        self._heap: list[tuple[float, int, int, Entry]] = []
        self._numbers = count()
        self._limit = _LEAST
        self._now, self._age = -NEVER, 0.0

    def add(self, entry: Entry) -> None:
        """Add an entry; adding it again does no harm."""
        heapq.heappush(self._heap, (entry.leased_at, entry.lease.position, next(self._numbers), entry))
        if len(self._heap) > self._limit:
            self._heap = list({item[1]: item for item in self._heap if self._holds(item)}.values())
            heapq.heapify(self._heap)
            self._limit = max(_LEAST, 2 * len(self._heap))

    def look(self, now: float, age: float) -> None:
        """From here on, entries count that had been leased for `age` seconds by `now`."""
        self._now, self._age = now, age

    def due(self) -> tuple[float, int] | None:
        """The lease time and position of the first entry that counts."""
        while self._heap and not self._holds(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._heap or self._now - self._heap[0][0] < self._age:
            return None
        return self._heap[0][:2]

    def pop(self) -> Entry:
        """Remove the entry that `due` returned."""
        return heapq.heappop(self._heap)[3]

    def _holds(self, item: tuple[float, int, int, Entry]) -> bool:
        leased_at, _, _, entry = item
        return entry.state == "open" and entry.leased_at == leased_at and self._wanted(entry)


def _oldest(heaps: Iterable[_ByAge]) -> Entry | None:
    due = [(first, heap) for heap in heaps if (first := heap.due()) is not None]
    return min(due, key=lambda pair: pair[0])[1].pop() if due else None


class _Takers:
    """Workers that may get copies: the one with the fewest is next, then in order of arrival."""

    def __init__(self, peers: Iterable[Peer], limit_bytes: int) -> None:
        self._fresh = self._with_room(peers, limit_bytes)
        self._turns: list[tuple[int, int, PendingGrant]] = []
        """Visited workers with room: number of copies given, order of arrival, grant."""
        self._given: dict[int, PendingGrant] = {}
        self.any = True
        """Whether a worker may be left."""

    @property
    def shares(self) -> list[PendingGrant]:
        """The grants, in the workers' order of arrival."""
        return [pending for _, pending in sorted(self._given.items(), key=lambda item: item[0])]

    def give(self, entry: Entry) -> bool:
        """Give a copy to a worker that does not hold the entry already; returns whether there was one."""
        holding = []
        while (turn := self._next()) is not None and turn[2].peer.name in entry.holders:
            holding.append(turn)
        for passed in holding:
            heapq.heappush(self._turns, passed)
        if turn is None:
            self.any = bool(self._turns)
            return False
        given, number, pending = turn
        pending.add(entry)
        self._given[number] = pending
        if not pending.full:
            heapq.heappush(self._turns, (given + 1, number, pending))
        return True

    def _next(self) -> tuple[int, int, PendingGrant] | None:
        if not self._turns or self._turns[0][0] > 0:
            fresh = next(self._fresh, None)
            if fresh is not None:
                return fresh
        return heapq.heappop(self._turns) if self._turns else None

    @staticmethod
    def _with_room(peers: Iterable[Peer], limit_bytes: int) -> Iterator[tuple[int, int, PendingGrant]]:
        for number, peer in enumerate(peers):
            pending = PendingGrant(peer, peer.room(limit_bytes))
            if not pending.full:
                yield 0, number, pending
