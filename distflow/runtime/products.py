"""What a training worker leaves in the run folder for later: checkpoints, and models that others can load."""

from __future__ import annotations

from distflow.config.plugins import MODEL_WRITER
from distflow.flow.lineage import lineage
from distflow.flow.resolve import resolve
from distflow.runtime.arithmetic import arithmetic
from distflow.runtime.assembly import Setting
from distflow.runtime.checkpoint.keeping import Keeping
from distflow.runtime.checkpoint.model_folders import ModelFolders
from distflow.runtime.checkpoint.parts import CheckpointWriter


def checkpoint_writer(setting: Setting) -> CheckpointWriter:
    """For this worker's parts; keeps what the recipe says."""
    run = setting.recipe.run
    keeping = Keeping(run.keep_checkpoints, run.keep_best, run.keep_best_mode)
    stem = setting.me.name.file_stem
    plan = setting.plan
    return CheckpointWriter(setting.run_dir, stem, plan.digest, keeping, lineage(plan), arithmetic(plan))


def model_folders(setting: Setting) -> ModelFolders | None:
    """For the first trained model of the plan; None where the recipe wants no folders."""
    plan, recipe = setting.plan, setting.recipe
    if not recipe.run.hf_every:
        return None
    section = recipe.models[plan.primary].model_dump()
    return ModelFolders(setting.run_dir, plan.primary, section, resolve(MODEL_WRITER))
