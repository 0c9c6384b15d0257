"""A recipe made of what a script or a notebook has in hand: a model, rows, and a reward function.

Workers are other processes, so a function goes to them by its source: the file of its module or script, or, of a cell
of a notebook, a file with its definition and those of what it names. Nothing is pickled.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import linecache
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from distflow.config.paths import recipes_folder
from distflow.config.yamlfile import yaml_text
from distflow.errors import UserError

FLOW, LAYOUT, STEPS = "grpo", "colocated", 100
BATCH = {"prompts": 8, "samples_per_prompt": 8}
"""What is taken where nothing is said."""
CELLS, ROWS, RECIPE = "functions.py", "rows.jsonl", "recipe.yaml"
"""The files that are written."""
FUNCTION = "flow.steps.reward.with.function"


def write_recipe(
    folder: Path,
    *,
    model: str,
    data: str | Iterable[Mapping[str, Any]],
    reward: object,
    flow: str | None,
    settings: Mapping[str, Any],
) -> Path:
    """Write a recipe, and the rows and functions that have no file yet, into a folder; returns its path.

    `reward`: a function; the name of a shipped one or a place such as `./file.py:name`; several, as a list or by name.
    `settings`: sections of the recipe, as mappings. Raises UserError.
    """
    functions = Functions(folder / CELLS)
    defaults: list[object] = [{"flow": flow or FLOW}, {"layout": LAYOUT}]
    sections: dict[str, Any] = {"run": {"training_steps": STEPS}, "batch": dict(BATCH)}
    sections |= {"data": {"source": _path(data) if isinstance(data, str) else str(folder / ROWS)}}
    if model in {path.stem for path in (recipes_folder() / "model").glob("*.yaml")}:
        defaults.append({"model@models.policy": model})
    else:
        sections["models"] = {"policy": {"path": _path(model)}}
    if reward is not None:
        sections["flow"] = {"steps": {"reward": {"with": {"function": _rewards(reward, functions)}}}}
    if not isinstance(data, str):
        (folder / ROWS).write_text("".join(_lines(data)), encoding="utf-8")
    functions.write()
    text = yaml_text({"defaults": [*defaults, "_self_"], **_merged(sections, settings)})
    (folder / RECIPE).write_text(text, encoding="utf-8")
    return folder / RECIPE


def new_folder(within: Path) -> Path:
    """Make a folder for a recipe; raises UserError where none can be made."""
    try:
        within.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="recipe-", dir=within)).resolve()
    except OSError as error:
        raise UserError(f"{within}: {error.strerror or error} — give a runs_dir that can be written") from error


def _path(text: str) -> str:
    """Give a file or folder that is here its whole path, and leave anything else, such as a hub's id, as it is."""
    there = Path(text).expanduser()
    return str(there.resolve()) if there.exists() else text


