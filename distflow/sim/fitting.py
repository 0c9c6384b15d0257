"""Makes a latency model of measured times: least squares on the formulas of `distflow.sim.latency`.

Every measurement counts by its relative error, and no coefficient is negative: of the sets of terms whose best
coefficients are all positive, the one that errs least is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from distflow.parts import Lengths
from distflow.sim.latency import DecodeLatency, TrainLatency, terms_of

SMALLEST_S = 1e-9
"""A coefficient that has to be positive is at least this."""


class MeasuredDecode(Protocol):
    """A decode step: samples, mean tokens of context, and seconds."""

    @property
    def samples(self) -> int:
        """In the batch."""

    @property
    def context(self) -> float:
        """Mean tokens of a sample."""

    @property
    def seconds(self) -> float:
        """Of the step."""


class MeasuredTraining(Protocol):
    """Forward and backward: lengths of the rows, whether they were packed, and seconds."""

    @property
    def lengths(self) -> Lengths:
        """Give the lengths of the rows (`distflow.parts`)."""

    @property
    def packed(self) -> bool:
        """A prompt that rows share was computed once."""

    @property
    def seconds(self) -> float:
        """Of all of them together."""


@dataclass(frozen=True, slots=True)
class FitError:
    """How far a fitted formula is from what was measured, as shares of the measured times."""

    typical: float
    """Root of the mean square."""
    worst: float

    def __str__(self) -> str:
        return f"off by {self.typical:.0%} (root mean square), at most {self.worst:.0%}"


def fit_decode(steps: Sequence[MeasuredDecode], prefill: Sequence[tuple[int, float]]) -> tuple[DecodeLatency, FitError]:
    """`prefill`: prompt tokens and seconds. The batch from which arithmetic bounds a step is tried out."""
    seconds = np.array([step.seconds for step in steps])
    per_token = float(_positive(np.array([[tokens] for tokens, _ in prefill]), np.array([s for _, s in prefill]))[0])
    found: list[tuple[FitError, DecodeLatency]] = []
    for largest in sorted({step.samples for step in steps}):
        small = [step.samples <= largest for step in steps]
        rows = [
            [float(few), 0.0 if few else step.samples, step.samples * step.context]
            for few, step in zip(small, steps, strict=True)
        ]
        floor, sample, context = map(float, _positive(np.array(rows), seconds))
        model = DecodeLatency(max(floor, SMALLEST_S), sample, context, per_token)
        found.append((_error([model.seconds(step.samples, step.context) for step in steps], seconds), model))
    error, model = min(found, key=lambda pair: pair[0].typical)
    return model, error


def fit_training(batches: Sequence[MeasuredTraining], apply_s: float) -> tuple[TrainLatency, FitError]:
    """Seconds of a batch from its rows, their tokens, and the pairs of tokens within a row."""
    seconds = np.array([batch.seconds for batch in batches])
    rows = [[1.0, *terms_of(batch.lengths, packed=batch.packed)] for batch in batches]
    latency, token, pair = map(float, _positive(np.array(rows, dtype=float), seconds))
    model = TrainLatency(token, pair, latency, apply_s, packed=any(batch.packed for batch in batches))
    return model, _error([model.seconds_of(batch.lengths) for batch in batches], seconds)


def _error(expected: Sequence[float], seconds: NDArray[np.float64]) -> FitError:
    off = np.abs(np.array(expected) / np.maximum(seconds, SMALLEST_S) - 1.0)
    return FitError(math.sqrt(float(np.mean(off**2))), float(off.max()))


def _positive(terms: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The coefficients ≥ 0 of `terms` [measurements, terms] whose sums come closest to `seconds`, relatively."""
    known = seconds > 0
    weighted = terms[known] / seconds[known, None]
    columns = terms.shape[1]
    best, least = np.zeros(columns), float(known.sum())
    for size in range(1, columns + 1):
        for chosen in map(list, combinations(range(columns), size)):
            solved = np.linalg.lstsq(weighted[:, chosen], np.ones(len(weighted)), rcond=None)[0]
            left = float(np.sum((weighted[:, chosen] @ solved - 1.0) ** 2))
            if (solved >= 0).all() and left < least:
                best, least = np.zeros(columns), left
                best[chosen] = solved
    return best
