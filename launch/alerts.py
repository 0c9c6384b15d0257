"""What a user should hear of while a run goes on: rewards that fail, gradients that are 0 or explode."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

FAILURES = {"reward/timeouts": "timed out", "reward/errors": "raised an error"}
"""Counts of the workers, and what the reward function did."""
SAMPLES = "reward/samples"
GRAD_NORM, EQUAL = "actor/grad_norm", "group/zero_std_frac"
STEPS = 10
"""Training steps for which the gradient must be 0, or known, before there is something to say."""
EXPLODED = 1000.0
"""Times the median of the training steps before."""


class Alerts:
    """Reads what the workers count and what is measured in each training step; returns lines to show, each once."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._norms: deque[float] = deque(maxlen=10 * STEPS)

    def of_workers(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        """From the workers' status rows: the first reward that failed, on whatever worker."""
        for row in rows:
            counts = row.get("counts", {})
            for name, what in FAILURES.items():
                if counts.get(name) and name not in self._said:
                    self._said.add(name)
                    yield (
                        f"warning: the reward function {what} on {row['name']}: {counts[name]:.0f} of "
                        f"{counts.get(SAMPLES, 0):.0f} samples so far — see its log; `distflow status` counts them"
                    )

    def of_step(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        """From the merged metrics of a training step (1-based); call it with every one, in order."""
        if GRAD_NORM not in metrics:
            return
        norm = metrics[GRAD_NORM]
        before, zero = list(self._norms), "gradients of 0"
        self._norms.append(norm)
        if norm == 0 and len(before) >= STEPS - 1 and not any(before[1 - STEPS :]) and zero not in self._said:
            self._said.add(zero)
            yield f"warning: {GRAD_NORM} has been 0 for {STEPS} training steps: nothing is learnt{_why(metrics)}"
        usual = median(before) if len(before) >= STEPS else math.inf
        exploded = not math.isfinite(norm) or (usual > 0 and norm > EXPLODED * usual)
        if exploded and "exploded" not in self._said:
            self._said.add("exploded")
            than = f", and {usual:.3g} was usual before" if math.isfinite(usual) else ""
            yield (
                f"warning: {GRAD_NORM} is {norm:.3g} in training step {step}{than} — a lower "
                "models.NAME.optimizer.lr, or longer warmup_steps, may help"
            )


def counted_rewards(rows: Iterable[Mapping[str, Any]]) -> str:
    """For `status`: `rewards: 512 judged, 12 timed out`; empty while nothing failed."""
    counts = [row.get("counts", {}) for row in rows]
    totals = {name: sum(one.get(name, 0) for one in counts) for name in (SAMPLES, *FAILURES)}
    failed = [f"{totals[name]:.0f} {what}" for name, what in FAILURES.items() if totals[name]]
    return f"rewards: {', '.join([f'{totals[SAMPLES]:.0f} judged', *failed])}" if failed else ""


def _why(metrics: Mapping[str, float]) -> str:
    if metrics.get(EQUAL) == 1.0:
        return f" — the samples of each prompt all get the same reward ({EQUAL} is 1), so their advantages are 0"
    return " — look at the rewards: `distflow rollouts`"
