"""The ledgers of one owner together: what to lease next, what the open step may take, which leases are lost.

Their part of a checkpoint is a snapshot of plain JSON values: one frontier and its exceptions a ledger. A snapshot
belongs to weights of version v. All positions below a ledger's frontier are terminal (trained by a step < v, or
dropped), and so are the listed exceptions (dropped, or trained in free order); everything else is leased again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from distflow.errors import ProtocolError, UserError
from distflow.exchange.entry import Entry
from distflow.exchange.lease_order import LeaseOrder
from distflow.exchange.lease_settings import LeaseSettings
from distflow.exchange.ledger import Judged, Ledger, RefillsExhausted
from distflow.exchange.messages import Piece, Progress, PromptAt, Result
from distflow.exchange.partials import Kept, of_lineage


def awaited(entry: Entry | None) -> TypeGuard[Entry]:
    """Whether this is a leased position whose result has not arrived."""
    return entry is not None and entry.state in ("open", "back")


class LedgerSet:
    """Ledgers `indices` of `owner`, which share its memory evenly. Raises UserError if that is too small.

    Every change of a ledger is made here and noted for that ledger, so that what is needed with every message does not
    have to look at all of them.
    """

    def __init__(self, owner: str, indices: Sequence[int], settings: LeaseSettings, prompt_at: PromptAt) -> None:
        assert indices, f"owner {owner} owns no ledger"
        memory = settings.ledger_memory(len(indices))
        self.order = None if settings.schedule == "fifo" else LeaseOrder(settings)
        """What is leased next, where that is not the lowest position."""
        self._owner = owner
        self._settings = settings
        self._ledgers = {j: Ledger(j, settings, memory, prompt_at) for j in sorted(indices)}
        self._ready: set[int] = set()
        """Ledgers with groups that the open step may take now."""
        self._arriving: set[int] = set()
        """Ledgers whose set for the open step has not arrived."""
        self._open: set[int] = set()
        """Ledgers whose set for the open step is not taken."""
        self._changed: set[int] = set()
        """Ledgers whose entry in `_next` may be outdated."""
        self._next: dict[int, int] = {}
        """The lowest k that each ledger may lease; no entry if it may not lease any."""
        self._heap: list[tuple[int, int]] = []
        """All (k, ledger) in `_next`, and some outdated ones."""
        self._unread: set[int] = set()
        """Positions for `reach` whose prompts have not been read."""
        self._note_all()

    def __iter__(self) -> Iterator[Ledger]:
        return iter(self._ledgers.values())

    def restore(self, read: Callable[[Iterable[Ledger]], int]) -> int:
        """Restore the ledgers with `read` and return its result."""
        version = read(self)
        self._note_all()
        return version

    def so_far(self) -> tuple[int, int, int]:
        """Return how far the open step has come: groups here, all groups of it, and tokens of groups begun."""
        here, of, tokens = (sum(each) for each in zip(*(ledger.so_far() for ledger in self), strict=True))
        return here, of, tokens

    def place(self, position: int) -> tuple[Ledger, int]:
        """Ledger and k of a position. Raises ProtocolError for another owner's ledger."""
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
        """The leases that fit into a grant of `limit_bytes` (the last may exceed it), and the other positions."""
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

    def draw(self, term: int, now: float, worker: str, held: int) -> Entry | None:
        """Lease a position to a worker that holds so many: the lowest k over all ledgers, or what the order says."""
        if self.order is not None:
            for j in self._changed:
                self.order.open(self._ledgers[j].unfold(term, now))
        # With an order, only what was given back is left to the ledgers.
        ledger = self._first()
        if ledger is not None:
            entry = ledger.lease(term, now)
        elif self.order is not None and (found := self.order.pick(worker, held, now)) is not None:
            ledger = self._ledgers[found.lease.ledger]
            entry = ledger.lease_known(found.lease.k, now)
        else:
            return None
        self._note(ledger)
        return entry

    def keeps_back(self) -> bool:
        """Whether some worker may lease something although another one may not."""
        return self.order is not None and self.order.keeps_back()

    def _first(self) -> Ledger | None:
        """The ledger with the lowest k to lease."""
        for j in self._changed:
            k = self._ledgers[j].leasable()
            if k is None:
                self._next.pop(j, None)
            elif self._next.get(j) != k:
                self._next[j] = k
                heapq.heappush(self._heap, (k, j))
        self._changed.clear()
        while self._heap:
            k, j = self._heap[0]
            if self._next.get(j) == k:
                return self._ledgers[j]
            heapq.heappop(self._heap)
        return None

    def reach(self, positions: Iterable[int], term: int, now: float) -> bool:
        """Make positions that were begun before this term leasable, as far as they may be leased now.

        False: some prompts must be read first; these positions follow with `prompts_arrived`.
        """
        unread = []
        for position in positions:
            ledger, k = self.place(position)
            if not ledger.reach(k, term, now):
                unread.append(position)
            self._note(ledger)
        self._unread.update(unread)
        return not unread

    def prompts_arrived(self, term: int, now: float) -> None:
        """Check again what may be leased; prompts that are still missing are requested."""
        unread, self._unread = self._unread, set()
        self.reach(unread, term, now)
        self._changed.update(ledger.index for ledger in self if not ledger.unread)

    def release(self, position: int, worker: str) -> Entry | None:
        """A worker lost this lease; without another holder it will be leased again. Returns the entry it held."""
        ledger, k = self.place(position)
        entry = ledger.entries.get(k)
        if entry is None or entry.holders.pop(worker, None) is None:
            return None
        if not entry.holders and entry.state == "open":
            ledger.give_back(k)
            self._note(ledger)
        return entry

    def reported(self, progress: Progress, now: float) -> None:
        """A worker says how far its groups are."""
        if self.order is not None:
            self.order.reported(progress, now)

    def left(self, worker: str) -> None:
        """A worker is lost, or has left."""
        if self.order is not None:
            self.order.left(worker)

    def adopt(self, entry: Entry, worker: str, incarnation: int) -> None:
        """A worker reports that it holds this position: it need not be leased again."""
        entry.state = "open"
        entry.holders[worker] = incarnation
        self._note(self._ledgers[entry.lease.ledger])

    def settle(self, result: Result) -> RefillsExhausted | None:
        """The first copy of a leased position arrived, or it is dropped. Returns an error after too many drops."""
        ledger, k = self.place(result.position)
        entry = ledger.entries[k]
        entry.tokens = max(entry.tokens, result.tokens)
        if self.order is not None:
            self.order.arrived(entry, result)
        if result.dropped:
            ledger.drop(k, result.dropped, result.scores)
        else:
            assert result.oldest is not None, f"result of position {result.position} names no version"
            ledger.arrive(k, result.nbytes, result.oldest, result.worker)
        self._note(ledger)
        return ledger.exhausted() if result.dropped else None

    def take(self, position: int, *, keep: bool = False) -> Entry:
        """Hand a position named by `consumable` to the open training step. Returns its record."""
        ledger, k = self.place(position)
        entry = ledger.take(k, keep=keep)
        if self.order is not None:
            self.order.taken(entry)
        self._note(ledger)
        return entry

    def keep(
        self, pieces: Iterable[Piece], worker: str, incarnation: int, begins: Mapping[int, int]
    ) -> tuple[int, ...]:
        """Keep pieces of running samples; returns the positions with a gap.

        Accepts them only from holders of the lease, and only tokens that may be trained on under it.
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
        ready = sorted((k, j) for j in self._ready for k in self._ledgers[j].ready)
        return [self._settings.position_of(j, k) for k, j in ready]

    def complete(self) -> bool:
        """Whether all b groups of every ledger are taken for the open step."""
        return not self._open

    def set_complete(self) -> bool:
        """Whether all b groups of every ledger have arrived (or are taken) for the open step."""
        return not self._arriving

    def advance(self) -> None:
        """Open the next step in every ledger."""
        for ledger in self:
            ledger.advance()
        self._note_all()

    def judged(self) -> list[Judged]:
        """The dropped groups among those of the open step."""
        return [judged for ledger in self for judged in ledger.judged()]

    @property
    def passed_over(self) -> int:
        """Positions that were not leased since their prompts were not drawn."""
        return sum(ledger.passed_over for ledger in self)

    def unfinished(self) -> list[Entry]:
        """Leased positions that have not arrived, by (k, ledger)."""
        entries = [entry for ledger in self for entry in ledger.entries.values()]
        found = [entry for entry in entries if awaited(entry) and entry.lease.attempt]
        return sorted(found, key=lambda entry: (entry.lease.k, entry.lease.ledger))

    def _note(self, ledger: Ledger) -> None:
        """Record that this ledger has changed."""
        _keep(self._ready, ledger.index, bool(ledger.ready))
        _keep(self._arriving, ledger.index, not ledger.set_complete)
        _keep(self._open, ledger.index, not ledger.complete)
        self._changed.add(ledger.index)

    def _note_all(self) -> None:
        for ledger in self:
            self._note(ledger)
        self._heap = [(k, j) for j, k in self._next.items()]
        heapq.heapify(self._heap)


def _keep(indices: set[int], index: int, member: bool) -> None:
    if member:
        indices.add(index)
    else:
        indices.discard(index)


def snapshot_at(version: int, settings: LeaseSettings) -> dict[str, object]:
    """The state of all ledgers when a step begins before which nothing was dropped."""
    frontier = version * settings.groups_per_ledger
    ledgers = [{"ledger": j, "frontier": frontier, "dropped": [], "trained": []} for j in range(settings.ledgers)]
    return _snapshot(version, settings, ledgers)


def write_snapshot(version: int, settings: LeaseSettings, ledgers: Iterable[Ledger]) -> dict[str, object]:
    """The state of these ledgers."""
    return _snapshot(version, settings, [ledger.snapshot() for ledger in ledgers])


def _snapshot(version: int, settings: LeaseSettings, ledgers: Sequence[Mapping[str, object]]) -> dict[str, object]:
    return {
        "version": version,
        "batch_ledgers": settings.ledgers,
        "groups_per_ledger": settings.groups_per_ledger,
        "ledgers": ledgers,
    }


def read_snapshot(snapshot: Mapping[str, Any], settings: LeaseSettings, ledgers: Iterable[Ledger]) -> int:
    """Restore new ledgers from a snapshot, which may contain more ledgers than these. Returns its version.

    Raises UserError for a snapshot with other batch settings, or without one of the ledgers.
    """
    for key, ours in (("batch_ledgers", settings.ledgers), ("groups_per_ledger", settings.groups_per_ledger)):
        if snapshot[key] != ours:
            raise UserError(
                f"checkpoint of training step {snapshot['version']}: {key} was {snapshot[key]}, the recipe now gives "
                f"{ours}: resume with the batch.prompts and batch.ledgers the run began with"
            )
    version = int(snapshot["version"])
    saved: Mapping[int, Mapping[str, Any]] = {int(part["ledger"]): part for part in snapshot["ledgers"]}
    for ledger in ledgers:
        if ledger.index not in saved:
            raise UserError(
                f"checkpoint of training step {version}: ledger {ledger.index} is missing, has {sorted(saved)}"
            )
        part = saved[ledger.index]
        exceptions = _exceptions(part["dropped"]), map(int, part["trained"]), part.get("judged", ())
        ledger.restore(version, int(part["frontier"]), *exceptions)
    return version


def merge_snapshots(parts: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Merge the snapshots of all owners, so that any number of owners can begin from it."""
    assert parts, "nothing to merge"
    first = parts[0]
    for part in parts:
        assert part["version"] == first["version"], f"versions {part['version']} and {first['version']} do not mix"
    merged = sorted((ledger for part in parts for ledger in part["ledgers"]), key=lambda ledger: int(ledger["ledger"]))
    return {**first, "ledgers": merged}


def _exceptions(listed: Iterable[Sequence[Any]]) -> list[tuple[int, str]]:
    return [(int(k), str(reason)) for k, reason in listed]
