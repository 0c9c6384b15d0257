"""What an agent of a large mesh sends to whom: beats to its partners, answers, and news as soon as it hears them.

The parts: `Probes` (whom to ask, who is doubted), `News` (which reports to list), `RollCall` (who hears us).

Example: host 1 lists to host 40 that host 7 has report 9; 40 has 8, and answers with that; 1 sends report 9 at once,
and 40 lists it to its own partners within `SPREAD_S`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from distflow.comm.beats import HIGHEST, Beat, Heard
from distflow.comm.news import News
from distflow.comm.probes import RUMOUR_BEATS, Doubt, Draw, Probes
from distflow.comm.pulses import Pulses
from distflow.comm.roll_call import Roll, RollCall, bits, roll_from

SPREAD_S = 0.2
"""News are passed on at most this often between two beats."""
MOST_REPORTS = 128
"""In one beat; what is left out is asked for again."""
MOST_TOLD = 64
"""How many hosts are told that our agent exits, those with the lowest numbers: most likely one writes `run.json`."""


class Partners:
    """One agent's part."""

    def __init__(self, news: News[Any], pulses: Pulses, draw: Draw) -> None:
        self._news = news
        self._pulses = pulses
        self._probes = Probes(draw)
        self._roll = RollCall(pulses.host)
        self._owed: dict[int, set[int]] = {}
        """By agent that gets an answer: hosts that it is to list."""
        self._lacking: dict[int, set[int]] = {}
        """By agent: the hosts whose reports go into the next beat to it."""
        self._wanted: set[int] = set()
        """Hosts to ask because another agent wants a sign of life of them."""
        self._has_news = False
        """Since we last told our partners."""
        self._spread_at = 0.0

    @property
    def doubted(self) -> Iterable[int]:
        """Hosts that have not answered."""
        return self._probes.doubts

    def doubted_s(self, host: int) -> float:
        """For how long a host has not answered; 0: it is not doubted."""
        doubts = self._probes.doubts
        return self._pulses.clock - doubts[host].since if host in doubts else 0.0

    def seen_at(self, host: int) -> float:
        """When we said what a host has heard in the last roll (0: never)."""
        return self._roll.seen_at(host)

    def seen_since(self, at: float) -> int:
        """Hosts, as bits, that have heard in a roll what we said after this time."""
        return self._roll.seen_since(at)

    def has_ours(self, host: int) -> bool:
        """Whether a host has said in a roll that it has the reports that we have, the newest of ours included."""
        return self._roll.has_report(host, self._news.serial(self._pulses.host))

    def join(self, host: int) -> None:
        """A host is new."""
        self._probes.join(host)

    def resume(self) -> None:
        """We follow another agent of this host."""
        self._roll.resume(self._pulses.clock, len(self._pulses.others))

    def doubt_silent(self, silence_s: float) -> None:
        """Doubt all hosts of which no pulse has become known for so long."""
        for host in self._pulses.others:
            if self._pulses.age_s(host) >= silence_s:
                self._doubt(host, self._pulses.of(host), self._pulses.heard_at(host))

    # -- outgoing

    def publish(self, *, last: bool) -> list[Beat]:
        """Send our new report to our partners, who pass it on; the `last` one to more, as they may leave, too."""
        to = dict.fromkeys((*self._probes.partners, *(self._pulses.others[:MOST_TOLD] if last else ())))
        for host in to:
            self._lacking.setdefault(host, set()).add(self._pulses.host)
        return [self._beat_to(host) for host in to if not self._news.has_gone(host)]

    def beats(self, now: float, *, slept: bool) -> list[Beat]:
        """The regular beats. `slept`: our agent was not running before."""
        pulses, probes = self._pulses, self._probes
        if slept:
            probes.forgive(pulses.beat, pulses.clock)
        self._roll.call(pulses.clock, len(pulses.others))
        for host in bits(self._roll.missing(pulses.known & ~self._news.gone & ~probes.doubted)):
            # Only for ourselves: where it is the others who are cut off, they find out, too.
            old = pulses.beat - RUMOUR_BEATS - 1
            probes.doubt(host, Doubt(pulses.of(host), pulses.clock, self._roll.number, old))
        probes.replace_one(pulses.others, self._news.gone)
        asks, late = probes.ask(pulses.beat, pulses.clock)
        for host, asked_at in late.items():
            self._doubt(host, pulses.of(host), asked_at)
        self._agree()
        # Who is asked hears all that an answer says.
        rows = {host: self._owed.pop(host, set()) for host in asks}
        self._has_news = False
        return [*self.answers(now), *(self._beat_to(host, of, rows[host]) for host, of in asks.items())]

    def answers(self, now: float) -> list[Beat]:
        """Answers, questions that other agents want asked, and news for our partners."""
        owed, self._owed = self._owed, {}
        wanted, self._wanted = self._wanted, set()
        if owed:
            self._pulses.count()
        found = [self._beat_to(peer, (), rows) for peer, rows in owed.items() if not self._news.has_gone(peer)]
        found += [self._beat_to(host, [host]) for host in wanted]
        if self._has_news and now - self._spread_at >= SPREAD_S:
            self._has_news, self._spread_at = False, now
            found += [self._beat_to(host) for host in self._probes.partners if host not in owed]
        return found

    def _beat_to(self, peer: int, asks: Collection[int] = (), rows: Iterable[int] = ()) -> Beat:
        pulses, news = self._pulses, self._news
        listed = dict.fromkeys((pulses.host, peer, *rows, *news.newest(peer, pulses.beat)))
        lacking = sorted(self._lacking.pop(peer, ()))[:MOST_REPORTS]
        body = {
            "from": pulses.host,
            "seen": [[host, news.serial(host), pulses.of(host)] for host in listed],
            "reports": [news.as_wire(host) for host in lacking],
            "checksum": news.checksum,
            "asks": list(asks),
            "doubts": self._probes.rumours(pulses.beat, pulses.precisely),
            "roll": self._roll.as_wire(),
        }
        return Beat(peer, body)

    # -- incoming

    def roll_in(self, beat: Heard) -> Roll | None:
        """The roll in a beat; raises ProtocolError if it is malformed."""
        return None if beat.roll is None else roll_from(beat.roll)

    def learn(self, host: int, pulse: int) -> None:
        """A host has given a sign of life, of which we hear for the first time."""
        self._pulses.learn(host, pulse)
        for waiting in self._probes.hear(host):
            self._owed.setdefault(waiting, set()).add(host)
        if self._probes.clear(host, pulse):
            self._repeat(host)

    def hear(self, beat: Heard, roll: Roll | None, *, news: bool) -> None:
        """Handle what a beat says besides pulses and reports. `news`: it contained a new report."""
        self._has_news = self._has_news or news
        for host, pulse, ms in beat.doubts:
            self._hear_doubt(host, pulse, self._pulses.precisely - ms / 1e3)
        if roll is not None:
            self._hear_roll(roll)
        self._compare(beat)
        for host in beat.asks:
            if host == self._pulses.host:
                self._owed.setdefault(beat.sender, set())
            elif self._pulses.known >> host & 1:
                self._probes.relay(host, beat.sender)
                self._wanted.add(host)

    def _hear_doubt(self, host: int, pulse: int, since: float) -> None:
        pulses = self._pulses
        if host == pulses.host:
            if pulse >= pulses.own and pulse < HIGHEST:
                pulses.get_ahead_of(pulse + 1)
                self._repeat(host)
        elif pulses.of(host) > pulse and pulses.heard_at(host) > since:
            self._repeat(host)
        else:
            self._doubt(host, max(pulse, pulses.of(host)), since)

    def _doubt(self, host: int, pulse: int, since: float) -> None:
        if self._pulses.known >> host & 1 and not self._news.has_gone(host):
            new = self._probes.doubt(host, Doubt(pulse, since, self._roll.number, self._pulses.beat))
            self._has_news = self._has_news or new

    def _repeat(self, host: int) -> None:
        """Tell others the last pulse of a host that somebody doubts."""
        if self._news.repeat(host, self._pulses.beat):
            self._has_news = True

    def _hear_roll(self, roll: Roll) -> None:
        doubts = self._probes.doubts
        new = self._roll.hear(roll, self._pulses.clock, len(self._pulses.others))
        for host in bits(new & self._probes.doubted):
            # It has entered a roll that began after we learned of the doubt.
            if self._roll.number > doubts[host].roll:
                self._probes.forget(host)
        self._agree()

    def _agree(self) -> None:
        there = self._pulses.known & ~self._news.gone & ~self._probes.doubted
        self._roll.agree(there, self._news.checksum, self._news.serial(self._pulses.host))

    def _compare(self, beat: Heard) -> None:
        """Answer with what the sender lacks, and with what we lack."""
        news, sender = self._news, beat.sender
        ahead = {host for host, serial, _ in beat.seen if serial > news.serial(host)} - {self._pulses.host}
        lacking = {host for host, serial, _ in beat.seen if serial < news.serial(host)}
        if beat.checksum is None:
            # It lists all hosts that it knows.
            lacking |= news.reports.keys() - {host for host, _, _ in beat.seen}
        else:
            news.compare(sender, beat.checksum, self._pulses.beat)
        serials = {host: serial for host, serial, _ in beat.seen}
        rows = {host for host in ahead if news.fetches(host, serials[host], self._pulses.beat)}
        if lacking - {sender}:
            self._lacking.setdefault(sender, set()).update(lacking - {sender})
        if rows or sender in self._lacking:
            self._owed.setdefault(sender, set()).update(rows)
