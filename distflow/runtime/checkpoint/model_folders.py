"""The model of a checkpoint as a Hugging Face folder in the run folder (see `commit.py`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from distflow.runtime.checkpoint.commit import checkpoints_of, folder_of, forget_model_drafts, model_owed, models_of
from distflow.runtime.checkpoint.parts import CheckpointReader
from distflow.types import Version

WriteModel = Callable[[Mapping[str, Tensor], Mapping[str, Any], Path, Callable[[int], None]], object]
"""Writes a state, by the model's section of the recipe, into an empty folder; tells bytes as they are written."""


class ModelFolders:
    """Of one run. `name` and `section` say which model."""

    def __init__(self, run_dir: Path, name: str, section: Mapping[str, Any], write: WriteModel) -> None:
        self._run_dir = run_dir
        self._root = models_of(run_dir)
        self._name = name
        self._section = section
        self._write = write

    def owed(self, step: int, every: int) -> Path | None:
        """The checkpoint after training step `step`, if the folder that was due there or before it is missing."""
        if not model_owed(self._run_dir, step, every):
            return None
        return folder_of(checkpoints_of(self._run_dir), Version(0, step))

    def write(self, checkpoint: Path, note: Callable[[int], None]) -> Path:
        """Write the folder of this whole checkpoint; one of an earlier life of the run makes room.

        `note` is told how many bytes were written, as they are. Raises OSError when the disk refuses or a part is not
        on this host, ValueError or DistflowError for a checkpoint that does not hold the model.
        """
        state = CheckpointReader(checkpoint, "").model(self._name)
        folder = self._root / checkpoint.name
        draft = self._root / checkpoint.name.replace("step_", "draft_")
        # One is written at a time, by one replica: whatever is there was left by one that was killed.
        forget_model_drafts(self._run_dir)
        draft.mkdir(parents=True)
        try:
            self._write(state, self._section, draft, note)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(draft, folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return folder
