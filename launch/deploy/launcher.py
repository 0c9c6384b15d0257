"""From a planned recipe to a run on this machine; and what every launch begins and ends with, wherever it runs."""

from __future__ import annotations

from pathlib import Path

import click

from distflow.config.load import LoadedRecipe
from distflow.errors import RecipeError, UserError
from distflow.flow.plan import Plan
from distflow.launch.agent.start import agent_command, start_agent
from distflow.launch.deploy.folder_contents import Beginning, fill, start_first_agent
from distflow.launch.deploy.interpreter_check import problems_here
from distflow.launch.deploy.launch_monitor import Watcher
from distflow.launch.deploy.options import Options
from distflow.launch.deploy.plan_check import machine_problems
from distflow.launch.deploy.resumed_recipe import check_lineage, overridden
from distflow.launch.observe.progress import make_display
from distflow.launch.observe.run_summary import tell_end
from distflow.launch.run.exit_status import Outcome, finish
from distflow.launch.run.folder import LOCK, MODES, claim, create_run_folder, existing_run_folder, remove_run_folder
from distflow.launch.run.process_table import processes_of, shares_here, sweep
from distflow.launch.run.record import RunRecord, read_record
from distflow.launch.run.resume import Resumption, check_whole, find_checkpoint, forget_abandoned, forget_unfinished
from distflow.runtime.commit import checkpoints_of
from distflow.runtime.fence import begins
from distflow.runtime.modelnames import model_owed, models_of


def launch_here(options: Options, loaded: LoadedRecipe, plan: Plan) -> int:
    """Start a run on this machine and watch it; returns the exit code."""
    problems = machine_problems(plan, loaded.origin) + problems_here(plan, loaded.origin)
    if problems:
        raise RecipeError(problems)
    made = not options.runs_dir.exists()
    run_dir, lock = claim_folder(options.runs_dir, options.name, plan, resume=options.resume)
    click.echo(str(run_dir))
    beginning = begin(run_dir, plan, resume=options.resume)
    if beginning is None:
        return 0
    try:
        fill(run_dir, loaded, plan, beginning)
    except BaseException:
        # Whatever it was, nothing runs: the name is free again.
        if not options.resume:
            remove_run_folder(run_dir, with_parent=made)
        raise
    steps = plan.batch.training_steps
    watcher = Watcher(
        run_dir,
        lambda: start_first_agent(run_dir, lock, options.worker_entry),
        lambda: start_agent(run_dir, agent_command(run_dir, entry=options.worker_entry)),
        make_display(steps),
    )
    return conclude(watcher.watch(until_running=options.detach), options)


def claim_folder(runs_dir: Path, name: str | None, plan: Plan, *, resume: bool) -> tuple[Path, int]:
    """The folder of a new run, or of the one to go on with, and the descriptor of its lock; raises UserError."""
    wanted, explicit = (plan.run_name, False) if name is None else (name, True)
    mode = MODES[plan.recipe.security.run_folder]
    if not resume:
        made = not runs_dir.exists()
        run_dir = create_run_folder(runs_dir, wanted, explicit=explicit, mode=mode)
        try:
            return run_dir, claim(run_dir)
        except UserError:
            # With a lock in it, it is another launch's by now.
            if not (run_dir / LOCK).exists():
                remove_run_folder(run_dir, with_parent=made)
            raise
    run_dir = existing_run_folder(runs_dir, wanted, explicit=explicit)
    run_dir.chmod(mode)
    lock = claim(run_dir)
    if any(processes_of(part) for part in shares_here(read_record(run_dir))):
        raise UserError(f"{run_dir}: its workers still run, without a host agent — wait, or `distflow stop {wanted}`")
    return run_dir, lock


def begin(run_dir: Path, plan: Plan, *, resume: bool, here: bool = True) -> Beginning | None:
    """Where the run begins; None if there is nothing left to train. What an earlier life has left is removed.

    `here`: the workers will run on this machine. Shows the plan's warnings.

    Raises UserError for a recipe that the checkpoint cannot be used with.
    """
    for warning in plan.warnings:
        click.echo(warning)
    if not resume:
        return Beginning()
    found = find_checkpoint(run_dir)
    for line in found.ignored:
        click.echo(f"ignored: {line}")
    check_whole(found, read_record(run_dir))
    changed = list(check_lineage(found, plan, here=here))
    sweep(run_dir)
    if found.step >= plan.batch.training_steps:
        forget_unfinished(run_dir)
        click.echo(_nothing_left(found, plan.batch.training_steps))
        if model_owed(run_dir, found.step, plan.recipe.run.hf_every):
            to = models_of(run_dir) / f"step_{found.step:06d}"
            click.echo(f"{to} was not finished: `distflow export {run_dir} --step {found.step} --to {to}` makes it")
        _note_done(run_dir, found.step)
        return None
    for line in (str(found), *overridden(run_dir, plan), *changed):
        click.echo(line)
    forget_abandoned(run_dir, found.step)
    terms = [read_record(run_dir).term, *begins(checkpoints_of(run_dir))]
    return Beginning(max(terms) + 1, found.checkpoint)


def _nothing_left(found: Resumption, steps: int) -> str:
    if found.step > steps:
        return (
            f"the checkpoint is of training step {found.step}, and run.training_steps is {steps}: nothing is left to "
            "train — raise run.training_steps to go on"
        )
    return f"all {steps} training steps are done — raise run.training_steps to go on"


def _note_done(run_dir: Path, step: int) -> None:
    """Of a run whose processes were all killed when it had nothing left to do but to say so."""
    record = read_record(run_dir)
    if not record.over and not record.hosts and step >= record.training_steps:
        finish(record, Outcome("done", 0))


def conclude(record: RunRecord, options: Options) -> int:
    """Say how it ended, or that it runs; returns the exit code."""
    if not record.over:
        click.echo(f"running; `distflow status {record.name}` asks the workers, `distflow stop {record.name}` ends it")
        return 0
    return tell_end(record, options.runs_dir, () if options.resume else options.words)
