"""Checks the data sources of a recipe without reading them: are files there, do functions take their settings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from distflow.config.data_files import data_files
from distflow.config.data_schema import MOST_FED_ROWS, DataConfig, SourceConfig
from distflow.config.paths import FED, HUB_PREFIX, is_data_file
from distflow.config.schema import Recipe
from distflow.errors import PluginError, Problems, UserError, did_you_mean
from distflow.flow.plan import Plan
from distflow.flow.resolve import Value, find_named
from distflow.flow.reward_form import REWARD as FUNCTION
from distflow.flow.reward_form import find_signature, needed_columns
from distflow.flow.step_declaration import read_declaration, read_parameters
from distflow.flow.step_settings import complaints, functions_of
from distflow.flow.structure import Structure
from distflow.types import REWARD, written

_SETTINGS = {"file": ("split",), "hub": ("split", "config")}


def keyed_sources(data: DataConfig, section: str = "data") -> Iterator[tuple[str, SourceConfig]]:
    """The sources with their keys in a recipe: `data`, or `data.mix.NAME`."""
    for name, source in data.sources.items():
        yield (f"{section}.mix.{name}" if name else section), source


def all_sources(recipe: Recipe) -> Iterator[tuple[str, SourceConfig]]:
    """Those of training, and those of validation."""
    yield from keyed_sources(recipe.data)
    if recipe.val is not None and recipe.val.data is not None:
        yield from keyed_sources(recipe.val.data, "val.data")


def reward_calls(plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield users' own reward functions that judge samples of the data's prompts, with the names of their settings."""
    for step in plan.steps:
        spec = read_declaration(step.call).spec if step.role == "score" and not step.prefix else None
        for setting, positional in spec.plugins.items() if spec is not None else ():
            if tuple(positional) == FUNCTION:
                yield from functions_of(step.settings.get(setting)).values()


def columns_called_with(plan: Plan) -> dict[str, str]:
    """Find the columns without which a reward function that takes lists cannot be called, each with its function."""
    calls = dict(reward_calls(plan))
    found = {call: find_signature(call) for call in calls}
    lists = {call: one for call, one in found.items() if one is not None and one.form == "lists"}
    return {column: call for call, one in lists.items() for column in needed_columns(one, calls[call])}


def check_data(data: DataConfig, problems: Problems, missing: Problems, section: str = "data") -> None:
    """Check that the sources exist and take the settings in `with`; `missing` gets what only this machine may lack."""
    for key, source in keyed_sources(data, section):
        if is_data_file(source.source):
            _check_settings(key, source, "file", problems)
            _check_file(key, source, missing)
        elif source.source.startswith(HUB_PREFIX):
            _check_settings(key, source, "hub", problems)
        else:
            _check_function(key, source, problems)


def check_difficulty(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse to draw prompts by their pass rates where these are not known in time, or not to all."""
    key = "data.difficulty"
    if recipe.data.difficulty is None:
        return
    if structure.reads is not None:
        message = f"step {structure.reads.name!r} reads the samples from the data: none is judged"
        problems.add(key, message, "leave it out, or a flow that generates")
    elif any(node.generates_further for node in structure.steps):
        message = "this flow generates with a further model, on prompts that other steps write: not built yet"
        problems.add(key, message, "leave it out, or another flow")
    elif not any(written(field, node.writes) for node in structure.before_custody for field in ("score", REWARD)):
        message = "samples have neither score nor reward when the workers that train get them"
        problems.add(
            key, message, "leave it out, or let the pool that generates, or a service of it, run a reward step"
        )
    if recipe.layout.max_staleness == "unbounded":
        message = "without a bound of the staleness, what is known when a prompt is drawn depends on timing"
        problems.add(key, message, "layout.max_staleness=1, or another bound", others=("layout.max_staleness",))


def check_fed(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse what cannot be done with prompts that clients put while the run goes on."""
    data, val = recipe.data, recipe.val
    for key, source in all_sources(recipe):
        if source.source == FED and key != "data":
            problems.add(f"{key}.source", "clients put prompts of training, as its only source", "data.source, no mix")
    if not data.fed:
        return
    for setting, value in data.with_.items():
        if isinstance(value, int) and not 1 <= value <= MOST_FED_ROWS:
            problems.add(
                f"data.with.{setting}", f"{value} is not allowed", f"expected a number from 1 to {MOST_FED_ROWS}"
            )
    if structure.reads is not None:
        message = f"step {structure.reads.name!r} reads the samples from the data: not built yet for prompts of clients"
        problems.add("data.source", message, "a file, or a flow that generates")
    if val is not None and val.data is None:
        problems.add("val.data", "prompts of training come from clients, later on", "val.data.source=held_out.jsonl")
    for name, why, hint in (
        ("shuffle", "prompts of clients are taken in the order in which they come", "data.shuffle=false"),
        ("overlong", "clients are told of prompts that are too long, and none is put", "data.overlong=error"),
        ("difficulty", "which prompts there are is not known when they are drawn", "leave it out"),
    ):
        if getattr(data, name) not in (False, "error", None):
            problems.add(f"data.{name}", why, hint)


def _check_settings(key: str, source: SourceConfig, kind: str, problems: Problems) -> None:
    for setting, value in source.with_.items():
        if setting not in _SETTINGS[kind]:
            problems.add(f"{key}.with.{setting}", "unknown setting", did_you_mean(setting, _SETTINGS[kind]))
        elif not isinstance(value, str):
            problems.add(f"{key}.with.{setting}", f"expected text, got {value!r}", "write a name")


def _check_file(key: str, source: SourceConfig, missing: Problems) -> None:
    split = source.with_.get("split")
    try:
        data_files(Path(source.source), split if isinstance(split, str) else None)
    except UserError as error:
        missing.add(f"{key}.source", str(error))


def _check_function(key: str, source: SourceConfig, problems: Problems) -> None:
    try:
        found = find_named(source.source)
    except PluginError as error:
        problems.add(f"{key}.source", str(error))
        return
    if isinstance(found, Value):
        if source.with_ and not isinstance(found.made_by, ast.Lambda | None):
            message = f"{found.where} makes the data set itself, which takes no settings"
            problems.add(f"{key}.with", message, "leave it out, or name a function that returns a data set")
        return
    node = found.node
    if isinstance(node, ast.ClassDef):
        return
    parameters = read_parameters(node)
    if parameters.positional:
        message = f"{node.name!r} takes positional parameters ({', '.join(parameters.positional)})"
        problems.add(f"{key}.source", message, f"expected def {node.name}(*, setting=default, …)")
        return
    for setting, message, hint in complaints(source.with_, parameters, {}, {}):
        problems.add(f"{key}.with.{setting}", message, hint)
