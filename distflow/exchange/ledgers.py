"""The ledgers of one owner taken together: what to lease next, what the open step may take, who lost what."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard

from distflow.errors import ProtocolError
from distflow.exchange.ledger import Entry, Ledger
from distflow.exchange.messages import LeasePrompt, Piece
from distflow.exchange.pieces import Kept, of_lineage
from distflow.exchange.settings import LeaseSettings


def awaited(entry: Entry | None) -> TypeGuard[Entry]:
    """Is this a leased position whose result has not arrived?"""
    return entry is not None and entry.state in ("open", "back")


class LedgerSet:
    """Ledgers `indices` of `owner`, sharing its memory evenly. Raises UserError when that is too small."""

    def __init__(
        self, owner: str, indices: Sequence[int], settings: LeaseSettings, prompt_at: Callable[[int], LeasePrompt]
    ) -> None:
        assert indices, f"owner {owner} owns no ledger"
        memory = settings.ledger_memory(len(indices))
        self._owner = owner
        self._settings = settings
        self._ledgers = {j: Ledger(j, settings, memory, prompt_at) for j in sorted(indices)}

    def __iter__(self) -> Iterator[Ledger]:
        return iter(self._ledgers.values())

    def place(self, position: int) -> tuple[Ledger, int]:
        """Ledger and k of a position. Raises ProtocolError if the ledger is another owner's."""
        index = self._settings.ledger_of(position)
        if index not in self._ledgers:
            raise ProtocolError(
                f"owner {self._owner} was sent position {position} of ledger {index}, "
                f"but owns the ledgers {sorted(self._ledgers)}"
            )
        return self._ledgers[index], self._settings.k_of(position)

    def entry(self, position: int) -> Entry | None:
        """The record of a position, None before it is leased and after its step (or its drop)."""
        ledger, k = self.place(position)
        return ledger.entries.get(k)

    def fitting(self, positions: Iterable[int], limit_bytes: int) -> tuple[list[Entry], list[int]]:
        """The leases that a grant of so many bytes has room for (the last may be larger), and the other positions."""
        entries: list[Entry] = []
        rest: list[int] = []
        for position in positions:
            entry = self.entry(position)
            if limit_bytes <= 0:
                rest.append(position)
            elif entry is not None:
                entries.append(entry)
                limit_bytes -= entry.grant_bytes
        return entries, rest

    def draw(self, term: int, now: float) -> Iterator[Entry]:
        """Lease positions, lowest k first over all ledgers, each when it is asked for."""
        heap = [(k, j) for j, ledger in self._ledgers.items() if (k := ledger.leasable()) is not None]
        heapq.heapify(heap)
        while heap:
            ledger = self._ledgers[heap[0][1]]
            yield ledger.lease(term, now)
            k = ledger.leasable()
            if k is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (k, ledger.index))

    def reach(self, positions: Iterable[int], term: int, now: float) -> None:
        """Make leasable, as far as it may be leased now, what somebody has begun before this term."""
        for position in positions:
            ledger, k = self.place(position)
            ledger.reach(k, term, now)

    def release(self, position: int, worker: str) -> None:
        """A worker lost this lease; if nobody else holds it, it will be leased again."""
        ledger, k = self.place(position)
        entry = ledger.entries.get(k)
        if entry is None or entry.holders.pop(worker, None) is None:
            return
        if not entry.holders and entry.state == "open":
            ledger.give_back(k)

    def keep(
        self, pieces: Iterable[Piece], worker: str, incarnation: int, begins: Mapping[int, int]
    ) -> tuple[int, ...]:
        """Add to what is known of running samples; returns the positions of which something in between is missing.

        Only from workers that hold the lease, and only tokens that may be trained on under it.
        """
        gaps: dict[int, None] = {}
        for piece in pieces if self._settings.partial_rollouts else ():
            entry = self.entry(piece.position)
            if not awaited(entry) or worker not in entry.holders or piece.sample >= self._settings.samples_per_prompt:
                continue
            if not of_lineage(piece, entry.lease.term, begins, entry.lease.min_version):
                continue
            entry.kept = entry.kept or Kept()
            if entry.kept.add(piece, (worker, incarnation), entry.reserved) == "gap":
                gaps[piece.position] = None
        return tuple(gaps)

    def consumable(self) -> list[int]:
        """Positions the open step may take now, ordered by (k, ledger)."""
        ready = sorted((k, j) for j, ledger in self._ledgers.items() for k in ledger.ready)
        return [self._settings.position_of(j, k) for k, j in ready]

    def complete(self) -> bool:
        """All b groups of every ledger are taken for the open step."""
        return all(ledger.complete for ledger in self)

    def set_complete(self) -> bool:
        """All b groups of every ledger have arrived (or are taken already) for the open step."""
        return all(ledger.set_complete for ledger in self)

    def advance(self) -> None:
        """Open the next step in every ledger."""
        for ledger in self:
            ledger.advance()

    def open_entries(self) -> Iterator[Entry]:
        """Leased positions that somebody holds."""
        return (entry for ledger in self for entry in ledger.entries.values() if entry.state == "open")

    def unfinished(self) -> list[Entry]:
        """Leased positions that have not arrived, by (k, ledger)."""
        found = [entry for ledger in self for entry in ledger.entries.values() if awaited(entry)]
        return sorted(found, key=lambda entry: (entry.lease.k, entry.lease.ledger))
