"""`distflow config`: the resolved recipe, its JSON Schema, and single keys explained. `distflow validate`: all problems
of a recipe at once. `distflow test-plugin`: what is wrong with a plug-in. `distflow init`: files to start
from. `distflow convert`: a recipe made of the configuration of another tool.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from distflow.errors import RecipeError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from distflow.flow.plan import Plan
    from distflow.launch.deploy.placement import WorkerPlacement

SHOWN = 500
"""Characters shown of a prompt and of its task."""


@click.group()
def command() -> None:
    """Show the resolved recipe, its JSON Schema, or one key explained."""


@command.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of YAML.")
def show(recipe: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Print RECIPE with everything composed and resolved, defaults included."""
    import json

    from distflow.config.load import load_recipe
    from distflow.config.yamlfile import yaml_text

    resolved = load_recipe(recipe, overrides).resolved
    click.echo(json.dumps(resolved, indent=1) + "\n" if as_json else yaml_text(resolved), nl=False)
    return 0


@command.command()
@click.argument("kind", default="recipe", type=click.Choice(["recipe", "flow", "layout", "model", "data"]))
def schema(kind: str) -> int:
    """Print the JSON Schema of recipe files, or of one KIND of group: flow, layout, model, data."""
    import json

    from distflow.config.explain import json_schema

    click.echo(json.dumps(json_schema(kind), indent=1, ensure_ascii=False))
    return 0


@command.command()
@click.argument("key")
def explain(key: str) -> int:
    """Print what KEY means, its type, unit and default; for example batch.ledgers, flow.steps.sample.with.top_p."""
    from distflow.config.explain import explain as explained
    from distflow.flow.step_settings import explain_setting

    match key.split("."):
        case ["flow", "steps", step, "with", name]:
            click.echo(explain_setting(step, name))
        case _:
            click.echo(explained(key))
    return 0


@click.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option(
    "--deep", is_flag=True, help="Also import every plug-in, create the data source and show prompt 0 (loads torch)."
)
@click.option(
    "--elsewhere",
    is_flag=True,
    help="The recipe is for other machines: do not check the libraries and GPUs of this one.",
)
@click.option(
    "--hosts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The recipe is for these hosts: check that its workers find places on them, and nothing of this machine.",
)
def validate(recipe: str, overrides: tuple[str, ...], deep: bool, elsewhere: bool, hosts: Path | None) -> int:
    """Check RECIPE (a shipped name or a file): prints `ok`, or all problems with file, line and fix (exit code 2)."""
    from distflow.flow.lanes import ONE_HOST
    from distflow.flow.memory_fit import UNSEEN, room_problems
    from distflow.flow.memory_fit import warnings as memory_warnings
    from distflow.flow.model_fit import position_problems
    from distflow.flow.plan_text import notes_of
    from distflow.flow.recipe_check import check_imports, plan_recipe
    from distflow.launch.deploy.host_checks import (
        absent_data,
        capacity_for,
        problems_here,
        row_problems,
        slow_here,
    )
    from distflow.launch.deploy.placement import placement_lines

    loaded, plan = plan_recipe(recipe, overrides, need_files=hosts is None)
    problems, first = [*position_problems(plan, loaded.origin)], ""
    if hosts is None and not elsewhere:
        here = problems_here(plan, loaded.origin, ask_pythons=deep)
        problems += [
            replace(one, hint=f"{one.hint}; for other machines there are --elsewhere and --hosts FILE") for one in here
        ]
        problems += row_problems(plan, loaded.origin)
    placement = None if hosts is None else _placed(plan, hosts, loaded.origin)
    seen = UNSEEN if elsewhere else capacity_for(plan, placement)
    problems += room_problems(plan, seen, loaded.origin)
    if deep:
        problems += check_imports(plan, loaded.origin)
    if problems:
        raise RecipeError(problems)
    if deep:
        first = _first_prompt(plan, loaded.origin("data.source"))
    imported = ", all plug-ins imported" if deep else ""
    click.echo(
        f"ok: {plan.run_name}, {_counted(plan.recipe.run.training_steps, 'training step')} of "
        f"{_counted(plan.batch.samples, 'sample')} each, on {_counted(len(plan.workers), 'worker')}, "
        f"by a flow of {_counted(len(plan.steps), 'function')}{imported}"
    )
    if first:
        click.echo(first)
    for absent in [] if elsewhere or hosts is not None else absent_data(plan, loaded.origin):
        click.echo(f"warning: {absent}")
    for line in [] if placement is None else placement_lines(plan, placement):
        click.echo(line)
    # Where the recipe is for other machines, their number is not known.
    for note in plan.notes if elsewhere else notes_of(plan, ONE_HOST if placement is None else placement.where):
        click.echo(note if note in plan.warnings else f"note: {note}")
    slow = slow_here(plan) if hosts is None and not elsewhere else ()
    for warning in (*memory_warnings(plan, seen), *slow):
        click.echo(f"warning: {warning}")
    return 0


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _placed(plan: Plan, file: Path, origin: Callable[[str], str]) -> WorkerPlacement:
    """Place the workers on the hosts of this file; raises HostsError where they find no places."""
    from distflow.launch.deploy.hostfile import read_hosts
    from distflow.launch.deploy.placement import place_workers

    return place_workers(plan, read_hosts(file, None, None), origin)


