"""Learning rate as a pure function of the number of optimizer steps done."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(peak: float, schedule: Schedule, done: int, *, warmup_steps: int, training_steps: int) -> float:
    """Rate of the next step after `done` steps: linear warm-up to `peak`, then as `schedule` says down to 0 at the end.

    The first step of a warm-up of n steps has peak / n, step n the peak.
    """
    if done < warmup_steps:
        return peak * (done + 1) / warmup_steps
    if schedule == "constant":
        return peak
    share = min(1.0, (done - warmup_steps) / max(1, training_steps - warmup_steps))
    return peak * (1.0 - share) if schedule == "linear" else peak * 0.5 * (1.0 + math.cos(math.pi * share))
