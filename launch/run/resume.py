"""Finds the checkpoint that `--resume` goes on from, and what the recipe has changed since."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distflow.errors import UserError
from distflow.launch.run.record import RunRecord
from distflow.runtime.checkpoint.commit import (
    abandoned,
    checkpoints_of,
    drafts,
    examine,
    forget_model_drafts,
    newest_first,
    step_of,
    vanished,
)
from distflow.types import WorkerName


@dataclass(frozen=True, slots=True)
class Resumption:
    """`checkpoint` is None when there is no whole one: training begins again at step 1. `ignored` says what and why."""

    checkpoint: Path | None
    step: int
    ignored: tuple[str, ...]
    commit: Mapping[str, Any]
    """What its COMMIT says."""
    damaged: tuple[Path, ...] = ()
    """Newer checkpoints, the newest first, that were finished and still count, but are not whole here any more."""

    def __str__(self) -> str:
        if self.checkpoint is None:
            return "no whole checkpoint yet: begins again at training step 1"
        return f"resumes after training step {self.step}, from {self.checkpoint}"


def find_checkpoint(run_dir: Path) -> Resumption:
    """The newest checkpoint with a COMMIT of this format whose parts are there, to the last byte (all are read)."""
    root = checkpoints_of(run_dir)
    ignored = [f"{folder.name}: it has no COMMIT, so it was not finished" for folder in reversed(drafts(root))]
    damaged: list[Path] = []
    for folder in newest_first(root):
        commit, fault = examine(folder)
        void = abandoned(folder)
        if commit is not None and not fault and not void:
            return Resumption(folder, step_of(folder), tuple(ignored), commit, tuple(damaged))
        ignored.append(f"{folder.name}: {fault or void}")
        if not void and not vanished(folder):
            damaged.append(folder)
    return Resumption(None, 0, tuple(ignored), {}, tuple(damaged))


def check_whole(found: Resumption, record: RunRecord) -> None:
    """Raises UserError if a run has been saved and nothing of that is whole: to begin again would throw it away.

    `record`: of the run until now, which tells on which host each part was written.
    """
    if found.checkpoint is not None or not found.damaged:
        return
    newest = found.damaged[0]
    commit, fault = examine(newest)
    parts = () if commit is None else missing_parts(newest, commit)
    what = f"lacks {_written(parts, record)}" if parts else f"is not whole: {fault}"
    hint = f"bring them to {newest}" if parts else "bring back a whole one"
    names = ", ".join(folder.name for folder in found.damaged)
    raise UserError(
        f"--resume: {newest} {what}, and there is no older checkpoint that is whole — {hint}; to begin again at "
        f"training step 1 all the same, move {names} out of {newest.parent}"
    )


def _written(parts: Iterable[str], record: RunRecord) -> str:
    """Parts of a checkpoint and where they were written, human-readable."""
    where = {WorkerName.parse(entry.name).file_stem: entry for entry in record.workers}
    told = []
    for part in parts:
        entry = next((one for stem, one in where.items() if Path(part).stem.endswith(f"-{stem}")), None)
        host = f" on {record.hosts[entry.host].name}" if entry is not None and record.hosts else ""
        told.append(part if entry is None else f"{part} (written by {entry.name}{host})")
    return ", ".join(told)


def missing_parts(folder: Path, commit: Mapping[str, Any]) -> tuple[str, ...]:
    """The parts that COMMIT lists and the folder lacks."""
    return tuple(name for name in commit["parts"] if not (folder / name).is_file())


def checkpoint_of(run_dir: Path, step: int) -> Path | None:
    """The checkpoint after `step` training steps; None before the first."""
    return run_dir / "checkpoints" / f"step_{step:06d}" if step else None


def forget_abandoned(run_dir: Path, step: int) -> None:
    """Remove what was not finished, and the rollout dumps of training steps after `step`: these are trained anew.

    What is left tells of every prompt position once, even if the resumed run ends before it has come as far again.
    Newer checkpoints, which were passed over, get a name with `ignored_`: among those that count they would make good
    ones superfluous.
    """
    for folder in newest_first(checkpoints_of(run_dir)):
        if step_of(folder) > step:
            aside = folder.with_name(folder.name.replace("step_", "ignored_"))
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
    for folder in (run_dir / "rollouts").glob("step_*"):
        if step_of(folder) > step:
            shutil.rmtree(folder)
    forget_unfinished(run_dir)


def forget_dumps_of(run_dir: Path, step: int, workers: Iterable[str]) -> None:
    """Remove what these workers wrote of training steps after `step`: others train them anew."""
    for stem in (WorkerName.parse(name).file_stem for name in workers):
        for path in (run_dir / "rollouts").glob(f"step_*/{stem}.jsonl"):
            if step_of(path.parent) > step:
                path.unlink(missing_ok=True)


def forget_unfinished(run_dir: Path) -> None:
    """Remove checkpoints and Hugging Face folders that were being written when the run was killed."""
    forget_drafts(run_dir)
    forget_model_drafts(run_dir)


def forget_drafts(run_dir: Path) -> None:
    """Remove checkpoints that nobody will finish; another host may be doing the same."""
    for folder in drafts(checkpoints_of(run_dir)):
        shutil.rmtree(folder, ignore_errors=True)
