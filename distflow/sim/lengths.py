"""Lengths of responses: lognormal, with a share that the prompt explains, or a trace of measured ones.

Both are functions of two uniform numbers in (0, 1), one of the prompt and one of the sample, so that the
simulator and an emulated engine of a real run draw the same lengths.

Example: Lognormal(median=900, sigma=1.1, prompt_share=0.6).length(0.5, 0.5, limit=16_384)  # 900
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

from distflow.errors import UserError

NORMAL = NormalDist()
MOST_MEDIAN, MOST_SIGMA = 1e9, 10.0
"""Beyond them lengths are no numbers of tokens any more."""


class Lengths(Protocol):
    """A distribution of response lengths in tokens."""

    def length(self, prompt: float, sample: float, limit: int) -> int:
        """The length of a sample, 1 … limit, from a uniform number of its prompt and one of its own."""


@dataclass(frozen=True, slots=True)
class Lognormal:
    """`median` tokens, and `sigma`, the standard deviation of the logarithm: 1.1 is a heavy tail, 0 none."""

    median: float
    sigma: float
    prompt_share: float = 0.0
    """Share of the variance of the logarithm that the prompt explains, 0 … 1."""

    def length(self, prompt: float, sample: float, limit: int) -> int:
        """exp(ln median + sigma · (√share · z_prompt + √(1 − share) · z_sample)), rounded."""
        normal = math.sqrt(self.prompt_share) * _normal(prompt) + math.sqrt(1.0 - self.prompt_share) * _normal(sample)
        return max(1, min(limit, round(self.median * math.exp(self.sigma * normal))))


@dataclass(frozen=True, slots=True)
class Trace:
    """Measured lengths: one row for each prompt, with those of its samples; samples draw from their prompt's row."""

    rows: Sequence[Sequence[int]]

    def length(self, prompt: float, sample: float, limit: int) -> int:
        """The row at that quantile of all rows, and in it the length at that quantile."""
        row = self.rows[min(len(self.rows) - 1, int(prompt * len(self.rows)))]
        return max(1, min(limit, row[min(len(row) - 1, int(sample * len(row)))]))


def read_trace(path: Path) -> Trace:
    """Measured lengths, a line for each prompt with those of its samples, in tokens: `118 431 97`. Raises UserError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"trace of lengths {path}: cannot be read: {error}") from None
    rows = [(number, line.split()) for number, line in enumerate(lines, 1) if line.strip()]
    for number, row in rows:
        if not all(word.isascii() and word.isdigit() and int(word) for word in row):
            raise UserError(f"{path}:{number}: expected lengths in tokens (whole numbers from 1) with spaces between")
    if not rows:
        raise UserError(f"trace of lengths {path}: it has no lines; expected one for each prompt, such as 118 431 97")
    return Trace([sorted(map(int, row)) for _, row in rows])


def _normal(uniform: float) -> float:
    return NORMAL.inv_cdf(min(max(uniform, 1e-9), 1.0 - 1e-9))
