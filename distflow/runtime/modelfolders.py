"""The model of a checkpoint as a Hugging Face folder in the run folder, written while the run goes on.

hf/step_000100/   weights (safetensors), configuration, generation configuration, tokenizer
hf/draft_000200/  one that is being written, or was never finished
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from distflow.runtime.checkpoint import CheckpointReader

WriteModel = Callable[[Mapping[str, Tensor], Mapping[str, Any], Path, Callable[[int], None]], object]
"""Writes a state, by the model's section of the recipe, into an empty folder; tells bytes as they are written."""


class ModelFolders:
    """Of one run. `name` and `section` say which model."""

    def __init__(self, run_dir: Path, name: str, section: Mapping[str, Any], write: WriteModel) -> None:
        self._root = run_dir / "hf"
        self._name = name
        self._section = section
        self._write = write

    def write(self, checkpoint: Path, note: Callable[[int], None]) -> Path:
        """Write the folder of this whole checkpoint; one of an earlier life of the run makes room.

        `note` is told how many bytes were written, as they are. Raises OSError when the disk refuses or a part is not
        on this host, ValueError or DistflowError for a checkpoint that does not hold the model.
        """
        state = CheckpointReader(checkpoint, "").model(self._name)
        folder = self._root / checkpoint.name
        draft = self._root / checkpoint.name.replace("step_", "draft_")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            self._write(state, self._section, draft, note)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(draft, folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return folder
