"""From a run's checkpoint to a Hugging Face folder: which checkpoint, which model, and texts to compare it by."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from distflow.config.load import recipe_from_mapping
from distflow.config.plugins import EXPORTER
from distflow.errors import UserError
from distflow.flow.planner import make_plan
from distflow.flow.resolve import resolve
from distflow.launch.resuming import find_checkpoint
from distflow.runtime.commit import checkpoints_of, examine, newest_first, step_of

TEXTS = 8
"""Samples of the run by which the exported model is compared."""


def export_checkpoint(run_dir: Path, step: int | None, to: Path) -> Iterator[str]:
    """Write the folder `to`; yields lines for people. Raises UserError when there is no such checkpoint."""
    if step is None:
        found = find_checkpoint(run_dir)
        yield from (f"ignored: {line}" for line in found.ignored)
        folder = found.checkpoint
        if folder is None:
            raise UserError(f"{run_dir}: no whole checkpoint yet — run.save_every says when they are written")
    else:
        folder = _named(run_dir, step)
    yield f"exports training step {step_of(folder)}, from {folder}"
    # Imported late: this is what needs torch.
    from distflow.runtime.checkpoint import CheckpointReader

    source = run_dir / "recipe.yaml"
    recipe = recipe_from_mapping(yaml.safe_load(source.read_text()), lambda key: str(source))
    plan = make_plan(recipe, lambda key: str(source))
    texts = list(islice(_texts(run_dir), TEXTS))
    model = plan.recipe.models[plan.primary].model_dump()
    try:
        lines: list[str] = resolve(EXPORTER)(CheckpointReader(folder, "").model(plan.primary), model, texts, to)
    except FileNotFoundError:
        if folder.exists():
            raise
        raise UserError(
            f"{folder}: the run has removed it meanwhile — export again, or let it keep more (run.keep_checkpoints)"
        ) from None
    yield from lines


def _named(run_dir: Path, step: int) -> Path:
    folders = {step_of(folder): folder for folder in newest_first(checkpoints_of(run_dir))}
    if step not in folders:
        there = ", ".join(map(str, sorted(folders))) or "none"
        raise UserError(f"--step {step}: {run_dir}/checkpoints has no checkpoint of it; there are: {there}")
    _, fault = examine(folders[step])
    if fault:
        raise UserError(f"--step {step}: {folders[step]} is not whole: {fault} — take another one")
    return folders[step]


def _texts(run_dir: Path) -> Iterator[tuple[str, list[int]]]:
    """Prompts with responses that were sampled in the run, the newest first, one a prompt."""
    for file in sorted(run_dir.glob("rollouts/step_*/*.jsonl"), reverse=True):
        seen: set[Any] = set()
        # The last line may just be in the making.
        for line in file.read_text().splitlines()[:-1]:
            sample = json.loads(line)
            if sample["uid"][2] not in seen:
                seen.add(sample["uid"][2])
                yield sample["prompt"], sample["response_ids"]
