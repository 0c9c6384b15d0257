"""The request for a launch: the options of its command line, and the recipe of a resumed run.

A resumed run uses its own recipe from the run folder: `recipe.yaml` is the resolved recipe, `overrides.txt` the
overrides of all command lines so far, and `env.json` names the file it was read from. `flow/lineage.py` says what the
recipe must have in common with that of the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distflow.config.load import LoadedRecipe, load_recipe, recipe_to_mapping
from distflow.config.paths import find_recipe
from distflow.config.schema import Recipe
from distflow.config.yamlfile import shown, yaml_value
from distflow.errors import RecipeError, UserError
from distflow.flow.lineage import ARITHMETIC, OF_MACHINE, Change, arithmetic, changes, departures, leaves, lineage
from distflow.flow.plan import Plan
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.schedule import leaps
from distflow.launch.run.folder import existing_run_folder, find_run
from distflow.launch.run.record import FILE_NAME
from distflow.launch.run.resume import Resumption
from distflow.runtime.checkpoint.commit import Commit

RECIPE = "recipe.yaml"
AS_WRITTEN = "as_written.yaml"
"""The recipe with which a submitted job resumes a run, if it is not the run's own."""
STOP_AFTER = "run.stop_after"
"""Applies to one launch only, not to later resumes."""
BY_SSH, ON_HOSTS = ("--hosts",), ("--hosts", "--env", "--slurm")
TAKEN_BY: Mapping[str, tuple[str, ...]] = {
    "--include": BY_SSH,
    "--exclude": BY_SSH,
    "--ssh-config": BY_SSH,
    "--ssh-options": BY_SSH,
    "--forward": ON_HOSTS,
    "--set": ("--hosts", "--env"),  # a job's script would show the values
    "--ship-code": ON_HOSTS,
}
"""Options that only some ways of launching take: by what these are asked for."""


def as_asked(options: Options) -> Options:
    """The options with defaults filled in: `--resume` needs no recipe. Raises UserError if one is missing."""
    if options.recipe_as_written and not options.resume:
        raise UserError("--recipe-as-written: a new run always reads its recipe — leave it out, or add --resume")
    if options.resume and options.recipe is not None and "=" in options.recipe:
        options = replace(options, recipe=None, overrides=(options.recipe, *options.overrides))
    if options.recipe is None and not options.resume:
        raise UserError(
            "launch: no recipe given — give a shipped name (quickstart) or a file, or --resume [--run NAME]"
        )
    if options.recipe is None and options.name is None:
        run_dir = find_run(None, options.runs_dir)
        options = replace(options, name=run_dir.name)
    check_way(options)
    return options


def check_way(options: Options) -> None:
    """Refuse several ways of launching at once, and options that the chosen one does not take."""
    given = options.given
    ways = [way for way in ON_HOSTS if given[way]]
    if len(ways) > 1:
        raise UserError(f"{' and '.join(ways)} are different ways to get to hosts — keep one of them")
    for name, takers in TAKEN_BY.items():
        if given[name] and not set(ways) & set(takers):
            where = f"a run by {ways[0]}" if ways else "a run on this machine"
            raise UserError(f"{name} has no effect on {where} — leave it out, or give {' or '.join(takers)}")


def recipe_of(options: Options, *, need_files: bool) -> tuple[LoadedRecipe, Plan]:
    """The recipe to launch, and its plan; raises RecipeError and UserError."""
    run_dir = _resumed(options)
    if run_dir is None or not (run_dir / RECIPE).is_file():
        assert options.recipe is not None, "only a run that is there can be without a recipe"
        return plan_recipe(options.recipe, options.overrides, need_files=need_files)
    source, before = _inputs(run_dir)
    if options.recipe_as_written:
        frozen = run_dir / AS_WRITTEN
        if not (options.prepared and frozen.is_file()):
            return plan_recipe(options.recipe or str(source), options.overrides, need_files=need_files)
        loaded, plan = plan_recipe(str(frozen), (), need_files=need_files, resolved=True)
        return replace(loaded, source=_file_of(options, source), overrides=options.overrides), plan
    _check_same(options, run_dir, source)
    kept = yaml_value((run_dir / RECIPE).read_text())
    last = {_key(text): text for text in before}
    # Repeating an earlier override changes nothing, even if it names a group.
    overrides = [text for text in options.overrides if last.get(_key(text)) != text]
    if not (run_dir / FILE_NAME).exists():
        # As it was when the job was submitted, overrides and all.
        overrides = []
    elif kept["run"]["stop_after"] is not None and STOP_AFTER not in map(_key, options.overrides):
        overrides = [f"{STOP_AFTER}=null", *overrides]
    loaded, plan = plan_recipe(str(run_dir / RECIPE), overrides, need_files=need_files, resolved=True)
    return replace(loaded, source=source, overrides=(*before, *overrides)), plan


def found_changes(options: Options) -> tuple[Path, Path, list[Change]]:
    """Compare a recipe that is given with `--resume` to that of the run, as it was when it was last launched.

    Returns the folder of the run, the file of its recipe, and what differs; files beside the two recipes count as the
    same. Raises RecipeError and UserError.
    """
    run_dir = _resumed(options)
    assert run_dir is not None, "a run is resumed"
    assert options.recipe is not None, "a recipe is given"
    source, before = _inputs(run_dir)
    given = load_recipe(options.recipe, before)
    beside, there = f"{given.source.parent}/", f"{source.parent}/"
    now = {
        key: value.replace(beside, there) if isinstance(value, str) else value
        for key, value in leaves(given.resolved).items()
    }
    return run_dir, source, changes(leaves(yaml_value((run_dir / RECIPE).read_text())), now)


