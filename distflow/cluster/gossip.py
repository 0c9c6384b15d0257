"""How the agents' reports spread, and how each agent knows which hosts are silent.

Once a second an agent sends beats. In a mesh of at most `FEW` other hosts they go to all of them, and list all hosts:
the serial of the newest known report of each and its last known pulse (a counter that rises with each beat), with the
reports that the receiver lacks: our own at once, those of other hosts once the receiver's beats show that they have not
reached it. A host is silent from when no agent that we hear has heard its pulse.

In a larger mesh an agent talks to a few partners, whom it asks for a sign of life, and answers whoever asks it, so that
its work does not grow with the number of hosts:

- Silence: who does not answer is doubted, and others are told so (`comm/probes.py`). A host is silent from the question
  on that it did not answer, until anybody hears a newer pulse of it.
- Reports: a beat lists what is new (`News`). Who lacks a listed report says so, and gets it at once. News are passed on
  as soon as they are heard.
- What did not arrive so: every beat has a checksum over the serials of all reports. Two agents with different ones list
  more and more of their newest reports to each other, until they are equal ("peel back": Demers and others, "Epidemic
  Algorithms for Replicated Database Maintenance", PODC 1987).
- Who hears us: the roll that is called among all (`comm/roll_call.py`).

So beats may be lost, duplicated or reordered; two agents that cannot reach each other still hear of each other through
a third; and a host is silent only when no agent hears its pulse any more.

Example: a worker on host 1 of three fails, so its report gets serial 8 and is sent to 0 and 2 at once. The one to 2 is
lost. A second later 0 and 1 send beats again: 2 has confirmed serial 7 of host 1 only, so both send it 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec import structs

from distflow.cluster.host_report import HostReport, to_wire
from distflow.comm.beats import BEAT_S, HIGHEST, STRIDE, UNSEEN, Beat, Heard
from distflow.comm.news import News
from distflow.comm.partners import Partners
from distflow.comm.probes import Draw
from distflow.comm.pulses import Pulses
from distflow.comm.roll_call import RollCall
from distflow.data.decoding import read

FEW = 16
"""As long as there are no more other hosts than this, each of them gets every beat."""
PATIENT_BEATS = 2
"""An agent that was silent for more of our beats may still hear us: it is sent all that it may lack."""


def least_silence_s(hosts: int) -> float:
    """What the limit of silence must exceed in a run on so many hosts: how old the proof can be that others hear us."""
    return 0.0 if hosts <= FEW + 1 else 2 * RollCall.length_s(hosts)


def in_order(below: int) -> int:
    """In place of a random number: hosts get their turns in order."""
    return below - 1


class Gossip:
    """What one agent knows of all hosts. `draw`: its randomness."""

    def __init__(self, own: HostReport, others: Iterable[int], silence_s: float, draw: Draw = in_order) -> None:
        self.host = own.host
        self._silence_s = silence_s
        self._pulses = Pulses(own.host, others)
        self._news = News(own, to_wire)
        self.reports = self._news.reports
        self._partners = Partners(self._news, self._pulses, draw)
        self._has_ours: dict[int, int] = {}
        """By agent: the serial of our report that it has."""
        self._seen: dict[int, dict[int, int]] = {}
        """In a mesh of few, by agent: the serials of the reports that it has, by host."""
        self._lacking = {host: {own.host} for host in self._pulses.others} if self.few else {}
        """In a mesh of few, by agent: the hosts whose newest report goes into the next beat to it."""
        self._unheard_beats: dict[int, int] = {}
        """In a mesh of few, by agent: how many beats we have sent since its last one."""
        self.revision = 0
        """Rises with every new report and every new host."""
        self._revised = {own.host: 0}
        """By host, the one that changed last at the end: the revision in which it did."""

    @property
    def few(self) -> bool:
        """Whether each host gets every beat of ours."""
        return len(self._pulses.others) <= FEW

    @property
    def own(self) -> HostReport:
        """Our own report."""
        return self.reports[self.host]

    @property
    def others(self) -> Sequence[int]:
        """Numbers of the other hosts, in order."""
        return self._pulses.others

    @property
    def clock(self) -> float:
        """Seconds in which our own agent was running."""
        return self._pulses.clock

    def changed_since(self, revision: int) -> list[int]:
        """Hosts that are new, or have a new report, since this revision: the work is for these alone."""
        found: list[int] = []
        for host in reversed(self._revised):
            if self._revised[host] <= revision:
                break
            found.append(host)
        return found

    def know(self, host: int) -> None:
        """Add a host."""
        if not self._pulses.know(host):
            return
        self._revise(host)
        if self.few:
            self._lacking[host] = self.reports.keys() - {host}
            return
        self._partners.join(host)
        if len(self._pulses.others) == FEW + 1:
            # What was counted for each host goes on as doubts about the silent ones.
            self._lacking, self._seen, self._unheard_beats = {}, {}, {}
            self._partners.doubt_silent(PATIENT_BEATS * BEAT_S)

    def resume(self, report: HostReport, first: int) -> None:
        """Continue from the last report of the previous agent; `first`: the number to count from.

        The previous agent may have sent more after that. If so, the others' beats show it, and our numbers then jump
        ahead (`hear`). Confirmations of its pulses do not count as confirmations of ours.
        """
        self._take(structs.replace(report, serial=first))
        self._pulses.get_ahead_of(first)
        self._partners.resume()

    def report(self, host: int) -> HostReport | None:
        """The newest report of a host, if there is one."""
        return self.reports.get(host)

    def silent(self, for_s: float | None = None) -> frozenset[int]:
        """Hosts from which no agent that we hear has heard for `for_s` seconds (default: the run's limit)."""
        limit = self._silence_s if for_s is None else for_s
        may_be = self._pulses.others if self.few else self._partners.doubted
        return frozenset(host for host in may_be if self.unheard_s(host) >= limit)

    def is_outnumbered(self) -> bool:
        """Whether more than half of the hosts that have not exited are silent; those whose workers have all left or
        ended, as far as was heard, cannot go on without us and do not count."""
        missing = 2 * sum(not self._is_done(host) for host in self.silent())
        # No more are looked for than it takes.
        there = islice((host for host in self._pulses.others if not self._is_done(host)), missing)
        return missing > 1 + sum(1 for _ in there)

    def _is_done(self, host: int) -> bool:
        report = self.report(host)
        emptied = report is not None and bool(report.workers) and not report.living
        return emptied or self._news.has_gone(host)

    def unheard_s(self, host: int) -> float:
        """Seconds since any agent that we hear has heard from a host, without the time in which we were not running.

        In a large mesh they count from the first question that the host did not answer.
        """
        if host == self.host:
            return 0.0
        return self._pulses.age_s(host) if self.few else self._partners.doubted_s(host)

    def unseen_s(self, host: int, now: float) -> float:
        """Seconds since our last pulse that the agent of a host has confirmed (at first: since our first pulse).

        The time in which our own agent was not running does not count, since answers were not read then.
        """
        return self._pulses.clock + self._pulses.passed_s(now) - self.seen_at(host)

    def seen_at(self, host: int) -> float:
        """When we said the last of what a host is known to have heard, on our clock; 0: it has confirmed nothing."""
        return max(self._pulses.heard_us_at(host), self._partners.seen_at(host))

    def confirmed(self, within_s: float, now: float) -> int:
        """Hosts, as bits, whose agents have confirmed a pulse of ours that is younger than this, and our own.

        In a large mesh these are the ones that rolls tell of; `unseen_s` also knows who has answered us directly.
        """
        since = self._pulses.clock + self._pulses.passed_s(now) - within_s
        if since < 0.0:
            return self._pulses.known
        own = 1 << self.host
        if not self.few:
            return own | self._partners.seen_since(since)
        return own | sum(1 << host for host in self._pulses.others if self._pulses.heard_us_at(host) > since)

    def seen_by(self, host: int) -> bool:
        """Whether another agent has our newest report."""
        return self._has_ours.get(host, UNSEEN) >= self.own.serial or self._partners.has_ours(host)

    def publish(self, report: HostReport) -> list[Beat]:
        """Replace our own report; returns the beats to send at once if it is new."""
        if structs.replace(report, serial=self.own.serial) == self.own:
            return []
        self._take(structs.replace(report, serial=self.own.serial + 1))
        if not self.few:
            return self._partners.publish(last=report.gone)
        self._all_lack_ours()
        return self._beats()

    def tick(self, now: float) -> list[Beat]:
        """The regular beats, when they are due, and answers, which always are."""
        self._pulses.look(now)
        if not self._pulses.is_due(now):
            return [] if self.few else self._partners.answers(now)
        slept = self._pulses.begin_beat(now)
        if not self.few:
            return self._partners.beats(now, slept=slept)
        for host in self._pulses.others:
            self._unheard_beats[host] = self._unheard_beats.get(host, 0) + 1
            if self._unheard_beats[host] > PATIENT_BEATS:
                self._lacking[host] = self._unknown_to(host)
        return self._beats()

    def hear(self, body: Mapping[str, Any], now: float | None = None) -> bool:
        """Handle a beat; returns whether it contained a new report. Raises ProtocolError if it is malformed.

        `now`: None is the time of the last tick.
        """
        beat = read(body, _Beat, "beat of a host agent")
        if now is not None:
            self._pulses.look(now)
        if beat.sender == self.host:
            return False
        roll = self._partners.roll_in(beat)
        self.know(beat.sender)
        has_ours = UNSEEN
        for host, serial, pulse in beat.seen:
            if host == self.host:
                has_ours = serial
                self._get_ahead_of(serial, pulse)
                self._pulses.confirm(beat.sender, pulse)
            elif pulse > self._pulses.of(host):
                self.know(host)
                self._partners.learn(host, pulse)
        # Replaced, not raised: a new agent of the host has less. After a reordered beat some reports are sent twice.
        self._has_ours[beat.sender] = has_ours
        new = [report for report in beat.reports if report.host != self.host and self._is_new(report)]
        for report in new:
            self.know(report.host)
            self._take(report)
        if self.few:
            self._seen[beat.sender] = {host: serial for host, serial, _ in beat.seen}
            # Only now: a host with a new report has most likely sent it to the sender, too; that confirms it in a beat.
            self._lacking[beat.sender] = self._unknown_to(beat.sender)
            self._unheard_beats[beat.sender] = 0
        else:
            self._partners.hear(beat, roll, news=bool(new))
        return bool(new)

    def _take(self, report: HostReport) -> None:
        """Replace a report by a newer one."""
        self._news.take(report, self._pulses.beat)
        self._revise(report.host)

    def _revise(self, host: int) -> None:
        self.revision += 1
        self._revised.pop(host, None)
        self._revised[host] = self.revision

    def _get_ahead_of(self, serial: int, pulse: int) -> None:
        """Jump ahead of the numbers that a previous agent has sent; never backwards.

        Far ahead: what it sent last may be under way still, and of two reports with one number the first would stay.
        """
        if self.own.serial < serial < HIGHEST:
            self._take(structs.replace(self.own, serial=serial + STRIDE))
            self._all_lack_ours()
        self._pulses.get_ahead_of(pulse)

    def _is_new(self, report: HostReport) -> bool:
        return report.serial > self._news.serial(report.host)

    # -- in a mesh of few

    def _all_lack_ours(self) -> None:
        for lacking in self._lacking.values():
            lacking.add(self.host)

    def _unknown_to(self, peer: int) -> set[int]:
        """Hosts whose newest report the agent of host `peer` has not confirmed."""
        known = self._seen.get(peer, {})
        return {
            host for host, report in self.reports.items() if report.serial > known.get(host, UNSEEN) and host != peer
        }

    def _beats(self) -> list[Beat]:
        # The same for all receivers, so it is made once.
        seen = [[host, self._news.serial(host), self._pulses.of(host)] for host in (self.host, *self._pulses.others)]
        return [
            Beat(peer, {"from": self.host, "seen": seen, "reports": [self._news.as_wire(h) for h in sorted(lacking)]})
            for peer, lacking in self._lacking.items()
            if not self._news.has_gone(peer)
        ]


class _Beat(Heard, frozen=True, kw_only=True):
    """Body of a beat."""

    reports: list[HostReport]
