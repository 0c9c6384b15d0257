"""An owner's table of its holders: their grants, the leases they hold, and their parked asks.

A grant is *unconfirmed* until a report names its number as seen (or a result for each of its leases has arrived). An
unconfirmed grant is sent again. A lease of a *confirmed* grant that the holder does not list was lost.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from distflow.exchange.entry import Entry
from distflow.exchange.messages import Report


@dataclass(slots=True)
class SentGrant:
    """A grant that may still be on its way."""

    ask: int
    positions: tuple[int, ...]
    nbytes: int
    sent_at: float


@dataclass(slots=True)
class Peer:
    """One incarnation of one worker, as seen by one owner."""

    name: str
    incarnation: int
    heard_at: float
    report: int = -1
    """Number of the newest report read."""
    ask: int = 0
    """Number of the newest ask read."""
    parked: int = 0
    """Groups wanted by its parked ask; 0: nothing is parked."""
    idle: bool = False
    """The parked ask said that the worker is nearly idle."""
    granted_at: float = 0.0
    """When it was last sent a grant."""
    contact: float = 0.0
    """When it last sent a report or was sent a grant, in seconds of listening."""
    grants: int = 0
    """Number of the last grant sent."""
    unconfirmed: dict[int, SentGrant] = field(default_factory=dict)
    granted_by: dict[int, int] = field(default_factory=dict)
    """The positions it holds, each with the number of its grant."""
    closed_seen: int = -1

    def grant(self, entries: Iterable[Entry], now: float) -> int:
        """Record a grant that answers its ask; returns the grant's number."""
        self.grants += 1
        self.granted_at = now
        positions = tuple([entry.lease.position for entry in entries])
        nbytes = sum(entry.grant_bytes for entry in entries)
        self.unconfirmed[self.grants] = SentGrant(self.ask, positions, nbytes, now)
        self.granted_by.update(dict.fromkeys(positions, self.grants))
        return self.grants

    def room(self, limit_bytes: int) -> int:
        """Bytes of leases that may be granted now, less those that may still be under way."""
        return limit_bytes - sum(sent.nbytes for sent in self.unconfirmed.values())

    def silent(self, before: float) -> bool:
        """Whether it holds leases, so that it should report, and has not been heard from since `before`."""
        return bool(self.granted_by) and max(self.heard_at, self.granted_at) <= before

    def still_granted(self, number: int) -> list[int]:
        """Positions of an unconfirmed grant that this worker should still hold."""
        return [p for p in self.unconfirmed[number].positions if self.granted_by.get(p, 0) == number]

    def forget(self, position: int) -> None:
        """The position is settled: the worker need not report it any more."""
        self.granted_by.pop(position, None)

    def confirm(self, report: Report) -> list[int]:
        """Read a report: grants up to `grant_seen` have arrived. Returns the positions that were lost."""
        for number in [number for number in self.unconfirmed if number <= report.grant_seen]:
            del self.unconfirmed[number]
        held = set(report.held)
        return [p for p, number in self.granted_by.items() if number <= report.grant_seen and p not in held]

    def adopt(self, position: int, report: Report) -> None:
        """The worker reports that it holds this position, which was considered lost."""
        self.granted_by[position] = report.grant_seen

    def unconfirmed_answer(self, ask: int) -> list[int]:
        """Numbers of unconfirmed grants that answered this ask and still have leases to deliver."""
        return [n for n, sent in self.unconfirmed.items() if sent.ask == ask and self.still_granted(n)]


@dataclass(frozen=True, slots=True)
class HolderState:
    """An owner's view of one worker."""

    name: str
    incarnation: int
    heard_at: float
    """When its newest ask or progress report arrived."""
    held: int
    """Number of leases of this owner that it holds."""
    parked: bool
    """Whether it has a parked ask here."""

    @classmethod
    def of(cls, peer: Peer) -> HolderState:
        """Describe one holder."""
        return cls(peer.name, peer.incarnation, peer.heard_at, len(peer.granted_by), peer.parked > 0)


