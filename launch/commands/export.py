"""`distflow export` and `evaluate`: a trained model as a Hugging Face folder, and how good it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import yaml

from distflow.config.load import load_recipe, recipe_from_mapping
from distflow.config.plugins import EXPORTER
from distflow.config.schema import ModelConfig, Recipe
from distflow.config.yamlfile import yaml_value
from distflow.data.files import whole_lines
from distflow.errors import UserError
from distflow.flow.plan import Plan
from distflow.flow.planner import make_plan
from distflow.flow.resolve import resolve
from distflow.launch.commands.launch import command as launch
from distflow.launch.commands.launch import launch_once
from distflow.launch.deploy.launch_request import RECIPE, Options, as_asked
from distflow.launch.observe.file_sync import finite, read_steps, refresh
from distflow.launch.run.folder import find_run
from distflow.launch.run.resume import best_checkpoint, find_checkpoint
from distflow.runtime.checkpoint.commit import checkpoints_of, examine, newest_first, step_of, vanished
from distflow.types import is_validated

TEXTS = 8
"""Number of samples of the run used to compare the exported model."""
TRIES = 5
"""Attempts to export the newest checkpoint while the run keeps removing old ones."""
ON_HOSTS = ("hosts", "include", "exclude", "ssh_config", "ssh_options", "forward", "settings", "ship_code")
"""Options of `launch` that `evaluate` has too."""
CI95 = "/ci95"


@click.command()
@click.argument("run", required=False)
@click.option("--step", type=click.IntRange(min=1), help="Training step.  [default: the newest complete checkpoint]")
@click.option("--best", is_flag=True, help="The checkpoint that run.keep_best chose.")
@click.option("--to", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Folder to create.")
@click.option("--model", help="A further model that the run trains, such as critic or solver.  [default: the policy]")
@click.option("--adapters", is_flag=True, help="Write the adapters of a model trained with lora alone, not merged.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def command(
    run: str | None, step: int | None, best: bool, to: Path, model: str | None, adapters: bool, runs_dir: Path
) -> None:
    """Write a checkpoint of RUN (default: the newest) for transformers, load it again and compare log-probs."""
    run_dir = find_run(run, runs_dir)
    _export(run_dir, best_step(run_dir, step) if best else step, to, model, adapters=adapters)


@click.command(params=[option for option in launch.params if option.name in ON_HOSTS])
@click.argument("target", metavar="RUN|FOLDER")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]…")
@click.option("--step", type=click.IntRange(min=1), help="Training step of RUN.  [default: its newest checkpoint]")
@click.option("--best", is_flag=True, help="The checkpoint that run.keep_best of RUN chose.")
@click.option("--run", "name", help="Name of the run that validates.  [default: RUN-eval or FOLDER-eval]")
@click.option("--json", "as_json", is_flag=True, help="Print all metrics as a JSON object, and the rest as errors.")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
def evaluate(
    target: str,
    words: tuple[str, ...],
    step: int | None,
    best: bool,
    name: str | None,
    as_json: bool,
    runs_dir: Path,
    **on_hosts: Any,
) -> int:
    """Do what the section `val` of RECIPE says, with a checkpoint of RUN or a Hugging Face FOLDER as the policy.

    RECIPE may be left out for a RUN: its own is taken. This is a run like any other, in a folder of its own, with
    run.training_steps=0; without a section `val`, it takes all prompts of training.
    """
    given = bool(words) and "=" not in words[0]
    with redirect_stdout(sys.stderr) if as_json else nullcontext(), TemporaryDirectory(prefix="distflow-") as folder:
        if (Path(target) / "config.json").is_file():
            if not given or step is not None or best:
                why = "--step and --best are for a run" if given else "which recipe says how to validate it?"
                raise UserError(f"{target} is a Hugging Face folder: {why} — distflow evaluate {target} RECIPE")
            model, recipe, about = Path(target).resolve(), words[0], Path(target).resolve().name
        else:
            run_dir = find_run(target, runs_dir)
            model, recipe, about = Path(folder) / "model", words[0] if given else str(run_dir / RECIPE), run_dir.name
            _export(run_dir, best_step(run_dir, step) if best else step, model, kept=False)
        overrides = words[1:] if given else words
        name = name or _free_name(runs_dir, f"{about}-eval")
        code = launch_once(replace(_asked(recipe, overrides, model, name, runs_dir), **on_hosts))
        found = read_steps(runs_dir / name, lambda line: None) if code == 0 else []
    metrics = {key: value for step in found for key, value in finite(step).items() if is_validated(key)}
    if code == 0:
        click.echo(json.dumps(metrics) if as_json else "\n".join(_val_lines(metrics)))
    return code


def best_step(run_dir: Path, step: int | None) -> int:
    """The training step of the checkpoint that the run's `run.keep_best` chose."""
    if step is not None:
        raise UserError("--step and --best: give one of them")
    for line in refresh(run_dir, ("checkpoints",), "checkpoints", lambda line: click.echo(line, err=True)):
        click.echo(line, err=True)
    found = best_checkpoint(run_dir, read_steps(run_dir, lambda line: click.echo(line, err=True)))
    if found is None:
        why = "the run has no run.keep_best, or none of its checkpoints has a value of it yet"
        raise UserError(f"--best: {run_dir}: {why} — give --step, or leave --best out for the newest checkpoint")
    return step_of(found[0])


