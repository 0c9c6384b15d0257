"""Create, claim and find run folders: two launches never share one.

Plug-in files, which a recipe names by absolute paths, are copied into them for hosts that do not have these paths.
"""

from __future__ import annotations

import difflib
import fcntl
import math
import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distflow.config.yamlfile import yaml_text, yaml_value
from distflow.errors import UserError
from distflow.flow.neighbours import neighbours
from distflow.flow.rescaling import resized, sizes
from distflow.launch.run.record import FILE_NAME, JOB, SubmittedJob, read_job, read_record
from distflow.metrics.merge import MetricsReader
from distflow.runtime.disk import replace_file

if TYPE_CHECKING:
    from distflow.config.schema import Recipe

LOCK = ".lock"
REPLACED = ".replaced"
"""Folder next to the runs: for each name, the last run that failed before its first training step."""
SUBFOLDERS = ("workers", "logs", "metrics", "rollouts", "checkpoints")
MODES: Mapping[str, int] = {"private": 0o700, "group": 0o750, "public": 0o755}
"""Mode of a run folder, by `security.run_folder`."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PLUGIN = re.compile(r"^\+?(?P<file>/.+\.py):[A-Za-z_]\w*$")
PLUGINS = "plugins"
SHIPPED_BYTES = 16 << 20
"""Plug-in files, which go to each host as they are: they hold code, no data."""


def create_run_folder(runs_dir: Path, name: str, *, explicit: bool, mode: int = MODES["private"]) -> Path:
    """Create the folder of a new run; absolute. A taken name gets -2, -3 …; an explicit one raises UserError.

    A run that failed before its first training step does not count: its folder is moved to `.replaced`.
    A `runs_dir` that is not a folder or cannot be written raises UserError, too.
    """
    check_name(name)
    if runs_dir.exists() and not runs_dir.is_dir():
        raise UserError(f"--runs-dir {runs_dir}: is a file — give a folder")
    made, folder = not runs_dir.exists(), None
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        folder = _new_folder(runs_dir, name, explicit=explicit)
        folder.chmod(mode)
        for sub in SUBFOLDERS:
            (folder / sub).mkdir()
    except OSError as error:
        if folder is not None:
            remove_run_folder(folder, with_parent=made)
        raise UserError(
            f"--runs-dir {runs_dir}: cannot create a run folder there ({error.strerror}: {error.filename}) — "
            "give a folder you can write to"
        ) from error
    return folder.resolve()


def remove_run_folder(run_dir: Path, *, with_parent: bool) -> None:
    """Remove the folder of a run that did not start, so that its name is free; `with_parent`: also its empty parent."""
    shutil.rmtree(run_dir, ignore_errors=True)
    with suppress(OSError):
        # Fails if another run was created there meanwhile.
        if with_parent:
            run_dir.parent.rmdir()


def _new_folder(runs_dir: Path, name: str, *, explicit: bool) -> Path:
    for number in count(1):
        candidate = runs_dir / (name if number == 1 else f"{name}-{number}")
        try:
            candidate.mkdir(mode=MODES["private"])
        except FileExistsError:
            if _set_aside(candidate):
                candidate.mkdir(mode=MODES["private"])
                break
            if explicit:
                raise UserError(f"--run {name}: {_taken(candidate)}") from None
        else:
            break
    return candidate


def _set_aside(folder: Path) -> bool:
    """Move the folder of a run away if it failed before its first training step; else returns False."""
    if not _never_trained(folder):
        return False
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another launch may have been quicker: check again while holding the lock.
        if not _never_trained(folder):
            return False
        aside = folder.parent / REPLACED / folder.name
        aside.parent.mkdir(exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _never_trained(folder: Path) -> bool:
    try:
        failed = read_record(folder).state == "failed"
    except UserError:
        return False
    if not failed or any((folder / "checkpoints").glob("step_*")):
        return False
    reader = MetricsReader(folder)
    reader.read()
    return not reader.merged()


def _taken(folder: Path) -> str:
    if (folder / FILE_NAME).is_file():
        return f"{folder} exists already — add --resume to continue that run, or choose another name"
    if (job := read_job(folder)) is not None:
        return f"{folder} exists already: {_waits(job, folder)}, or choose another name"
    # Another launch may be about to write it, so nothing is removed here.
    return (
        f"{folder} exists already, without {FILE_NAME}: no run has started there — choose another name; if it still "
        f"has none in a minute, no other launch is using it, and it can be removed (rm -r "
        f"{shlex.quote(str(folder))})"
    )


def mode_of(folder: Path) -> int:
    """The permission bits of a folder; other hosts create their run folder with the same ones."""
    return stat.S_IMODE(folder.stat().st_mode)


def existing_run_folder(runs_dir: Path, name: str, *, explicit: bool) -> Path:
    """The folder that `--resume` means: `name`, or without --run the latest of name, name-2, name-3 …; absolute."""
    check_name(name)
    pattern = re.compile(re.escape(name) + (r"" if explicit else r"(-\d+)?"))
    names = [found for found in run_names(runs_dir) if pattern.fullmatch(found)]
    if not names and explicit and (runs_dir / name).exists():
        _check_started(runs_dir / name)
        raise UserError(f"--resume: {_taken(runs_dir / name)}, and launch without --resume")
    if not names:
        raise UserError(f"--resume: there is no run {name!r} in {runs_dir} — start it first, without --resume")
    return (runs_dir / max(names, key=lambda found: (len(found), found))).resolve()


def claim(run_dir: Path) -> int:
    """Lock the folder for one agent; returns the descriptor that holds the lock, to be inherited by the agent.

    Raises UserError if another agent has it, or the folder cannot be written.
    """
    try:
        descriptor = try_claim(run_dir)
    except OSError as error:
        raise UserError(
            f"{run_dir}: cannot start a run in this folder ({error.strerror}: {error.filename}) — "
            "it must be a folder you can write to"
        ) from error
    if descriptor is None:
        raise UserError(
            f"{run_dir}: this run is still running — watch it with `distflow status {run_word(run_dir)}`, "
            f"end it with `distflow stop {run_word(run_dir)}`"
        )
    return descriptor


def try_claim(run_dir: Path) -> int | None:
    """As `claim`, but None if another process has the lock. Raises OSError if the folder cannot be written."""
    return try_lock(run_dir / LOCK)


def try_lock(path: Path) -> int | None:
    """Lock a file, creating it if needed; None if another process has it. Raises OSError if it cannot be written."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def check_name(name: str) -> None:
    """Raises UserError for an invalid run name."""
    if not _NAME.fullmatch(name):
        raise UserError(f"run name {name!r}: expected at most 64 letters, digits, dots, dashes and underscores")


