"""`distflow export`: a trained model as a Hugging Face folder. `distflow fetch`: a run from its second place."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click
import yaml
from msgspec import structs

from distflow.config.load import recipe_from_mapping
from distflow.config.plugins import EXPORTER
from distflow.data.files import whole_lines
from distflow.errors import UserError
from distflow.flow.plan import Plan
from distflow.flow.planner import make_plan
from distflow.flow.resolve import resolve
from distflow.launch.run.exit_status import STOPPED
from distflow.launch.run.record import FILE_NAME, read_record
from distflow.launch.run.resume import find_checkpoint
from distflow.runtime.checkpoint.commit import (
    COMMIT,
    Commit,
    abandoned,
    checkpoints_of,
    examine,
    newest_first,
    read_file,
    step_of,
    vanished,
)

TEXTS = 8
"""Number of samples of the run used to compare the exported model."""
TRIES = 5
"""Attempts to export the newest checkpoint while the run keeps removing old ones."""


@click.command()
@click.argument("run", required=False)
@click.option("--step", type=click.IntRange(min=1), help="Training step.  [default: the newest complete checkpoint]")
@click.option("--to", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Folder to create.")
@click.option("--model", help="A further model that the run trains, such as critic or solver.  [default: the policy]")
@click.option("--adapters", is_flag=True, help="Write the adapters of a model trained with lora alone, not merged.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(run: str | None, step: int | None, to: Path, model: str | None, adapters: bool, runs_dir: Path) -> None:
    """Write a checkpoint of RUN (default: the newest) for transformers, load it again and compare log-probs."""
    from distflow.launch.commands.export import export_checkpoint
    from distflow.launch.observe.file_sync import refresh
    from distflow.launch.run.folder import find_run

    run_dir = find_run(run, runs_dir)
    for line in refresh(run_dir, ("checkpoints",), "checkpoints", lambda line: click.echo(line, err=True)):
        click.echo(line, err=True)
    for line in export_checkpoint(run_dir, step, to, model, adapters=adapters):
        click.echo(line)


def export_checkpoint(
    run_dir: Path, step: int | None, to: Path, name: str | None = None, *, adapters: bool = False
) -> Iterator[str]:
    """Write the folder `to`; yields human-readable lines. Raises UserError when there is no such checkpoint or model.

    `name`: of the model, if it is not the one that generates; `adapters`: only those, not merged.

    A running run removes old checkpoints; unless `step` was given, the newest one is then tried again.
    """
    # Imported before a checkpoint is chosen: anything slow after that gives the run time to remove it.
    from distflow.runtime.checkpoint.parts import CheckpointReader

    export = resolve(EXPORTER)
    plan = _plan_of(run_dir)
    name = plan.primary if name is None else name
    if name not in plan.trained_models:
        raise UserError(f"--model {name}: this run trains {', '.join(plan.trained_models)}")
    model = plan.recipe.models[name].model_dump()
    texts = _some_texts(run_dir)
    for _ in range(TRIES):
        folder = _named(run_dir, step) if step is not None else (yield from _newest(run_dir))
        yield f"exporting training step {step_of(folder)} from {folder}"
        try:
            lines: list[str] = export(
                CheckpointReader(folder, "").model(name),
                model,
                texts,
                to,
                seed=plan.recipe.run.seed,
                adapters=adapters,
            )
        except (OSError, UserError) as error:
            if not vanished(folder):
                raise _readable(error) from error
            if step is not None:
                raise UserError(_removed(folder)) from None
            yield f"{folder.name}: the run removed it meanwhile"
        else:
            yield from lines
            return
    raise UserError(f"{_removed(folder)} — {TRIES} times in a row")


def _newest(run_dir: Path) -> Generator[str, None, Path]:
    """Returns the newest complete checkpoint, after lines about those that were ignored."""
    root = checkpoints_of(run_dir)
    for _ in range(TRIES):
        before = newest_first(root)
        found = find_checkpoint(run_dir)
        if found.checkpoint is not None:
            yield from (f"ignored: {line}" for line in found.ignored if (root / line.partition(":")[0]).exists())
            return found.checkpoint
        if newest_first(root) == before:
            break
    raise UserError(f"{run_dir}: no complete checkpoint yet — run.save_every says when they are written")


def _named(run_dir: Path, step: int) -> Path:
    folders = {step_of(folder): folder for folder in newest_first(checkpoints_of(run_dir))}
    if step not in folders:
        there = ", ".join(map(str, sorted(folders))) or "none"
        raise UserError(f"--step {step}: {run_dir}/checkpoints has no checkpoint of this step; it has: {there}")
    _, fault = examine(folders[step])
    if fault and not folders[step].exists():
        raise UserError(f"--step {step}: {_removed(folders[step])}")
    if fault:
        raise UserError(f"--step {step}: {folders[step]} is incomplete: {fault} — choose another one")
    return folders[step]


def _removed(folder: Path) -> str:
    return f"{folder}: the run removed it meanwhile — export again, or keep more (run.keep_checkpoints)"


def _readable(error: Exception) -> UserError:
    """The error as a UserError."""
    if isinstance(error, UserError):
        return error
    return UserError(f"the model cannot be exported: {error} — the checkpoint and the recipe's models must be readable")


def _plan_of(run_dir: Path) -> Plan:
    """The plan, from the recipe that the run was launched with."""
    source = run_dir / "recipe.yaml"
    try:
        resolved = yaml.safe_load(source.read_text(encoding="utf-8"))
        if not isinstance(resolved, dict):
            raise ValueError(f"expected a mapping, found {type(resolved).__name__}")
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{source}: cannot read a recipe from it ({reason}) — export needs the one that the run was launched "
            "with: `distflow config show` prints it, given the recipe and the overrides in overrides.txt"
        ) from error
    return make_plan(recipe_from_mapping(resolved, lambda key: str(source)), lambda key: str(source))


def _some_texts(run_dir: Path) -> list[tuple[str, list[int]]]:
    try:
        return list(islice(_texts(run_dir), TEXTS))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{run_dir}/rollouts: cannot read samples to compare the model with ({error}) — move the damaged file away"
        ) from error


def _texts(run_dir: Path) -> Iterator[tuple[str, list[int]]]:
    """Prompts with responses that were sampled in the run, newest first, one per prompt."""
    for file in sorted(run_dir.glob("rollouts/step_*/*.jsonl"), reverse=True):
        seen: set[Any] = set()
        for line in whole_lines(file)[0]:
            sample = json.loads(line)
            if sample["uid"][2] not in seen:
                seen.add(sample["uid"][2])
                yield sample["prompt"], sample["response_ids"]


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

    from distflow.launch.run.folder import SUBFOLDERS, check_name

    name = place.rstrip("/").rpartition("/")[2] if name is None else name
    check_name(name)
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
    yield f"fetched training step {commit.step} into {run_dir}; go on with: distflow launch --resume --run {name}"


def _fetch_newest(store: Any, there: str, here: Path) -> Generator[str, None, Commit]:
    """Fetch the newest checkpoint that is whole and still counts; COMMIT last."""
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
                return commit
            yield f"ignored: {step}: {fault}"
        shutil.rmtree(folder)
    raise UserError(f"{there}: there is no whole checkpoint")


def _note_fetched(draft: Path, name: str) -> None:
    """Record the run as one that was stopped on this machine: what it was elsewhere is gone."""
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
