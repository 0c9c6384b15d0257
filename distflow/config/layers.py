"""Mappings merged in layers, with the origin of every value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from distflow.config.yamlfile import KeyPath, dotted
from distflow.errors import Places

COMMAND_LINE = "command line"

_REPLACES = {
    "flow.steps.*.call": ("with",),
    "data.source": ("with", "fields", "mix"),
    "data.mix": ("source", "with", "fields"),
    "data.mix.*.source": ("with", "fields"),
    "val.data.source": ("with", "fields", "mix"),
    "val.data.mix": ("source", "with", "fields"),
    "val.data.mix.*.source": ("with", "fields"),
    "layout.pools.*.engine": ("engine_options",),
    "layout.pools.*.backend": ("backend_options", "zero"),
    "models.*.path": ("init", "tokenizer"),
    "models.*.init": ("path",),
}
"""Naming another function, engine or model drops the settings of the previous one."""


_NAMED = (
    "flow.steps.*",
    "flow.steps.*.with.function.*",
    "data.mix.*",
    "val.data.mix.*",
    "layout.pools.*",
    "layout.pools.*.each.*",
    "models.*",
    "run.trackers.*",
)
"""Sections that users name: null removes them."""


class Origin:
    """Where a value was written: the place for messages, the folder for relative paths, and how near to the user."""

    __slots__ = ("folder", "rank", "where")

    def __init__(self, where: str, folder: Path, rank: int) -> None:
        self.where = where
        self.folder = folder
        self.rank = rank
        """Larger for what is laid later; the user's own files are above shipped ones, the command line above all."""


class Layers:
    """The composed mapping so far. Later layers win; mappings merge, everything else is replaced."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._origins: dict[KeyPath, Origin] = {}
        self._removed: dict[KeyPath, Origin] = {}
        self._dropped: dict[KeyPath, Any] = {}
        """What went because another function, engine or model was named."""
        self.unremoved: list[tuple[KeyPath, Origin, list[str]]] = []
        """What null was to remove and is not there, with what is."""

    def lay(self, layer: Mapping[str, Any], origin_of: Callable[[KeyPath], Origin], at: KeyPath = ()) -> None:
        """Merge a mapping, nested under key path `at`, over the layers so far."""
        for key in reversed(at):
            layer = {key: layer}
        self._merge(self.values, layer, (), lambda key: origin_of(key[len(at) :]))

    def delete(self, key: KeyPath, origin: Origin | None = None) -> bool:
        """Remove a value; return False if there is, and was, none. `origin`: of the removal, if a user wanted it."""
        section = self._section(key[:-1])
        if key[-1] not in section:
            return self._was_dropped(key)
        self._remove(section, key, origin)
        return True

    def keys(self, at: KeyPath) -> list[str]:
        """The keys of a section; none where there is no section."""
        return list(self._section(at))

    def origin(self, key: KeyPath) -> Origin | None:
        """The origin of a value, of its removal, or of the nearest section above it."""
        while key and key not in self._origins and key not in self._removed:
            key = key[:-1]
        return self._written(key) if key else None

    def places(self, otherwise: str) -> Places:
        """The places of all keys; `otherwise` of what has no origin."""
        return _Places(self, otherwise)

    def rank(self, key: KeyPath) -> int:
        """How near to the user a key was written or removed; 0 if it was not."""
        return self._written(key).rank if key in self._origins or key in self._removed else 0

    def removed(self, section: KeyPath) -> list[KeyPath]:
        """What was removed from a section."""
        return [key for key in self._removed if key[:-1] == section]

    def _section(self, at: KeyPath) -> dict[str, Any]:
        node: Any = self.values
        for part in at:
            node = node[part] if isinstance(node, dict) and part in node else None
        return node if isinstance(node, dict) else {}

    def _written(self, key: KeyPath) -> Origin:
        return self._removed[key] if key in self._removed else self._origins[key]

    def _remove(self, node: dict[str, Any], key: KeyPath, origin: Origin | None) -> None:
        del node[key[-1]]
        self._origins = {known: at for known, at in self._origins.items() if known[: len(key)] != key}
        if origin is not None:
            self._removed[key] = origin

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
            if value is None and _matches(here, _NAMED):
                self._null(target, here, origin_of(here))
                continue
            self._removed.pop(here, None)
            if isinstance(value, Mapping):
                if not (key in target and isinstance(target[key], dict)):
                    target[key] = {}
                    self._origins[here] = origin_of(here)
                self._merge(target[key], value, here, origin_of)
            else:
                target[key] = value
                self._origins[here] = origin_of(here)

    def _null(self, target: dict[str, Any], here: KeyPath, origin: Origin) -> None:
        """Remove what lower layers give under a name."""
        if here[-1] in target:
            self._remove(target, here, origin)
        elif not self._was_dropped(here):
            self.unremoved.append((here, origin, list(target)))

    def _was_dropped(self, key: KeyPath) -> bool:
        """Tell whether a value was there until its function, engine or model was replaced."""
        return any(key[: len(at)] == at and _holds(value, key[len(at) :]) for at, value in self._dropped.items())

    def _drop_replaced(self, target: dict[str, Any], key: str, value: Any, here: KeyPath) -> None:
        old = target.get(key)
        if value is None or value == old or (isinstance(value, Mapping) and isinstance(old, dict)):
            return
        for pattern, dropped in _REPLACES.items():
            if _matches(here, (pattern,)):
                for name in dropped:
                    if name in target:
                        self._dropped[(*here[:-1], name)] = target.pop(name)


def _matches(key: KeyPath, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns, part by part, is that of the key."""
    return any(len(key) == pattern.count(".") + 1 and fnmatchcase(dotted(key), pattern) for pattern in patterns)


def _holds(value: Any, key: KeyPath) -> bool:
    for part in key:
        if not (isinstance(value, dict) and part in value):
            return False
        value = value[part]
    return True


class _Places(Places):
    """The places of composed values."""

    def __init__(self, layers: Layers, otherwise: str) -> None:
        super().__init__(self._place)
        self._layers = layers
        self._otherwise = otherwise

    def _place(self, key: str) -> str:
        origin = self._layers.origin(tuple(key.split(".")))
        return origin.where if origin is not None else self._otherwise

    def newest(self, keys: Sequence[str]) -> str:
        """The key written at the highest rank; the first of equals."""
        return max(keys, key=lambda key: self._layers.rank(tuple(key.split("."))))

    def removed(self, section: str) -> list[str]:
        """Keys right below a section that were removed."""
        return [dotted(key) for key in self._layers.removed(tuple(section.split(".")))]
