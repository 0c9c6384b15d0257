"""Launch a run on this machine or (--hosts, --env, --slurm) on many: one path with two ways to start agents.

`launch --slurm` submits a batch script that runs `launch --env` once per node.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import click

from distflow.cluster.processes import Outcome
from distflow.comm.processes import module_command
from distflow.config.load import LoadedRecipe
from distflow.errors import RecipeError, UserError
from distflow.flow.memory_fit import UNSEEN, room_problems
from distflow.flow.memory_fit import warnings as memory_warnings
from distflow.flow.model_fit import position_problems
from distflow.flow.plan import Plan
from distflow.flow.validation import before_training
from distflow.launch.agent.host_facts import gpus
from distflow.launch.agent.start import LIMIT, agent_command, agent_lives, start_agent
from distflow.launch.deploy.fan_out import SshWays, Ways
from distflow.launch.deploy.folder_contents import (
    Beginning,
    RunContents,
    description_of,
    fill,
    start_first_agent,
    unwritable,
    write_all,
)
from distflow.launch.deploy.host_checks import (
    absent_data,
    absent_models,
    capacity,
    capacity_for,
    job_notes,
    problems_here,
    row_problems,
    slow_here,
    space_problems,
)
from distflow.launch.deploy.hostfile import Host
from distflow.launch.deploy.job_environment import (
    JobRefused,
    JobSize,
    forwarded,
    job_size,
    render_job,
    slurm_settings,
    submit,
)
from distflow.launch.deploy.launch_request import AS_WRITTEN, RECIPE, Options, check_lineage, overridden, recipe_of
from distflow.launch.deploy.monitor import Interrupts, Monitor
from distflow.launch.deploy.multi_host import HostsRequest, forget_hosts, note_hosts, start_on_hosts
from distflow.launch.deploy.placement import (
    WorkerPlacement,
    begin_with,
    check_job,
    check_numbers,
    needs_here,
    place_workers,
)
from distflow.launch.deploy.ssh import Transport
from distflow.launch.observe.progress import Display, make_display
from distflow.launch.observe.run_summary import reached, tell_end
from distflow.launch.run.exit_status import conclude, finish
from distflow.launch.run.folder import (
    LOCK,
    MODES,
    claim,
    create_run_folder,
    existing_run_folder,
    remove_run_folder,
    run_word,
)
from distflow.launch.run.process_table import parts_here, processes_of, sweep
from distflow.launch.run.record import FILE_NAME, RunRecord, SubmittedJob, read_record
from distflow.launch.run.resume import (
    Resumption,
    check_folder,
    check_whole,
    find_checkpoint,
    forget_abandoned,
    forget_unfinished,
)
from distflow.metrics.merge import MetricsReader
from distflow.runtime.checkpoint.commit import begins, checkpoints_of, model_owed, models_of, newest_first, vanished

SCRIPT = "slurm.sh"
RETRY_S = 2.0
LEAVE_S = 10.0
"""Limit for the agent to exit after run.json says that the run is over, the last thing it writes."""
POLL_S = 0.02
LARGE_BYTES = 1 << 30
"""A checkpoint whose check takes long enough to be told."""
Start = Callable[[RunContents, int], tuple[Monitor, tuple[str, ...]]]
"""Starts the agents of a run, given its contents and the descriptor of the folder's lock; returns its monitor and notes
for the user. If it raises, nothing runs."""


class LocalAgent:
    """The agent of a run on this machine only; it is restarted if it is killed."""

    def __init__(
        self,
        run_dir: Path,
        start: Callable[[], subprocess.Popen[bytes]],
        start_again: Callable[[], subprocess.Popen[bytes]],
        display: Display,
    ) -> None:
        self._run_dir = run_dir
        self._start = start
        self._start_again = start_again
        self._agent: subprocess.Popen[bytes] | None = None
        self._restarts: list[float] = []
        self._start_again_at = 0.0
        self._display = display
        self._gone = False

    def look(self) -> RunRecord:
        """Start the agent, or restart it if it was killed; returns the current record."""
        if self._agent is None:
            self._agent = self._start()
        record = read_record(self._run_dir)
        if record.over or self.runs():
            return record
        record = read_record(self._run_dir)
        if record.over:
            return record
        # The agent exited before the run was over: it was killed, unless it failed before it had started anything.
        refused = (self._agent.returncode or 0) > 0 and not record.pids
        if not refused and time.monotonic() < self._start_again_at:
            return record
        if not refused and LIMIT.take(self._restarts, time.monotonic()):
            self._restart()
            return record
        # Restarting it again would not help. The workers continue, and the fork server ends the run; else this process.
        if not self._gone:
            self._gone = True
            self._display.say("the host agent is gone; the workers continue without it")
        if any(processes_of(part) for part in parts_here(record)):
            return record
        record = read_record(self._run_dir)
        return record if record.over else conclude(self._run_dir, {})

    def _restart(self) -> None:
        """Start another agent; if the system refuses, it is tried again, here and by the fork server."""
        self._display.say("the host agent was killed; restarting it while the workers continue")
        try:
            self._agent = self._start_again()
        except OSError as error:
            self._start_again_at = time.monotonic() + RETRY_S
            self._display.say(f"the host agent cannot be started now ({error}); trying again")

    def runs(self) -> bool:
        """Whether it runs, or a replacement that the fork server started."""
        ours = self._agent is not None and self._agent.poll() is None
        return ours or agent_lives(self._run_dir, 0)

    def await_leave(self) -> None:
        """Wait until it has exited."""
        deadline = time.monotonic() + LEAVE_S
        while self.runs() and time.monotonic() < deadline:
            time.sleep(POLL_S)


def launch_here(options: Options, loaded: LoadedRecipe, plan: Plan) -> int:
    """Start a run on this machine and watch it; returns the exit code."""
    check_here(options, loaded, plan)

    def start(contents: RunContents, lock: int) -> tuple[Monitor, tuple[str, ...]]:
        fill(contents)
        display, run_dir = make_display(plan.batch.training_steps), contents.head_dir
        agent = LocalAgent(
            run_dir,
            lambda: start_first_agent(run_dir, lock, options.worker_entry),
            lambda: start_agent(run_dir, agent_command(run_dir, entry=options.worker_entry)),
            display,
        )
        return Monitor(run_dir, display, agent), ()

    return _launch(options, loaded, plan, None, start)


def check_here(options: Options, loaded: LoadedRecipe, plan: Plan) -> None:
    """Raise RecipeError if this machine lacks something that the run needs."""
    needs = needs_here(plan, resume=options.resume)
    missing = [*problems_here(plan, loaded.origin), *absent_models(plan.recipe, loaded.origin)]
    missing += [*row_problems(plan, loaded.origin), *absent_data(plan, loaded.origin)]
    if problems := missing + space_problems(options.runs_dir, needs):
        raise RecipeError(problems)


def launch_by_ssh(options: Options, loaded: LoadedRecipe, plan: Plan, hosts: tuple[Host, ...]) -> int:
    """Start a run on the hosts of a file and watch it; returns the exit code."""
    transport = transport_of(options)
    placement = place_workers(plan, hosts, loaded.origin)
    ways = SshWays(dict(enumerate(hosts)), transport)
    if ways.here:
        # Host 0 collects what the others wrote when the run is over; the user looks for it here.
        check_numbers(plan, hosts[ways.here].name, loaded.origin)
        placement = begin_with(placement, ways.here)
        ways = SshWays(dict(enumerate(placement.hosts)), transport)
    return launch_on(options, loaded, plan, placement, ways)


def transport_of(options: Options) -> Transport:
    """Return how ssh is called."""
    return Transport(options.ssh_config, tuple(shlex.split(options.ssh_options)))


def launch_on(options: Options, loaded: LoadedRecipe, plan: Plan, placement: WorkerPlacement, ways: Ways) -> int:
    """Start a run on hosts and watch it; returns the exit code."""
    environment = forwarded(os.environ, options.forward, options.settings)

    def start(contents: RunContents, lock: int) -> tuple[Monitor, tuple[str, ...]]:
        # The agent that writes this folder takes the lock itself.
        os.close(lock)
        resume = (contents.head_dir / FILE_NAME).exists()
        request = HostsRequest(contents, resume, options.ship_code, environment, options.worker_entry)
        display = make_display(plan.batch.training_steps)
        interrupts = Interrupts(display)
        started = start_on_hosts(request, ways, interrupts.hear)
        forget_hosts(contents.head_dir)
        if not started.shares_folder:
            note_hosts(contents.head_dir, dict(enumerate(placement.hosts)), started.run_dirs, transport_of(options))
        monitor = Monitor(contents.head_dir, display, addresses=started.addresses, interrupts=interrupts)
        return monitor, started.notes

    return _launch(options, loaded, plan, placement, start)


def check_lengths(loaded: LoadedRecipe, plan: Plan, placement: WorkerPlacement | None) -> None:
    """Raise RecipeError for samples longer than a model's positions, or than an engine has memory for."""
    fits = room_problems(plan, capacity_for(plan, placement), loaded.origin)
    if problems := [*position_problems(plan, loaded.origin), *fits]:
        raise RecipeError(problems)


