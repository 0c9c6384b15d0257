"""Plug-ins by name: finds their source without importing it, or imports them and checks how they are called.

It knows no plans: child processes that only need a function start twice as fast without the schema of recipes.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from distflow.errors import PluginError, UserError, did_you_mean, nearest
from distflow.flow.file_import import import_file
from distflow.flow.step import ATTRIBUTE, StepSpec

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Statement = ast.Assign | ast.AnnAssign | ast.ImportFrom | ast.Import


def resolve(call: str) -> Any:
    """Import what `module:name` or `/path/file.py:name` names; raises PluginError."""
    place, name = split_call(call)
    module = import_file(Path(place), call) if place.endswith(".py") else _import_module(place, call)
    if not hasattr(module, name):
        public = [found for found in vars(module) if not found.startswith("_")]
        raise PluginError(f"{call}: {module.__file__} has no {name!r}; {did_you_mean(name, public)}")
    return getattr(module, name)


def not_a_generate_step(name: str) -> str:
    """The end of a message about a generate step of another form."""
    return (
        "cannot generate: the runtime takes leases and weights and drives the engine itself — expected "
        f"async def {name}(episode, generate, ctx, *, setting=default, …), which makes one sample: it awaits "
        "completion = await generate(episode.prompt_ids, SamplingParams(…)), as distflow.workers.rollout:sample does; "
        "or a plain def, which runs in a thread of its own, and calls generate without await"
    )


def check_call(call: str, function: Any, positional: Sequence[str], keywords: Sequence[str]) -> None:
    """Check that `function(*positional, **keywords)` can be called; raises PluginError with the expected signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise PluginError(f"{call}: {function!r} has no signature: {error}") from error
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        expected = ", ".join([*positional, *(["*", *keywords] if keywords else [])])
        raise PluginError(f"{call} has the wrong signature {signature}: {error}; expected ({expected})") from error


def _import_module(name: str, call: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PluginError(f"{call}: module {name!r} cannot be imported: {error}") from error


@dataclass(frozen=True, slots=True)
class Source:
    """One top-level function or class in its file."""

    call: str
    file: Path
    text: str
    node: Definition
    module: ast.Module
    """The whole file, as it was read."""

    @property
    def where(self) -> str:
        """`file:line` of the definition."""
        return f"{self.file}:{self.node.lineno}"


@dataclass(frozen=True, slots=True)
class Value:
    """A name that a file gives at its top level to what it makes there, such as a partial, or imports."""

    call: str
    file: Path
    text: str
    node: Statement
    definitions: Mapping[str, Definition]
    """The functions and classes of the file."""

    @property
    def where(self) -> str:
        """`file:line` of the statement."""
        return f"{self.file}:{self.node.lineno}"

    @property
    def made_by(self) -> ast.expr | None:
        """The expression that makes it; None for what is imported."""
        return None if isinstance(self.node, ast.ImportFrom | ast.Import) else self.node.value


def split_call(call: str) -> tuple[str, str]:
    """The module or file, and the name in it; raises PluginError."""
    place, colon, name = call.rpartition(":")
    if not (colon and place and name.isidentifier()):
        raise PluginError(f"{call!r} does not name a function: expected module:name or ./file.py:name")
    return place, name


def find_source(call: str) -> Source:
    """The definition that `call` names; raises PluginError when the file or the name does not exist."""
    found = find_named(call)
    if isinstance(found, Source):
        return found
    name = split_call(call)[1]
    raise PluginError(
        f"{call}: {found.where} makes {name!r} or imports it; here it must be a function or a class that the file "
        f"itself defines; {did_you_mean(name, found.definitions)}"
    )


def find_named(call: str) -> Source | Value:
    """Find what `call` names, as a definition or as a value; raises PluginError if the file or the name is missing."""
    place, name = split_call(call)
    file = Path(place) if place.endswith(".py") else _module_file(place, call)
    if not file.is_file():
        beside = [path.name for path in file.parent.glob("*.py")] if file.parent.is_dir() else []
        close = nearest(file.name, beside)
        guess = f"; did you mean {file.parent / close}?" if close is not None else ""
        raise PluginError(f"{call}: there is no file {file}{guess}")
    stat = file.stat()
    text, module, definitions, values = _definitions(file, stat.st_mtime_ns, stat.st_size)
    if name in definitions:
        return Source(call, file, text, definitions[name], module)
    if name in values:
        return Value(call, file, text, values[name], definitions)
    raise PluginError(f"{call}: {file} defines no {name!r} at its top level; {did_you_mean(name, definitions)}")


@functools.lru_cache(maxsize=64)
def _definitions(
    file: Path, changed_ns: int, size: int
) -> tuple[str, ast.Module, dict[str, Definition], dict[str, Statement]]:
    """Text, tree, top-level definitions and other names of a file; its time and size are part of the cache's key."""
    text = file.read_text(encoding="utf-8")
    try:
        tree = ast.parse(text, filename=str(file))
    except SyntaxError as error:
        raise PluginError(f"{file}:{error.lineno}: {error.msg}") from error
    values = {name: node for node in tree.body if isinstance(node, Statement) for name in _names(node)}
    return text, tree, {node.name: node for node in tree.body if isinstance(node, Definition)}, values


def _names(node: Statement) -> list[str]:
    """List the names that a statement gives."""
    if isinstance(node, ast.ImportFrom | ast.Import):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _module_file(module: str, call: str) -> Path:
    """The file of a module, found without running code of its parent packages."""
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


def named_function(setting: str, name: str, table: Mapping[str, FunctionT]) -> FunctionT:
    """The function called `name` in `table`, or the one at `module:name` or `/path/file.py:name`.

    Raises UserError for an unknown short name, PluginError for a plug-in that cannot be found or called.
    """
    if name in table:
        return table[name]
    if ":" not in name:
        raise UserError(f"{setting}={name!r}: expected {', '.join(sorted(table))}, or module:name or ./file.py:name")
    found = _resolved(name)
    if not callable(found):
        raise PluginError(f"{setting}={name!r} is a {type(found).__name__}; expected a function")
    return cast(FunctionT, found)


@functools.cache
def chosen(step: Callable[..., Any], setting: str, name: str) -> Callable[..., Any]:
    """The function that a setting of a step names: one of its declared choices, or a plug-in. Raises as above."""
    return named_function(setting, name, shipped(step, setting))


@functools.cache
def shipped(function: Callable[..., Any], setting: str) -> Mapping[str, Callable[..., Any]]:
    """The functions, by name, among which a setting of a step chooses, as its declaration lists them."""
    spec: StepSpec = getattr(function, ATTRIBUTE)
    return {call.rpartition(":")[2]: resolve(call) for call in spec.choices[setting]}


# A plug-in file is executed when it is resolved: once, not once a batch.
_resolved = functools.cache(resolve)
