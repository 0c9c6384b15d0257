"""`distflow launch`, `stop` and `fetch`: start a run on this machine or on many, then watch it; end one; bring one back
from its second place (`run.copy_to`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distflow.launch.deploy.launch_request import Options

if TYPE_CHECKING:
    from distflow.config.load import LoadedRecipe
    from distflow.flow.plan import Plan
    from distflow.launch.deploy.hostfile import Host
    from distflow.runtime.checkpoint.commit import Commit


@click.command()
@click.argument("recipe", required=False)
@click.argument("overrides", nargs=-1)
@click.option("--run", "name", help="Name of the run.  [default: the recipe's run.name; -2, -3 … if it is taken]")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--resume", is_flag=True, help="Continue the run from its newest checkpoint; RECIPE may be left out.")
@click.option(
    "--recipe-as-written", is_flag=True, help="With --resume: read RECIPE again instead of using the run's own copy."
)
@click.option("--detach", is_flag=True, help="Return as soon as the workers are started.")
@click.option(
    "--sweep",
    multiple=True,
    metavar="KEY=A,B,…",
    help="A run for each value, one after another, or as a job array; of several keys, for each combination.",
)
@click.option("--dry-run", is_flag=True, help="Only show the plan; start nothing, contact no host, reserve no name.")
@click.option("--hosts", type=click.Path(path_type=Path), metavar="FILE", help="Run on the hosts of this file, by ssh.")
@click.option("--include", metavar="HOSTS", help="Only these hosts and slots, as in gpu-1@gpu-2:0,2.")
@click.option("--exclude", metavar="HOSTS", help="All but these hosts and slots.")
@click.option("--ssh-config", type=click.Path(path_type=Path), metavar="FILE", help="Configuration file for ssh.")
@click.option("--ssh-options", default="", metavar="WORDS", help="More arguments for the ssh command.")
@click.option(
    "--forward", multiple=True, metavar="NAMES", help="More environment variables to forward to all hosts: A,B_*."
)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Set a variable on all hosts.")
@click.option("--ship-code", is_flag=True, help="Copy this machine's distflow to all hosts.")
@click.option("--env", is_flag=True, help="Be one node of a job of torchrun, Slurm, Kubernetes or SkyPilot.")
@click.option("--slurm", multiple=True, metavar="SETTINGS", help="Submit as a job: nodes=4,time=2:00:00,partition=gpu.")
@click.option(
    "--prepared",
    is_flag=True,
    hidden=True,
    help="The run folder was created by --slurm; resume if the run was started.",
)
@click.option("--worker-entry", hidden=True, help="module:function to run in the workers' processes, for tests.")
def command(**given: Any) -> int:
    """Start RECIPE (a shipped name or a file), with values changed by KEY=VALUE …, and watch it.

    With --resume the run continues with its own recipe and overrides; KEY=VALUE … change these.
    """
    from distflow.launch.deploy.launch_request import as_asked

    options = as_asked(Options(**given))
    if options.sweep:
        from distflow.launch.commands.sweep import launch_each

        return launch_each(options, launch_once)
    return launch_once(options)


def launch_once(options: Options) -> int:
    """Start one run, as these options say, and watch it; returns the exit code."""
    from distflow.launch.deploy.launch_request import recipe_of
    from distflow.launch.run.folder import check_name

    if options.env or options.slurm:
        from distflow.launch.deploy.job_bootstrap import launch_in_job
        from distflow.launch.deploy.launcher import submit_jobs

        return launch_in_job(options) if options.env else submit_jobs([options])
    hosts = _hosts(options)
    # With hosts, the preflight checks for model files there; this machine may have none.
    loaded, plan = recipe_of(options, need_files=hosts is None)
    if options.dry_run:
        check_name(options.name or plan.run_name)
        return _show_plan(loaded, plan, hosts)
    if hosts is not None:
        from distflow.launch.deploy.launcher import launch_by_ssh

        return launch_by_ssh(options, loaded, plan, hosts)
    from distflow.launch.deploy.launcher import launch_here

    return launch_here(options, loaded, plan)


def _hosts(options: Options) -> tuple[Host, ...] | None:
    from distflow.launch.deploy.hostfile import read_hosts

    return None if options.hosts is None else read_hosts(options.hosts, options.include, options.exclude)


def _show_plan(loaded: LoadedRecipe, plan: Plan, hosts: tuple[Host, ...] | None) -> int:
    from distflow.flow.plan_text import render_page
    from distflow.launch.deploy.host_checks import capacity_for
    from distflow.launch.deploy.launcher import check_lengths

    if hosts is None:
        check_lengths(loaded, plan, None)
        click.echo(render_page(plan, capacity_for(plan, None)))
        return 0
    from distflow.launch.deploy.placement import place_workers, placement_lines

    placement = place_workers(plan, hosts, loaded.origin)
    check_lengths(loaded, plan, placement)
    click.echo(render_page(plan, capacity_for(plan, placement), placement.where))
    click.echo("\n".join(["", "hosts", *(f"  {line}" for line in placement_lines(plan, placement))]))
    return 0


@click.command()
@click.argument("run", required=False)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=None,
    help="Seconds without progress that the run gets to save and exit; 0: it ends at once, and saves nothing.  "
    "[default: the recipe's limits.drain_s + 10]",
)
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def stop(run: str | None, timeout: float | None, runs_dir: Path) -> None:
    """Stop RUN (default: the newest): it saves and exits, or is killed; prints what was ended and removed."""
    from distflow.launch.deploy.stop_run import stop_run
    from distflow.launch.run.folder import find_run
    from distflow.launch.run.record import read_record

    run_dir = find_run(run, runs_dir)
    lines = stop_run(run_dir, read_record(run_dir).drain_s + 10 if timeout is None else timeout, tell=click.echo)
    for line in lines:
        click.echo(f"ended: {line}")
    click.echo(
        f"{run_dir}: {read_record(run_dir).state}; nothing of it is left running" + ("" if lines else " (nothing was)")
    )


@click.command()
@click.argument("place")
@click.option("--run", "name", help="Name of the run here.  [default: its name there]")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def fetch(place: str, name: str | None, runs_dir: Path) -> None:
    """Bring a run back, with its newest whole checkpoint, from PLACE: its run.copy_to and its name, s3://bucket/RUN."""
    for line in fetch_run(place, name, runs_dir):
        click.echo(line)