def _launch(options: Options, loaded: LoadedRecipe, plan: Plan, placement: WorkerPlacement | None, start: Start) -> int:
    """Claim a run folder, start the agents, watch. Raises RecipeError for samples that are too long."""
    check_lengths(loaded, plan, placement)
    made = not options.runs_dir.exists()
    run_dir, lock, resume = _folder(options, plan)
    click.echo(str(run_dir))
    beginning = begin(run_dir, loaded, plan, resume=resume, here=placement is None)
    if beginning is None:
        return 0
    try:
        count = len(gpus()) if placement is None else 0
        monitor, notes = start(RunContents(loaded, plan, beginning, run_dir, placement, gpus=count), lock)
    except BaseException:
        # Nothing runs, whatever failed: the name is free again.
        if not resume and not options.prepared:
            remove_run_folder(run_dir, with_parent=made)
        raise
    # Only now: on hosts the agents run already, so whoever stops reading our output does not cost them their folder.
    for note in notes:
        click.echo(f"note: {note}")
    return _report(monitor.watch(until_running=options.detach), options)


def _folder(options: Options, plan: Plan) -> tuple[Path, int, bool]:
    """The run folder, its lock, and whether the run is resumed."""
    if options.prepared:
        run_dir = (options.runs_dir / str(options.name)).resolve()
        # A requeued job resumes its run.
        if not options.resume and not (run_dir / FILE_NAME).exists():
            return run_dir, claim(run_dir), False
    resume = options.resume or options.prepared
    return *claim_folder(options.runs_dir, options.name, plan, resume=resume), resume