def _lines(rows: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(f"data: row {number} is {type(row).__name__}; expected a mapping, such as {{'prompt': …}}")
        try:
            yield json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise UserError(f"data: row {number} cannot be written as JSON: {error}") from error


def _merged(sections: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Put settings over sections, mapping by mapping."""
    for key, value in settings.items():
        below = sections.get(key)
        sections[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return sections


def _rewards(reward: object, functions: Functions) -> object:
    """Return what stands for these rewards in a recipe."""
    if isinstance(reward, Mapping):
        return {str(name): {"function": functions.place_of(one)} for name, one in reward.items()}
    if isinstance(reward, list | tuple):
        named = {getattr(one, "__name__", str(one)): one for one in reward}
        if len(named) < len(reward):
            raise UserError("reward: several of one name — give them as a mapping, each by a name of its own")
        return _rewards(named, functions)
    return functions.place_of(reward)


class Functions:
    """Where workers find functions; what has no file is gathered in one."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._parts: dict[str, str] = {}
        """Source by name, what others need first."""

    def place_of(self, function: object) -> str:
        """Return `module:name` or `/path/file.py:name` of a function; a text is one already. Raises UserError."""
        if isinstance(function, str):
            return _place(function)
        name = str(getattr(function, "__qualname__", ""))
        if not callable(function) or isinstance(function, partial) or not name:
            raise UserError(
                f"reward: {function!r} has no name by which workers could import it — give a function, or name "
                "what it is: ./file.py:name"
            )
        module = sys.modules.get(getattr(function, "__module__", ""))
        file = _file_of(module)
        known = module is not None and getattr(module, name, None) is function
        if known and file is not None and module is not None:
            inside = bool(module.__package__) or Path(file).name == "__init__.py"
            return f"{module.__name__}:{name}" if inside else f"{file}:{name}"
        if not known or file is not None:
            raise UserError(
                f"reward: {name} is no function at the top of its module, so that workers cannot import it — define "
                "it outside of functions and classes, under its own name"
            )
        self._gather(name, function, vars(module) if module is not None else {})
        return f"{self._file}:{name}"

    def write(self) -> None:
        """Write what was gathered."""
        if self._parts:
            head = '"""Functions of a notebook, and what they name."""\n\nfrom __future__ import annotations\n\n'
            self._file.write_text(head + "\n\n".join(self._parts.values()) + "\n", encoding="utf-8")

    def _gather(self, name: str, what: object, scope: Mapping[str, object]) -> None:
        """Note the source of what is called `name` in the cells, behind that of all that it names."""
        if name in self._parts:
            return
        imported = _imported(name, what)
        if imported:
            self._parts[name] = imported
            return
        if inspect.isfunction(what) or inspect.isclass(what):
            source = _source_of(name, what)
            self._parts[name] = ""  # what names itself, or one that names it, ends here
            for used in _names_in(source):
                if used in scope and used != name:
                    self._gather(used, scope[used], scope)
            del self._parts[name]
            self._parts[name] = source
            return
        text = repr(what)
        try:
            same = ast.literal_eval(text) == what
        except (ValueError, SyntaxError):
            same = False
        if not same:
            raise UserError(
                f"reward: it uses {name}, {type(what).__name__}, which cannot be sent to workers by its source — make "
                "it within the function, or put the function into a file and name it: ./file.py:name"
            )
        self._parts[name] = f"{name} = {text}"


def _place(text: str) -> str:
    path, colon, name = text.rpartition(":")
    return f"{Path(path).expanduser().resolve()}:{name}" if colon and path.endswith(".py") else text


def _file_of(module: ModuleType | None) -> str | None:
    """Find the file of a module; None for the cells of a notebook, and for what is typed."""
    file = getattr(module, "__file__", None)
    return str(Path(file).resolve()) if file is not None and Path(file).is_file() else None


def _imported(name: str, what: object) -> str:
    """Write the statement that imports what comes from a module; empty for what the cells themselves define."""
    if isinstance(what, ModuleType):
        return f"import {what.__name__} as {name}"
    module, own = getattr(what, "__module__", None), getattr(what, "__qualname__", "")
    if module in (None, "__main__") or not own.isidentifier():
        return ""
    found = getattr(sys.modules.get(str(module)), own, None)
    return f"from {module} import {own} as {name}" if found is what else ""


def _source_of(name: str, what: Any) -> str:
    if inspect.isclass(what) and (written := _class_in_cell(what)):
        return written
    try:
        return textwrap.dedent(inspect.getsource(what)).strip()
    except (OSError, TypeError) as error:
        raise UserError(
            f"reward: the source of {name} is not known ({error}) — put it into a file and name it: ./file.py:{name}"
        ) from error


def _class_in_cell(what: type) -> str:
    """Find the source of a class of a notebook, by the cell of a method: `inspect` looks for classes in files alone."""
    cells = [one.__code__.co_filename for one in vars(what).values() if inspect.isfunction(one)]
    for text in ("".join(linecache.getlines(cell)) for cell in cells if not Path(cell).is_file()):
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == what.__name__:
                return ast.get_source_segment(text, node) or ""
    return ""


def _names_in(source: str) -> list[str]:
    """List all names that a definition reads, in their order."""
    read = [node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    return [name for name in dict.fromkeys(read) if not hasattr(builtins, name)]
