"""What it took a training pool to come back, as metrics of the first training step of its new term."""

from __future__ import annotations

import json
import time
from pathlib import Path

from distflow.runtime.metrics import MetricStore

SECONDS, REPEATED = "recovery/seconds/max", "recovery/repeated_steps/max"
"""From the moment at which the host's agent found the former term over to the end of the first training step after it;
training steps that this worker had finished and that are trained once more."""
TAIL_BYTES = 1 << 16


class Recovery:
    """Of one training worker. `broken_at`: by the machine's monotonic clock; `step`: where the new term begins."""

    def __init__(self, run_dir: Path, stem: str, broken_at: float, step: int) -> None:
        self._broken_at = broken_at
        self._repeated = max(0, last_step(run_dir / "metrics" / f"{stem}.jsonl") - step)

    def note(self, metrics: MetricStore) -> None:
        """The first training step is over."""
        metrics.max(SECONDS, time.monotonic() - self._broken_at)
        metrics.max(REPEATED, float(self._repeated))


def last_step(path: Path) -> int:
    """Training step (1-based) of the last line of a worker's metrics that is whole; 0: there is none."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            # Cut short by a kill, or by our own begin in the middle of a line.
            continue
    return 0
