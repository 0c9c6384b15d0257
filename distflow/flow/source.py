"""Finds the source of `module:name` or `/path/file.py:name` without importing it."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distflow.config.suggest import did_you_mean, nearest
from distflow.errors import PluginError

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Source:
    """One top-level function or class in its file."""

    call: str
    file: Path
    text: str
    node: Definition

    @property
    def where(self) -> str:
        """`file:line` of the definition."""
        return f"{self.file}:{self.node.lineno}"


def split_call(call: str) -> tuple[str, str]:
    """The module or file, and the name in it; raises PluginError."""
    place, colon, name = call.rpartition(":")
    if not (colon and place and name.isidentifier()):
        raise PluginError(f"{call!r} names no function: expected module:name or ./file.py:name")
    return place, name


def find_source(call: str) -> Source:
    """The definition that `call` names; raises PluginError when the file or the name does not exist."""
    place, name = split_call(call)
    file = Path(place) if place.endswith(".py") else _module_file(place, call)
    if not file.is_file():
        beside = [path.name for path in file.parent.glob("*.py")] if file.parent.is_dir() else []
        close = nearest(file.name, beside)
        guess = f"; did you mean {file.parent / close}?" if close is not None else ""
        raise PluginError(f"{call}: there is no file {file}{guess}")
    stat = file.stat()
    text, definitions = _definitions(file, stat.st_mtime_ns, stat.st_size)
    if name not in definitions:
        raise PluginError(f"{call}: {file} defines no {name!r} at its top level; {did_you_mean(name, definitions)}")
    return Source(call, file, text, definitions[name])


@functools.lru_cache(maxsize=64)
def _definitions(file: Path, changed_ns: int, size: int) -> tuple[str, dict[str, Definition]]:
    """Text and top-level definitions; time and size of the file are part of the cache's key."""
    text = file.read_text(encoding="utf-8")
    try:
        tree = ast.parse(text, filename=str(file))
    except SyntaxError as error:
        raise PluginError(f"{file}:{error.lineno}: {error.msg}") from error
    return text, {node.name: node for node in tree.body if isinstance(node, Definition)}


def _module_file(module: str, call: str) -> Path:
    """The file of a module; its parents' code is not run."""
    search: Sequence[str] | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        if name in sys.modules and hasattr(sys.modules[name], "__path__") and depth < len(parts):
            search = list(sys.modules[name].__path__)
            continue
        spec = next((found for finder in sys.meta_path if (found := finder.find_spec(name, search, None))), None)
        if spec is None:
            raise PluginError(
                f"{call}: there is no module {name!r} (a file is named ./file.py:name, relative to the recipe)"
            )
        if depth == len(parts):
            if spec.origin is None or not spec.origin.endswith(".py"):
                raise PluginError(f"{call}: module {module!r} has no Python source")
            return Path(spec.origin)
        search = list(spec.submodule_search_locations or [])
    raise AssertionError("a module name has at least one part")
