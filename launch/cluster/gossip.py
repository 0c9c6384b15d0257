"""How the agents' reports spread: each agent beats to all others, and passes on what they have not seen yet.

A beat carries, for every host, the serial of the report known and the last pulse heard of, and those reports that the
receiver lacks: our own at once, those of other hosts when its own beats say that they have not reached it. So beats may
be lost, doubled or overtaken; two agents that cannot reach each other still hear of each other through a third; and a
host is silent only when nobody hears its pulse any more.

Example: host 1's worker fails, its report gets serial 8 and goes to 0 and 2 at once. The one to 2 is lost. A second
later 0 and 1 beat again: 2 has said that it knows serial 7 of host 1, so both send 8.
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
"""Of the time between two of our own beats at most this much counts as silence, of others or of ours: had there been
more of it, it was our own agent that neither listened nor spoke."""
UNSEEN = -1
STRIDE = 1 << 44
"""A later agent of a host begins to count at random less than this above the one before: no two count the same."""
HIGHEST = MOST >> 1
"""What others say to have of us beyond that, we never sent."""
PATIENT_BEATS = 2
"""An agent that has not been heard of for more beats of ours may hear us all the same: it is sent all that is new."""
REMEMBERED_PULSES = 4096
"""Of our own; who says that it has heard an older one says nothing that is still of use."""


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
        """Seconds of silence by host."""
        self._pulse: dict[int, int] = {own.host: 0}
        self._seen: dict[int, dict[int, int]] = {}
        """Serial of each host's report that another agent has, by that agent's host."""
        self._beat_at: float | None = None
        self._attentive_s = 0.0
        """The time since our first beat without that for which our own agent was away."""
        self._sent: dict[int, float] = {}
        """When our last pulses were sent, in attentive seconds."""
        self._heard_us: dict[int, float] = {}
        """When the newest pulse of ours was sent that another agent says to have heard, by its host."""
        self._lacking: dict[int, set[int]] = {host: {own.host} for host in self._others}
        """Hosts whose newest report goes into the next beat to the agent of a host."""
        self._unheard_beats: dict[int, int] = {}
        """Beats of ours since the last one of the agent of a host."""
        self._wire: dict[int, tuple[HostReport, dict[str, Any]]] = {}
        """Reports as plain data, made once."""
        self.revision = 0
        """Rises with every report that is new and every host that becomes known."""

    @property
    def own(self) -> HostReport:
        """Our own report."""
        return self.reports[self.host]

    @property
    def others(self) -> list[int]:
        """Numbers of the other hosts, in order."""
        return sorted(self._others)

    def know(self, host: int) -> None:
        """There is a host of this number."""
        if host != self.host and host not in self._others:
            self._others[host] = 0.0
            self._lacking[host] = self.reports.keys() - {host}
            self.revision += 1

    def resume(self, report: HostReport, first: int) -> None:
        """Follow another agent of this host, whose last report this is; `first`: what we begin to count from.

        It may have got further. Whoever has something newer of it than of us says so in its next beat, and what we say
        from then on is newer (`hear`). What it was heard of does not count for us: our pulses are none of its.
        """
        self._take(structs.replace(report, serial=first))
        self._pulse[self.host] = first

    def report(self, host: int) -> HostReport | None:
        """The newest report of a host, if there is one."""
        return self.reports.get(host)

    def silent(self, for_s: float | None = None) -> frozenset[int]:
        """Hosts of which nobody we hear has heard for `for_s` seconds; without it, for the run's limit."""
        limit = self._silence_s if for_s is None else for_s
        return frozenset(host for host, age in self._others.items() if age >= limit)

    def is_outnumbered(self) -> bool:
        """Whether more than half of the hosts that have not left are silent."""
        there = [host for host in self._others if not self._has_gone(host)]
        return 2 * len(self.silent() & set(there)) > len(there) + 1

    def unheard_s(self, host: int) -> float:
        """For how many seconds nobody we hear has heard of a host; as long as we were not listening does not count."""
        return self._others.get(host, 0.0)

    def unseen_s(self, host: int, now: float) -> float:
        """How long ago the last pulse of ours was sent that the agent of a host says to have heard.

        Until it has said so of any, since the first one. As long as our own agent was away does not count: the answers
        that came meanwhile have not been read yet.
        """
        return self._attentive_s + self._passed(now) - self._heard_us.get(host, 0.0)

    def seen_by(self, host: int) -> bool:
        """Whether another agent has our newest report."""
        return self._serial_at(host, self.host) >= self.own.serial

    def publish(self, report: HostReport) -> list[Beat]:
        """Replace our own report; what is to be sent at once if it says anything new."""
        if structs.replace(report, serial=self.own.serial) == self.own:
            return []
        self._take(structs.replace(report, serial=self.own.serial + 1))
        for lacking in self._lacking.values():
            lacking.add(self.host)
        return self._beats()

    def tick(self, now: float) -> list[Beat]:
        """The regular beat, when it is due."""
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
        """Take a beat; whether it brought a report that is new. Raises ProtocolError if it is none."""
        beat = read(body, _Heard, "beat of a host agent")
        sender = beat.sender
        if sender == self.host:
            return False
        self.know(sender)
        # All that it has now: one that follows another has less. Of a beat that was overtaken we only send some twice.
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
        # Only now: who reported has most likely told the sender itself, and it says so in this beat or in the next.
        self._lacking[sender] = self._unknown_to(sender)
        self._unheard_beats[sender] = 0
        return bool(new)

    def _take(self, report: HostReport) -> None:
        """Replace a report by a newer one."""
        self.reports[report.host] = report
        self.revision += 1

    def _unknown_to(self, peer: int) -> set[int]:
        """Hosts of whose reports the agent of a host has not said that it has the newest one."""
        known = self._seen.get(peer, {})
        return {
            host for host, report in self.reports.items() if report.serial > known.get(host, UNSEEN) and host != peer
        }

    def _passed(self, now: float) -> float:
        return 0.0 if self._beat_at is None else min(now - self._beat_at, LONGEST_TICK_S)

    def _get_ahead_of(self, serial: int, pulse: int) -> None:
        """Of what an agent before us has sent. Never back: what we have sent ourselves is known at most."""
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
        # To all the same: made once, and read by nobody here.
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
