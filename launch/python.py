"""Runs from Python: `distflow.launch`, `distflow.load_run`, and what they return.

A run is launched by the command, in a process and session of its own. So it is the same run as one from a terminal: it
needs no main thread and no signal handler here, and neither an interrupted cell nor the end of this process ends it.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click

from distflow.comm.processes import module_command
from distflow.config.check import known_key
from distflow.config.other_tools import meant
from distflow.config.schema import Recipe
from distflow.config.yamlfile import shown
from distflow.errors import DistflowError, Problem, RecipeError, UserError, WorkerFailed, did_you_mean, nearest
from distflow.flow.file_import import plugin_being_imported
from distflow.launch.commands.launch import command
from distflow.launch.commands.status import look
from distflow.launch.deploy.launch_request import Options, as_asked, found_changes, recipe_of
from distflow.launch.deploy.launcher import check_here
from distflow.launch.deploy.monitor import Monitor
from distflow.launch.deploy.stop_run import stop_run
from distflow.launch.observe.file_sync import finite, read_steps
from distflow.launch.observe.progress import PlainDisplay, RunStatus
from distflow.launch.observe.run_summary import failure_report, progress_of
from distflow.launch.python_recipe import new_folder, other_files, write_recipe
from distflow.launch.run.folder import check_name, find_run
from distflow.launch.run.record import FILE_NAME, read_record

RUNS_DIR, LAUNCHED = "runs", ".launched"
"""Where recipes lie that `launch` has made."""
AS: Mapping[int, type[DistflowError]] = {2: UserError, 3: WorkerFailed}
"""What is raised, by the exit code of the command."""
NOT_HERE: Mapping[str, str] = {
    "detach": "a run from Python always goes on by itself: leave it out",
    "dry_run": "use `distflow plan`",
    "env": "every node of a job starts the command: use `distflow launch --env`",
    "slurm": "a submitted job is no run before it begins: use `distflow launch --slurm`, then load_run",
    "sweep": "call launch in a loop",
}
"""Options of the command that start no run to hold in hand."""
ARGUMENTS: Mapping[str, str] = {
    "flow.steps.reward.with.function.NAME.weight": 'reward={NAME: {"function": …, "weight": 0.5}, …}',
    "flow.steps.reward.with.function": 'reward=…: a function, its name, or several: {NAME: {"function": …}, …}',
    "val.data.source": 'val={"data": {"source": …}}: a file, or hub:ID',
    "data.source": "data=…: a file, hub:ID, or rows",
    "models.policy.path": "model=…: a folder, a hub's id, or a shipped one",
    "--runs-dir": "runs_dir=…",
    "--resume": 'resume=True, run="NAME"',
    "--hosts": 'hosts="FILE"',
}
"""Arguments of `launch`, by the keys and options that stand for what other tools call otherwise."""
OVERRIDES = ' overrides=["KEY=VALUE"]'
FIELDS = (
    'its fields stand in sections here, as batch={"samples_per_prompt": 8}; `distflow convert FILE` makes a recipe of '
    "a script with it"
)


class Run:
    """A run, going on or over. All that is asked of it is read from its folder and its workers, by any process."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        """The run folder, absolute."""
        self.name: Final = path.name

    def __repr__(self) -> str:
        progress = progress_of(read_record(self.path), read_steps(self.path, _ignore))
        return f"<distflow run {self.name!r}: {progress}>"

    def wait(self, timeout: float | None = None, *, progress: bool = False) -> Run:
        """Wait until the run is over, and return it; `progress`: print a line every two seconds or so.

        Raises what ended it, with the text that the command prints: UserError, WorkerFailed or DistflowError; that it
        was stopped is no error. Raises TimeoutError after `timeout` seconds, and KeyboardInterrupt; the run goes on.
        """
        display = PlainDisplay() if progress else _NoDisplay()
        record = Monitor(self.path, display).only_look(math.inf if timeout is None else timeout)
        if not record.over:
            raise TimeoutError(
                f"{self.path}: the run is not over after {timeout:g} s — it goes on; wait again, or stop it"
            )
        if record.failure is not None:
            text = "\n".join(failure_report(record, record.failure))
            raise _error(record.failure.exit_code, text)
        return self

    def status(self) -> dict[str, Any]:
        """What `distflow status --json` prints: the state of the run, and what each worker does and waits for."""
        return look(self.path).as_json()

    def metrics(self) -> list[dict[str, float | None]]:
        """What `distflow metrics --json` prints: one row per training step so far, by metric. None: not finite."""
        return [finite(step) for step in read_steps(self.path, _warn)]

    def stop(self, timeout: float | None = None) -> Run:
        """Stop the run as `distflow stop` does, if it goes on: it saves and exits, and nothing of it is left.

        `timeout`: seconds without progress that it gets for this (default: limits.drain_s + 10); 0: at once.
        """
        stop_run(self.path, read_record(self.path).drain_s + 10 if timeout is None else timeout)
        return self


def launch(
    recipe: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    *,
    model: str | os.PathLike[str] | None = None,
    data: str | os.PathLike[str] | Iterable[Mapping[str, Any]] | None = None,
    reward: object = None,
    flow: str | None = None,
    **options: object,
) -> Run:
    """Start a run as `distflow launch RECIPE KEY=VALUE …` does, and return it once its workers run, or it is over.

    In place of a recipe there may be a `model` (a folder, a hub's id, or a shipped one) and `data` (a file, `hub:ID`,
    or rows), with a `reward` (a function, several as a list or by name, by name with weights as in a recipe, or the
    name of a shipped one) and a `flow` (`grpo` unless given). Sections of the recipe are keywords then, as mappings:
    `batch={"prompts": 8}`.

    `options`: the long options of the command with underscores, such as `run="name"`, `runs_dir="runs"`, `resume=True`,
    `hosts="hosts.txt"`. With `resume`, `recipe` may be None, and a call with `model` and `data` must be the run's own.
    Prints what the command prints. Raises RecipeError with all problems of a recipe, and UserError; `Run.wait` raises
    what ends the run later.
    """
    if imported := plugin_being_imported():
        raise UserError(
            f"distflow.launch was called while {imported} was imported, as workers and checks do for the functions in "
            'it — put what starts the run behind `if __name__ == "__main__":`'
        )
    _check_names(options, of_recipe=recipe is not None)
    if model is None and data is None:
        if reward is not None or flow is not None:
            raise UserError("launch: reward and flow go with model and data; of a recipe they are overrides")
        return _started(recipe, overrides, options)
    if recipe is not None or model is None or data is None:
        raise UserError("launch: expected a recipe, or both of model and data")
    settings = {name: options.pop(name) for name in [*options] if isinstance(options[name], Mapping)}
    with new_folder(Path(str(options.get("runs_dir") or RUNS_DIR)) / LAUNCHED) as folder:
        source = os.fspath(data) if isinstance(data, str | os.PathLike) else data
        written = write_recipe(
            folder,
            model=_model(model),
            data=source,
            reward=reward,
            flow=flow,
            settings=settings,
            caller=_caller(),
        )
        if not options.get("resume") or options.get("recipe_as_written"):
            return _started(written, overrides, options)
        name = _of_this_call(written, overrides, options)
        shutil.rmtree(folder)
    return _started(None, overrides, {**options, "run": name})


def _of_this_call(recipe: Path, overrides: Sequence[str], options: Mapping[str, object]) -> str:
    """Return the name of the run to go on with; raises UserError if it was launched by another call than this."""
    run_dir, source, changed = found_changes(_options_of(_arguments(recipe, overrides, options)))
    if source.parent.parent.name != LAUNCHED:
        raise UserError(
            f"resume=True: {run_dir} was launched from {shown(source)} — give that instead of model and data"
        )
    told = [*map(str, changed), *other_files(recipe.parent, source.parent)]
    if told:
        raise UserError(
            f"resume=True: {run_dir} was launched by another call: {'; '.join(told)} — put that back, or give it in "
            "overrides; recipe_as_written=True takes the call as it is now"
        )
    return run_dir.name


def _started(recipe: str | os.PathLike[str] | None, overrides: Sequence[str], options: Mapping[str, object]) -> Run:
    """Run the command, once it is clear that it would not refuse this; raises what `launch` does."""
    arguments = _arguments(recipe, overrides, options)
    _check(arguments)
    began = time.time()
    started = [*module_command(sys.executable, "distflow.launch"), "launch", "--detach", *arguments]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            started, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        assert process.stdout is not None, "its output comes by a pipe"
        with process.stdout as lines:
            first = _shown(lines.readline())
            for line in lines:
                _shown(line)
        code = process.wait()
        errors.seek(0)
        said = errors.read().strip()
    if code != 0 and not (first and _ended(Path(first), code, began)):
        raise _error(code, said or f"the launch ended with exit code {code}")
    return Run(Path(first))


def load_run(run: str | os.PathLike[str] | None = None, *, runs_dir: str | os.PathLike[str] = "runs") -> Run:
    """A run that goes on or is over: a name in `runs_dir`, or the path of its folder; None: the newest.

    Raises UserError if there is none.
    """
    found = find_run(None if run is None else os.fspath(run), Path(runs_dir))
    read_record(found)
    return Run(found)


def _caller() -> FrameType | None:
    """Return the innermost frame outside of distflow, whose code launches."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "distflow":
        frame = frame.f_back
    return frame


