"""Signs of life: the last known pulse of each host, our own, and who has confirmed which of ours.

All times are those of a clock that counts the time since our first beat, without the time in which our own agent was
not running (a slow turn of its loop, SIGSTOP): it did not read what arrived then, and most likely nobody was silent.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Iterable

from distflow.comm.beats import BEAT_S, HIGHEST

LONGEST_TICK_S = 2 * BEAT_S
"""The time between two of our own beats counts up to this limit: if it was longer, we were not running."""
REMEMBERED_PULSES = 4096
"""How many of our own pulses are remembered; a confirmation of an older one is of no use."""


class Pulses:
    """As one agent knows them."""

    def __init__(self, host: int, others: Iterable[int]) -> None:
        self.host = host
        self.others = sorted(others)
        self.known = sum(1 << number for number in (host, *self.others))
        """All hosts, as bits."""
        self.beat = 0
        """The number of our last beat."""
        self.clock = 0.0
        # By host, 0 for those that are not known: 24 bytes each, a tenth of what dictionaries take.
        self._newest, self._heard_at, self._heard_us = array("q"), array("d"), array("d")
        self._reserve(max((host, *self.others)))
        self.sent: dict[int, float] = {}
        """When our last pulses were sent."""
        self._beat_at: float | None = None
        self._since_beat_s = 0.0

    @property
    def precisely(self) -> float:
        """The time when we last looked at it; `clock` is that of the last regular beat."""
        return self.clock + self._since_beat_s

    @property
    def own(self) -> int:
        """Our own last pulse."""
        return self._newest[self.host]

    def of(self, host: int) -> int:
        """The last known pulse of a host."""
        return self._newest[host] if host < len(self._newest) else 0

    def heard_at(self, host: int) -> float:
        """When the last pulse of a host became known; 0 for one that was known from the start."""
        return self._heard_at[host] if host < len(self._heard_at) else 0.0

    def heard_us_at(self, host: int) -> float:
        """When our newest pulse that a host has confirmed was sent; 0: it has confirmed none."""
        return self._heard_us[host] if host < len(self._heard_us) else 0.0

    def know(self, host: int) -> bool:
        """Add a host; returns whether it is new."""
        if self.known >> host & 1:
            return False
        insort(self.others, host)
        self.known |= 1 << host
        self._reserve(host)
        self._heard_at[host] = self.clock
        return True

    def look(self, now: float) -> None:
        """Look at the time."""
        self._since_beat_s = self.passed_s(now)

    def is_due(self, now: float) -> bool:
        """Whether it is time for a regular beat."""
        return self._beat_at is None or now - self._beat_at >= BEAT_S

    def passed_s(self, now: float) -> float:
        """Time since the last regular beat that is not on the clock yet."""
        return 0.0 if self._beat_at is None else min(now - self._beat_at, LONGEST_TICK_S)

    def begin_beat(self, now: float) -> bool:
        """Count a regular beat; returns whether we were not running before it."""
        slept = self._beat_at is not None and now - self._beat_at > LONGEST_TICK_S
        self.clock += self.passed_s(now)
        self._beat_at, self._since_beat_s = now, 0.0
        self.beat += 1
        self.count()
        return slept

    def count(self) -> None:
        """Our next pulse is about to be sent."""
        self._newest[self.host] += 1
        self.sent[self.own] = self.clock
        while len(self.sent) > REMEMBERED_PULSES:
            del self.sent[next(iter(self.sent))]

    def get_ahead_of(self, pulse: int) -> None:
        """Jump ahead of a number that a previous agent has sent, or that others take for our last one."""
        if self.own < pulse < HIGHEST:
            self._newest[self.host] = pulse

    def learn(self, host: int, pulse: int) -> None:
        """A pulse of a known host has become known."""
        self._newest[host], self._heard_at[host] = pulse, self.precisely

    def confirm(self, by: int, pulse: int) -> None:
        """The agent of another known host has heard a pulse of ours."""
        if pulse in self.sent:
            self._heard_us[by] = max(self.sent[pulse], self._heard_us[by])

    def age_s(self, host: int) -> float:
        """For how long no new pulse of a host has become known (at first: since it is known)."""
        return self.clock - self.heard_at(host)

    def _reserve(self, host: int) -> None:
        for column in (self._newest, self._heard_at, self._heard_us):
            column.frombytes(bytes(column.itemsize * max(0, host + 1 - len(column))))
