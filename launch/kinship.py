"""What a recipe that goes on from a checkpoint must have in common with the one that wrote it."""

from __future__ import annotations

from collections.abc import Iterator

from distflow.errors import UserError
from distflow.flow.lineage import changes, lineage
from distflow.flow.plan import Plan
from distflow.launch.resuming import Resumption


def check_lineage(found: Resumption, plan: Plan) -> Iterator[str]:
    """What the recipe has changed since the checkpoint, a line each; UserError for what it must not have changed."""
    if found.checkpoint is None or found.commit["digest"] == plan.digest:
        return
    different = changes(found.commit["recipe"], lineage(plan))
    forbidden = [str(change) for change in different if change.forbidden]
    if forbidden:
        raise UserError(
            f"--resume: {found.checkpoint} is of another recipe: {'; '.join(forbidden)} — resume with the values that "
            "the run began with, or start a new run"
        )
    for change in different:
        yield f"changed since the checkpoint: {change}"