@click.command("test-plugin")
@click.argument("plugins", nargs=-1, required=True, metavar="PLUGIN… [KEY=VALUE]…")
@click.option("--as", "kind", metavar="KIND", help="What it is, where its parameters do not tell it: reward, loss, ….")
@click.option("--with", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of the plug-in; repeatable.")
@click.option("--data", metavar="SOURCE", help="Prompts and tasks for it: a file, or a function as data.source.")
@click.option("--limit", default=30.0, show_default=True, metavar="SECONDS", help="Longest time for one call.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def test_plugin(
    plugins: tuple[str, ...], kind: str | None, settings: tuple[str, ...], data: str | None, limit: float, as_json: bool
) -> int:
    """Test each PLUGIN (module:name, ./file.py:name, or a recipe: all that it names with these overrides) on
    synthetic batches.

    Prints what is wrong and how to mend it; exit code 1 if anything is.
    """
    import json
    from functools import partial
    from importlib import import_module

    from distflow.config.plugins import PLUGIN_TESTS

    tests = import_module(PLUGIN_TESTS)
    found = []
    for subject in tests.find_subjects(plugins, kind, settings, data):
        found.append(tests.examine(subject, limit, partial(click.echo, err=True)))
        if not as_json:
            click.echo("\n".join(found[-1].lines()))
    failed = [tested for tested in found if not tested.passed]
    if as_json:
        click.echo(json.dumps([tested.as_json() for tested in found], indent=1, ensure_ascii=False))
    else:
        click.echo(f"{len(found) - len(failed)} of {len(found)} passed")
    return 1 if failed else 0


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--task", default="arithmetic", show_default=True, help="What to start from: arithmetic, chat or turns.")
@click.option("--model", metavar="MODEL", help="Folder or hub id of a Hugging Face model, for --task chat.")
def init(folder: Path, task: str, model: str | None) -> int:
    """Write FOLDER, which must be new or empty, with a recipe, its code, a data file and a README."""
    from distflow.config.paths import SMOLLM2
    from distflow.config.starts import start_files

    folder = folder.expanduser()
    files = start_files(task, folder.resolve().name, model)
    try:
        there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else [folder.name] * folder.exists()
        if there:
            named = ", ".join(there[:3]) + (", …" if len(there) > 3 else "")
            raise UserError(f"{folder} exists already, with {named} — give a folder that is new or empty")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
            click.echo(f"wrote {folder / name}")
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror or error} — give a folder that can be written") from error
    click.echo(f"next: cd {folder}; distflow launch recipe.yaml")
    if task == "chat":
        click.echo("a real task, with validation and a goal: recipe gsm8k; without GPU and network its twin, reasoning")
    if task == "chat" and (model is None or not Path(model).expanduser().is_dir()):
        click.echo(
            "the model comes from the hub; without a network give one of this machine: "
            f"distflow init FOLDER --task chat --model FOLDER, or models.policy.path=FOLDER behind `launch` ({SMOLLM2})"
        )
    return 0


def _first_prompt(plan: Plan, where: str) -> str:
    from distflow.data.fed import AWAITED
    from distflow.runtime.owner_side import first_prompt

    if plan.recipe.data.fed:
        return AWAITED
    prompt, problems = first_prompt(plan, where)
    if prompt is None:
        raise RecipeError(problems)
    text, task = (repr(part) if len(part) <= SHOWN else f"{part[:SHOWN]!r}…" for part in (prompt.text, prompt.task))
    return f"prompt 0 (number {prompt.index} of the source, {len(prompt.token_ids)} tokens): {text}, task {task}"


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def convert(file: Path) -> int:
    """Print a recipe made of FILE: a TRL script (.py, read and never run), a shell script that runs one or `trl grpo`,
    its options as YAML, or verl's overrides, listed or in a script.

    Comments say what became of each key: what it is here, or why it does not map.
    """
    from distflow.config.conversion import convert as converted
    from distflow.config.conversion import written
    from distflow.config.foreign import read_foreign
    from distflow.data.files import count_rows

    foreign = read_foreign(file.expanduser())
    found = converted(foreign, lambda name: count_rows(Path(name).expanduser()))
    click.echo(written(foreign, found), nl=False)
    return 0
