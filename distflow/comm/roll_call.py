"""Roll calls: how an agent of many knows that most of them hear it, at a cost that hardly grows with their number.

Agents of a large mesh talk to few others, so no beat of most hosts ever arrives directly. But the decision which part
of a run may go on (`term_vote.py`) needs a positive proof of whom we hear and who hears us. So the agents call the
roll, one roll after another: each enters its own host in the list, and lists are merged whenever two agents talk, which
fills them in a few seconds. An agent whose list is complete (all hosts that are not doubted) *agrees*: it enters itself
in a second list, and its copy of the first into the intersection of all those that agreed.

If host A finds itself in the intersection, all hosts that agreed have heard what A said in this roll. So A knows, of
each of them, a time at which it spoke and was heard, as it does from a beat that confirms its pulse.

Beside it each agent that agrees enters a checksum of the reports that it has. While these are equal, all of them have
the same reports.

A list is one bit a host. Example with four hosts, as seen by host 0: Roll(7, present=0b1111, agreed=0b0110,
common=0b1111): hosts 1 and 2 have heard 0 since 0 entered roll 7.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec

from distflow.data.decoding import Row, Whole, decoder
from distflow.errors import ProtocolError

LEAST_S, DOUBLING_S = 2.0, 0.5
"""How long a roll is called: lists take the longer to fill the more hosts there are, by their logarithm."""
PROVES_AFTER = 2
"""For so many rolls the agent that follows another one of its host takes no confirmation for one of its own."""
MOST_BYTES = (1 << 16) // 8
"""Of a list: one bit for each host that there can be."""
MIXED = 0
"""In place of the checksum, once two were different."""


class ToldRoll(Row, frozen=True):
    """A roll as it travels."""

    number: Whole
    present: Annotated[bytes, msgspec.Meta(max_length=2 * MOST_BYTES)]
    agreed: Annotated[bytes, msgspec.Meta(max_length=2 * MOST_BYTES)]
    common: Annotated[bytes, msgspec.Meta(max_length=2 * MOST_BYTES)]
    checksum: Whole


def bits(hosts: int) -> Iterator[int]:
    """The numbers of the hosts in a list."""
    while hosts:
        lowest = hosts & -hosts
        yield lowest.bit_length() - 1
        hosts ^= lowest


def pack(hosts: int) -> bytes:
    """A list for the wire: those that are nearly full or nearly empty become short."""
    return zlib.compress(hosts.to_bytes((hosts.bit_length() + 7) // 8, "little"), 1)


@decoder
def unpack(packed: bytes) -> int:
    """The inverse; raises ProtocolError for what is no list."""
    opened = zlib.decompressobj()
    found = opened.decompress(packed, MOST_BYTES + 1)
    if not opened.eof or len(found) > MOST_BYTES:
        raise ProtocolError("malformed beat: not a list of hosts, or one of more than there can be")
    return int.from_bytes(found, "little")


@dataclass(frozen=True, slots=True)
class Roll:
    """A roll as another agent knows it: lists of hosts as bits."""

    number: int
    present: int
    agreed: int
    common: int
    checksum: int


def roll_from(told: ToldRoll) -> Roll:
    """Unpack; raises ProtocolError."""
    return Roll(told.number, unpack(told.present), unpack(told.agreed), unpack(told.common), told.checksum)


class RollCall:
    """The roll as one agent knows it. Times are those of a clock that stands still while the agent does not run."""

    def __init__(self, host: int) -> None:
        self.number = 0
        self._me = 1 << host
        self._entered_at = 0.0
        self._present = self._me
        self._agreed = 0
        self._common = 0
        self._checksum = MIXED
        self._proves_from = 0.0
        self._follows = False
        """We follow another agent of this host, and no roll has proven yet that anybody else hears us."""
        self._seen: list[tuple[int, float]] = []
        """Hosts that have heard us in a roll before this one, as bits, and when we entered it: each host once, by the
        last such roll, and the last roll first. While all hear us it is one entry, however many there are."""
        self._own = (MIXED, -1)
        """The checksum with which we agreed, and the serial of our own report then."""
        self._informed = (-1, 0)
        """A serial of our report, and the hosts that had it in former rolls."""
        self._absent = 0
        """Hosts that were not in the roll before; a bit more than there are hosts in none."""
        self._missing = 0
        self._packed: dict[int, bytes] = {}
        """The lists as they travel, converted once."""

    @staticmethod
    def length_s(hosts: int) -> float:
        """How long a roll of so many hosts is called."""
        return LEAST_S + DOUBLING_S * hosts.bit_length()

    def resume(self, clock: float, hosts: int) -> None:
        """We follow another agent of this host, which may have entered the rolls of the last moments: those that were
        called before we began, and those that we hear of later and did not come to one by one. What others sent before
        may have been under way for long.
        """
        self._follows, self._proves_from = True, clock + PROVES_AFTER * self.length_s(hosts)

    def call(self, clock: float, hosts: int) -> None:
        """Begin the next roll when it is time."""
        if not self.number or clock - self._entered_at >= self.length_s(hosts):
            self._enter(self.number + 1, clock, self.length_s(hosts))

    def hear(self, told: Roll, clock: float, hosts: int) -> int:
        """Merge the roll as another agent knows it; returns the hosts that are new on the list."""
        if self._follows and told.number > self.number + 1:
            self._proves_from = clock + PROVES_AFTER * self.length_s(hosts)
        if told.number > self.number:
            self._enter(told.number, clock, self.length_s(hosts))
        if told.number < self.number:
            return 0
        new = told.present & ~self._present
        self._present |= told.present
        self._merge(told.agreed, told.common, told.checksum)
        return new

    def agree(self, expected: int, checksum: int, serial: int) -> None:
        """Agree once all expected hosts are on the list. `checksum`: of all reports here; `serial`: of our own."""
        if not self._agreed & self._me and not expected & ~self._present:
            self._merge(self._me, self._present, checksum)
            self._own = checksum, serial

    def seen_at(self, host: int) -> float:
        """When we entered the last roll in which a host has heard us; 0: never."""
        if self._proven and self._agreed >> host & 1:
            return self._entered_at
        return next((at for hosts, at in self._seen if hosts >> host & 1), 0.0)

    def seen_since(self, at: float) -> int:
        """Hosts, as bits, that have heard us in a roll that we entered after this time."""
        found = self._agreed if self._proven and self._entered_at > at else 0
        for hosts, entered_at in self._seen:
            found |= hosts if entered_at > at else 0
        return found

    def has_report(self, host: int, serial: int) -> bool:
        """Whether a host is known to have our report of this serial, since it had the same reports as we."""
        return bool(self._informed_of(serial) >> host & 1)

    def _informed_of(self, serial: int) -> int:
        former = self._informed[1] if self._informed[0] == serial else 0
        return former | (self._agreed if self._own == (self._checksum, serial) else 0)

    def missing(self, known: int) -> int:
        """Those of the known hosts that have been on neither of the last two lists; each time only once."""
        found, self._missing = known & self._missing, 0
        return found

    def as_wire(self) -> list[object]:
        """As plain data."""
        lists = (self._present, self._agreed, self._common)
        self._packed = {one: self._packed[one] if one in self._packed else pack(one) for one in lists}
        return [self.number, *(self._packed[one] for one in lists), self._checksum]

    @property
    def _proven(self) -> bool:
        return bool(self._common & self._me) and self._entered_at >= self._proves_from

    def _merge(self, agreed: int, common: int, checksum: int) -> None:
        if not agreed:
            return
        if self._agreed:
            common &= self._common
            checksum = checksum if checksum == self._checksum else MIXED
        self._agreed |= agreed
        self._common, self._checksum = common, checksum

    def _enter(self, number: int, clock: float, length_s: float) -> None:
        if self._proven:
            self._follows = self._follows and self._agreed == self._me
            former = [(hosts & ~self._agreed, at) for hosts, at in self._seen]
            self._seen = [(self._agreed, self._entered_at), *(seen for seen in former if seen[0])]
        # A list that was left early, since others are further, says nothing about who is missing.
        absent = ~self._present if self.number and clock - self._entered_at >= 0.75 * length_s else 0
        self._missing, self._absent = absent & self._absent, absent
        self._informed = self._own[1], self._informed_of(self._own[1])
        self.number, self._entered_at = number, clock
        self._present, self._agreed, self._common, self._checksum = self._me, 0, 0, MIXED
        self._own = MIXED, self._own[1]
