"""The source text that a plan's workers have in common, and what is odd about where its parts come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from distflow.config.paths import HUB_PREFIX, is_data_file
from distflow.config.schema import Recipe
from distflow.flow.data_check import all_sources
from distflow.flow.graph import StepNode
from distflow.flow.neighbours import mistakable, neighbours
from distflow.flow.resolve import find_named, split_call
from distflow.flow.step_settings import is_file_plugin


def code_of(recipe: Recipe, nodes: Sequence[StepNode]) -> dict[str, str]:
    """The texts by what they are for: `step NAME`, `step NAME.SETTING`, `data.source`; each neighbour by itself.

    Raises PluginError for a neighbour that is no Python.
    """
    code = {f"step {node.name}": node.declaration.text for node in nodes}
    for place, call in _calls(recipe, nodes):
        code[place] = find_named(call).text
        if is_file_plugin(call):
            beside = neighbours(Path(split_call(call)[0]))
            code |= {f"{place}: {name}": path.read_text(errors="replace") for name, path in beside.items()}
    return code


def import_warnings(recipe: Recipe, nodes: Sequence[StepNode]) -> Iterator[str]:
    """Warnings about imports that seem to mean a neighbour, but mean what is installed."""
    files = {Path(split_call(call)[0]): None for _, call in _calls(recipe, nodes) if is_file_plugin(call)}
    for text in dict.fromkeys(text for file in files for text in mistakable(file)):
        yield f"warning: {text}"


def _calls(recipe: Recipe, nodes: Sequence[StepNode]) -> Iterator[tuple[str, str]]:
    """Plug-ins of the user's whose code counts: steps, files in their settings, and data sources."""
    for node in nodes:
        yield f"step {node.name}", node.declaration.call
        for below, call in _files_in(node.settings):
            yield f"step {node.name}{below}", call
    for key, source in all_sources(recipe):
        if not (is_data_file(source.source) or source.source.startswith((HUB_PREFIX, "distflow."))):
            yield f"{key}.source", source.source


def _files_in(value: object) -> Iterator[tuple[str, str]]:
    """The plug-in files that settings name, by what follows the key."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from ((f".{key}{below}", call) for below, call in _files_in(item))
    elif isinstance(value, str) and is_file_plugin(value):
        yield "", value