def find_run(run: str | None, runs_dir: Path, *, queued: bool = False) -> Path:
    """The folder of `run`: a name under `runs_dir`, a path, or None for the newest; absolute.

    `queued`: runs count, too, whose job has been submitted and has not started them. Raises UserError, naming the
    nearest run, if there is none.
    """
    if run is None:
        return _newest(runs_dir, queued=queued)
    for candidate in (runs_dir / run, Path(run)):
        if (candidate / FILE_NAME).is_file() or (queued and (candidate / JOB).is_file()):
            return candidate.resolve()
        _check_started(candidate)
    if (Path(run) / "metrics").is_dir():
        # Workers that were started by hand write metrics, but no record.
        return Path(run).resolve()
    raise UserError(_unknown(run, runs_dir))


def run_word(run_dir: Path) -> str:
    """Write a run for a command to paste: its name if commands look for it here anyway, else its path."""
    return run_dir.name if _is_usual(run_dir) else shlex.quote(str(run_dir))


def run_options(run_dir: Path) -> str:
    """Write the options of `launch` that name a run, for a command to paste."""
    return f"--run {run_dir.name}" + ("" if _is_usual(run_dir) else f" --runs-dir {shlex.quote(str(run_dir.parent))}")


def _is_usual(run_dir: Path) -> bool:
    return run_dir.parent.resolve() == Path("runs").resolve()


def run_names(runs_dir: Path, *files: str) -> list[str]:
    """Names of the runs in a folder, sorted. `files`: one of which each has; by default run.json."""
    if not runs_dir.is_dir():
        return []
    wanted = files or (FILE_NAME,)
    return sorted(path.name for path in runs_dir.iterdir() if any((path / file).is_file() for file in wanted))


def _newest(runs_dir: Path, *, queued: bool) -> Path:
    waiting = run_names(runs_dir, FILE_NAME, JOB)
    names = waiting if queued else run_names(runs_dir)
    if not names and waiting:
        _check_started(runs_dir / waiting[-1])
    if not names:
        raise UserError(f"{runs_dir}: no run in this folder — start one with `distflow launch`, or give --runs-dir")
    # The name breaks a tie, such as among records that cannot be read: the command will say what is wrong with one.
    return (runs_dir / max(names, key=lambda name: (_started(runs_dir / name), name))).resolve()


