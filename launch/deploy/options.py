"""What stands on the command line of `distflow launch`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Options:
    """What stands on the command line."""

    recipe: str | None
    """A shipped name or a file; None only with `resume`: the recipe of the run."""
    overrides: tuple[str, ...]
    name: str | None
    runs_dir: Path
    resume: bool
    recipe_as_written: bool
    """With `resume`: the recipe is read anew, instead of that which the run began with."""
    detach: bool
    dry_run: bool
    hosts: Path | None
    include: str | None
    exclude: str | None
    ssh_config: Path | None
    ssh_options: str
    forward: tuple[str, ...]
    settings: tuple[str, ...]
    ship_code: bool
    env: bool
    slurm: tuple[str, ...]
    prepared: bool
    worker_entry: str | None

    @property
    def words(self) -> list[str]:
        """The recipe and its overrides, to be typed again."""
        return [*([] if self.recipe is None else [self.recipe]), *self.overrides]