def claim_folder(runs_dir: Path, name: str | None, plan: Plan, *, resume: bool) -> tuple[Path, int]:
    """The folder of a new run, or of the one to resume, and the descriptor of its lock; raises UserError."""
    wanted, explicit = (plan.run_name, False) if name is None else (name, True)
    mode = MODES[plan.recipe.security.run_folder]
    if not resume:
        made = not runs_dir.exists()
        run_dir = create_run_folder(runs_dir, wanted, explicit=explicit, mode=mode)
        try:
            return run_dir, claim(run_dir)
        except UserError:
            # A folder with a lock belongs to another launch by now.
            if not (run_dir / LOCK).exists():
                remove_run_folder(run_dir, with_parent=made)
            raise
    run_dir = existing_run_folder(runs_dir, wanted, explicit=explicit)
    run_dir.chmod(mode)
    lock = claim(run_dir)
    if any(processes_of(part) for part in parts_here(read_record(run_dir))):
        raise UserError(
            f"{run_dir}: its workers are still running, without a host agent — wait, or "
            f"`distflow stop {run_word(run_dir)}`"
        )
    return run_dir, lock


def begin(run_dir: Path, loaded: LoadedRecipe, plan: Plan, *, resume: bool, here: bool = True) -> Beginning | None:
    """Where the run starts; None if there is nothing left to train. Removes what an earlier launch left behind.

    `here`: the workers will run on this machine. Shows the plan's warnings. Raises UserError if the checkpoint cannot
    be used with the recipe.
    """
    fit = (*memory_warnings(plan, capacity()), *slow_here(plan)) if here else ()
    for warning in (*plan.warnings, *(f"warning: {text}" for text in fit)):
        click.echo(warning)
    if not resume:
        if first := before_training(plan):
            click.echo(first)
        return Beginning()
    if (size := _size_of_newest(run_dir)) >= LARGE_BYTES:
        click.echo(f"checking the checkpoint ({size / 1e9:.0f} GB)")
    found = find_checkpoint(run_dir)
    for line in found.ignored:
        click.echo(f"ignored: {line}")
    record = read_record(run_dir)
    check_whole(found, record)
    if here and found.checkpoint is None:
        check_folder(record)
    changed = list(check_lineage(found, plan, here=here))
    sweep(run_dir)
    nothing_left = _nothing_left(run_dir, found, plan)
    if nothing_left:
        forget_unfinished(run_dir)
        click.echo(nothing_left)
        if model_owed(run_dir, found.step, plan.recipe.run.hf_every):
            to = models_of(run_dir) / f"step_{found.step:06d}"
            click.echo(f"{to} was not finished: `distflow export {run_dir} --step {found.step} --to {to}` creates it")
        _note_done(run_dir, found.step)
        return None
    for line in (str(found), *overridden(run_dir, loaded.recipe, plan, found.step), *changed):
        click.echo(line)
    forget_abandoned(run_dir, found.step)
    terms = [read_record(run_dir).term, *begins(checkpoints_of(run_dir))]
    return Beginning(max(terms) + 1, found.checkpoint)