def _check_started(folder: Path) -> None:
    """Raise UserError for the folder of a run that a submitted job has not started yet."""
    job = None if (folder / FILE_NAME).is_file() else read_job(folder)
    if job is not None:
        raise UserError(f"{folder}: {_waits(job, folder)}")


def _waits(job: SubmittedJob, folder: Path) -> str:
    return (
        f"job {job.number} has not started this run yet — `distflow status {run_word(folder)}` says where it stands, "
        f"`scancel {job.number}` takes it out of the queue"
    )


def _started(run_dir: Path) -> float:
    """When the run was started, or submitted; before all others if its record cannot be read, which must not hide
    other runs."""
    try:
        if not (run_dir / FILE_NAME).is_file() and (job := read_job(run_dir)) is not None:
            return job.submitted
        return read_record(run_dir).started
    except UserError:
        return -math.inf


def _unknown(run: str, runs_dir: Path) -> str:
    names = run_names(runs_dir, FILE_NAME, JOB)
    if not names:
        return f"no run {run!r}: {runs_dir} holds no run — give the folder of your runs with --runs-dir"
    near = difflib.get_close_matches(run, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names[-10:])}"
    return f"no run {run!r} in {runs_dir} — {hint}"


def recipe_in(run_dir: Path) -> Recipe:
    """The recipe of a run, from its folder; raises RecipeError."""
    from distflow.config.load import recipe_from_mapping

    source = run_dir / "recipe.yaml"
    return recipe_from_mapping(yaml_value(source.read_text()), lambda key: str(source))


def note_sizes(run_dir: Path, names: Iterable[str]) -> None:
    """Record how many workers the pools of these ones have: for `--resume`, and for workers planned from now on."""
    counts = sizes(names)
    recipe, overrides = run_dir / "recipe.yaml", run_dir / "overrides.txt"
    before = yaml_value(recipe.read_text())
    after = resized(before, counts)
    if after != before:
        told = [f"layout.pools.{pool}.count={count}\n" for pool, count in counts.items()]
        replace_file(overrides, overrides.read_text() + "".join(told))
        replace_file(recipe, yaml_text(after))


def plugin_files(value: Any) -> list[Path]:
    """Files that a resolved recipe, or a part of it, names as plug-ins or scripts; sorted."""
    return sorted(set(_files(value)))


def shipped_names(files: list[Path]) -> dict[Path, str]:
    """Where each file goes below the run folder. Files of one folder stay together; all keep their names.

    The name is part of the interface digest, and the folder is not.
    """
    folders = {folder: number for number, folder in enumerate(dict.fromkeys(file.parent for file in files))}
    return {file: f"{PLUGINS}/{folders[file.parent]}/{file.name}" for file in files}


def shipped_files(files: list[Path], run_dir: Path | None = None) -> dict[str, Path]:
    """Plug-in files and what they import beside them, by where a copy of it goes below the run folder.

    `run_dir`: a run folder with copies, which are copied in their turn. Raises UserError if it is too much.
    """
    found: dict[str, Path] = {}
    for file, name in shipped_names(files).items():
        copy = run_dir / name if run_dir is not None else file
        found[name] = source = copy if copy.exists() else file
        found |= {f"{Path(name).parent}/{below}": path for below, path in neighbours(source).items()}
    size = sum(path.stat().st_size for path in found.values())
    if size > SHIPPED_BYTES:
        most = max(found.values(), key=lambda path: path.stat().st_size)
        raise UserError(
            f"{files[0]}: the recipe's plug-in files with what they import beside them have {size / 2**20:.1f} MiB, "
            f"{most} the most of it; at most {SHIPPED_BYTES >> 20} MiB are copied to other hosts — install them as a "
            "package on all hosts, or keep data in files of its own"
        )
    return found


def rewritten(value: Any, places: Mapping[Path, Path]) -> Any:
    """The same values, with files replaced by their new paths in `places`."""
    if isinstance(value, dict):
        return {key: rewritten(item, places) for key, item in value.items()}
    if isinstance(value, list):
        return [rewritten(item, places) for item in value]
    file = _file(value)
    if file is None or file not in places:
        return value
    return value.replace(str(file), str(places[file]), 1)


def _files(value: Any) -> Iterator[Path]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _files(item)
    else:
        file = _file(value)
        if file is not None:
            yield file


def _file(value: object) -> Path | None:
    if not isinstance(value, str):
        return None
    plugin = _PLUGIN.match(value)
    if plugin is not None:
        return Path(plugin["file"])
    return Path(value) if value.startswith("/") and value.endswith(".py") else None
