"""How the agents' reports spread: each agent sends beats to all others, with the reports that they lack.

A beat contains, for every host, the serial of its newest known report and its last known pulse (a counter that rises
with each beat), and the reports that the receiver lacks: our own at once, those of other hosts once the receiver's
beats show that they have not reached it. So beats may be lost, duplicated or reordered; two agents that cannot reach
each other still hear of each other through a third; and a host is silent only when no agent hears its pulse any more.

Example: a worker on host 1 fails, so its report gets serial 8 and is sent to 0 and 2 at once. The one to 2 is lost. A
second later 0 and 1 send beats again: 2 has confirmed serial 7 of host 1 only, so both send it 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import structs

from distflow.data.decoding import MOST, Form, Whole, read
from distflow.launch.cluster.host_report import HostNumber, HostReport, to_wire

BEAT = "mesh.beat"
BEAT_S = 1.0
LONGEST_TICK_S = 2 * BEAT_S
"""The time between two of our own beats counts as silence up to this limit: if it was longer, it was our own agent that
was not running."""
UNSEEN = -1
STRIDE = 1 << 44
"""The next agent of a host counts from a random number less than this above the previous agent's: no two agents use the
same numbers."""
HIGHEST = MOST >> 1
"""Others cannot have higher numbers from us: we never sent any."""
PATIENT_BEATS = 2
"""An agent that was silent for more of our beats may still hear us: it is sent all that it may lack."""
REMEMBERED_PULSES = 4096
"""How many of our own pulses are remembered; a confirmation of an older one is of no use."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A message to the agent of a host."""

    host: int
    body: Mapping[str, Any]