def _shown(line: str) -> str:
    text = line.rstrip("\n")
    if text:
        print(text, flush=True)
    return text


def _arguments(
    recipe: str | os.PathLike[str] | None, overrides: Sequence[str], options: Mapping[str, object]
) -> list[str]:
    """The words of the command line; raises UserError."""
    if isinstance(overrides, str):
        raise UserError(f"overrides: expected a list of KEY=VALUE, got the text {overrides!r} — write [{overrides!r}]")
    known, words = _options(), []
    for key, value in options.items():
        words += _words(*known[key], value)
    return [*words, "--", *([] if recipe is None else [os.fspath(recipe)]), *overrides]


def _options() -> dict[str, tuple[str, click.Option]]:
    """The command's options, and the words by which it knows them, by their names in Python."""
    shown = [option for option in command.params if isinstance(option, click.Option)]
    return {name.removeprefix("--").replace("-", "_"): (name, one) for one in shown for name in one.opts}


def _check_names(options: Mapping[str, object], *, of_recipe: bool) -> None:
    """Raise RecipeError with all keywords that are none, and what each may have meant."""
    known = _options()
    usual = [key for key, (_, one) in known.items() if key not in NOT_HERE and not one.hidden]
    problems = []
    for key, value in options.items():
        if key in NOT_HERE:
            problems.append(Problem("launch", key, NOT_HERE[key]))
        elif key not in known and key in Recipe.model_fields and (of_recipe or not isinstance(value, Mapping)):
            message = "a recipe is given" if of_recipe else f"expected a mapping of its keys, got {value!r}"
            problems.append(Problem("launch", key, message, f'its keys are overrides, as ["{key}.KEY=VALUE"]'))
        elif key not in known and not isinstance(value, Mapping):
            problems.append(Problem("launch", key, "unknown keyword", _meant(key, value, usual)))
    if problems:
        raise RecipeError(problems)


