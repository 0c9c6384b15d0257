"""Where the models of a run lie as Hugging Face folders, and whether one is missing. No torch here.

hf/step_000100/   weights (safetensors), configuration, generation configuration, tokenizer
hf/draft_000200/  one that is being written, or was never finished
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

_FOLDER = re.compile(r"step_(\d+)")
_DRAFT = re.compile(r"draft_\d+")


def models_of(run_dir: Path) -> Path:
    """The folder of all of them."""
    return run_dir / "hf"


def model_owed(run_dir: Path, step: int, every: int) -> bool:
    """Whether the folder that was due last, until after training step `step`, is missing; one is due every so many.

    It is made of the first checkpoint at or after the step that it was due at, which may be a later one.
    """
    if every <= 0 or step < every:
        return False
    made = [int(found[1]) for path in models_of(run_dir).glob("step_*") if (found := _FOLDER.fullmatch(path.name))]
    return not any(step - step % every <= number <= step for number in made)


def forget_model_drafts(run_dir: Path) -> None:
    """Remove folders that nobody will finish."""
    for path in models_of(run_dir).glob("draft_*"):
        if _DRAFT.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