def _asked(recipe: str, overrides: Sequence[str], model: Path, name: str, runs_dir: Path) -> Options:
    """The launch that validates the model in a folder, and does no more."""
    composed = load_recipe(recipe, overrides).recipe
    plan = make_plan(composed, lambda key: recipe, need_files=False)
    policy = plan.primary
    own = composed.models[policy]
    changed: dict[str, object] = {"run.training_steps": 0}
    # An exported model is whole: adapters merged, nothing rounded.
    given = (key for key in ("init", "lora", "quantize") if getattr(own, key) is not None)
    changed |= {f"models.{policy}.{key}": "null" for key in given}
    # One round measures one version, and keeps no checkpoint.
    unused = (key for key in ("stop_after", "stop_when", "keep_best") if getattr(composed.run, key) is not None)
    changed |= {f"run.{key}": "null" for key in unused}
    changed |= {"run.keep_best_mode": "max"} if composed.run.keep_best_mode != "max" else {}
    changed |= {"val.at_start": "true"} if composed.val is None else {}
    words = [f"{key}={value}" for key, value in changed.items()]
    # A path may hold any letter.
    words.append(f"models.{policy}.path={json.dumps(str(model))}")
    words += _kept_models(plan, composed)
    line = [f"--run={name}", f"--runs-dir={runs_dir}", "--", recipe, *overrides, *words]
    return as_asked(Options(**launch.make_context("launch", line).params))


def _kept_models(plan: Plan, composed: Recipe) -> Iterator[str]:
    """Overrides by which frozen copies of the policy stay what they were when it was trained: what its rows are
    compared with is a reference, which is not what came of the training.
    """
    for name, model in plan.recipe.models.items() if plan.reads is not None else ():
        given = composed.models[name] if name in composed.models else ModelConfig()
        if name not in plan.trained_models and given.inherited:
            section = model.model_dump(include={"path", "init", "tokenizer", "dtype", "quantize"}, exclude_none=True)
            yield f"++models.{name}={_as_override(section)}"


def _as_override(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_as_override(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_override, value))}]"
    return json.dumps(value)


def _free_name(runs_dir: Path, wanted: str) -> str:
    names = (wanted if number == 1 else f"{wanted}-{number}" for number in count(1))
    return next(name for name in names if not (runs_dir / name).exists())


def _val_lines(metrics: Mapping[str, float | None]) -> Iterator[str]:
    """A line for each metric, with its interval."""
    width = max(map(len, metrics), default=0)
    for name, value in sorted(metrics.items()):
        if not name.endswith(CI95):
            half = metrics.get(name + CI95)
            yield f"{name:<{width}}  {_figure(value)}{'' if half is None else f' ± {_figure(half)}'}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _export(
    run_dir: Path, step: int | None, to: Path, model: str | None = None, *, adapters: bool = False, kept: bool = True
) -> None:
    """Export, and tell of it. `kept`: the folder stays, so that it is worth its name."""
    for line in refresh(run_dir, ("checkpoints",), "checkpoints", lambda line: click.echo(line, err=True)):
        click.echo(line, err=True)
    for line in export_checkpoint(run_dir, step, to, model, adapters=adapters):
        if kept or not line.startswith(f"{to}:"):
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
        loads = ", and loading it again to compare: minutes, for large models"
        yield f"exporting training step {step_of(folder)} from {folder}{loads}"
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
        resolved = yaml_value(source.read_text(encoding="utf-8"))
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
