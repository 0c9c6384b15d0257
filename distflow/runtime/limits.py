"""From the recipe: what the training side trains on, and for how long it waits."""

from __future__ import annotations

from dataclasses import dataclass

from distflow.flow.plan import BatchPlan


@dataclass(frozen=True, slots=True)
class TrainingLimits:
    """Of one training worker."""

    batch: BatchPlan
    streamed: bool
    """Begin with micro-batches as they arrive; else wait for the step's whole set and take it in order."""
    dump_every: int
    save_every: int
    stop_after: int | None
    no_progress_s: float
    drain_s: float
    save_every_s: float | None = None
    keep_best: str | None = None
    """The metric by which a checkpoint is kept beside the newest."""
