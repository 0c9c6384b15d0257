"""`distflow launch`: start a run on this machine, then only watch it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from distflow.errors import UserError

if TYPE_CHECKING:
    from distflow.config.load import LoadedRecipe
    from distflow.flow.plan import Plan


@click.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
@click.option("--run", "name", help="Name of the run.  [default: the recipe's run.name; -2, -3 … if it is taken]")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--resume", is_flag=True, help="Go on with the run from its newest checkpoint.")
@click.option("--detach", is_flag=True, help="Return as soon as the workers are started.")
@click.option("--dry-run", is_flag=True, help="Only show the plan; start nothing, take no name.")
@click.option("--worker-entry", hidden=True, help="module:function to run in the workers' processes, for tests.")
def command(
    recipe: str,
    overrides: tuple[str, ...],
    name: str | None,
    runs_dir: Path,
    resume: bool,
    detach: bool,
    dry_run: bool,
    worker_entry: str | None,
) -> int:
    """Start RECIPE (a shipped name or a file), with values changed by KEY=VALUE …, and watch it."""
    from distflow.flow.check import plan_recipe

    loaded, plan = plan_recipe(recipe, overrides)
    if dry_run:
        return _show_plan(plan)
    run_dir, lock = _claim_folder(runs_dir, name, plan.run_name, resume=resume)
    click.echo(str(run_dir))
    if not _prepare(run_dir, loaded, plan, resume=resume):
        return 0
    return _run(run_dir, lock, [recipe, *overrides], runs_dir, detach=detach, entry=worker_entry)


def _show_plan(plan: Plan) -> int:
    from distflow.flow.page import render_page

    click.echo(render_page(plan))
    return 0


def _claim_folder(runs_dir: Path, name: str | None, default: str, *, resume: bool) -> tuple[Path, int]:
    from distflow.launch.folder import claim, create_run_folder, existing_run_folder
    from distflow.launch.processes import processes_of, shares_here
    from distflow.launch.record import read_record

    wanted, explicit = (default, False) if name is None else (name, True)
    if not resume:
        run_dir = create_run_folder(runs_dir, wanted, explicit=explicit)
        return run_dir, claim(run_dir)
    run_dir = existing_run_folder(runs_dir, wanted, explicit=explicit)
    lock = claim(run_dir)
    if any(processes_of(part) for part in shares_here(read_record(run_dir))):
        raise UserError(f"{run_dir}: its workers still run, without a host agent — wait, or `distflow stop {wanted}`")
    return run_dir, lock


def _prepare(run_dir: Path, loaded: LoadedRecipe, plan: Plan, *, resume: bool) -> bool:
    """Fill the folder; False if there is nothing left to train."""
    from distflow.launch.processes import sweep
    from distflow.launch.record import read_record
    from distflow.launch.resuming import find_checkpoint, forget_abandoned
    from distflow.launch.starting import Beginning, fill

    if not resume:
        fill(run_dir, loaded, plan, Beginning())
        return True
    found = find_checkpoint(run_dir)
    for line in found.ignored:
        click.echo(f"ignored: {line}")
    if found.step >= plan.batch.training_steps:
        click.echo(f"all {plan.batch.training_steps} training steps are done — raise run.training_steps to go on")
        return False
    click.echo(found)
    sweep(run_dir)
    forget_abandoned(run_dir, found.step)
    fill(run_dir, loaded, plan, Beginning(read_record(run_dir).term + 1, found.checkpoint))
    return True


def _run(run_dir: Path, lock: int, recipe: list[str], runs_dir: Path, *, detach: bool, entry: str | None) -> int:
    from distflow.launch.progress import make_display
    from distflow.launch.record import read_record
    from distflow.launch.report import failure_report, summary
    from distflow.launch.starting import start_agent
    from distflow.launch.watching import Watcher

    steps = read_record(run_dir).training_steps
    watcher = Watcher(run_dir, lambda: start_agent(run_dir, lock, entry), make_display(steps))
    record = watcher.watch(until_running=detach)
    if record.failure is not None:
        for line in failure_report(record, record.failure):
            click.echo(line, err=True)
    if record.exit_code is None:
        click.echo(f"running; `distflow status {record.name}` asks the workers, `distflow stop {record.name}` ends it")
        return 0
    if record.state != "failed":
        for line in summary(record, recipe, runs_dir):
            click.echo(line)
    return record.exit_code
