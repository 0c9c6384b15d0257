"""The reports that one agent has, and which of them it lists to others: the newest first.

By a checksum two agents tell whether they have the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from distflow.comm.beats import UNSEEN
from distflow.comm.probes import RUMOUR_BEATS
from distflow.data.decoding import MOST

MOST_NEWS = 128
"""In one beat, unless the receiver has another checksum."""
WIDER = 4
"""While checksums differ, a beat lists so many times the hosts that the one before listed."""


class Reported(Protocol):
    """What a host says about itself; of two, the one with the higher serial is newer."""

    @property
    def host(self) -> int:
        """Its number."""

    @property
    def serial(self) -> int:
        """Rises with every change."""

    @property
    def gone(self) -> bool:
        """It is the last one."""


R = TypeVar("R", bound=Reported)


class News(Generic[R]):
    """Reports by host, in the order in which they came. `beat`: number of our own beat, for how old they are.

    `to_wire`: makes a report plain data.
    """

    def __init__(self, own: R, to_wire: Callable[[R], dict[str, Any]]) -> None:
        self.reports: dict[int, R] = {own.host: own}
        self.checksum = _mixed(own.host, own.serial)
        self.gone = 0
        """Hosts whose agents have exited, as bits."""
        self._came: dict[int, int] = {own.host: 0}
        """By host, the last one that is new last: the number of our beat at that time."""
        self._windows: dict[int, tuple[int, int]] = {}
        """By agent with another checksum: how many hosts we list to it, and since which of our beats."""
        self._fetched: dict[int, tuple[int, int]] = {}
        """By host: the serial of the report that we have said to lack, and with which of our beats."""
        self._wire: dict[int, tuple[R, dict[str, Any]]] = {}
        """Reports as plain data, converted once."""
        self._to_wire = to_wire

    def serial(self, host: int) -> int:
        """Of the newest known report of a host."""
        return self.reports[host].serial if host in self.reports else UNSEEN

    def has_gone(self, host: int) -> bool:
        """Whether the agent of a host has exited."""
        return host in self.reports and self.reports[host].gone

    def take(self, report: R, beat: int) -> None:
        """Replace a report by a newer one."""
        before = self.serial(report.host)
        if before != UNSEEN:
            self.checksum ^= _mixed(report.host, before)
        self.checksum ^= _mixed(report.host, report.serial)
        self.reports[report.host] = report
        if report.gone:
            self.gone |= 1 << report.host
        self._came.pop(report.host, None)
        self._came[report.host] = beat

    def repeat(self, host: int, beat: int) -> bool:
        """List a host as if its report were new, since its pulse is; returns whether it was not listed just now."""
        if host in self._came and beat - self._came[host] < 2:
            return False
        self._came.pop(host, None)
        self._came[host] = beat
        return True

    def newest(self, peer: int, beat: int) -> Iterator[int]:
        """The hosts to list to an agent: those with news, and the more the longer it has had another checksum."""
        window, _ = self._windows.get(peer, (0, 0))
        for number, host in enumerate(reversed(self._came)):
            is_new = number < MOST_NEWS and beat - self._came[host] <= RUMOUR_BEATS
            if number >= window and not is_new:
                return
            yield host

    def compare(self, peer: int, checksum: int, beat: int) -> None:
        """Take the checksum of another agent: the longer it is another one, the more hosts are listed to it."""
        if checksum == self.checksum:
            self._windows.pop(peer, None)
            return
        window, at = self._windows.get(peer, (MOST_NEWS // WIDER, UNSEEN))
        if beat > at:
            self._windows[peer] = min(WIDER * window, len(self._came)), beat

    def fetches(self, host: int, serial: int, beat: int) -> bool:
        """Whether to say that we lack a report: not to everybody who lists it while it may be under way."""
        known, at = self._fetched.get(host, (UNSEEN, UNSEEN))
        if known >= serial and beat == at:
            return False
        self._fetched[host] = serial, beat
        return True

    def as_wire(self, host: int) -> dict[str, Any]:
        """A report as plain data."""
        report, made = self.reports[host], self._wire.get(host)
        if made is None or made[0] is not report:
            made = self._wire[host] = (report, self._to_wire(report))
        return made[1]


def _mixed(host: int, serial: int) -> int:
    """A number that looks random, to be combined by exclusive or (the finalizer of SplitMix64, cut to what is sent)."""
    mixed = (serial * 0x9E3779B97F4A7C15 + (host + 1) * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) % MOST