@dataclass(slots=True)
class PendingGrant:
    """Leases to be granted to a worker: at most as many as it asked for, until its room is used up."""

    peer: Peer
    room: int
    entries: list[Entry] = field(default_factory=list)

    @property
    def held(self) -> int:
        """How many groups of this owner the worker will hold."""
        return len(self.peer.granted_by) + len(self.entries)

    @property
    def full(self) -> bool:
        """Whether nothing more can be added."""
        return self.room <= 0 or len(self.entries) >= self.peer.parked

    def add(self, entry: Entry) -> None:
        """Add an entry; the last one may exceed the remaining room."""
        self.entries.append(entry)
        self.room -= entry.grant_bytes


Draw = Callable[[str, int], Entry | None]
"""Leases something to a worker that holds so many groups; None: there is nothing for it."""
_LONGEST_TICK_S = 2.0
"""Time that counts as silence between two looks: had we been away for longer, it was us who did not listen."""


class Peers:
    """All holders known to an owner, with parked asks in order of arrival and holders ordered by silence.

    The cost of operations needed with every message does not grow with their number.
    """

    def __init__(self) -> None:
        self.wanted = 0
        """Groups wanted by all parked asks together."""
        self._peers: dict[str, Peer] = {}
        self._least_incarnation: dict[str, int] = {}
        self._parked: OrderedDict[str, Peer] = OrderedDict()
        self._idle: OrderedDict[str, Peer] = OrderedDict()
        """Workers with parked asks that are nearly idle."""
        self._holding: OrderedDict[str, Peer] = OrderedDict()
        """Workers that hold leases, and some that did, longest silence first."""
        self._sent: deque[tuple[float, Peer, int]] = deque()
        """Grants that may be unconfirmed, with the time of their last copy, in the order of that time."""
        self._looked_at: float | None = None
        self._away_s = 0.0
        """Seconds in which this owner did not listen."""

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def __len__(self) -> int:
        return len(self._peers)

    def __getitem__(self, worker: str) -> Peer:
        return self._peers[worker]

    @property
    def parked(self) -> Iterable[Peer]:
        """Workers with parked asks, in order of arrival."""
        return self._parked.values()

    @property
    def idle(self) -> Iterable[Peer]:
        """Those of them that are nearly idle."""
        return self._idle.values()

    def find(self, worker: str, incarnation: int) -> Peer | None:
        """The record of this incarnation, if it is known and not lost."""
        peer = self._peers.get(worker)
        return peer if peer is not None and peer.incarnation == incarnation else None

    def replaces(self, report: Report) -> bool:
        """Whether this report is from a newer incarnation than the one known."""
        peer = self._peers.get(report.worker)
        return peer is not None and report.incarnation > peer.incarnation

    def admit(self, report: Report, now: float) -> Peer | None:
        """The sender's record. None: the report is older than one already read, or of an incarnation that is gone."""
        if report.incarnation < self._least_incarnation.get(report.worker, 0):
            return None
        if report.worker not in self._peers:
            self._peers[report.worker] = Peer(report.worker, report.incarnation, now)
        peer = self._peers[report.worker]
        if report.incarnation < peer.incarnation or report.number <= peer.report:
            return None
        peer.report, peer.heard_at, peer.contact = report.number, now, now - self._away_s
        if peer.name in self._holding:
            self._holding.move_to_end(peer.name)
        return peer

    def remove(self, worker: str, incarnation: int | None) -> Peer | None:
        """Never admit this incarnation (None: the one known) or an older one again. Returns the record it had."""
        peer = self._peers.get(worker)
        if incarnation is None:
            if peer is None:
                return None
            incarnation = peer.incarnation
        self._least_incarnation[worker] = max(self._least_incarnation.get(worker, 0), incarnation + 1)
        if peer is None or peer.incarnation > incarnation:
            return None
        self.unpark(peer)
        self._holding.pop(worker, None)
        return self._peers.pop(worker)

    def forget(self, worker: str, position: int) -> None:
        """The position is settled: this worker need not report it."""
        self._peers[worker].forget(position)

    def grant(self, peer: Peer, entries: Sequence[Entry], now: float) -> int:
        """Record the grant of these entries in answer to its ask; returns the grant's number."""
        self.unpark(peer)
        number = peer.grant(entries, now)
        self._sent.append((now, peer, number))
        self._hold(peer)
        peer.contact = now - self._away_s
        return number

    def grant_again(self, peer: Peer, number: int, now: float) -> None:
        """Record that another copy of a grant is sent."""
        peer.unconfirmed[number].sent_at = now
        self._sent.append((now, peer, number))

    def overdue(self, before: float) -> Iterator[tuple[Peer, int]]:
        """Unconfirmed grants whose last copy was sent before this time and that still have leases to deliver."""
        while self._sent and self._sent[0][0] <= before:
            sent_at, peer, number = self._sent.popleft()
            gone = self._peers.get(peer.name) is not peer or number not in peer.unconfirmed
            if gone or peer.unconfirmed[number].sent_at != sent_at:
                continue
            if peer.still_granted(number):
                yield peer, number
            else:
                del peer.unconfirmed[number]

    def adopt(self, peer: Peer, position: int, report: Report) -> None:
        """A worker reports that it holds this position, which was considered lost."""
        peer.adopt(position, report)
        self._hold(peer)

    def silent(self, before: float) -> list[Peer]:
        """Workers that hold leases, so that they should report, and have been silent since `before`."""
        return self._longest_unheard(lambda peer: peer.silent(before))

    def lapsed(self, limit_s: float, now: float) -> list[Peer]:
        """Workers that hold leases and were silent for `limit_s` while this owner listened. Call it with every tick."""
        if self._looked_at is not None:
            self._away_s += max(0.0, now - self._looked_at - _LONGEST_TICK_S)
        self._looked_at = now
        return self._longest_unheard(lambda peer: now - self._away_s - peer.contact >= limit_s)

    def _longest_unheard(self, counts: Callable[[Peer], bool]) -> list[Peer]:
        found: list[Peer] = []
        done: list[str] = []
        for peer in self._holding.values():
            if not peer.granted_by:
                done.append(peer.name)
            elif counts(peer):
                found.append(peer)
            else:
                break
        for name in done:
            del self._holding[name]
        return found

    def park(self, peer: Peer, groups: int, *, idle: bool) -> None:
        """Park an ask for `groups`, behind those that are parked already."""
        self.unpark(peer)
        peer.parked, peer.idle = groups, idle
        self.wanted += groups
        self._parked[peer.name] = peer
        if idle:
            self._idle[peer.name] = peer

    def grow(self, worker: str, incarnation: int, groups: int) -> None:
        """The worker has room for more groups since it parked its ask; this saves a message."""
        peer = self.find(worker, incarnation)
        if peer is not None and 0 < peer.parked < groups:
            self.wanted += groups - peer.parked
            peer.parked = groups

    def unpark(self, peer: Peer) -> None:
        """Its ask is answered or withdrawn."""
        self.wanted -= peer.parked
        peer.parked, peer.idle = 0, False
        self._parked.pop(peer.name, None)
        self._idle.pop(peer.name, None)

    def deal(self, draw: Draw, keeps_back: Callable[[], bool], limit_bytes: int) -> list[PendingGrant]:
        """Distribute entries evenly among the parked asks, one to each in turn, up to their wants and room.

        Draws no more than it distributes. Where nothing is drawn for one worker, and nothing `keeps_back` what others
        may get, there is nothing more.
        """
        shares: list[PendingGrant] = []
        turn: Iterable[PendingGrant] = (PendingGrant(peer, peer.room(limit_bytes)) for peer in self._parked.values())
        while True:
            served: list[PendingGrant] = []
            for pending in turn:
                entry = None if pending.full else draw(pending.peer.name, pending.held)
                if entry is not None:
                    if not pending.entries:
                        shares.append(pending)
                    pending.add(entry)
                    served.append(pending)
                elif not pending.full and not keeps_back():
                    return shares
            if not served:
                return shares
            turn = served

    def _hold(self, peer: Peer) -> None:
        self._holding[peer.name] = peer
        self._holding.move_to_end(peer.name)
