"""From the recipe: what the training side trains on, and for how long it waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from distflow.flow.plan import BatchPlan, Plan


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
    hf_every: int = 0
    dump_fields: tuple[str, ...] = ()
    """Of the dumps, besides the standard ones; may hold patterns."""

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """What the plan's recipe says."""
        recipe = plan.recipe
        return cls(
            batch=plan.batch,
            streamed=plan.streamed and not recipe.run.deterministic,
            dump_every=recipe.run.dump_rollouts,
            save_every=recipe.run.save_every,
            stop_after=recipe.run.stop_after,
            no_progress_s=recipe.limits.no_progress_s,
            drain_s=recipe.limits.drain_s,
            save_every_s=recipe.run.save_every_s,
            keep_best=recipe.run.keep_best,
            hf_every=recipe.run.hf_every,
            dump_fields=plan.dump_fields,
        )