def _size_of_newest(run_dir: Path) -> int:
    """Bytes of the newest checkpoint, all of which are read before a run resumes from it."""
    newest = next((folder for folder in newest_first(checkpoints_of(run_dir)) if not vanished(folder)), None)
    return 0 if newest is None else sum(path.stat().st_size for path in newest.iterdir())


def _nothing_left(run_dir: Path, found: Resumption, plan: Plan) -> str:
    """Why there is nothing to train after a checkpoint; empty if there is."""
    steps, goal, stop = plan.batch.training_steps, plan.recipe.run.stop_when, plan.recipe.run.stop_after
    if found.step > steps:
        return (
            f"the checkpoint is of training step {found.step}, and run.training_steps is {steps}: nothing is left to "
            "train — raise run.training_steps to continue"
        )
    if found.step == steps:
        return f"all {steps} training steps are done — raise run.training_steps to continue"
    if stop is not None and found.step >= stop:
        return (
            f"the checkpoint is of training step {found.step}, and run.stop_after is {stop}: nothing is left to train "
            f"in this launch — raise run.stop_after, or run.stop_after=null, to continue up to {steps}"
        )
    if goal is None or not found.step:
        return ""
    reader = MetricsReader(run_dir)
    reader.read()
    met = "".join(reached(goal, [step for step in reader.merged() if step["step"] <= found.step]))
    return met and f"{met}: nothing is left to train — change it, or run.stop_when=null, to continue"


def _note_done(run_dir: Path, step: int) -> None:
    """Record the end of a run whose processes were killed after the last step, before they could do so."""
    record = read_record(run_dir)
    if not record.over and not record.hosts and step >= record.training_steps:
        finish(record, Outcome("done", 0))


def _report(record: RunRecord, options: Options) -> int:
    """Show how the run ended, or that it runs; returns the exit code."""
    if not record.over:
        run = run_word(record.path)
        click.echo(f"running; `distflow status {run}` asks the workers, `distflow stop {run}` ends it")
        return 0
    return tell_end(record, options.runs_dir, () if options.resume else options.words)


