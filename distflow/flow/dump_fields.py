"""Which fields go to the rollout dumps beside the standard ones: those that the user's own steps write, by default."""

from __future__ import annotations

from collections.abc import Iterable

from distflow.config.check import Where
from distflow.config.schema import Recipe
from distflow.config.suggest import did_you_mean
from distflow.errors import Problem
from distflow.flow.edges import DUMPED
from distflow.flow.graph import StepNode
from distflow.flow.structure import Structure
from distflow.types import REWARD_PARTS, written

_OURS = "distflow."
_GENERATED = ("prompt_ids", "task", "rollout_logprobs")
"""What every generate step writes, a user's too: dumped only when asked for."""
_DROP_REASON = "drop_reason"
"""What is dumped was not dropped."""


def dump_fields(recipe: Recipe, steps: Iterable[StepNode]) -> tuple[str, ...]:
    """Names, or patterns such as `stats/*`, of the fields that dumps have besides those that they always have."""
    if not recipe.run.dump_rollouts:
        return ()
    wanted = recipe.run.dump_fields
    if wanted is None:
        own = (node for node in steps if not node.declaration.call.startswith(_OURS))
        wanted = [field for node in own for field in node.writes if field not in _GENERATED]
    kept = [name for name in wanted if not _always(name)]
    return tuple(dict.fromkeys(kept))


def dump_problems(recipe: Recipe, structure: Structure, where: Where) -> list[Problem]:
    """Fields that are to be dumped and that no step writes."""
    key = "run.dump_fields"
    steps = (*structure.steps, *structure.private.all)
    known = [field for node in steps for field in node.writes]
    return [
        Problem(where(key), key, f"no step of the flow writes {name!r}", did_you_mean(name, set(known)))
        for name in recipe.run.dump_fields or ()
        if not written(name, known) and not any(written(field, [name]) for field in known)
    ]


def _always(name: str) -> bool:
    return name in DUMPED or name.startswith(REWARD_PARTS) or name == _DROP_REASON
