"""`distflow launch --sweep`: runs that differ in the values of some keys, one after another or as a job array."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count, product
from pathlib import Path

import click

from distflow.cluster.processes import STOPPED
from distflow.config.compose import listed_values
from distflow.config.load import load_recipe
from distflow.errors import DistflowError, RecipeError, UserError
from distflow.launch.commands.metrics import MEAN_OF, figures, print_columns
from distflow.launch.deploy.launch_request import Options, recipe_of
from distflow.launch.deploy.launcher import submit_jobs
from distflow.launch.observe.file_sync import Steps, read_steps
from distflow.launch.observe.run_summary import progress_of
from distflow.launch.run.folder import check_name
from distflow.launch.run.record import FILE_NAME, read_record

RESULTS = ("critic/score/mean", "critic/rewards/mean")


def launch_each(options: Options, launch: Callable[[Options], int]) -> int:
    """Launch a run for each combination, and show what became of them; returns the largest exit code.

    All recipes are checked first. A run that fails does not keep the others from running; Ctrl-C does. With --slurm
    they are submitted as an array of jobs.
    """
    keys, combinations = _combinations(options)
    _check_recipes(options, combinations)
    names = _run_names(options, keys, combinations)
    runs = [
        replace(options, name=name, sweep=(), overrides=(*options.overrides, *words))
        for name, words in zip(names, combinations, strict=True)
    ]
    if options.slurm:
        return submit_jobs(runs)
    if options.dry_run:
        for run in runs:
            click.echo(f"{run.name}: {' '.join(run.words)}")
        return 0
    codes = []
    for number, run in enumerate(runs, 1):
        click.echo(f"run {number} of {len(runs)}: {' '.join(run.words)}")
        codes.append(_launched(run, launch))
        if codes[-1] == STOPPED:
            break
    _show_sweep(runs, keys)
    return max(codes)


def _launched(run: Options, launch: Callable[[Options], int]) -> int:
    try:
        return launch(run)
    except DistflowError as error:
        click.echo(str(error), err=True)
        return error.exit_code
    except KeyboardInterrupt:
        # Before the run was watched.
        return STOPPED


def _combinations(options: Options) -> tuple[list[str], list[tuple[str, ...]]]:
    """The keys, and the overrides of each run; raises UserError."""
    ways = {"--resume": options.resume, "--detach": options.detach, "--env": options.env}
    for way, given in ways.items():
        if given:
            raise UserError(
                f"--sweep: starts one run after another and waits for each, which {way} does not — start them singly"
            )
    values = {}
    for text in options.sweep:
        key, sign, listed = text.partition("=")
        found = listed_values(listed)
        if not key or not sign or not all(found) or len(set(found)) < len(found):
            raise UserError(f"--sweep {text}: expected KEY=A,B,… with different values, as in --sweep run.seed=0,1,2")
        if key in values or any(override.partition("=")[0] == key for override in options.overrides):
            raise UserError(f"--sweep {text}: {key} is given twice — leave one of them out")
        values[key] = found
    return list(values), list(product(*([f"{key}={value}" for value in found] for key, found in values.items())))


def _check_recipes(options: Options, combinations: Iterable[Sequence[str]]) -> None:
    """Raises RecipeError with all problems of all runs."""
    problems = []
    for words in combinations:
        try:
            recipe_of(replace(options, overrides=(*options.overrides, *words)), need_files=options.hosts is None)
        except RecipeError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise RecipeError(problems)


def _run_names(options: Options, keys: Sequence[str], combinations: Sequence[Sequence[str]]) -> list[str]:
    """NAME-seed-0, NAME-seed-1, …; with NAME-2 for NAME if one of these is taken and no name was asked for."""
    short = [key.rpartition(".")[2] for key in keys]
    labels = short if len(set(short)) == len(short) else keys
    ends = []
    for words in combinations:
        values = [re.sub(r"[^A-Za-z0-9._-]+", "-", word.partition("=")[2]).strip("-") for word in words]
        ends.append("-".join(f"{label}-{value}" for label, value in zip(labels, values, strict=True)))
    if len(set(ends)) < len(ends):
        raise UserError(
            f"--sweep: the names of the runs would not differ: {', '.join(ends)} — start them singly, with --run"
        )
    assert options.recipe is not None, "only a resumed run can be without a recipe"
    given = options.name or load_recipe(options.recipe, options.overrides).recipe.run.name
    for number in count(1):
        base = given if number == 1 else f"{given}-{number}"
        names = [f"{base}-{end}" for end in ends]
        if options.name is not None or not any((options.runs_dir / name).exists() for name in names):
            break
    for name in names:
        check_name(name)
    return names


def _show_sweep(runs: Sequence[Options], keys: Sequence[str]) -> None:
    """A line for each run: its values, how it ended, and the mean of its last scores and rewards."""
    columns = [["run"], *([key] for key in keys), ["state"], ["steps"], ["seconds"], ["score"], ["reward"]]
    for run in runs:
        assert run.name is not None, "the runs of a sweep have names"
        folder = run.runs_dir / run.name
        steps = read_steps(folder, lambda line: None) if (folder / FILE_NAME).exists() else []
        found = figures(steps, RESULTS, MEAN_OF)
        means = [found[name]["mean"] if name in found else None for name in RESULTS]
        values = [word.partition("=")[2] for word in run.overrides[-len(keys) :]]
        cells = [run.name, *values, *_how_far(folder, steps), *("" if one is None else f"{one:.3f}" for one in means)]
        for column, cell in zip(columns, cells, strict=True):
            column.append(cell)
    click.echo()
    print_columns(columns)
    click.echo(f"score and reward: means of the last {MEAN_OF} training steps")


def _how_far(folder: Path, steps: Steps) -> list[str]:
    """State, training steps and seconds of a run, as text."""
    if not (folder / FILE_NAME).exists():
        return ["not started", "", ""]
    progress = progress_of(read_record(folder), steps)
    seconds = "" if progress.seconds is None else f"{progress.seconds:.0f}"
    return [progress.state, f"{progress.step} of {progress.training_steps}", seconds]
