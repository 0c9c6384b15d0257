"""Find the checkpoint that `--resume` continues from, and remove what later steps left behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from distflow.config.yamlfile import yaml_value
from distflow.errors import UserError
from distflow.launch.run.record import HOSTS, RunRecord
from distflow.runtime.checkpoint.commit import (
    Commit,
    Keeping,
    abandoned,
    checkpoints_of,
    commits,
    drafts,
    examine,
    forget_model_drafts,
    newest_first,
    step_of,
    vanished,
)
from distflow.runtime.disk import ROLLOUTS, VAL_ROLLOUTS
from distflow.types import WorkerName, is_validated


@dataclass(frozen=True, slots=True)
class Resumption:
    """Where to resume. `checkpoint` None: no complete one, training restarts at step 1. `ignored`: what and why."""

    checkpoint: Path | None
    step: int
    ignored: tuple[str, ...]
    commit: Commit | None
    """The content of its COMMIT."""
    damaged: tuple[Path, ...] = ()
    """Newer checkpoints, newest first, that were finished and still count, but are incomplete here."""

    def __str__(self) -> str:
        if self.checkpoint is None:
            return "no complete checkpoint yet: restarting at training step 1"
        return f"resuming after training step {self.step}, from {self.checkpoint}"


def find_checkpoint(run_dir: Path) -> Resumption:
    """The newest checkpoint with a COMMIT of this format and all of its parts, which are read and verified."""
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
    return Resumption(None, 0, tuple(ignored), None, tuple(damaged))


def best_checkpoint(run_dir: Path, steps: Iterable[Mapping[str, float]]) -> tuple[Path, float, str] | None:
    """What `run.keep_best` chose among the checkpoints, its value and the metric; None: nothing yet, or no such key.

    `steps`: the merged metrics, with values of validation that no COMMIT holds yet.
    """
    recipe = run_dir / "recipe.yaml"
    run = yaml_value(recipe.read_text(encoding="utf-8"))["run"] if recipe.is_file() else {}
    metric = run.get("keep_best")
    if metric is None:
        return None
    later = {int(step["step"]): step[metric] for step in steps if metric in step} if is_validated(metric) else {}
    best = Keeping(1, metric, run.get("keep_best_mode", "max")).best(dict(commits(checkpoints_of(run_dir))), later)
    return None if best is None else (*best, metric)


def check_whole(found: Resumption, record: RunRecord) -> None:
    """Raises UserError if a run has checkpoints but none is complete: restarting would throw them away.

    `record`: that of the run so far, which says on which host each part was written.
    """
    if found.checkpoint is not None or not found.damaged:
        return
    newest = found.damaged[0]
    commit, fault = examine(newest)
    absent = [] if commit is None else [name for name in commit.parts if not (newest / name).is_file()]
    bad = [] if commit is None else [name for name in commit.parts if fault.startswith(f"its part {name} ")]
    what = f"lacks {_written(absent, record)}" if absent else f"is incomplete: {fault}"
    if bad and not absent:
        what = what.replace(bad[0], _written(bad, record), 1)
    hint = f"copy {'them' if absent else 'it'} to {newest}" if absent or bad else "restore a complete one"
    names = ", ".join(folder.name for folder in found.damaged)
    raise UserError(
        f"--resume: {newest} {what}, and there is no older complete checkpoint — {hint}; to restart at "
        f"training step 1 anyway, move {names} out of {newest.parent}"
    )


def check_folder(record: RunRecord) -> None:
    """Raises UserError if a run without a checkpoint here was on hosts that all have folders of their own."""
    began = [(n, entry) for n, entry in enumerate(record.hosts) if entry.agent]
    files = {n: record.path / HOSTS / f"{n}.nonce" for n, _ in began}
    if began and not any(
        entry.nonce and files[n].is_file() and files[n].read_text() == entry.nonce for n, entry in began
    ):
        name = began[0][1].name
        raise UserError(
            f"--resume: {record.path} has no checkpoint, and the hosts of this run ({name}, …) have folders of "
            f"their own — resume it on {name}, or with --hosts and its hosts file"
        )


def _written(parts: Iterable[str], record: RunRecord) -> str:
    """Parts of a checkpoint and where they were written, as text."""
    where = {WorkerName.parse(entry.name).file_stem: entry for entry in record.workers}
    told = []
    for part in parts:
        entry = next((one for stem, one in where.items() if Path(part).stem.endswith(f"-{stem}")), None)
        host = f" on {record.hosts[entry.host].name}" if entry is not None and record.hosts else ""
        told.append(part if entry is None else f"{part} (written by {entry.name}{host})")
    return ", ".join(told)


def missing_parts(folder: Path, commit: Commit) -> tuple[str, ...]:
    """The parts that COMMIT lists and that the folder lacks, or has with another size."""
    return tuple(name for name, (size, _) in commit.parts.items() if _size(folder / name) != size)


def _size(path: Path) -> int | None:
    """Bytes of a file; None: there is none."""
    try:
        return path.stat().st_size if path.is_file() else None
    except FileNotFoundError:
        # Removed meanwhile.
        return None


def checkpoint_of(run_dir: Path, step: int) -> Path | None:
    """The checkpoint after `step` training steps; None before the first."""
    return run_dir / "checkpoints" / f"step_{step:06d}" if step else None


def forget_abandoned(run_dir: Path, step: int) -> None:
    """Remove unfinished checkpoints, and rollout dumps of training steps after `step`, which will be repeated.

    The remaining dumps have every prompt position once, even if the resumed run ends before it gets as far again.
    Newer checkpoints, which were skipped, are renamed to `ignored_…`: otherwise they would count as kept ones, and
    good ones would be removed.
    """
    for folder in newest_first(checkpoints_of(run_dir)):
        if step_of(folder) > step:
            aside = folder.with_name(folder.name.replace("step_", "ignored_"))
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
    for folder in _dump_folders(run_dir):
        if step_of(folder) > step:
            shutil.rmtree(folder)
    forget_unfinished(run_dir)


def forget_dumps_of(run_dir: Path, step: int, workers: Iterable[str]) -> None:
    """Remove dumps of these workers for training steps after `step`: others will repeat them."""
    for stem in (WorkerName.parse(name).file_stem for name in workers):
        for folder in _dump_folders(run_dir):
            if step_of(folder) > step:
                (folder / f"{stem}.jsonl").unlink(missing_ok=True)


def _dump_folders(run_dir: Path) -> list[Path]:
    return [folder for kind in (ROLLOUTS, VAL_ROLLOUTS) for folder in (run_dir / kind).glob("step_*")]


def forget_unfinished(run_dir: Path) -> None:
    """Remove checkpoints and Hugging Face folders that were being written when the run was killed."""
    forget_drafts(run_dir)
    forget_model_drafts(run_dir)


def forget_drafts(run_dir: Path) -> None:
    """Remove checkpoints that will never be finished; another host may be doing the same."""
    for folder in drafts(checkpoints_of(run_dir)):
        shutil.rmtree(folder, ignore_errors=True)
