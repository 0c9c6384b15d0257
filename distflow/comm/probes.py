"""Whom one agent asks for a sign of life, and which hosts it doubts: SWIM, without I/O.

After Das, Gupta and Motivala, "SWIM: Scalable Weakly-consistent Infection-style Process Group Membership Protocol"
(DSN 2002). With each beat an agent asks `PARTNERS` others; one of them is then replaced by the next host of a round in
random order, so that every host gets its turn and few connections are opened. Whoever has not answered by the next beat
is asked again, by us and by `RELAYS` of our partners; whoever has not answered by the beat after that is *doubted*, and
others are told so. The pulse of a host is its incarnation number in the sense of that paper: a doubt names the newest
pulse that is known, and ends with a newer one, which the doubted host itself or anybody who has heard it since
the unanswered question may report. A doubt is no death: it is only since when nothing has been heard.

Example: host 7 stops. Eight others ask it once a second; the first of them doubts it two beats later: (7, pulse 512,
2.0 s). A host that heard pulse 513 a second ago answers with that, and asks 7 itself; after two beats nobody does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

PARTNERS = 8
RELAYS = 3
ASKED_BEATS = 2
"""After so many beats without an answer a host is doubted."""
RUMOUR_BEATS = 6
"""For so many beats what is new is told to all that we talk to: many more than it takes to reach everybody."""
MOST_DOUBTS = 512
"""In one beat. Others follow in the next."""
Draw = Callable[[int], int]
"""A random number below another one."""


@dataclass(slots=True)
class Doubt:
    """Nothing was heard from a host."""

    pulse: int
    """The newest that is known."""
    since: float
    """When the question was asked that it has not answered, on our clock (s)."""
    roll: int
    """The roll that was being called when we learned of it."""
    beat: int
    """Number of our own beat when we learned of it."""


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """Asked with our beat of this number, at this time on our clock (s), and not answered yet."""

    beat: int
    at: float


class Probes:
    """The partners of one agent, its open questions, and its doubts."""

    def __init__(self, draw: Draw) -> None:
        self.partners: list[int] = []
        """Whom we talk to with each beat; who became one first is replaced first."""
        self.doubts: dict[int, Doubt] = {}
        self.doubted = 0
        """The hosts in `doubts`, as bits."""
        self._draw = draw
        self._round: list[int] = []
        """Hosts whose turn is still to come, in any order: the next one is drawn when it is needed."""
        self._open: dict[int, OpenQuestion] = {}
        self._relays: dict[int, set[int]] = {}
        """By host: who wants to hear of a sign of life."""

    def join(self, host: int) -> None:
        """A new host gets its turn in the current round."""
        self._round.append(host)

    def replace_one(self, others: Sequence[int], away: int) -> None:
        """Take the next host of the round in place of the longest-standing partner. `away`: bits of hosts to leave out.

        Partners that do not answer are replaced, too.
        """
        self.partners = [host for host in self.partners if not (away | self.doubted) >> host & 1]
        del self.partners[: len(self.partners) - PARTNERS + 1]
        for _ in range(2 * len(others)):
            if len(self.partners) == PARTNERS:
                return
            if not self._round:
                self._round = list(others)
            host = self._drawn()
            if not away >> host & 1 and host not in self.partners:
                self.partners.append(host)

    def ask(self, beat: int, clock: float) -> tuple[dict[int, list[int]], dict[int, float]]:
        """What to ask now, and who has not answered.

        First: by the host that is talked to, the hosts whose sign of life is wanted, its own or through it. Second:
        when hosts were asked that have not answered in time.
        """
        late = {host: question.at for host, question in self._open.items() if beat - question.beat >= ASKED_BEATS}
        for host in late:
            del self._open[host]
        asks = {host: [host] for host in (*self.partners, *self._open)}
        for host in self._open:
            for relay in self._some(RELAYS, host):
                asks[relay].append(host)
        for host in self.partners:
            self._open.setdefault(host, OpenQuestion(beat, clock))
        return asks, late

    def forgive(self, beat: int, clock: float) -> None:
        """Our own agent was not running: what was asked before counts as asked now."""
        self._open = dict.fromkeys(self._open, OpenQuestion(beat, clock))

    def relay(self, host: int, to: int) -> None:
        """Another agent wants to hear of a sign of life."""
        self._relays.setdefault(host, set()).add(to)

    def hear(self, host: int) -> set[int]:
        """A host has given a sign of life; returns who else wanted to hear of it."""
        self._open.pop(host, None)
        return self._relays.pop(host, set())

    def doubt(self, host: int, doubt: Doubt) -> bool:
        """Take a doubt; returns whether it is one of which others should hear."""
        known = self.doubts.get(host)
        if known is not None and known.pulse >= doubt.pulse:
            return False
        # The newest last.
        self.doubts.pop(host, None)
        self.doubts[host] = doubt
        self.doubted |= 1 << host
        return known is None

    def clear(self, host: int, pulse: int) -> bool:
        """End the doubt about a host of which a newer pulse is known; returns whether there was one."""
        if host not in self.doubts or pulse <= self.doubts[host].pulse:
            return False
        self.forget(host)
        return True

    def forget(self, host: int) -> None:
        """End the doubt about a host."""
        del self.doubts[host]
        self.doubted &= ~(1 << host)

    def rumours(self, beat: int, clock: float) -> list[list[int]]:
        """New doubts, as they travel: host, pulse, and for how long it has not answered (ms)."""
        new = (host for host in reversed(self.doubts) if beat - self.doubts[host].beat <= RUMOUR_BEATS)
        return [
            [host, self.doubts[host].pulse, round(1e3 * (clock - self.doubts[host].since))]
            for host, _ in zip(new, range(MOST_DOUBTS), strict=False)
        ]

    def _some(self, count: int, besides: int) -> Iterator[int]:
        """Partners drawn at random."""
        there = [host for host in self.partners if host != besides and host not in self._open]
        for _ in range(min(count, len(there))):
            yield there.pop(self._draw(len(there)))

    def _drawn(self) -> int:
        """Take one of the round (Fisher and Yates, one step at a time: no beat does work for all hosts)."""
        left = self._round
        number = self._draw(len(left))
        left[number], left[-1] = left[-1], left[number]
        return left.pop()
