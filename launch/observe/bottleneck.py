"""Where the time of a run goes, in one line, from the shares that its workers measure."""

from __future__ import annotations

from collections.abc import Mapping

from distflow.launch.run.metrics_merge import MetricsReader

WINDOW = 20
"""Training steps that the verdict looks back."""
MUCH = 0.2
"""Waiting below this share of the time is not worth a word."""
CLEAR = 0.1
"""Shares that differ by less than this are called equal."""
DOMINATES = 0.6
"""A phase of a colocated worker that takes more than this share of a step is what bounds it."""
TRAINER, ROLLOUT = "perf/trainer_idle_share", "perf/rollout_idle_share"
GENERATE, SCORE = "perf/generate_share", "perf/score_share"
PHASE = "perf/generation_share"
STALENESS = "staleness/max"
READ = (TRAINER, ROLLOUT, GENERATE, SCORE, PHASE, STALENESS)


def where_time_went(reader: MetricsReader, last: int, steps: int) -> str:
    """The verdict on the `steps` training steps up to `last` (1-based)."""
    return verdict(reader.window(last, steps, READ))


def verdict(metrics: Mapping[str, float]) -> str:
    """`rollout-bound: trainers waited 63%, rollouts 4%`, say; empty while too little is known.

    `metrics`: the merged metrics of one or several training steps.
    """
    if PHASE in metrics:
        return _colocated(metrics)
    if TRAINER not in metrics or ROLLOUT not in metrics:
        return ""
    trainer, rollout = metrics[TRAINER], metrics[ROLLOUT]
    waited = f"trainers waited {trainer:.0%}, rollouts {rollout:.0%}"
    if min(trainer, rollout) >= MUCH and metrics.get(STALENESS) == 0:
        waited += "; they take turns (try layout=async)"
    if trainer >= MUCH and trainer - rollout >= CLEAR:
        if _scoring_dominates(metrics):
            return f"reward-bound: {waited}; rewards took {metrics[SCORE]:.0%}, generation {metrics[GENERATE]:.0%}"
        return f"rollout-bound: {waited}"
    if rollout >= MUCH and rollout - trainer >= CLEAR:
        return f"training-bound: {waited}"
    return f"balanced: {waited}"


def _colocated(metrics: Mapping[str, float]) -> str:
    generation = metrics[PHASE]
    # What is waited for in either phase is somebody else's doing, and told apart.
    idle = metrics.get(ROLLOUT, 0.0) * generation + metrics.get(TRAINER, 0.0) * (1 - generation)
    shares = f"generation took {generation:.0%} of a training step, training {1 - generation:.0%}"
    shares += f", {idle:.0%} of it waiting for others" if idle >= MUCH else ""
    if generation >= DOMINATES:
        return f"{'reward' if _scoring_dominates(metrics) else 'generation'}-bound: {shares}"
    return f"{'training-bound' if 1 - generation >= DOMINATES else 'balanced'}: {shares}"


def _scoring_dominates(metrics: Mapping[str, float]) -> bool:
    return SCORE in metrics and metrics[SCORE] > metrics.get(GENERATE, 0.0)
