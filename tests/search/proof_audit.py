"""Whether what agents take for proven is true: who is said to have heard a host has, directly or through others.

Every message carries, unseen by the agents, when its sender last heard of each host, as of when that host spoke.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from distflow.cluster.gossip import Gossip

Spoken = Mapping[int, float]
"""By host, when it said the last of what is known of it, in seconds of the simulation."""
ROUNDING_S = 1e-6


class ProofAudit:
    """What the agents of a mesh have really heard."""

    def __init__(self) -> None:
        self._heard: dict[int, dict[int, float]] = {}
        self._beats: dict[int, tuple[list[float], list[float]]] = {}
        """Of the present agent of a host: its beats, on its own clock and on that of the simulation."""

    def starts(self, host: int) -> None:
        """An agent begins, the first of its host or not."""
        self._beats[host] = ([], [])

    def turns(self, host: int, clock: float, now: float) -> None:
        """An agent has looked at what is due, by its own clock."""
        clocks, times = self._beats[host]
        if not clocks or clocks[-1] != clock:
            clocks.append(clock)
            times.append(now)

    def speaks(self, host: int, now: float) -> Spoken:
        """What goes with a message."""
        heard = self._heard.setdefault(host, {})
        heard[host] = now
        return dict(heard)

    def hears(self, host: int, spoken: Spoken) -> None:
        """A message has come."""
        heard = self._heard.setdefault(host, {})
        for other, at in spoken.items():
            heard[other] = max(at, heard.get(other, at))

    def check(self, agent: Gossip) -> None:
        """Raises AssertionError if another host has not heard what it is said to have heard."""
        clocks, times = self._beats[agent.host]
        for other in agent.others:
            seen_at = agent.seen_at(other)
            if seen_at <= 0.0:
                continue
            since = times[bisect_left(clocks, seen_at - ROUNDING_S)]
            heard = self._heard.get(other, {}).get(agent.host, -1.0)
            assert heard >= since - ROUNDING_S, (
                f"host {agent.host} takes it for proven that {other} has heard it at {since:.1f} s or later, which has "
                f"heard nothing of it that is later than {heard:.1f} s"
            )
