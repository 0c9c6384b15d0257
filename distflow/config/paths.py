"""Relative files in a recipe (plug-ins, scripts, models, data) made absolute: every worker reads the same thing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distflow.config.shipped import recipes_folder
from distflow.config.yamlfile import KeyPath

_FILE_PLUGIN = re.compile(r"^(?P<plus>\+?)(?P<file>[^:]+\.py):(?P<name>[A-Za-z_]\w*)$")
_FILE_NAME = re.compile(r"^[^/\s][^\s]*(/[^\s]*|\.\w+)$")
"""Text that reads like a relative file: with a slash, or with a suffix."""
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


def absolute_paths(value: Any, folder_of: Callable[[KeyPath], Path], model_folder: Path, at: KeyPath = ()) -> Any:
    """The same values with absolute files.

    They start from the folder of the file in which they are written, and models of shipped files from `model_folder`.
    In the `with` of the data source and of steps, text is a file if it begins with ./, ../ or ~/, or if it has a slash
    or a suffix and there is such a file.
    """
    if isinstance(value, dict):
        return {k: absolute_paths(v, folder_of, model_folder, (*at, k)) for k, v in value.items()}
    if isinstance(value, list):
        return [absolute_paths(v, folder_of, model_folder, (*at, str(i))) for i, v in enumerate(value)]
    if not isinstance(value, str):
        return value
    if at[:1] == ("models",) and len(at) == 3 and at[2] in ("path", "tokenizer"):
        written = folder_of(at)
        return _model_path(value, model_folder if written.is_relative_to(recipes_folder()) else written)
    if at[-1] == "script":
        return str((folder_of(at) / Path(value).expanduser()).resolve())
    if _is_interpreter(at):
        # Links are kept: the Python of a virtual environment is one, and is known by where it lies.
        return os.path.abspath(folder_of(at) / Path(value).expanduser())
    plugin = _FILE_PLUGIN.match(value)
    if plugin is not None and _is_plugin_place(at, plugin["file"]):
        return f"{plugin['plus']}{(folder_of(at) / Path(plugin['file']).expanduser()).resolve()}:{plugin['name']}"
    return _setting(value, folder_of(at)) if _is_setting(at) else value


def looks_like_path(name: str) -> bool:
    """True for a folder, False for a hub id such as Qwen/Qwen2.5-0.5B."""
    return not _HUB_ID.match(name)


def _model_path(name: str, folder: Path) -> str:
    if name.startswith("chars:"):
        return name
    path = (folder / Path(name).expanduser()).resolve()
    # `models/mine` reads like a hub id; a folder `models` that exists settles it.
    local = looks_like_path(name) or path.exists() or ("/" in name and path.parent.is_dir())
    return str(path) if local else name


def _setting(text: str, folder: Path) -> str:
    """A setting of the user's, absolute if it names a file."""
    if text.startswith(("./", "../", "~/")):
        return str((folder / Path(text).expanduser()).resolve())
    if not _FILE_NAME.match(text):
        return text
    try:
        found = (folder / text).exists()
    except OSError:  # too long for a name, say
        return text
    return str((folder / text).resolve()) if found else text


def _is_setting(at: KeyPath) -> bool:
    """Below `data.with` or `flow.steps.NAME.with`."""
    return at[:2] == ("data", "with") or (at[:2] == ("flow", "steps") and at[3:4] == ("with",))


def _is_interpreter(at: KeyPath) -> bool:
    """`layout.pools.NAME.python`, or `layout.pools.NAME.each.INDEX.python`; not an option of some engine's."""
    return at[:2] == ("layout", "pools") and (at[3:] == ("python",) or (at[3:4] == ("each",) and at[5:] == ("python",)))


def _is_plugin_place(at: KeyPath, file: str) -> bool:
    """`call`, `engine`, … name plug-ins with or without `./`; in free settings `./` (or /, ~) tells them apart."""
    return at[-1] in ("call", "source", "engine", "backend") or "steps" in at[-2:] or file[0] in "./~"
