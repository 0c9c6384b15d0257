"""Functions that a step's settings name: short names from a table, or plug-ins of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar, cast

from distflow.errors import PluginError, UserError
from distflow.flow.resolve import resolve

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


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
