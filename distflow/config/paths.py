"""Files of recipes: the shipped ones, what a recipe's name means, and relative files in a recipe made absolute.

Plug-ins, scripts, models and data are named relative to the file that names them; every worker reads the same files.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import distflow
from distflow.config.yamlfile import KeyPath, read_yaml, shown
from distflow.errors import Problem, RecipeError, did_you_mean, nearest

CHARS_PREFIX = "chars:"
"""What precedes the characters of a tokenizer that has a token for each."""
HUB_PREFIX = "hub:"
"""What precedes the id of a data set on the Hugging Face hub."""
FED = "distflow.data.fed:by_clients"
"""The data source whose rows clients put while the run goes on."""
_FILE_PLUGIN = re.compile(r"^(?P<plus>\+?)(?P<file>[^:]+\.py):(?P<name>[A-Za-z_]\w*)$")
_FUNCTION = re.compile(r":[A-Za-z_]\w*$")
"""How the names of functions end."""
_FILE_NAME = re.compile(r"^[^/\s][^\s]*(/[^\s]*|\.\w+)$")
"""Text that looks like a relative file: with a slash or a suffix."""
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


def recipes_folder() -> Path:
    """The folder of the shipped recipes, in a checkout or an installation."""
    for root in distflow.__path__:
        folder = Path(root, "recipes")
        if folder.is_dir():
            return folder.resolve()
    raise AssertionError(f"the recipes folder is missing beside {list(distflow.__path__)}: install distflow again")


def shipped_recipes() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


@functools.cache
def shipped_steps() -> Mapping[str, tuple[str, ...]]:
    """Return the functions that the shipped flows call (`module:name`), by the names of their steps."""
    calls: dict[str, list[str]] = {}
    for path in sorted((recipes_folder() / "flow").glob("*.yaml")):
        for name, step in read_yaml(path).value["steps"].items():
            known = calls.setdefault(name, [])
            known += [step["call"]] if step.get("call", "") not in ("", *known) else []
    return {name: tuple(known) for name, known in calls.items()}


@functools.cache
def layouts_with(pool: str) -> tuple[str, ...]:
    """Names of the shipped layouts whose own file has a pool of this name."""
    files = sorted((recipes_folder() / "layout").glob("*.yaml"))
    return tuple(path.stem for path in files if pool in read_yaml(path).value.get("pools", {}))


def find_recipe(name_or_path: str) -> Path:
    """The file of a shipped recipe's name or of a path; raises RecipeError."""
    if name_or_path in shipped_recipes():
        return recipes_folder() / f"{name_or_path}.yaml"
    path = _real(Path(name_or_path).expanduser())
    if path.is_dir():
        raise RecipeError([Problem("command line", name_or_path, "this is a folder, not a recipe", _inside(path))])
    looks_like_path = "/" in name_or_path or path.suffix in (".yaml", ".yml")
    if not looks_like_path:
        hint = did_you_mean(name_or_path, shipped_recipes()) + "; or give the path of a .yaml file"
        raise RecipeError([Problem("command line", name_or_path, "there is no recipe of this name", hint)])
    if not path.is_file():
        close = _close_file(path)
        hint = f"give the path of a .yaml file or one of: {', '.join(shipped_recipes())}"
        hint = hint if close is None else f"did you mean {shown(close)}?"
        raise RecipeError([Problem("command line", name_or_path, f"there is no file {shown(path)}", hint)])
    if path.suffix != ".yaml":
        raise RecipeError([Problem("command line", name_or_path, "a recipe's file name ends in .yaml", "rename it")])
    return path


