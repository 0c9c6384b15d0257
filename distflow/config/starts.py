"""The files that `distflow init` writes, from `recipes/starts`: each task a folder that runs as it is."""

from __future__ import annotations

import re
from pathlib import Path

from distflow.config.paths import recipes_folder
from distflow.errors import UserError, did_you_mean

_RUN_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
"""As `run.name` has it."""
_MODEL = re.compile(r"(?<=    path: )\S+")


def start_files(task: str, name: str, model: str | None = None) -> dict[str, str]:
    """The texts of a task's files by their names, for a run of this name. Raises UserError.

    `model`: a folder, or an id on the hub, of the model that is trained; only for a task that trains such a one.
    """
    root = recipes_folder() / "starts"
    tasks = sorted(path.name for path in root.iterdir() if path.is_dir())
    if task not in tasks:
        raise UserError(f"--task {task}: {did_you_mean(task, tasks)}")
    if not _RUN_NAME.match(name):
        raise UserError(
            f"{name!r} cannot be the name of a run: letters, digits, '.', '_' and '-', a letter or digit first"
        )
    files = {path.name: path.read_text(encoding="utf-8") for path in sorted((root / task).iterdir()) if path.is_file()}
    recipe = files["recipe.yaml"].replace(f"run: {{name: {task},", f"run: {{name: {name},")
    if model is not None:
        if not _MODEL.search(recipe):
            raise UserError(f"--model {model}: task {task} trains a model from scratch; leave it out, or --task chat")
        found = Path(model).expanduser()
        recipe = _MODEL.sub(lambda match: str(found.resolve()) if found.is_dir() else model, recipe)
    return {"recipe.yaml": recipe, **{name: text for name, text in files.items() if name != "recipe.yaml"}}
