"""`distflow launch` and `stop`: start a run on this machine or on many, then watch it; end one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distflow.launch.deploy.launch_request import Options

if TYPE_CHECKING:
    from distflow.flow.plan import Plan
    from distflow.launch.deploy.hostfile import Host


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
    help="A run for each value, one after another; of several keys, for each combination.",
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
        from distflow.launch.deploy.launcher import submit_job

        return launch_in_job(options) if options.env else submit_job(options)
    hosts = _hosts(options)
    # With hosts, the preflight checks for model files there; this machine may have none.
    loaded, plan = recipe_of(options, need_files=hosts is None)
    if options.dry_run:
        check_name(options.name or plan.run_name)
        return _show_plan(plan, hosts)
    if hosts is not None:
        from distflow.launch.deploy.launcher import launch_by_ssh

        return launch_by_ssh(options, loaded, plan, hosts)
    from distflow.launch.deploy.launcher import launch_here

    return launch_here(options, loaded, plan)


def _hosts(options: Options) -> tuple[Host, ...] | None:
    from distflow.launch.deploy.hostfile import read_hosts

    return None if options.hosts is None else read_hosts(options.hosts, options.include, options.exclude)


def _show_plan(plan: Plan, hosts: tuple[Host, ...] | None) -> int:
    from distflow.flow.plan_text import render_page
    from distflow.launch.deploy.host_checks import capacity

    # Workers of several hosts do not share this one's memory.
    seen = capacity()
    click.echo(render_page(plan, seen if hosts is None else replace(seen, host=None)))
    if hosts is not None:
        from distflow.launch.deploy.placement import place_workers, placement_lines

        lines = placement_lines(plan, place_workers(plan, hosts))
        click.echo("\n".join(["", "hosts", *(f"  {line}" for line in lines)]))
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