def fetch_run(place: str, name: str | None, runs_dir: Path) -> Iterator[str]:
    """Make the folder of a run that can be resumed; yields human-readable lines. Raises UserError if there is none."""
    import fsspec

    from distflow.errors import UserError
    from distflow.launch.run.folder import SUBFOLDERS, check_name
    from distflow.launch.run.record import FILE_NAME
    from distflow.runtime.checkpoint.commit import checkpoints_of

    name = place.rstrip("/").rpartition("/")[2] if name is None else name
    check_name(name)
    from distflow.launch.run.folder import run_options

    run_dir, draft = (runs_dir / name).resolve(), (runs_dir / f".{name}.fetching").resolve()
    if run_dir.exists():
        raise UserError(f"{run_dir} exists already — give another name with --run")
    try:
        store, root = fsspec.core.url_to_fs(place)
        root = root.rstrip("/")
        if not store.isfile(f"{root}/{FILE_NAME}"):
            raise UserError(
                f"{place}: there is no {FILE_NAME} — give run.copy_to of the run and its name, s3://bucket/RUN"
            )
        shutil.rmtree(draft, ignore_errors=True)
        for sub in SUBFOLDERS:
            (draft / sub).mkdir(parents=True, mode=0o700)
        for path in (*store.ls(root, detail=False), *store.ls(f"{root}/checkpoints", detail=False)):
            file = str(path).removeprefix(root).lstrip("/") if root in str(path) else str(path).rpartition("/")[2]
            if store.isfile(path):
                store.get_file(path, str(draft / file))
        commit = yield from _fetch_newest(store, f"{root}/checkpoints", checkpoints_of(draft))
    except (OSError, ImportError, ValueError) as error:
        raise error if isinstance(error, UserError) else UserError(f"{place}: cannot be fetched: {error}") from error
    _note_fetched(draft, name)
    draft.rename(run_dir)
    if root.rpartition("/")[2] == name:
        yield (
            f"{name} goes on copying to {place} when it is resumed, and removes older checkpoints there; to leave it "
            "as it is, add run.copy_to=null, or fetch it with --run NAME"
        )
    again = f"distflow launch --resume {run_options(run_dir)}"
    yield f"fetched training step {commit.step} into {run_dir}; go on with: {again}"


def _fetch_newest(store: Any, there: str, here: Path) -> Generator[str, None, Commit]:
    """Fetch the newest checkpoint that is whole and still counts; COMMIT last."""
    from distflow.data.fed import PROMPTS
    from distflow.errors import UserError
    from distflow.runtime.checkpoint.commit import COMMIT, abandoned, examine, read_file

    steps = [str(path).rstrip("/").rpartition("/")[2] for path in store.ls(there, detail=False)]
    for step in sorted((step for step in steps if step.startswith("step_")), reverse=True):
        folder = here / step
        folder.mkdir()
        if not store.isfile(f"{there}/{step}/{COMMIT}"):
            yield f"ignored: {step}: it has no COMMIT, so its copy was not finished"
        else:
            store.get_file(f"{there}/{step}/{COMMIT}", str(folder / "commit"))
            commit, fault = read_file(folder / "commit")
            for part in commit.parts if commit is not None else ():
                if store.isfile(f"{there}/{step}/{part}"):
                    store.get_file(f"{there}/{step}/{part}", str(folder / part))
            (folder / "commit").rename(folder / COMMIT)
            commit, fault = examine(folder)
            fault = fault or abandoned(folder)
            if commit is not None and not fault:
                _fetch_prompts(store, f"{there}/{step}/{PROMPTS}", here.parent / PROMPTS)
                return commit
            yield f"ignored: {step}: {fault}"
        shutil.rmtree(folder)
    raise UserError(f"{there}: there is no whole checkpoint")


def _fetch_prompts(store: Any, there: str, here: Path) -> None:
    """Fetch the prompts that clients had put when a checkpoint was copied, if they had."""
    for path in store.ls(there, detail=False) if store.isdir(there) else ():
        here.mkdir(exist_ok=True)
        store.get_file(path, str(here / str(path).rpartition("/")[2]))


def _note_fetched(draft: Path, name: str) -> None:
    """Record the run as one that was stopped on this machine: what it was elsewhere is gone."""
    from msgspec import structs

    from distflow.cluster.processes import STOPPED
    from distflow.launch.run.record import read_record

    record = read_record(draft)
    # Its folder is that from which it is read, whatever it is called then.
    structs.replace(
        record,
        name=name,
        workers=tuple(structs.replace(entry, host=0) for entry in record.workers),
        roster={},
        hosts=(),
        pids={},
        pid=None,
        state="stopped",
        exit_code=STOPPED,
        ended=time.time(),
        failure=None,
        silent=(),
        waits_for="",
    ).write()
