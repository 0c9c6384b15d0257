"""Checkpoints as a run leaves them, without running one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distflow.flow.lineage import lineage
from distflow.flow.recipe_check import plan_recipe
from distflow.runtime.checkpoint.commit import Keeping
from distflow.runtime.checkpoint.parts import CheckpointWriter
from distflow.types import Version


def leave_checkpoint(
    run_dir: Path, step: int, *overrides: str, term: int = 0, arithmetic: Mapping[str, Any] | None = None
) -> Path:
    """One of a quickstart run; `overrides` are those of its recipe."""
    _, plan = plan_recipe("quickstart", overrides)
    writer = CheckpointWriter(run_dir, "trainer-0", plan.digest, Keeping(99), lineage(plan), arithmetic)
    version = Version(term, step)
    return writer.commit(version, writer.write_parts(version, {}, {"home": "trainer", "ledger": {}, "steps": {}}))
