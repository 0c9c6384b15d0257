"""YAML files with the line of every key. The values are what OmegaConf would read (1e-3 is a number)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from distflow.errors import Problem, RecipeError

KeyPath = tuple[str, ...]
"""Keys from the root down to a value; entries of lists by number."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's safe loader that reads 1e-3 as a number and leaves dates as text; by libyaml where it is there, which
    takes a tenth of the time."""


class _SlowLoader(yaml.SafeLoader):
    """The same without libyaml, whose messages of what is wrong say less."""


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes text that `_Loader` would read as a number."""


_Loader.yaml_implicit_resolvers = _SlowLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )


@dataclass(frozen=True, slots=True)
class YamlFile:
    """One file: its mapping (keys as text) and the line of each key path."""

    path: Path
    value: dict[str, Any]
    lines: Mapping[KeyPath, int]

    def where(self, key: KeyPath) -> str:
        """`file:line` of the key, or of the nearest key above it."""
        while key and key not in self.lines:
            key = key[:-1]
        return f"{shown(self.path)}:{self.lines[key] if key else 1}"


def shown(path: Path) -> str:
    """The path as messages show it: relative where it lies below the current folder."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def dotted(key: KeyPath) -> str:
    """`layout.pools.rollout.count`."""
    return ".".join(key)


def yaml_text(values: Mapping[str, Any]) -> str:
    """Plain data as YAML, in the order given; `read_yaml` reads the same values back."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def yaml_value(text: str) -> Any:
    """Read plain data of YAML that this program has written; raises YAMLError."""
    return yaml.load(text, Loader=_Loader)


def read_yaml(path: Path) -> YamlFile:
    """Read a file that must hold a mapping (an empty file counts as an empty mapping); raises RecipeError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError([Problem(shown(path), "file", f"cannot be read: {error}")]) from error
    try:
        try:
            reader, value = _parsed(text, path, _Loader)
        except yaml.YAMLError:
            reader, value = _parsed(text, path, _SlowLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = Problem(f"{shown(path)}:{line}", "YAML", str(error.problem), "check indentation, brackets and quotes")
        raise RecipeError([problem]) from error
    except yaml.YAMLError as error:
        raise RecipeError([Problem(shown(path), "YAML", str(error))]) from error
    if reader.problems:
        raise RecipeError(reader.problems)
    if not isinstance(value, dict):
        raise RecipeError(
            [Problem(f"{shown(path)}:1", "file", "expected a mapping, KEY: VALUE", "see `distflow config schema`")]
        )
    return YamlFile(path, value, reader.lines)


def _parsed(text: str, path: Path, kind: type[_Loader] | type[_SlowLoader]) -> tuple[_Reader, Any]:
    """Read text; an empty one is an empty mapping. Raises YAMLError."""
    loader = kind(text)
    try:
        reader = _Reader(loader, path)
        node = loader.get_single_node()
        return reader, {} if node is None else reader.read(node, ())
    finally:
        loader.dispose()


class _Reader:
    """Turns nodes into plain values and notes the line of each."""

    def __init__(self, loader: _Loader | _SlowLoader, path: Path) -> None:
        self.loader = loader
        self.path = path
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []

    def read(self, node: yaml.Node, at: KeyPath) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, at)
        if isinstance(node, yaml.SequenceNode):
            return [self._entry(item, (*at, str(index))) for index, item in enumerate(node.value)]
        return self.loader.construct_object(node, deep=True)

    def _entry(self, node: yaml.Node, at: KeyPath) -> Any:
        self.lines[at] = node.start_mark.line + 1
        return self.read(node, at)

    def _mapping(self, node: yaml.MappingNode, at: KeyPath) -> dict[str, Any]:
        own = {id(key) for key, _ in node.value}
        self.loader.flatten_mapping(node)
        result: dict[str, Any] = {}
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key = str(self.loader.construct_object(key_node, deep=True))
            here = (*at, key)
            line = key_node.start_mark.line + 1
            if id(key_node) in own and key in seen:
                message = f"duplicate key, first at line {self.lines[here]}"
                self.problems.append(
                    Problem(f"{shown(self.path)}:{line}", dotted(here), message, "remove one of the two")
                )
            if id(key_node) in own:
                seen.add(key)
            self.lines[here] = line
            result[key] = self.read(value_node, here)
        return result
