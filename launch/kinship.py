"""What a recipe that goes on from a checkpoint must have in common with the one that wrote it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distflow.errors import UserError
from distflow.flow.lineage import changes, lineage
from distflow.flow.plan import Plan
from distflow.launch.resuming import Resumption
from distflow.runtime.arithmetic import KEY, OF_MACHINE, arithmetic, departures


def check_lineage(found: Resumption, plan: Plan, *, here: bool = True) -> Iterator[str]:
    """What has changed since the checkpoint, a line each; UserError for what the recipe must not have changed.

    `here`: the workers will run on this machine.
    """
    yield from _changed(found, plan)
    if found.checkpoint is not None and plan.recipe.run.deterministic:
        now = arithmetic(plan)
        known = now if here else {name: value for name, value in now.items() if name not in OF_MACHINE}
        yield from dict.fromkeys(_departures(found.checkpoint, found.commit, known))


def _changed(found: Resumption, plan: Plan) -> Iterator[str]:
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


def _departures(checkpoint: Path, commit: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What the last bits depend on and is another now, by the parts of the training workers that are here."""
    for part in commit["parts"]:
        if part.startswith("worker-") and (checkpoint / part).is_file():
            was = json.loads((checkpoint / part).read_text())
            yield from departures(was.get(KEY, {}), now)
