"""When it pays to give the longest groups to workers of their own, by a completion formula.

An engine that holds samples of lengths L_1 ≥ … ≥ L_n and decodes a token of each of b samples in τ(b) seconds is done
after T = Σ_j L_j (τ(j) − τ(j−1)), τ(0) = 0: it decodes all n for L_n tokens, then n − 1 for L_{n−1} − L_n more, and so
on (StreamRL, arXiv:2504.15930, approximates this by two quantiles of the lengths, which can choose a split that hurts).

Of more groups than it has slots, S, the longest begin first, and the others take turns in the slots that these leave:
the k longest run from the beginning to the end, all others are done after h = Σ_{j>k} L_j / (S − k) tokens of each
slot, where k is the least for which L_{k+1} ≤ h (McNaughton, 1959). So

    T = h τ(S) + Σ_{j≤k} (L_j − max(L_{j+1}, h)) τ(j),      which for n ≤ S is the above.

So a split pays where decoding together costs: long contexts, for which τ grows with each sample, and a tail that takes
about as long as all the rest. Where τ hardly grows, or there are many waves, all workers are needed for the rest.

Example: 1 long group of 1,000 tokens and 31 of 100 on 4 workers of 8 slots, τ(b) = 1 + b: 8 groups together take
2,700 s; alone the long one takes 2,000 s, and the 31 others of three workers 1,238 s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distflow.metrics.batch_cost import BatchCost

Lengths = NDArray[np.float64]

LEAST_GAIN = 0.05
"""Share of the time that a split has to save, by the formula: lengths are predictions."""
OBSERVED = 256
"""Most observations of a decode time."""
FEWEST = 16
"""Observations without which no decode time is known."""
LEAST_VARIANCE = 0.1
"""Of the groups decoded together, below which their number says nothing."""
_OUTLIER = 3.0


class Split(NamedTuple):
    """The longest groups go to `workers` workers, which get nothing else."""

    workers: int
    groups: int
    seconds: float
    """Until all groups are done, and the same if they are dealt evenly."""
    together_s: float


@dataclass(frozen=True, slots=True)
class DecodeLine:
    """τ(b) = base_s + b · group_s, for up to `slots` groups at once."""

    base_s: float
    group_s: float
    slots: int

    def __call__(self, groups: int) -> float:
        """Seconds for a token of each of so many groups."""
        return self.base_s + groups * self.group_s if groups > 0 else 0.0


def completion_s(lengths: Sequence[float], line: DecodeLine) -> float:
    """T of an engine that gets groups of these lengths, in any order."""
    return _completion(np.sort(np.asarray(lengths, float))[::-1], _paces(line))


def best_split(lengths: Sequence[float], workers: int, line: DecodeLine) -> Split | None:
    """The split of these groups over equal workers that is done first; None if dealing them evenly is hardly slower.

    For each number of workers of the tail, the time of the tail grows with the number of its groups and that of the
    others falls, so the best number is where they meet.
    """
    ordered = np.sort(np.asarray(lengths, float))[::-1]
    paces = _paces(line)
    together = _dealt(ordered, workers, paces)
    best: Split | None = None
    for tail in range(1, workers):
        least, most = 1, len(ordered) - 1
        while least < most:
            groups = (least + most) // 2
            if _dealt(ordered[:groups], tail, paces) < _dealt(ordered[groups:], workers - tail, paces):
                least = groups + 1
            else:
                most = groups
        for groups in {max(1, least - 1), least} if len(ordered) > 1 else ():
            parts = _dealt(ordered[:groups], tail, paces), _dealt(ordered[groups:], workers - tail, paces)
            if best is None or max(parts) < best.seconds:
                best = Split(tail, groups, max(parts), together)
    return best if best is not None and best.seconds < (1.0 - LEAST_GAIN) * together else None


def _dealt(ordered: Lengths, workers: int, paces: Lengths) -> float:
    """The first worker gets the longest of each round, so that it is the last to be done."""
    return _completion(ordered[::workers], paces)


def _completion(ordered: Lengths, paces: Lengths) -> float:
    slots = len(paces) - 1
    first = ordered[:slots]
    left = ordered.sum() - np.cumsum(first) + first
    free = slots - np.arange(len(first))
    shared = np.flatnonzero(first * free <= left)
    long = int(shared[0]) if len(shared) else len(first)
    level = float(left[long] / free[long]) if len(shared) else 0.0
    drained = first[:long] - np.append(first[1:long], level)[:long]
    return level * float(paces[slots]) + float(drained @ paces[1 : long + 1])


def _paces(line: DecodeLine) -> Lengths:
    """τ(b), b = 0 … S."""
    return np.array([line(groups) for groups in range(line.slots + 1)])


class DecodeTimes:
    """Estimates τ from the progress that workers report: between two reports of a worker its fastest group has got as
    many tokens a sample as the engine made decode steps, and all of them together tell how many groups ran.

    An owner sees its own groups alone. Where a worker holds as many of other owners, both b and τ's slope are off by
    the same factor, and times are not.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._last: dict[str, tuple[float, Mapping[int, int]]] = {}
        """By worker: when it last reported, and the tokens of each group."""
        self._seen: deque[tuple[float, float]] = deque(maxlen=OBSERVED)
        """Groups decoded together, and seconds of a step."""

    def report(self, worker: str, tokens: Iterable[tuple[int, int]], now: float) -> None:
        """A progress report: tokens of all samples, by position of the group."""
        newest = dict(tokens)
        at, before = self._last.pop(worker, (now, {}))
        self._last[worker] = (now, newest)
        grown = [newest[position] - before[position] for position in newest.keys() & before.keys()]
        steps = max(grown, default=0) / self._samples
        if now > at and steps > 0:
            self._seen.append((sum(grown) / self._samples / steps, (now - at) / steps))

    def forget(self, worker: str) -> None:
        """It has left."""
        self._last.pop(worker, None)

    def line(self, slots: int) -> DecodeLine | None:
        """The line of least squares through what was seen; None while that says nothing about τ."""
        if len(self._seen) < FEWEST:
            return None
        usual = median(seconds for _, seconds in self._seen)
        kept = [(groups, seconds) for groups, seconds in self._seen if seconds < _OUTLIER * usual]
        cost = BatchCost()
        for groups, seconds in kept:
            cost.add(groups, 1.0, seconds)
        if cost.variance < LEAST_VARIANCE:
            return None
        base, slope = cost.line
        return DecodeLine(base, slope, slots) if base > 0 and slope > 0 else None
