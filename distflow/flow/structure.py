"""The structure of a flow on a layout, independent of batch and run: steps, models, placement."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from distflow.config.plugins import BACKENDS, ENGINES, full_name
from distflow.config.schema import DataConfig, FlowConfig, LayoutConfig, ModelConfig
from distflow.errors import PluginError, Problems
from distflow.flow.graph import StepNode, order_steps, read_steps
from distflow.flow.model_roles import Models, settle_models
from distflow.flow.per_worker_steps import PrivateSteps, check_private_steps, read_private_steps
from distflow.flow.resolve import Definition, find_source
from distflow.flow.role_placement import Placement, place
from distflow.flow.sharding import check_zero
from distflow.flow.step_declaration import read_parameters
from distflow.flow.step_settings import complaints

_NEEDED = ("temperature", "max_new_tokens")
"""Settings of a generate step that the runtime needs."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A flow on a layout."""

    steps: tuple[StepNode, ...]
    """In order."""
    models: Models
    placement: Placement
    private: PrivateSteps


def build_structure(
    flow: FlowConfig,
    layout: LayoutConfig,
    models: Mapping[str, ModelConfig],
    problems: Problems,
) -> Structure | None:
    """Read, order and place the steps; None if problems (added to `problems`) leave nothing to build."""
    steps = read_steps(flow, problems)
    private = read_private_steps(layout, problems)
    _check_plugins(layout, problems)
    check_zero(layout, problems)
    if len(steps) < len(flow.steps):
        return None  # a step that cannot be read would only cause further, misleading problems
    ordered = order_steps(steps, private.fills, problems)
    _check_generate(ordered, problems)
    settled = settle_models(ordered, models, problems)
    placement = place(ordered, layout, problems)
    if settled is None or placement is None:
        return None
    check_private_steps(private, ordered, placement, problems)
    return Structure(tuple(ordered), settled, placement, private)


def check_data(data: DataConfig, problems: Problems) -> None:
    """Check that the data source exists and takes the settings in `with`."""
    node = _definition(data.source, "data.source", problems)
    if node is None or isinstance(node, ast.ClassDef):
        return
    parameters = read_parameters(node)
    if parameters.positional:
        message = f"{node.name!r} takes positional parameters ({', '.join(parameters.positional)})"
        cure = f"expected def {node.name}(*, setting=default, …)"
        problems.add("data.source", message, cure)
        return
    for setting, message, cure in complaints(data.with_, parameters, {}, {}):
        problems.add(f"data.with.{setting}", message, cure)


def _check_generate(steps: list[StepNode], problems: Problems) -> None:
    for node in steps:
        lacking = [name for name in _NEEDED if node.role == "generate" and name not in node.settings]
        if lacking:
            key = f"flow.steps.{node.name}"
            message = f"a generate step needs the settings {', '.join(lacking)} with literal defaults"
            cure = "declare them as keyword-only parameters, for example max_new_tokens: int = 16"
            problems.add(key, message, cure)


def _check_plugins(layout: LayoutConfig, problems: Problems) -> None:
    for name, pool in layout.pools.items():
        key = f"layout.pools.{name}"
        named = [(f"{key}.engine", pool.engine, ENGINES), (f"{key}.backend", pool.backend, BACKENDS)]
        named += [(f"{key}.each.{i}.engine", own.engine, ENGINES) for i, own in pool.each.items() if own.engine]
        for at, value, table in named:
            try:
                call = full_name(value, table)
            except LookupError as error:
                kind = at.rpartition(".")[2]
                problems.add(at, f"there is no {kind} {value!r}", str(error))
            else:
                _definition(call, at, problems)


def _definition(call: str, key: str, problems: Problems) -> Definition | None:
    try:
        return find_source(call).node
    except PluginError as error:
        problems.add(key, str(error))
        return None