def _meant(key: str, value: object, usual: Sequence[str]) -> str:
    """Say what an unknown keyword may have meant: an option, an argument, or a key of a recipe."""
    told = FIELDS if key in ("args", "training_args", "config") else known_key((key,), value)
    argument = next((text for name, text in ARGUMENTS.items() if name in told), "")
    if argument:
        return argument
    if nearest(key, usual, cutoff=0.8) is not None and not meant(key):
        return did_you_mean(key, usual)
    if "allowed: " in told:
        return did_you_mean(key, {*usual, *Recipe.model_fields, "model", "reward", "overrides"})
    return told + OVERRIDES if told.endswith("?") else told


def _model(model: object) -> str:
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    raise UserError(
        f"launch: model is {type(model).__name__}; workers are other processes — give a folder or a hub's id; "
        "model.save_pretrained(FOLDER) and tokenizer.save_pretrained(FOLDER) write one"
    )


def _words(name: str, option: click.Option, value: object) -> list[str]:
    """One option as the command reads it."""
    if value is None or value is False:
        return []
    if option.is_flag:
        if value is not True:
            raise UserError(f"launch: {name} — expected True or False, got {value!r}")
        return [name]
    values = value if option.multiple and isinstance(value, list | tuple) else [value]
    return [f"{name}={one}" for one in values]


def _check(arguments: list[str]) -> None:
    """Raise here what the command would refuse, with all problems of a recipe."""
    options = _options_of(arguments)
    loaded, plan = recipe_of(options, need_files=options.hosts is None)
    check_name(options.name or plan.run_name)
    if options.hosts is None:
        check_here(options, loaded, plan)


def _options_of(arguments: list[str]) -> Options:
    try:
        given = command.make_context("launch", list(arguments)).params
    except click.ClickException as error:
        raise UserError(f"launch: {error.format_message()}") from error
    return as_asked(Options(**given))


def _ended(run_dir: Path, code: int, began: float) -> bool:
    """Whether the run was started, and ended with this exit code: else it was refused."""
    if not (run_dir / FILE_NAME).exists():
        return False
    record = read_record(run_dir)
    return record.over and record.exit_code == code and record.started >= began


def _error(code: int, text: str) -> DistflowError:
    return AS[code](text) if code in AS else DistflowError(text)


def _ignore(line: str) -> None:
    """Nobody asked."""


def _warn(line: str) -> None:
    print(line, file=sys.stderr)


class _NoDisplay:
    """Shows nothing."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, *raised: object) -> None:
        """Nothing to restore."""

    def show(self, status: RunStatus) -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""

    def finish(self, status: RunStatus) -> None:
        """Show nothing."""
