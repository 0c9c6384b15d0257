"""How far the clocks of several hosts are apart, by messages between them: pure arithmetic, see `tracing.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

Delay = tuple[int, int, float]
"""Sender's host, receiver's host, and the time from sending to receiving as their two clocks show it."""


def corrections(hosts: Sequence[int], delays: Iterable[Delay]) -> dict[int, float]:
    """What to add to each host's times so that nothing is received before it was sent; the first host's stay.

    If delays contradict each other (a clock was set in between), some remain negative.
    """
    least: dict[tuple[int, int], float] = {}
    for sender, receiver, delay in delays:
        if sender != receiver:
            least[sender, receiver] = min(delay, least.get((sender, receiver), delay))
    found = _centred(hosts, least)
    # Pairs that the walk did not go along may be violated still: move receivers, as far as necessary. Each round
    # settles the chains that are one message longer (Bellman and Ford's longest paths).
    for _ in hosts:
        for (sender, receiver), delay in least.items():
            found[receiver] = max(found[receiver], found[sender] - delay)
    return {host: shift - found[hosts[0]] for host, shift in found.items()}


def _centred(hosts: Sequence[int], least: Mapping[tuple[int, int], float]) -> dict[int, float]:
    """Walk from the first host along the messages; each host is placed relative to where it was reached from."""
    found: dict[int, float] = {}
    for start in hosts:
        if start in found:
            continue
        found[start] = 0.0
        front = [start]
        while front:
            here = front.pop(0)
            for there in hosts:
                if there not in found and ((here, there) in least or (there, here) in least):
                    found[there] = found[here] + _between(least, here, there)
                    front.append(there)
    return found


def _between(least: Mapping[tuple[int, int], float], here: int, there: int) -> float:
    """Correction of `there` relative to `here`: the middle of what the two directions allow, or nearest to 0."""
    low = -least[here, there] if (here, there) in least else -math.inf
    high = least.get((there, here), math.inf)
    return (low + high) / 2 if math.isfinite(low + high) else min(max(0.0, low), high)
