"""From the recipe: what the training side trains on, and for how long it waits."""

from __future__ import annotations

from dataclasses import dataclass

from distflow.config.schema import Recipe
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


def limits_of(recipe: Recipe, plan: Plan) -> TrainingLimits:
    """As the recipe says."""
    run = recipe.run
    return TrainingLimits(
        batch=plan.batch,
        streamed=plan.streamed and not run.deterministic,
        dump_every=run.dump_rollouts,
        save_every=run.save_every,
        stop_after=run.stop_after,
        no_progress_s=recipe.limits.no_progress_s,
        drain_s=recipe.limits.drain_s,
        save_every_s=run.save_every_s,
        keep_best=run.keep_best,
        hf_every=run.hf_every,
    )
