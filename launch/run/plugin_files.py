"""Plug-in files of a recipe, which it names by absolute paths, copied to hosts where these paths mean nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_PLUGIN = re.compile(r"^\+?(?P<file>/.+\.py):[A-Za-z_]\w*$")
FOLDER = "plugins"


def plugin_files(value: Any) -> list[Path]:
    """Files that a resolved recipe, or a part of it, names as plug-ins or scripts; sorted."""
    return sorted(set(_files(value)))


def shipped_names(files: list[Path]) -> dict[Path, str]:
    """Where each file goes below the run folder. Files of one folder stay together; all keep their names.

    The name is part of the interface digest, and the folder is not.
    """
    folders = {folder: number for number, folder in enumerate(dict.fromkeys(file.parent for file in files))}
    return {file: f"{FOLDER}/{folders[file.parent]}/{file.name}" for file in files}


def rewritten(value: Any, places: Mapping[Path, Path]) -> Any:
    """The same values with the files of `places` where they are now."""
    if isinstance(value, dict):
        return {key: rewritten(item, places) for key, item in value.items()}
    if isinstance(value, list):
        return [rewritten(item, places) for item in value]
    file = _file(value)
    if file is None or file not in places:
        return value
    return value.replace(str(file), str(places[file]), 1)


def _files(value: Any) -> Iterator[Path]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _files(item)
    else:
        file = _file(value)
        if file is not None:
            yield file


def _file(value: object) -> Path | None:
    if not isinstance(value, str):
        return None
    plugin = _PLUGIN.match(value)
    if plugin is not None:
        return Path(plugin["file"])
    return Path(value) if value.startswith("/") and value.endswith(".py") else None