def _close_file(path: Path) -> Path | None:
    """A recipe's file beside this one, of a similar name."""
    beside = sorted(path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    name = nearest(path.stem, [file.stem for file in beside])
    return None if name is None else path.with_name(f"{name}.yaml")


def _inside(folder: Path) -> str:
    """What to give instead of a folder."""
    if (folder / "run.json").is_file():
        return f"it is a run: continue it with --run {folder.name} --resume, or give the file recipe.yaml in it"
    files = sorted(path.name for path in folder.glob("*.yaml"))
    some = f"one of its files: {', '.join(files[:9])}" if files else "the path of a .yaml file"
    return f"give {some}, or a shipped recipe: {', '.join(shipped_recipes())}"


def absolute_paths(value: Any, folder_of: Callable[[KeyPath], Path], model_folder: Path, at: KeyPath = ()) -> Any:
    """The same values with absolute files.

    They are relative to the folder of the file that names them; models in shipped files, to `model_folder`. In the
    `with` of the data source and of steps, text is a file if it begins with ./, ../ or ~/, or if it has a slash or a
    suffix and such a file exists. What an interpolation is yet to fill in is left as it is.
    """
    if isinstance(value, dict):
        return {k: absolute_paths(v, folder_of, model_folder, (*at, k)) for k, v in value.items()}
    if isinstance(value, list):
        return [absolute_paths(v, folder_of, model_folder, (*at, str(i))) for i, v in enumerate(value)]
    if not isinstance(value, str) or "${" in value:
        return value
    if at[:1] == ("models",) and len(at) == 3 and at[2] in ("path", "tokenizer"):
        written = folder_of(at)
        return _model_path(value, model_folder if written.is_relative_to(recipes_folder()) else written)
    if at[-1] == "script":
        return str(_real(folder_of(at) / Path(value).expanduser()))
    if _is_interpreter(at):
        # Links are kept: the Python of a virtual environment is a link, and its place identifies it.
        return os.path.abspath(folder_of(at) / Path(value).expanduser())
    if at == ("run", "copy_to") and "://" not in value:
        return str(_real(folder_of(at) / Path(value).expanduser()))
    if _is_source(at) and value and is_data_file(value):
        return str(_real(folder_of(at) / Path(value).expanduser()))
    plugin = _FILE_PLUGIN.match(value)
    if plugin is not None and _is_plugin_place(at, plugin["file"]):
        return f"{plugin['plus']}{_real(folder_of(at) / Path(plugin['file']).expanduser())}:{plugin['name']}"
    return _setting(value, folder_of(at)) if _is_setting(at) else value


def _real(path: Path) -> Path:
    """The path without links. Unlike `resolve` it leaves a link to itself as it is, which whoever opens it refuses."""
    return Path(os.path.realpath(path))


def looks_like_path(name: str) -> bool:
    """Whether a name is a folder, no hub id such as Qwen/Qwen2.5-0.5B and no `chars:…`."""
    return not (name.startswith(CHARS_PREFIX) or _HUB_ID.match(name))


def is_data_file(source: str) -> bool:
    """Whether a data source is a file or folder of prompts, no function and no `hub:ID`."""
    return not source.startswith(HUB_PREFIX) and not _FUNCTION.search(source)


def _model_path(name: str, folder: Path) -> str:
    if name.startswith(CHARS_PREFIX):
        return name
    path = _real(folder / Path(name).expanduser())
    # `models/mine` looks like a hub id, but not if there is a folder `models`.
    local = looks_like_path(name) or path.exists() or ("/" in name and path.parent.is_dir())
    return str(path) if local else name


def _setting(text: str, folder: Path) -> str:
    """A user's setting, made absolute if it names a file."""
    if text.startswith(("./", "../", "~/")):
        return str(_real(folder / Path(text).expanduser()))
    if not _FILE_NAME.match(text):
        return text
    try:
        found = (folder / text).exists()
    except OSError:  # too long for a name, say
        return text
    return str(_real(folder / text)) if found else text


def _is_source(at: KeyPath) -> bool:
    """Whether it is `data.source` or `data.mix.NAME.source`, or the same below `val`."""
    at = at[1:] if at[:2] == ("val", "data") else at
    return at == ("data", "source") or (at[:2] == ("data", "mix") and at[3:] == ("source",))


def _is_setting(at: KeyPath) -> bool:
    """Below `data.with`, `data.mix.NAME.with` (or the same below `val`) or `flow.steps.NAME.with`."""
    at = at[1:] if at[:2] == ("val", "data") else at
    mixed = at[:2] in (("data", "mix"), ("flow", "steps")) and at[3:4] == ("with",)
    return at[:2] == ("data", "with") or mixed


def _is_interpreter(at: KeyPath) -> bool:
    """Whether it is `layout.pools.NAME.python` or `layout.pools.NAME.each.INDEX.python`, not an engine's option."""
    return at[:2] == ("layout", "pools") and (at[3:] == ("python",) or (at[3:4] == ("each",) and at[5:] == ("python",)))


def _is_plugin_place(at: KeyPath, file: str) -> bool:
    """`call`, `engine` … name plug-ins with or without `./`; in free settings only with ./, / or ~."""
    return at[-1] in ("call", "source", "engine", "backend") or "steps" in at[-2:] or file[0] in "./~"


SMOLLM2 = "`make smollm2` in the clone of distflow writes one to models/smollm2-135m"