def _file_of(options: Options, otherwise: Path) -> Path:
    """The file of the recipe that was given, even if it is gone by now."""
    if options.recipe is None:
        return otherwise
    try:
        return find_recipe(options.recipe)
    except RecipeError:
        return Path(options.recipe).expanduser().resolve()


def overridden(run_dir: Path, recipe: Recipe, plan: Plan, step: int) -> Iterator[str]:
    """Lines about what a resume after training step `step` changes in the run's recipe, and what leaps by it.

    Call it before `recipe.yaml` is replaced.
    """
    if (run_dir / RECIPE).is_file():
        kept = yaml_value((run_dir / RECIPE).read_text())
        for change in changes(leaves(kept), leaves(recipe_to_mapping(recipe))):
            yield f"override: {change}"
        yield from leaps(kept, plan, step)


def _resumed(options: Options) -> Path | None:
    """The folder of the run to resume; None for a new run."""
    if options.prepared and (options.runs_dir / str(options.name) / RECIPE).exists():
        # A job: its recipe was written when it was submitted, and again when it began.
        return (options.runs_dir / str(options.name)).resolve()
    if not options.resume:
        return None
    if options.name is not None:
        return existing_run_folder(options.runs_dir, options.name, explicit=True)
    assert options.recipe is not None, "a run without a name is found by its recipe"
    name = load_recipe(options.recipe, options.overrides).recipe.run.name
    return existing_run_folder(options.runs_dir, str(name), explicit=False)


def _key(override: str) -> str:
    return override.partition("=")[0]


def _inputs(run_dir: Path) -> tuple[Path, tuple[str, ...]]:
    """The file that a run's recipe was read from, and the overrides of its command lines."""
    known = json.loads((run_dir / "env.json").read_text())
    overrides = (run_dir / "overrides.txt").read_text().splitlines()
    return Path(known["recipe"] if "recipe" in known else run_dir / RECIPE), tuple(overrides)


def _check_same(options: Options, run_dir: Path, source: Path) -> None:
    """A recipe given with `--resume` must be that of the run."""
    if options.recipe is None or source.parent == run_dir:
        return
    try:
        given = find_recipe(options.recipe)
    except RecipeError:
        if Path(options.recipe).expanduser().resolve() == source:
            # The file is gone, but not needed.
            return
        raise
    if given != source and (source.exists() or given.name != source.name):
        raise UserError(
            f"--resume: {run_dir} was launched from {shown(source)}, not from {shown(given)} — leave the recipe out, "
            "or start a new run with it"
        )


def check_lineage(found: Resumption, plan: Plan, *, here: bool = True) -> Iterator[str]:
    """Lines about what changed since the checkpoint; raises UserError for changes that a resume does not allow.

    `here`: the workers will run on this machine.
    """
    yield from _changed(found, plan)
    if found.checkpoint is not None and found.commit is not None and plan.recipe.run.deterministic:
        now = arithmetic(plan)
        known = now if here else {name: value for name, value in now.items() if name not in OF_MACHINE}
        yield from dict.fromkeys(_departures(found.checkpoint, found.commit, known))


def _changed(found: Resumption, plan: Plan) -> Iterator[str]:
    if found.commit is None:
        return
    different = changes(found.commit.recipe, lineage(plan))
    if found.commit.digest == plan.digest:
        different = [change for change in different if change.of_data]
    forbidden = [str(change) for change in different if change.forbidden]
    if forbidden:
        raise UserError(
            f"--resume: {found.checkpoint} was written with another recipe: {'; '.join(forbidden)} — resume with the "
            "original values, or start a new run"
        )
    for change in different:
        yield f"changed since the checkpoint: {change}"


def _departures(checkpoint: Path, commit: Commit, now: Mapping[str, Any]) -> Iterator[str]:
    """Differences that change the last bits of results, from the checkpoint parts present on this machine."""
    for part in commit.parts:
        if part.startswith("worker-") and (checkpoint / part).is_file():
            was = json.loads((checkpoint / part).read_text())
            yield from departures(was.get(ARITHMETIC, {}), now)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line."""

    recipe: str | None
    """A shipped name or a file; None only with `resume`: the recipe of the run."""
    overrides: tuple[str, ...]
    name: str | None
    runs_dir: Path
    resume: bool
    recipe_as_written: bool
    """With `resume`: read the recipe file again instead of using the run's own copy."""
    detach: bool
    dry_run: bool
    sweep: tuple[str, ...]
    """KEY=A,B,…: a run for each value."""
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
    def given(self) -> dict[str, object]:
        """What asks for hosts, and what is only for these, by its name on the command line."""
        return {
            "--hosts": self.hosts,
            "--env": self.env,
            "--slurm": self.slurm,
            "--include": self.include,
            "--exclude": self.exclude,
            "--ssh-config": self.ssh_config,
            "--ssh-options": self.ssh_options,
            "--forward": self.forward,
            "--set": self.settings,
            "--ship-code": self.ship_code,
        }

    @property
    def words(self) -> list[str]:
        """The recipe and its overrides, for a command line that repeats them."""
        return [*([] if self.recipe is None else [self.recipe]), *self.overrides]
