"""Which open groups a second worker gets: those of silent holders, and those that take long while somebody is idle.

In words. An open group has *live* holders, who have been heard of lately, and silent ones. Without a live holder it is
*stranded*: any asker gets a copy. With one live holder, and leased much longer ago than groups usually take, it is
*slow*: a nearly idle asker gets a copy; and so it is when it still waits for its turn there. With two live holders it
gets no further copy. Silent holders keep their lease: they may come back, and the first complete result counts,
whosever it is.

Nothing here grows with the number of open groups but the heaps, by which the longest leased is found first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import count

from distflow.exchange.holder_table import Peer, Peers, Share
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.ledger import Entry

_SMOOTHING = 0.05
_SLOW = 2.0
"""Times the usual duration after which a group counts as slow."""
_LEAST = 64
"""Entries below which a heap is not cleaned."""
NEVER = float("inf")

EntryOf = Callable[[int], Entry | None]


class Copies:
    """What may be copied, by the time and the silence of the last look."""

    def __init__(self, settings: LeaseSettings) -> None:
        self.usual_s: float | None = None
        """Smoothed time from lease to arrival; None before the first result."""
        self._settings = settings
        self._silent: set[str] = set()
        self._stranded = _ByAge(lambda entry: self._live(entry) == 0)
        self._started = _ByAge(lambda entry: entry.started and self._live(entry) == 1)
        self._unstarted = _ByAge(lambda entry: not entry.started and self._live(entry) == 1)

    def arrived(self, entry: Entry, now: float) -> None:
        """A result has come."""
        seconds = now - entry.leased_at
        self.usual_s = seconds if self.usual_s is None else self.usual_s + _SMOOTHING * (seconds - self.usual_s)

    def note(self, entry: Entry | None) -> None:
        """The holders of an entry are others now, or one of them has started it."""
        if entry is None or entry.state != "open" or not self._settings.hedging:
            return
        live = self._live(entry)
        if live == 0:
            self._stranded.add(entry)
        elif live == 1:
            (self._started if entry.started else self._unstarted).add(entry)

    def heard(self, peer: Peer, entry_of: EntryOf) -> None:
        """A holder has reported: if it was silent, it is not any more."""
        if peer.name in self._silent:
            self._silent.remove(peer.name)
            self._note_all(peer, entry_of)

    def look(self, peers: Peers, entry_of: EntryOf, now: float) -> None:
        """See who has fallen silent, and what has become slow. The asks of silent workers are forgotten."""
        if not self._settings.hedging:
            return
        silent = {peer.name: peer for peer in peers.silent(now - self._settings.silence_s)}
        fallen = silent.keys() - self._silent
        self._silent = set(silent)
        for peer in silent.values():
            # It would sit on what it is given; when it comes back it asks again.
            peers.unpark(peer)
            if peer.name in fallen:
                self._note_all(peer, entry_of)
        slow_s = NEVER if self.usual_s is None else max(self._settings.hedge_s, _SLOW * self.usual_s)
        self._stranded.look(now, 0.0)
        self._started.look(now, slow_s)
        # A report has had the time to say that it runs.
        self._unstarted.look(now, self._settings.hedge_s + self._settings.report_s)

    def stranded(self, peers: Peers) -> list[Share]:
        """Copies for anybody who asks."""
        return self._deal((self._stranded,), peers.parked)

    def slow(self, peers: Peers) -> list[Share]:
        """Copies for those who are nearly idle."""
        return self._deal((self._started, self._unstarted), peers.idle)

    def _deal(self, heaps: Iterable[_ByAge], peers: Iterable[Peer]) -> list[Share]:
        """One copy of each entry to a worker that does not hold it, in fair shares; the longest leased first."""
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

    def _note_all(self, peer: Peer, entry_of: EntryOf) -> None:
        for position in peer.granted_by:
            self.note(entry_of(position))


class _ByAge:
    """Open entries that are `wanted`, the longest leased first. Others are thrown out when they are met."""

    def __init__(self, wanted: Callable[[Entry], bool]) -> None:
        self._wanted = wanted
        self._heap: list[tuple[float, int, int, Entry]] = []
        self._numbers = count()
        self._limit = _LEAST
        self._now, self._age = -NEVER, 0.0

    def add(self, entry: Entry) -> None:
        """Have this entry among them; more than once does no harm."""
        heapq.heappush(self._heap, (entry.leased_at, entry.lease.position, next(self._numbers), entry))
        if len(self._heap) > self._limit:
            self._heap = list({item[1]: item for item in self._heap if self._holds(item)}.values())
            heapq.heapify(self._heap)
            self._limit = max(_LEAST, 2 * len(self._heap))

    def look(self, now: float, age: float) -> None:
        """From here on those count that had been leased for `age` seconds by now."""
        self._now, self._age = now, age

    def due(self) -> tuple[float, int] | None:
        """When the first that counts was leased, and its position."""
        while self._heap and not self._holds(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._heap or self._now - self._heap[0][0] < self._age:
            return None
        return self._heap[0][:2]

    def pop(self) -> Entry:
        """Take out the one that `due` named."""
        return heapq.heappop(self._heap)[3]

    def _holds(self, item: tuple[float, int, int, Entry]) -> bool:
        leased_at, _, _, entry = item
        return entry.state == "open" and entry.leased_at == leased_at and self._wanted(entry)


def _oldest(heaps: Iterable[_ByAge]) -> Entry | None:
    due = [(first, heap) for heap in heaps if (first := heap.due()) is not None]
    return min(due, key=lambda pair: pair[0])[1].pop() if due else None


class _Takers:
    """Those who may be given copies. The one with the fewest is next, and among them the one that came first."""

    def __init__(self, peers: Iterable[Peer], limit_bytes: int) -> None:
        self._fresh = self._with_room(peers, limit_bytes)
        self._turns: list[tuple[int, int, Share]] = []
        """Those that were looked at and have room: how many they were given, and in which order they came."""
        self._given: dict[int, Share] = {}
        self.any = True
        """Somebody may be left."""

    @property
    def shares(self) -> list[Share]:
        """What was given, in the order in which the takers came."""
        return [share for _, share in sorted(self._given.items(), key=lambda item: item[0])]

    def give(self, entry: Entry) -> bool:
        """Whether somebody took a copy who does not hold the entry already."""
        holding = []
        while (turn := self._next()) is not None and turn[2].peer.name in entry.holders:
            holding.append(turn)
        for passed in holding:
            heapq.heappush(self._turns, passed)
        if turn is None:
            self.any = bool(self._turns)
            return False
        given, number, share = turn
        share.add(entry)
        self._given[number] = share
        if not share.full:
            heapq.heappush(self._turns, (given + 1, number, share))
        return True

    def _next(self) -> tuple[int, int, Share] | None:
        if not self._turns or self._turns[0][0] > 0:
            fresh = next(self._fresh, None)
            if fresh is not None:
                return fresh
        return heapq.heappop(self._turns) if self._turns else None

    @staticmethod
    def _with_room(peers: Iterable[Peer], limit_bytes: int) -> Iterator[tuple[int, int, Share]]:
        for number, peer in enumerate(peers):
            share = Share(peer, peer.room(limit_bytes))
            if not share.full:
                yield 0, number, share
