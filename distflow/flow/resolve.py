"""Plug-ins by name: finds their source without importing it, or imports them and checks how they are called.

It knows no plans: child processes that only need a function start twice as fast without the schema of recipes.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from distflow.errors import PluginError, UserError, did_you_mean, nearest
from distflow.flow.file_import import import_file, importing
from distflow.flow.statements import Definition, imported_statements, is_main_guard, names_given
from distflow.flow.step import ATTRIBUTE, StepSpec

PARTS = "_parts"
"""What ends the name of the file into which the parts of a script are copied that a recipe names."""
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


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
        with importing(name):
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
    node: ast.stmt
    """The last statement that gives the name; the import of `*` that may bring it."""
    certain: bool
    """An import of the file always runs it, and it runs once."""
    definitions: Mapping[str, Definition]
    """The functions and classes of the file."""

    @property
    def where(self) -> str:
        """`file:line` of the statement."""
        return f"{self.file}:{self.node.lineno}"

    @property
    def made_by(self) -> ast.expr | None:
        """The expression that makes it; None for what is imported, is a part of what is made, or depends."""
        if not (self.certain and isinstance(self.node, ast.Assign | ast.AnnAssign)):
            return None
        targets = self.node.targets if isinstance(self.node, ast.Assign) else [self.node.target]
        name = split_call(self.call)[1]
        return self.node.value if name in [one.id for one in targets if isinstance(one, ast.Name)] else None


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
        raise PluginError(f"{call}: there is no file {file}{_instead(file, name)}")
    there = _names_of(file)
    if name in there.definitions:
        return Source(call, file, there.text, there.definitions[name], there.module)
    node = there.values.get(name) or next((one for one in there.stars if _may_bring(one, name, file)), None)
    if node is not None:
        return Value(call, file, there.text, node, node in there.module.body, there.definitions)
    if name in there.guarded:
        raise PluginError(
            f'{call}: {file} defines {name!r} behind `if __name__ == "__main__":` alone, which nobody runs who imports '
            "it, as workers do — move it out of there, to the top level"
        )
    known = did_you_mean(name, {*there.definitions, *there.assigned})
    raise PluginError(f"{call}: {file} defines no {name!r} at its top level; {known}")


def _instead(file: Path, name: str) -> str:
    """Say what may be meant by a file that is missing, or what to write into it."""
    beside = [path.name for path in file.parent.glob("*.py")] if file.parent.is_dir() else []
    script = f"{file.stem.removesuffix(PARTS)}.py"
    if script in beside:
        # Whoever imports the script itself may start its trainer.
        return f" — write it, with {name!r} and what it needs of {script}, without what trains there"
    close = nearest(file.name, beside)
    return f"; did you mean {file.parent / close}?" if close is not None else ""


@dataclass(frozen=True, slots=True)
class _Names:
    """The names that a file gives at its top level."""

    text: str
    module: ast.Module
    definitions: Mapping[str, Definition]
    values: Mapping[str, ast.stmt]
    """What gives each other name last."""
    stars: Sequence[ast.ImportFrom]
    guarded: Collection[str]
    """Names that are given behind `if __name__ == "__main__":`."""

    @property
    def assigned(self) -> list[str]:
        """Names that are given by other statements than an import."""
        return [name for name, node in self.values.items() if not isinstance(node, ast.Import | ast.ImportFrom)]


def _names_of(file: Path) -> _Names:
    stat = file.stat()
    return _names_at(file, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=64)
def _names_at(file: Path, changed_ns: int, size: int) -> _Names:
    """Read the names of a file; its time and size are part of the cache's key."""
    text = file.read_text(encoding="utf-8")
    try:
        tree = ast.parse(text, filename=str(file))
    except SyntaxError as error:
        raise PluginError(f"{file}:{error.lineno}: {error.msg}") from error
    nodes = list(imported_statements(tree.body))
    stars = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    others = [node for node in nodes if not isinstance(node, Definition) and node not in stars]
    return _Names(
        text,
        tree,
        {node.name: node for node in nodes if isinstance(node, Definition)},
        {name: node for node in others for name in names_given(node, whole=False)},
        stars,
        {name for node in tree.body if is_main_guard(node) for name in names_given(node)},
    )


def _may_bring(star: ast.ImportFrom, name: str, file: Path) -> bool:
    """Tell whether `from … import *` gives a name: also where its module cannot be found without running code."""
    if not star.level and star.module in sys.modules:
        return hasattr(sys.modules[star.module], name)
    folder, module = file.parents[max(0, star.level - 1)], star.module or ""
    beside = folder.joinpath(*module.split(".")).with_suffix(".py")
    try:
        there = _names_of(beside if beside.is_file() else _module_file(module, module))
    except (PluginError, OSError):
        return True
    lazy = "__getattr__" in there.definitions or "__all__" in there.values
    return lazy or bool(there.stars) or name in there.definitions or name in there.values


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
                f"{_replaced(call)}"
            )
        if depth == len(parts):
            if spec.origin is None or not spec.origin.endswith(".py"):
                raise PluginError(f"{call}: module {module!r} has no Python source")
            return Path(spec.origin)
        search = list(spec.submodule_search_locations or [])
    raise AssertionError("a module name has at least one part")


def _replaced(call: str) -> str:
    from distflow.config.trl_keys import shipped_reward  # only where a module is missing

    found = shipped_reward(call)
    return "" if found is None else f" — install trl where workers run, or take {found} in its place"


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
