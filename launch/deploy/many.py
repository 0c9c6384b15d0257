"""`launch` with --hosts, --env or --slurm: from a recipe to a run on many hosts."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

import click

from distflow.config.load import LoadedRecipe
from distflow.errors import UserError
from distflow.flow.plan import Plan
from distflow.launch.deploy.env_forwarding import forwarded
from distflow.launch.deploy.fan_out import SshWays, Ways
from distflow.launch.deploy.fetching import fetch_record
from distflow.launch.deploy.folder_contents import unwritable
from distflow.launch.deploy.hostfile import Host
from distflow.launch.deploy.hosts_monitor import HostsWatcher
from distflow.launch.deploy.job_bootstrap import first_of_node, follow, gathered, stand_by, with_address
from distflow.launch.deploy.job_environment import read_node
from distflow.launch.deploy.launcher import begin, claim_folder, conclude
from distflow.launch.deploy.multi_host import Asked, Begun, start_on_hosts
from distflow.launch.deploy.options import Options
from distflow.launch.deploy.placement import Placing, begin_with, place_workers
from distflow.launch.deploy.resumed_recipe import recipe_of
from distflow.launch.deploy.slurm import SCRIPT, Refused, render_job, slurm_settings, submit
from distflow.launch.deploy.ssh import Transport
from distflow.launch.observe.progress import make_display
from distflow.launch.run.folder import MODES, claim, create_run_folder, remove_run_folder
from distflow.launch.run.record import FILE_NAME, RunRecord


def launch_by_ssh(options: Options, loaded: LoadedRecipe, plan: Plan, hosts: tuple[Host, ...]) -> int:
    """Start a run on the hosts of a file and watch it; returns the exit code."""
    transport = Transport(options.ssh_config, tuple(shlex.split(options.ssh_options)))
    placing = place_workers(plan, hosts)
    ways = SshWays(dict(enumerate(hosts)), transport)
    if ways.here:
        # Host 0 collects what the others have written when the run is over: that is to be found here.
        placing = begin_with(placing, ways.here)
        ways = SshWays(dict(enumerate(placing.hosts)), transport)
    return _launch(options, loaded, plan, placing, ways)


def launch_in_job(options: Options) -> int:
    """One process of each node acts; those beside it wait for the end."""
    if options.hosts is not None or options.detach or options.dry_run:
        raise UserError("--env: the hosts are those of the job, and it lasts as long as the run — leave out "
                        "--hosts, --detach and --dry-run")  # fmt: skip
    # A job that is cancelled before its workers run is undone like one that is interrupted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    node = with_address(read_node(os.environ))
    loaded, plan = recipe_of(options, need_files=False)
    limit_s = loaded.recipe.limits.connect_s
    if node.local_rank > 0:
        return stand_by(node, os.environ, limit_s)
    with first_of_node(node, os.environ) as codes:
        if node.rank > 0:
            codes.append(follow(node, os.environ, limit_s))
        else:
            with gathered(node, os.environ, len(plan.workers), limit_s) as (hosts, ways):
                codes.append(_launch(options, loaded, plan, place_workers(plan, hosts), ways))
                ways.see_off()
    return codes[0]


def submit_job(options: Options) -> int:
    """Write a batch script into a new run folder and hand it to Slurm; the job fills the folder."""
    settings = slurm_settings(options.slurm)
    plan = recipe_of(options, need_files=False)[1]
    name = plan.run_name if options.name is None else options.name
    made = not options.runs_dir.exists()
    if options.resume:
        run_dir = claim_folder(options.runs_dir, options.name, plan, resume=True)[0]
    elif options.dry_run:
        run_dir = options.runs_dir.resolve() / name
    else:
        mode = MODES[plan.recipe.security.run_folder]
        run_dir = create_run_folder(options.runs_dir, name, explicit=options.name is not None, mode=mode)
    again = ["--run", run_dir.name, "--runs-dir", str(run_dir.parent), "--env", "--prepared"]
    again += ["--resume"] * options.resume + ["--recipe-as-written"] * options.recipe_as_written
    code = ["--ship-code"] if options.ship_code else []
    command = [sys.executable, "-m", "distflow.launch", "launch", *options.words, *again, *code]
    text = render_job(settings, run_dir, command, Path.cwd())
    if options.dry_run:
        click.echo(text, nl=False)
        return 0
    click.echo(str(run_dir))
    try:
        _write_script(run_dir, text)
        job = submit(run_dir / SCRIPT)
    except Refused:
        # The next attempt is to find the name free.
        if not options.resume:
            remove_run_folder(run_dir, with_parent=made)
        raise
    click.echo(f"job {job}: {run_dir / SCRIPT}; its output goes to {run_dir}/logs/slurm-{job}.log")
    return 0


def _write_script(run_dir: Path, text: str) -> None:
    try:
        (run_dir / SCRIPT).write_text(text)
    except OSError as error:
        raise Refused(str(unwritable(run_dir, error))) from error


def _launch(options: Options, loaded: LoadedRecipe, plan: Plan, placing: Placing, ways: Ways) -> int:
    """Claim a run folder, start, watch."""
    environment = forwarded(os.environ, options.forward, options.settings)
    made = not options.runs_dir.exists()
    run_dir, lock, resume = _folder(options, plan)
    # The agent that keeps this folder takes the lock itself.
    os.close(lock)
    click.echo(str(run_dir))
    beginning = begin(run_dir, plan, resume=resume, here=False)
    if beginning is None:
        return 0
    asked = Asked(
        loaded=loaded,
        plan=plan,
        placing=placing,
        head_dir=run_dir,
        beginning=beginning,
        resume=resume,
        ship_code=options.ship_code,
        environment=environment,
        entry=options.worker_entry,
    )
    try:
        begun = start_on_hosts(asked, ways)
    except BaseException:
        # Whatever it was, nothing runs: the name is free again.
        if not resume and not options.prepared:
            remove_run_folder(run_dir, with_parent=made)
        raise
    return _watch(options, asked, ways, begun)


def _folder(options: Options, plan: Plan) -> tuple[Path, int, bool]:
    """The run folder, its lock, and whether the run goes on in it."""
    if options.prepared:
        run_dir = (options.runs_dir / str(options.name)).resolve()
        # A job that was put back into the queue goes on with what it had begun.
        if not options.resume and not (run_dir / FILE_NAME).exists():
            return run_dir, claim(run_dir), False
    resume = options.resume or options.prepared
    return *claim_folder(options.runs_dir, options.name, plan, resume=resume), resume


def _watch(options: Options, asked: Asked, ways: Ways, begun: Begun) -> int:
    for note in begun.notes:
        click.echo(f"note: {note}")

    def fetch() -> RunRecord | None:
        return fetch_record(asked.placing.hosts, ways, begun.run_dirs, asked.head_dir)

    display = make_display(asked.plan.batch.training_steps)
    watcher = HostsWatcher(asked.head_dir, begun.agents, display, None if begun.shares_folder else fetch)
    return conclude(watcher.watch(until_running=options.detach), options)
