"""Flows that read their samples from the data: what their step says about a recipe's batch and layout."""

from __future__ import annotations

from collections.abc import Iterator

from distflow.config.schema import BatchConfig, LayoutConfig, Recipe
from distflow.flow.plan import Plan
from distflow.flow.structure import Structure


def as_read(recipe: Recipe, structure: Structure) -> Recipe:
    """The recipe with what follows from a read step: how many samples a row has, and that none is older than the
    weights. The same recipe where samples are generated.
    """
    if structure.reads is None:
        return recipe
    batch = recipe.batch.model_copy(update={"samples_per_prompt": structure.reads.declaration.spec.samples})
    layout = recipe.layout.model_copy(update={"max_staleness": 0, "schedule": "fifo"})
    return recipe.model_copy(update={"batch": batch, "layout": layout})


def unread_keys(recipe: Recipe, plan: Plan) -> Iterator[tuple[str, str]]:
    """Keys that differ from their defaults and say nothing where samples are read from the data, each with why."""
    if plan.reads is None:
        return
    name, samples = plan.reads.name, plan.batch.samples_per_prompt
    if recipe.batch.samples_per_prompt not in (samples, BatchConfig.model_fields["samples_per_prompt"].default):
        yield "batch.samples_per_prompt", f"step {name!r} makes {samples} of each row of the data"
    if recipe.batch.mask_truncated is not None:
        yield "batch.mask_truncated", f"step {name!r} reads whole responses from the data, and none is cut off"
    given, default = recipe.layout, LayoutConfig.model_fields
    for key in ("max_staleness", "schedule", "refresh", "hedging", "partial_rollouts"):
        if getattr(given, key) != default[key].default:
            yield f"layout.{key}", f"step {name!r} reads the samples from the data, and no worker generates"