def submit_jobs(runs: Sequence[Options]) -> int:
    """Write a batch script into a new folder of each run and hand it to Slurm, as an array if there are several runs;
    the jobs fill the folders.
    """
    options = runs[0]
    settings = slurm_settings(options.slurm)
    size = job_size(settings, os.environ)
    forwarded(os.environ, options.forward, ())  # told now rather than by the job
    made = not options.runs_dir.exists()
    created: list[Path] = []
    try:
        notes: dict[str, None] = {}
        commands = [_prepared(run, created, size, notes) for run in runs]
        _tell(notes)
        text = render_job(settings, commands, Path.cwd())
        if options.dry_run:
            click.echo(text, nl=False)
            return 0
        for folder in created:
            _keep(folder, {SCRIPT: text.encode()})
        job, said = submit(created[0] / SCRIPT)
    except UserError as error:
        # The names must be free for the next attempt; a script that Slurm has not refused can be submitted by hand.
        by_hand = len(created) == len(runs) and not isinstance(error, JobRefused)
        for folder in () if options.resume or by_hand else created:
            remove_run_folder(folder, with_parent=made and folder is created[-1])
        raise
    click.echo("\n".join(map(str, created)))
    _tell(said)
    jobs = [f"{job}_{task}" for task in range(len(created))] if len(created) > 1 else [job]
    logs = [f"{folder}/logs/slurm-{number}.log" for folder, number in zip(created, jobs, strict=True)]
    click.echo(f"job {job}: {created[0] / SCRIPT}; its output goes to {logs[0]}")
    for folder, number, log in zip(created, jobs, logs, strict=True):
        try:
            SubmittedJob(number, log, time.time()).write(folder)
        except OSError as error:
            click.echo(f"note: `distflow status` will not know of job {number}: {unwritable(folder, error)}")
    if len(created) > 1:
        click.echo(f"an array of {len(created)} runs: `distflow metrics {' '.join(map(run_word, created))}`")
    return 0


def _tell(notes: Iterable[str]) -> None:
    for note in notes:
        click.echo(f"note: {note}", err=True)


def _prepared(options: Options, created: list[Path], size: JobSize, notes: dict[str, None]) -> tuple[Path, list[str]]:
    """Return the folder of a run that a job of this size will fill, and the job's command; notes the folder if it
    is there now, and what the job may lack. Raises RecipeError or HostsError for workers that find no places in it."""
    loaded, plan = recipe_of(options, need_files=False)
    check_job(plan, size, loaded.origin)
    # What each GPU of the job has is not known here.
    notes |= dict.fromkeys((*job_notes(plan, loaded.origin, size), *memory_warnings(plan, UNSEEN)))
    name = plan.run_name if options.name is None else options.name
    if options.dry_run and options.resume:
        run_dir = existing_run_folder(options.runs_dir, name, explicit=options.name is not None)
    elif options.dry_run:
        run_dir = options.runs_dir.resolve() / name
    elif options.resume:
        run_dir = claim_folder(options.runs_dir, options.name, plan, resume=True)[0]
        created.append(run_dir)
        if options.recipe_as_written:
            _keep(run_dir, {AS_WRITTEN: description_of(loaded)[RECIPE]})
    else:
        mode = MODES[plan.recipe.security.run_folder]
        run_dir = create_run_folder(options.runs_dir, name, explicit=options.name is not None, mode=mode)
        created.append(run_dir)
        _keep(run_dir, description_of(loaded))
    again = ["--run", run_dir.name, "--runs-dir", str(run_dir.parent), "--env", "--prepared"]
    again += ["--resume"] * options.resume + ["--recipe-as-written"] * options.recipe_as_written
    again += ["--ship-code"] * options.ship_code
    again += [word for names in options.forward for word in ("--forward", names)]
    return run_dir, [*module_command(sys.executable, "distflow.launch"), "launch", *options.words, *again]


def _keep(run_dir: Path, files: Mapping[str, bytes]) -> None:
    """Write what a job reads, by path in its run folder: the recipe as it is now, whatever becomes of its file."""
    try:
        write_all(run_dir, files)
    except OSError as error:
        raise JobRefused(str(unwritable(run_dir, error))) from error