class Gossip:
    """What one agent knows of all hosts."""

    def __init__(self, own: HostReport, others: Iterable[int], silence_s: float) -> None:
        self.host = own.host
        self.reports: dict[int, HostReport] = {own.host: own}
        self._silence_s = silence_s
        self._others: dict[int, float] = dict.fromkeys(others, 0.0)
        """Seconds of silence, by host."""
        self._pulse: dict[int, int] = {own.host: 0}
        self._seen: dict[int, dict[int, int]] = {}
        """By agent: the serials of the reports that it has, by host."""
        self._beat_at: float | None = None
        self._attentive_s = 0.0
        """Time since our first beat, without the time in which our own agent was not running."""
        self._sent: dict[int, float] = {}
        """When our last pulses were sent, on the clock of `_attentive_s`."""
        self._heard_us: dict[int, float] = {}
        """By agent: when our newest pulse that it has confirmed was sent."""
        self._lacking: dict[int, set[int]] = {host: {own.host} for host in self._others}
        """By agent: the hosts whose newest report goes into the next beat to it."""
        self._unheard_beats: dict[int, int] = {}
        """By agent: how many beats we have sent since its last one."""
        self._wire: dict[int, tuple[HostReport, dict[str, Any]]] = {}
        """Reports as plain data, converted once."""
        self.revision = 0
        """Rises with every new report and every new host."""

    @property
    def own(self) -> HostReport:
        """Our own report."""
        return self.reports[self.host]

    @property
    def others(self) -> list[int]:
        """Numbers of the other hosts, in order."""
        return sorted(self._others)

    def know(self, host: int) -> None:
        """Add a host."""
        if host != self.host and host not in self._others:
            self._others[host] = 0.0
            self._lacking[host] = self.reports.keys() - {host}
            self.revision += 1

    def resume(self, report: HostReport, first: int) -> None:
        """Continue from the last report of the previous agent; `first`: the number to count from.

        The previous agent may have sent more after that. If so, the others' beats show it, and our numbers then jump
        ahead (`hear`). Confirmations of its pulses do not count as confirmations of ours.
        """
        self._take(structs.replace(report, serial=first))
        self._pulse[self.host] = first

    def report(self, host: int) -> HostReport | None:
        """The newest report of a host, if there is one."""
        return self.reports.get(host)

    def silent(self, for_s: float | None = None) -> frozenset[int]:
        """Hosts from which no agent that we hear has heard for `for_s` seconds (default: the run's limit)."""
        limit = self._silence_s if for_s is None else for_s
        return frozenset(host for host, age in self._others.items() if age >= limit)

    def is_outnumbered(self) -> bool:
        """Whether more than half of the hosts that have not exited are silent."""
        there = [host for host in self._others if not self._has_gone(host)]
        return 2 * len(self.silent() & set(there)) > len(there) + 1

    def unheard_s(self, host: int) -> float:
        """Seconds since any agent that we hear has heard from a host, without the time in which we were not running."""
        return self._others.get(host, 0.0)

    def unseen_s(self, host: int, now: float) -> float:
        """Seconds since our last pulse that the agent of a host has confirmed (at first: since our first pulse).

        The time in which our own agent was not running does not count, since answers were not read then.
        """
        return self._attentive_s + self._passed(now) - self._heard_us.get(host, 0.0)

    def seen_by(self, host: int) -> bool:
        """Whether another agent has our newest report."""
        return self._serial_at(host, self.host) >= self.own.serial

    def publish(self, report: HostReport) -> list[Beat]:
        """Replace our own report; returns the beats to send at once if it is new."""
        if structs.replace(report, serial=self.own.serial) == self.own:
            return []
        self._take(structs.replace(report, serial=self.own.serial + 1))
        for lacking in self._lacking.values():
            lacking.add(self.host)
        return self._beats()

    def tick(self, now: float) -> list[Beat]:
        """The regular beats, when they are due."""
        if self._beat_at is not None and now - self._beat_at < BEAT_S:
            return []
        passed = self._passed(now)
        self._beat_at = now
        self._attentive_s += passed
        for host in self._others:
            self._others[host] += passed
            self._unheard_beats[host] = self._unheard_beats.get(host, 0) + 1
            if self._unheard_beats[host] > PATIENT_BEATS:
                self._lacking[host] = self._unknown_to(host)
        self._pulse[self.host] += 1
        self._sent[self._pulse[self.host]] = self._attentive_s
        while len(self._sent) > REMEMBERED_PULSES:
            del self._sent[next(iter(self._sent))]
        return self._beats()

    def hear(self, body: Mapping[str, Any]) -> bool:
        """Handle a beat; returns whether it contained a new report. Raises ProtocolError if it is malformed."""
        beat = read(body, _Heard, "beat of a host agent")
        sender = beat.sender
        if sender == self.host:
            return False
        self.know(sender)
        # Replaced as a whole: a new agent of the host has less. After a reordered beat some reports are sent twice.
        self._seen[sender] = {host: serial for host, serial, _ in beat.seen}
        for host, serial, pulse in beat.seen:
            if host == self.host:
                self._get_ahead_of(serial, pulse)
                self._note_heard(sender, pulse)
            elif pulse > self._pulse.get(host, 0):
                self.know(host)
                self._pulse[host] = pulse
                self._others[host] = 0.0
        new = [report for report in beat.reports if report.host != self.host and self._is_new(report)]
        for report in new:
            self.know(report.host)
            self._take(report)
        # Only now: a host with a new report has most likely sent it to the sender, too, which confirms it in a beat.
        self._lacking[sender] = self._unknown_to(sender)
        self._unheard_beats[sender] = 0
        return bool(new)

    def _take(self, report: HostReport) -> None:
        """Replace a report by a newer one."""
        self.reports[report.host] = report
        self.revision += 1

    def _unknown_to(self, peer: int) -> set[int]:
        """Hosts whose newest report the agent of host `peer` has not confirmed."""
        known = self._seen.get(peer, {})
        return {
            host for host, report in self.reports.items() if report.serial > known.get(host, UNSEEN) and host != peer
        }

    def _passed(self, now: float) -> float:
        return 0.0 if self._beat_at is None else min(now - self._beat_at, LONGEST_TICK_S)

    def _get_ahead_of(self, serial: int, pulse: int) -> None:
        """Jump ahead of the numbers that a previous agent has sent; never backwards."""
        if self.own.serial < serial < HIGHEST:
            self._take(structs.replace(self.own, serial=serial + 1))
            for lacking in self._lacking.values():
                lacking.add(self.host)
        if self._pulse[self.host] < pulse < HIGHEST:
            self._pulse[self.host] = pulse

    def _note_heard(self, sender: int, pulse: int) -> None:
        if pulse in self._sent:
            self._heard_us[sender] = max(self._sent[pulse], self._heard_us.get(sender, 0.0))

    def _is_new(self, report: HostReport) -> bool:
        return report.host not in self.reports or report.serial > self.reports[report.host].serial

    def _serial_at(self, peer: int, host: int) -> int:
        return self._seen[peer].get(host, UNSEEN) if peer in self._seen else UNSEEN

    def _beats(self) -> list[Beat]:
        # The same for all receivers, so it is made once.
        seen = [
            [host, self.reports[host].serial if host in self.reports else UNSEEN, self._pulse.get(host, 0)]
            for host in [self.host, *self._others]
        ]
        return [
            Beat(peer, {"from": self.host, "seen": seen, "reports": [self._as_wire(host) for host in sorted(lacking)]})
            for peer, lacking in self._lacking.items()
            if not self._has_gone(peer)
        ]

    def _as_wire(self, host: int) -> dict[str, Any]:
        report, made = self.reports[host], self._wire.get(host)
        if made is None or made[0] is not report:
            made = self._wire[host] = (report, to_wire(report))
        return made[1]

    def _has_gone(self, host: int) -> bool:
        return host in self.reports and self.reports[host].gone


class _Heard(Form, frozen=True):
    """Body of a beat."""

    sender: HostNumber = msgspec.field(name="from")
    seen: list[tuple[HostNumber, Annotated[int, msgspec.Meta(ge=UNSEEN, lt=MOST)], Whole]]
    """Host, serial of its report and its last pulse, as the sender knows them."""
    reports: list[HostReport]
