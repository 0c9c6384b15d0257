"""Finds the checkpoint that `--resume` goes on from."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from distflow.errors import UserError


@dataclass(frozen=True, slots=True)
class Resumption:
    """`checkpoint` is None when there is no whole one: training begins again at step 1. `ignored` says what and why."""

    checkpoint: Path | None
    step: int
    ignored: tuple[str, ...]

    def __str__(self) -> str:
        if self.checkpoint is None:
            return "no whole checkpoint yet: begins again at training step 1"
        return f"resumes after training step {self.step}, from {self.checkpoint}"


def find_checkpoint(run_dir: Path) -> Resumption:
    """The newest checkpoint with a COMMIT whose parts are all there with their sizes (workers check the bytes)."""
    ignored: list[str] = []
    for folder in sorted((run_dir / "checkpoints").glob("step_*"), key=_step, reverse=True):
        fault = _fault(folder)
        if fault is None:
            return Resumption(folder, _step(folder), tuple(ignored))
        ignored.append(f"{folder.name}: {fault}")
    return Resumption(None, 0, tuple(ignored))


def whole_steps(run_dir: Path) -> tuple[int, ...]:
    """Training steps of all checkpoints that are whole, by the sizes of their parts."""
    folders = (run_dir / "checkpoints").glob("step_*")
    return tuple(sorted(_step(folder) for folder in folders if _fault(folder) is None))


def checkpoint_of(run_dir: Path, step: int) -> Path | None:
    """The checkpoint after `step` training steps; None before the first."""
    return run_dir / "checkpoints" / f"step_{step:06d}" if step else None


def forget_abandoned(run_dir: Path, step: int) -> None:
    """Remove the rollout dumps of training steps after `step`: they will be trained anew, with other samples.

    What is left tells of every prompt position once, even if the resumed run ends before it has come as far again.
    """
    for folder in (run_dir / "rollouts").glob("step_*"):
        if _step(folder) > step:
            shutil.rmtree(folder)


def _step(folder: Path) -> int:
    number = folder.name.removeprefix("step_")
    if not number.isdecimal():
        raise UserError(
            f"{folder}: expected a name such as step_000100 — move it out of the {folder.parent.name} folder"
        )
    return int(number)


def _fault(folder: Path) -> str | None:
    try:
        parts = json.loads((folder / "COMMIT").read_text())["parts"]
    except FileNotFoundError:
        return "it has no COMMIT, so it was not finished"
    except (ValueError, KeyError) as error:
        return f"its COMMIT cannot be read ({error})"
    for name, (size, _) in parts.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is missing or does not have {size} bytes"
    return None
