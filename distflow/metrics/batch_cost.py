"""How much of a decode step is due to the samples that run together in it, from what an engine has done.

A step of b samples is taken to last t(b) = t₀ + s·b: reading the weights, and what each sample adds (its context, and
its arithmetic). The line is fitted by least squares to stretches of some steps each, weighted by these, of which only
five sums are kept. Its share s·b / t(b) at the mean b is what fewer samples could save of the time at most.

Example: 10 steps of 1 sample in 10 s and 10 of 3 samples in 20 s: t(b) = 0.5 + 0.5·b, and a share of 2/3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Self

from distflow.types import SampleOutput

SPREAD = 0.02
"""Variance of the number of samples, of its squared mean, below which no line is told: a seventh up and down."""
STRETCH_S = 1.0
"""Engines tell of their tokens in portions, so single steps tell little."""
HALF_LIFE_S = 300.0
"""Of decoding, after which what was seen counts half as much."""


@dataclass(slots=True)
class BatchCost:
    """Sums over stretches of n steps of b samples in t seconds."""

    steps: float = 0.0
    """Σ n."""
    seconds: float = 0.0
    """Σ t."""
    samples: float = 0.0
    """Σ n·b."""
    squares: float = 0.0
    """Σ n·b²."""
    products: float = 0.0
    """Σ t·b."""

    def add(self, samples: float, steps: float, seconds: float) -> None:
        """A stretch of so many steps, with so many samples in each."""
        self.steps += steps
        self.seconds += seconds
        self.samples += steps * samples
        self.squares += steps * samples * samples
        self.products += seconds * samples

    def faded(self, factor: float) -> BatchCost:
        """The same, counting only `factor` times as much."""
        return BatchCost(*(factor * part for part in astuple(self)))

    @classmethod
    def of(cls, costs: Iterable[BatchCost]) -> Self:
        """All of them together."""
        parts = [astuple(cost) for cost in costs] or [astuple(BatchCost())]
        return cls(*map(sum, zip(*parts, strict=True)))

    def since(self, earlier: BatchCost) -> BatchCost:
        """What was added after these sums were."""
        return BatchCost(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))

    @property
    def _spread(self) -> float:
        return self.steps * self.squares - self.samples**2

    @property
    def variance(self) -> float:
        """Of the number of samples, over the steps."""
        return self._spread / self.steps**2 if self.steps else 0.0

    @property
    def line(self) -> tuple[float, float]:
        """t₀ and s, in seconds; the number of samples must have varied."""
        slope = (self.steps * self.products - self.samples * self.seconds) / self._spread
        return (self.seconds - slope * self.samples) / self.steps, slope

    @property
    def share(self) -> float:
        """Of the time of a step, what the number of samples adds to that of none; 0 if it hardly varied."""
        if self.seconds <= 0.0 or self._spread <= SPREAD * self.samples**2:
            return 0.0
        _, slope = self.line
        return min(1.0, max(0.0, slope * self.samples / self.seconds))


class BatchMeter:
    """Makes a `BatchCost` of looks at an engine, between which it has decoded."""

    def __init__(self) -> None:
        self._cost = BatchCost()
        self._last: Mapping[int, int] = {}
        self._seconds = self._sample_s = self._tokens = 0.0

    @property
    def share(self) -> float:
        """Of the time of a decode step, what its samples add; 0 as long as that is not known."""
        return self._cost.share

    def look(
        self, samples: float, seconds: float, progress: Mapping[int, int], outputs: Sequence[SampleOutput]
    ) -> None:
        """The engine has decoded with so many samples for so long. `progress`: tokens of those that are still there, by
        position; `outputs`: samples that have left.

        Of a group that has just come it is not known what it came with, so its first look is left out.
        """
        left = Counter[int]()
        for output in outputs:
            left[output.position] += len(output.token_ids)
        now = Counter(progress) + left
        self._tokens += sum(max(0, now[position] - had) for position, had in self._last.items() if position in now)
        self._last = dict(progress)
        self._seconds += seconds
        self._sample_s += seconds * samples
        if self._seconds >= STRETCH_S:
            self._close()

    def _close(self) -> None:
        samples, seconds = self._sample_s / self._seconds, self._seconds
        if self._tokens and samples:
            self._cost = self._cost.faded(0.5 ** (seconds / HALF_LIFE_S))
            self._cost.add(samples, self._tokens / samples, seconds)
        self._seconds = self._sample_s = self._tokens = 0.0
