"""Plug-ins by name, imported inside the worker that uses them, and checked against what they declared."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from distflow.config.suggest import did_you_mean
from distflow.errors import PluginError, UserError
from distflow.flow.source import split_call
from distflow.flow.step import ATTRIBUTE, StepSpec

if TYPE_CHECKING:
    # Child processes that only need a function start twice as fast without the schema of recipes.
    from distflow.flow.plan import StepPlan

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def resolve(call: str) -> Any:
    """Import what `module:name` or `/path/file.py:name` names; raises PluginError."""
    place, name = split_call(call)
    module = _import_file(Path(place), call) if place.endswith(".py") else _import_module(place, call)
    if not hasattr(module, name):
        public = [found for found in vars(module) if not found.startswith("_")]
        raise PluginError(f"{call}: {module.__file__} has no {name!r}; {did_you_mean(name, public)}")
    return getattr(module, name)


def check_step(function: object, plan: StepPlan) -> None:
    """The imported function is the step that the planner read: same declaration, a fitting signature. PluginError."""
    if not callable(function):
        raise PluginError(f"step {plan.name!r}: {plan.call} is a {type(function).__name__}, not a function")
    if not hasattr(function, ATTRIBUTE):
        raise PluginError(f"step {plan.name!r}: {plan.call} lacks @step (is it wrapped by another decorator?)")
    spec: StepSpec = getattr(function, ATTRIBUTE)
    conditional = {field for fields in spec.reads_when.values() for field in fields}
    same = (spec.role, spec.scope, spec.writes) == (plan.role, plan.scope, plan.writes)
    if not same or set(spec.reads) - set(plan.reads) or set(plan.reads) - set(spec.reads) - conditional:
        raise PluginError(
            f"step {plan.name!r}: {plan.call} was imported with another declaration than its source shows"
        )
    check_call(plan.call, function, ("batch", "ctx"), tuple(plan.settings))


def check_call(call: str, function: Any, positional: Sequence[str], keywords: Sequence[str]) -> None:
    """`function(*positional, **keywords)` can be called; raises PluginError with the signature that was expected."""
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


def _import_file(path: Path, call: str) -> ModuleType:
    """Import a file once per process, under a name that follows from its path."""
    path = path.resolve()
    name = f"distflow_plugin_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise PluginError(f"{call}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"{path} ends in .py"
    assert spec.loader is not None, f"{path} ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the edge of a user's code: whatever it raises is the user's to read
        del sys.modules[name]
        raise PluginError(f"{call}: importing {path} raised {type(error).__name__}: {error}") from error
    return module


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


# A plug-in file is executed when it is resolved: once, not once a batch.
_resolved = cache(resolve)
