"""Which checkpoints are kept: the newest ones, and the best one by a metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Keeping:
    """From the recipe."""

    last: int
    """Newest checkpoints that are kept."""
    metric: str | None = None
    """The best one by this metric is kept beside them."""
    mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value is the best."""

    def superfluous(self, scores: Mapping[Path, float | None]) -> list[Path]:
        """What is to be removed of these checkpoints (oldest first), by their values of the metric.

        A function of the values alone, so that all who keep the same checkpoints remove the same ones. Of equal values
        the newest is the best.
        """
        folders = list(scores)
        kept = set(folders[-self.last :])
        sign = 1.0 if self.mode == "max" else -1.0
        ranked = [(sign * value, place) for place, value in enumerate(scores.values()) if value is not None]
        if self.metric is not None and ranked:
            kept.add(folders[max(ranked)[1]])
        return [folder for folder in folders if folder not in kept]


LAST = Keeping(2)
