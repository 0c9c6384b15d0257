"""The learning rate of a training step, by the schedule of the recipe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from distflow.flow.plan import Plan

Schedule = Literal["constant", "linear", "cosine", "wsd"]
_WSD_SHARE = 10
"""Schedule wsd decays during this part of the run, unless the recipe says how long."""
_LEAP = 0.05
"""Of the peak: a smaller difference is not worth a word."""


def learning_rate(
    peak: float,
    schedule: Schedule,
    done: int,
    *,
    warmup_steps: int,
    training_steps: int,
    min_lr: float = 0.0,
    decay_steps: int | None = None,
) -> float:
    """Rate of the next step after `done` steps: linear warm-up to `peak`, then by `schedule` down to `min_lr`.

    The first step of a warm-up of n steps has peak / n, step n the peak. wsd stays at the peak until the last
    `decay_steps` (default: a tenth of all).
    """
    if done < warmup_steps:
        return peak * (done + 1) / warmup_steps
    if schedule == "constant":
        return peak
    start = warmup_steps
    if schedule == "wsd":
        start = max(start, training_steps - (decay_steps or -(-training_steps // _WSD_SHARE)))
    progress = min(1.0, max(0.0, (done - start) / max(1, training_steps - start)))
    fall = peak - min_lr
    return min_lr + (
        fall * 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else fall * (1.0 - progress)
    )


def leaps(before: Mapping[str, Any], plan: Plan, step: int) -> Iterator[str]:
    """Warn of rates that leap after training step `step`, since a run whose recipe was `before` is prolonged or cut."""
    run = plan.recipe.run
    for name in sorted({str(one.model) for one in plan.steps if one.role == "train" and one.model is not None}):
        own = plan.recipe.models[name].optimizer
        was, now = (
            learning_rate(
                own.lr,
                own.schedule,
                step,
                warmup_steps=own.warmup_steps,
                training_steps=steps,
                min_lr=own.min_lr,
                decay_steps=own.decay_steps,
            )
            for steps in (int(before["run"]["training_steps"]), run.training_steps)
        )
        if step and abs(now - was) > _LEAP * own.lr:
            yield (
                f"warning: the learning rate of {name} goes from {was:.3g} to {now:.3g} after training step {step}: "
                f"schedule {own.schedule} ends at run.training_steps, which was {before['run']['training_steps']} and "
                f"is {run.training_steps} — to go on without a leap, set models.{name}.optimizer.schedule=constant "
                "and its lr"
            )
