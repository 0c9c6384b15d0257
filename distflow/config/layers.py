"""Mappings merged in layers, with the origin of every value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from distflow.config.yamlfile import KeyPath, dotted

COMMAND_LINE = "command line"

_REPLACES = {
    "flow.steps.*.call": ("with",),
    "data.source": ("with",),
    "layout.pools.*.engine": ("engine_options",),
    "layout.pools.*.backend": ("backend_options", "zero"),
    "models.*.path": ("init", "tokenizer"),
    "models.*.init": ("path",),
}
"""Naming another function, engine or model drops the settings of the previous one."""


class Origin:
    """Where a value was written: the place for messages, and the folder for relative paths."""

    __slots__ = ("folder", "where")

    def __init__(self, where: str, folder: Path) -> None:
        self.where = where
        self.folder = folder


class Layers:
    """The composed mapping so far. Later layers win; mappings merge, everything else is replaced."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._origins: dict[KeyPath, Origin] = {}

    def lay(self, layer: Mapping[str, Any], origin_of: Callable[[KeyPath], Origin], at: KeyPath = ()) -> None:
        """Merge a mapping, nested under key path `at`, over the layers so far."""
        for key in reversed(at):
            layer = {key: layer}
        self._merge(self.values, layer, (), lambda key: origin_of(key[len(at) :]))

    def delete(self, key: KeyPath) -> bool:
        """Remove a value; return False if there is none."""
        node: Any = self.values
        for part in key[:-1]:
            node = node[part] if isinstance(node, dict) and part in node else None
        if not isinstance(node, dict) or key[-1] not in node:
            return False
        del node[key[-1]]
        return True

    def origin(self, key: KeyPath) -> Origin | None:
        """The origin of a value, or of the nearest section above it."""
        while key and key not in self._origins:
            key = key[:-1]
        return self._origins[key] if key else None

    def given(self, key: KeyPath) -> list[Origin]:
        """Where the value under a key, or part of it, was written."""
        return [origin for path, origin in self._origins.items() if path[: len(key)] == key]

    def _merge(
        self, target: dict[str, Any], layer: Mapping[str, Any], at: KeyPath, origin_of: Callable[[KeyPath], Origin]
    ) -> None:
        for key in layer:
            self._drop_replaced(target, key, layer[key], (*at, key))
        for key, value in layer.items():
            here = (*at, key)
            if isinstance(value, Mapping):
                if not (key in target and isinstance(target[key], dict)):
                    target[key] = {}
                    self._origins[here] = origin_of(here)
                self._merge(target[key], value, here, origin_of)
            else:
                target[key] = value
                self._origins[here] = origin_of(here)

    def _drop_replaced(self, target: dict[str, Any], key: str, value: Any, here: KeyPath) -> None:
        old = target.get(key)
        if value is None or value == old or (isinstance(value, Mapping) and isinstance(old, dict)):
            return
        for pattern, dropped in _REPLACES.items():
            if len(here) == pattern.count(".") + 1 and fnmatchcase(dotted(here), pattern):
                for name in dropped:
                    target.pop(name, None)
