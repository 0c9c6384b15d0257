"""A recipe made of what a script or a notebook has in hand: a model, rows, and a reward function.

Workers are other processes, so a function goes to them by its source: the file of its module or script, or, where an
import does not give it, a file with the statements that make it and those of what it names. Nothing is pickled.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import json
import linecache
import os
import re
import shutil
import symtable
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import walk_stack
from types import FrameType, ModuleType, NoneType
from typing import Any

from distflow.config.conversion import fitting_ledgers
from distflow.config.paths import absolute_paths, recipes_folder
from distflow.config.yamlfile import yaml_text
from distflow.errors import PluginError, RecipeError, UserError
from distflow.flow.resolve import find_named
from distflow.flow.statements import (
    Definition,
    blocks,
    imported_statements,
    is_main_guard,
    names_changed,
    names_given,
    root_of,
)

FLOW, LAYOUT, STEPS = "grpo", "colocated", 100
BATCH = {"prompts": 8, "samples_per_prompt": 8}
"""What is taken where nothing is said."""
CELLS, ROWS, RECIPE = "functions.py", "rows.jsonl", "recipe.yaml"
"""The files that are written."""
_COMPREHENSIONS = ("listcomp", "setcomp", "dictcomp", "genexpr")


def write_recipe(
    folder: Path,
    *,
    model: str,
    data: str | Iterable[Mapping[str, Any]],
    reward: object,
    flow: str | None,
    settings: Mapping[str, Any],
    caller: FrameType | None = None,
) -> Path:
    """Write a recipe, and the rows and functions that have no file yet, into a folder; returns its path.

    `reward`: a function; the name of a shipped one or a place such as `./file.py:name`; several, as a list or by name,
    by name also as a recipe has them: `{NAME: {"function": …, "weight": …}}`.
    `settings`: sections of the recipe, as mappings. Relative files are of the current folder. `caller`: what launches.
    Raises UserError.
    """
    functions = Functions(folder / CELLS, caller)
    defaults: list[object] = [{"flow": flow or FLOW}, {"layout": LAYOUT}]
    source = data if isinstance(data, str) else str(folder / ROWS)
    sections: dict[str, Any] = {"run": {"training_steps": STEPS}, "batch": {**BATCH}, "data": {"source": source}}
    if model in {path.stem for path in (recipes_folder() / "model").glob("*.yaml")}:
        defaults.append({"model@models.policy": model})
    else:
        sections["models"] = {"policy": {"path": model}}
    if reward is not None:
        function = _rewards(reward, functions, functions.written.argument("reward"))
        sections["flow"] = {"steps": {"reward": {"with": {"function": function}}}}
    if not isinstance(data, str):
        (folder / ROWS).write_text("".join(_lines(data)), encoding="utf-8")
    functions.write()
    # As on a command line, where what is relative is so to the current folder.
    plain = {key: _plain(value, key) for key, value in _merged(sections, settings).items()}
    script = functions.written.file
    _complete(plain, Path(model).name if script is None else Path(script).stem)
    values = absolute_paths(plain, lambda key: Path.cwd(), Path.cwd())
    text = yaml_text({"defaults": [*defaults, "_self_"], **values})
    (folder / RECIPE).write_text(text, encoding="utf-8")
    return folder / RECIPE


def _complete(plain: dict[str, Any], name: str) -> None:
    """Add what is not set: the run's name, and ledgers that divide the prompts. What is wrong is left to be told."""
    if isinstance(plain["run"], dict):
        plain["run"].setdefault("name", re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-")[:64] or "run")
    if isinstance(batch := plain["batch"], dict):
        prompts, parts = batch.get("prompts"), batch.get("minibatches", 1)
        if isinstance(prompts, int) and isinstance(parts, int) and prompts >= parts > 0:
            batch.setdefault("ledgers", fitting_ledgers(prompts, parts))


@contextmanager
def new_folder(within: Path) -> Iterator[Path]:
    """Make a folder for a recipe, and remove it where a launch is refused; raises UserError where none can be made."""
    made = [folder for folder in (within, *within.parents) if not folder.exists()]
    try:
        within.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="recipe-", dir=within)).resolve()
    except OSError as error:
        raise UserError(f"{within}: {error.strerror or error} — give a runs_dir that can be written") from error
    try:
        yield folder
    except UserError as error:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # another launch has a folder there
            for one in made:
                one.rmdir()
        if isinstance(error, RecipeError):  # it names lines of a file that is gone
            rows = rf"\S*{folder.name}/{ROWS}(?::1(?=\D))?"  # what is checked of them is the first
            found = [
                replace(
                    one,
                    where="launch" if folder.name in one.where else one.where,
                    message=re.sub(rows, lambda match: "row 0 of data" if ":" in match[0] else "data", one.message),
                )
                for one in error.problems
            ]
            raise RecipeError(found) from None
        if type(error) is UserError and folder.name in str(error):
            raise UserError(re.sub(rf"\S*{folder.name}/{RECIPE}:\d+", "launch", str(error))) from None
        raise


def other_files(folder: Path, before: Path) -> list[str]:
    """Say which rows and functions two calls have written that differ; what is missing in either is not told."""
    kinds = {ROWS: "the rows are others", CELLS: "functions are others"}
    both = [name for name in kinds if (folder / name).is_file() and (before / name).is_file()]
    return [kinds[name] for name in both if (folder / name).read_bytes() != (before / name).read_bytes()]


def _lines(rows: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(f"data: row {number} is {type(row).__name__}; expected a mapping, such as {{'prompt': …}}")
        try:
            yield json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise UserError(f"data: row {number} cannot be written as JSON: {error}") from error


def _plain(value: Any, key: str) -> Any:
    """Return a value as a recipe has it: numbers of numpy and torch as numbers, paths as text; raises UserError."""
    if isinstance(value, Mapping):
        return {str(name): _plain(below, f"{key}.{name}") for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(below, f"{key}.{number}") for number, below in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    with suppress(AttributeError, TypeError, ValueError, RuntimeError):  # of an array with several numbers
        value = value.item()
    if isinstance(value, str | bool | int | float | NoneType):
        return value
    raise UserError(f"launch: {key} is {type(value).__name__}; a recipe has text, numbers, lists and mappings of these")


def _merged(sections: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Put settings over sections, mapping by mapping."""
    for key, value in settings.items():
        below = sections.get(key)
        sections[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return sections


def _rewards(reward: object, functions: Functions, written: ast.expr | None) -> object:
    """Return what stands for these rewards in a recipe. `written`: the expression that makes them."""
    written = functions.written.value_of(written)
    if isinstance(reward, Mapping):
        keys = [one.value if isinstance(one, ast.Constant) else None for one in _keys(written)]
        by_key = dict(zip(keys, written.values, strict=True)) if isinstance(written, ast.Dict) else {}
        return {str(key): _named_reward(one, functions, by_key.get(key)) for key, one in reward.items()}
    if isinstance(reward, list | tuple):
        items = written.elts if isinstance(written, ast.List | ast.Tuple) else []
        exact = len(items) == len(reward) and not any(isinstance(one, ast.Starred) for one in items)
        names = [functions.name_of(one) for one in reward]
        found = {}
        for number, (name, one) in enumerate(zip(names, reward, strict=True)):
            key = name if names.index(name) == number or not _is_object(one) else f"{name}_{number + 1}"
            if key in found:
                raise UserError("reward: several of one name — give them as a mapping, each by a name of its own")
            found[key] = {"function": functions.place_of(one, items[number] if exact else None)}
        return found
    return functions.place_of(reward, written)


def _named_reward(given: object, functions: Functions, written: ast.expr | None) -> dict[Any, Any]:
    """Return one of several rewards by name: a function, or as in a recipe a mapping with it, its weight and settings.

    What is wrong with the weight and the settings is told by whoever reads the recipe.
    """
    if not isinstance(given, Mapping):
        return {"function": functions.place_of(given, written)}
    match functions.written.value_of(written):
        case ast.Dict(keys=keys, values=values):
            by_key = {
                key.value: value for key, value in zip(keys, values, strict=True) if isinstance(key, ast.Constant)
            }
        case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
            by_key = {one.arg: one.value for one in keywords}
        case _:
            by_key = {}
    if "function" not in given:
        return dict(given)
    place = functions.place_of(given["function"], by_key.get("function"))
    return {**given, "function": place}


def _keys(written: ast.expr | None) -> list[ast.expr | None]:
    return written.keys if isinstance(written, ast.Dict) else []


def _is_object(one: object) -> bool:
    """Tell whether this has no name of its own, as a lambda or what a class makes."""
    return callable(one) and not str(getattr(one, "__name__", "")).isidentifier()


class LaunchingCode:
    """What is written where a run is launched: in a script, or in the cells of a notebook."""

    def __init__(self, caller: FrameType | None) -> None:
        main = sys.modules["__main__"]
        outer: Mapping[str, object] = vars(main) if caller is None else caller.f_globals
        inner: Mapping[str, object] = {} if caller is None or caller.f_locals is outer else caller.f_locals
        self.values: Mapping[str, object] = {**outer, **inner}
        """All names that can be read there."""
        self.own: frozenset[str] = frozenset(inner)
        """Those of the function that launches."""
        self.twice: frozenset[str] = frozenset(
            name for name in inner if name in outer and inner[name] is not outer[name]
        )
        """Those that its module knows as something else."""
        self.file = _file_of(main if caller is None else sys.modules.get(str(outer.get("__name__"))))
        place, self._line = (caller.f_code.co_filename, caller.f_lineno) if caller is not None else ("", 0)
        self._tree = _parsed("".join(linecache.getlines(place)))
        self._code = None if caller is None else caller.f_code
        self._running = [frame.f_code for frame, _ in walk_stack(caller)] if caller is not None else []
        texts = [Path(self.file).read_text(encoding="utf-8")] if self.file is not None else _cells(outer)
        self.unknown = not texts and not self._tree.body
        """Nothing that is written there is known: it was typed at Python's prompt, or given by -c."""
        here = ast.dump(self._tree, include_attributes=True)
        self._statements: list[ast.stmt] = []
        self._calling: list[ast.stmt] = []
        """Those of the text that launches."""
        for tree in map(_parsed, texts):
            calls = ast.dump(tree, include_attributes=True) == here
            reached = list(self._reached(tree.body, self._line if calls else 0))
            self._statements += reached
            self._calling += reached if calls else []
        imported = [one for text in texts for one in imported_statements(_parsed(text).body)] if self.file else []
        self._imported = {(one.lineno, one.col_offset) for one in imported}

    def _reached(self, body: Iterable[ast.stmt], line: int) -> Iterator[ast.stmt]:
        """List statements as they are, and those of the blocks around the line that launches."""
        for node in body:
            around = node.lineno <= line <= (node.end_lineno or 0)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and around:
                yield node
                yield from self._reached(node.body, line)
            elif is_main_guard(node) or (around and blocks(node)):
                for block in blocks(node):
                    yield from self._reached(block, line)
            else:
                yield node

    def statements_of(self, name: str) -> list[ast.stmt]:
        """List the statements that made what `name` is, in their order; empty if they are not known."""
        found: list[ast.stmt] = []
        for node in reversed(self._statements):
            given = name in names_given(node)
            if not given and name not in names_changed(node):
                continue
            found.insert(0, node)
            reads = isinstance(node, ast.AugAssign) or name in _names_in(ast.unparse(node))[0]
            if given and not blocks(node) and not reads:
                return found
        return found if any(name in names_given(node) for node in found) else []

    def is_imported(self, name: str) -> bool:
        """Tell whether an import of the file runs all statements that made what `name` is."""
        made = self.statements_of(name)
        return name not in self.own and all((one.lineno, one.col_offset) in self._imported for one in made)

    def calls_left_out(self, name: str, made: Sequence[ast.stmt] = ()) -> list[str]:
        """Write the calls that may have changed what `name` is and that workers do not make, with their lines.

        They are statements of their own, of a method of it or with it as an argument. `made`: the statements that
        make it there; none: an import of the file does.
        """
        behind = self._statements.index(made[-1]) + 1 if made else 0
        found = []
        for statement in self._statements[behind:]:
            for node in imported_statements([statement]):
                value = node.value if isinstance(node, ast.Expr) else None
                call = value.value if isinstance(value, ast.Await) else value
                again = not made and (node.lineno, node.col_offset) in self._imported
                later = statement in self._calling and self._is_later(node)
                if isinstance(call, ast.Call) and self._changes(call, name) and not again and not later:
                    where = f"line {node.lineno}, " if self.file is not None else ""
                    found.append(f"{where}`{textwrap.shorten(ast.unparse(node), 60, placeholder=' …')}`")
        return list(dict.fromkeys(found))

    def _changes(self, call: ast.Call, name: str) -> bool:
        """Tell whether a call may change what `name` is: none under way, of distflow, or of the standard library."""
        given = [*call.args, *(one.value for one in call.keywords)]
        if name in [root_of(one.value if isinstance(one, ast.Starred) else one) for one in given]:
            called = self.values.get(root_of(call.func), getattr(builtins, root_of(call.func), None))
            if called is setattr or called is delattr:
                return True
            home = called.__name__ if isinstance(called, ModuleType) else getattr(called, "__module__", None)
            top = str(home).partition(".")[0]
            known = top in sys.stdlib_module_names or top == "distflow"
            return not known and getattr(called, "__code__", None) not in self._running
        return isinstance(call.func, ast.Attribute) and root_of(call.func) == name

    def _is_later(self, node: ast.stmt) -> bool:
        """Tell whether a statement of the text that launches comes behind the call, or holds it."""
        if self._code is None or node.lineno < self._line:
            return False
        last = max(line or 0 for _, _, line in self._code.co_lines())
        return self._code.co_name == "<module>" or node.lineno <= last

    def argument(self, keyword: str) -> ast.expr | None:
        """Return the expression of an argument of the call that launches; None if it cannot be told."""
        calls = [node for node in ast.walk(self._tree) if isinstance(node, ast.Call)]
        here = [node for node in calls if node.lineno <= self._line <= (node.end_lineno or 0)]
        found = [one.value for node in here for one in node.keywords if one.arg == keyword]
        return found[0] if len(found) == 1 else None

    def value_of(self, written: ast.expr | None) -> ast.expr | None:
        """Return what a name was given, if that is written, and anything else as it is."""
        while isinstance(written, ast.Name):
            match self.statements_of(written.id):
                case [ast.Assign(targets=[ast.Name()], value=value)]:
                    written = value
                case _:
                    return written
        return written


class Functions:
    """Where workers find functions; what they cannot import is gathered in one file."""

    def __init__(self, file: Path, caller: FrameType | None = None) -> None:
        self._file = file
        self.written = LaunchingCode(caller)
        self._parts: dict[str, str] = {}
        """Source by name, what others need first."""
        self._folders: list[str] = []
        """Where modules of the user's lie that are imported."""

    def name_of(self, one: object) -> str:
        """Return the name of a reward: its own, that of its variable, or that of its class."""
        own = str(getattr(one, "__name__", ""))
        if isinstance(one, str) or own.isidentifier():
            return own or str(one)
        named = self._variable(one)
        inner = one.func if isinstance(one, partial) else one
        return named or (self.name_of(inner) if inner is not one else "function" if own else type(one).__name__)

    def place_of(self, function: object, written: ast.expr | None = None) -> str:
        """Return `module:name` or `/path/file.py:name` of a function; a text is one already. Raises UserError.

        `written`: the expression that makes it, where it has no name.
        """
        if isinstance(function, str):
            return _place(function)
        if not callable(function):
            raise UserError(
                f"reward: {function!r} is {type(function).__name__} — give a function, or name it: ./file.py:name"
            )
        name = str(getattr(function, "__qualname__", ""))
        module = sys.modules.get(str(getattr(function, "__module__", "")))
        if (
            module is not None
            and name
            and getattr(module, name, None) is function
            and (place := _import_of(module, name))
        ):
            return place
        if self.written.unknown:
            raise UserError(
                f"reward: {self.name_of(function)} cannot be sent to workers: Python keeps no source of what is "
                "typed at its prompt or given by -c — use a notebook, IPython or a script, or put the function into a "
                "file and name it: ./file.py:name"
            )
        variable = self._variable(function)
        file = self.written.file
        if variable and file is not None and self.written.is_imported(variable) and _is_defined(file, variable):
            _note_left_out(variable, function, self.written.calls_left_out(variable))
            return f"{file}:{variable}"
        if variable:
            self._gather(variable, function)
            return f"{self._file}:{variable}"
        if written is None or isinstance(written, ast.Name | ast.Starred):
            raise UserError(
                f"reward: {function!r} has no name by which workers could import it, and what makes it is not written "
                "in the call — name it at the top of the script or of a cell, such as `mine = …`, then `reward=mine`"
            )
        variable = self._free(self.name_of(function))
        self._add(variable, f"{variable} = {ast.unparse(written)}")
        return f"{self._file}:{variable}"

    def write(self) -> None:
        """Write what was gathered."""
        if self._parts:
            head = (
                '"""Functions of a script or notebook, and what they name."""\n\nfrom __future__ import annotations\n\n'
            )
            if self._folders:
                head += f"import sys as _sys\n\n_sys.path.extend({self._folders!r})\n\n"
            text = "\n\n".join(part for part in self._parts.values() if part)
            self._file.write_text(f"{head}{text}\n", encoding="utf-8")

    def _variable(self, what: object) -> str:
        """Return the name of a variable that is this very object; empty if there is none whose source is known."""
        own = str(getattr(what, "__name__", ""))
        names = [name for name, value in self.written.values.items() if value is what and not name.startswith("_")]
        names.sort(key=lambda name: name != own)
        return next((name for name in names if name == own or self.written.statements_of(name)), "")

    def _free(self, name: str) -> str:
        taken = {*self._parts, *self.written.values}
        numbers = (f"{name}_{number}" for number in itertools.count(1))
        return next(one for one in itertools.chain([f"{name}_made"], numbers) if one not in taken)

    def _gather(self, name: str, what: object) -> None:
        """Note the source of what is called `name`, behind that of all that it names."""
        if name in self._parts:
            return
        if name in self.written.twice:
            raise UserError(
                f"reward: {name} is one thing in the function that launches and another in its module — rename one"
            )
        imported = _imported(name, what)
        if imported:
            self._note_folder(what)
            self._parts[name] = imported
            return
        if literal := _literal(what):
            self._parts[name] = f"{name} = {literal}"
            return
        chain = self.written.statements_of(name)
        self._add(name, _source_of(name, what, chain))
        if chain:
            _note_left_out(name, what, self.written.calls_left_out(name, chain))
        for other in {given for node in chain for given in names_given(node)}:
            if other not in self._parts and self.written.statements_of(other) == chain:
                self._parts[other] = ""

    def _add(self, name: str, source: str) -> None:
        """Note a source: what it reads at once before it, what it reads when it is called behind it."""
        now, later = _names_in(source)
        self._parts[name] = ""  # what names itself, or one that names it, ends here
        known = self.written.values
        for used in now:
            if used in known and used != name:
                self._gather(used, known[used])
        del self._parts[name]
        self._parts[name] = source
        for used in later:
            if used in known and used != name:
                self._gather(used, known[used])

    def _note_folder(self, what: object) -> None:
        """Note the folder of a script or notebook if an import finds a module there."""
        module = what if isinstance(what, ModuleType) else sys.modules.get(str(getattr(what, "__module__", "")))
        file = _file_of(module)
        folder = Path(self.written.file).parent if self.written.file is not None else Path.cwd()
        below = file is not None and Path(file).is_relative_to(folder) and not Path(file).is_relative_to(sys.prefix)
        if below and str(folder) not in self._folders:
            self._folders.append(str(folder))


def _note_left_out(name: str, what: object, calls: Sequence[str]) -> None:
    """Say which calls workers do not make of what may have changed an object; functions and classes seldom do."""
    if calls and not (inspect.isroutine(what) or isinstance(what, type | partial)):
        print(
            f"note: {name} is made anew in each worker, without {', '.join(calls)} — where that changes it, do it in "
            f"the function or class that makes {name}",
            file=sys.stderr,
        )


def _place(text: str) -> str:
    path, colon, name = text.rpartition(":")
    return f"{Path(path).expanduser().resolve()}:{name}" if colon and path.endswith(".py") else text


def _file_of(module: ModuleType | None) -> str | None:
    """Find the file of a module; None for the cells of a notebook, and for what is typed."""
    file = getattr(module, "__file__", None)
    return str(Path(file).resolve()) if file is not None and Path(file).is_file() else None


def _import_of(module: ModuleType, name: str) -> str:
    """Return how workers import a name of a module; empty if an import of its file does not give it."""
    file = _file_of(module)
    if file is None:
        return ""
    if module.__package__ or Path(file).name == "__init__.py":
        own = module.__spec__.name if module.__spec__ is not None else module.__name__
        return f"{own}:{name}" if not file.endswith(".py") or _is_defined(file, name) or own != "__main__" else ""
    return f"{file}:{name}" if _is_defined(file, name) else ""


def _is_defined(file: str, name: str) -> bool:
    try:
        find_named(f"{file}:{name}")
    except PluginError:
        return False
    return True


def _imported(name: str, what: object) -> str:
    """Write the statement that imports what comes from a module; empty for what the cells themselves define."""
    if isinstance(what, ModuleType):
        return f"import {what.__name__} as {name}"
    module, own = getattr(what, "__module__", None), str(getattr(what, "__qualname__", ""))
    if module in (None, "__main__") or not own.isidentifier():
        return ""
    found = getattr(sys.modules.get(str(module)), own, None)
    return f"from {module} import {own} as {name}" if found is what else ""


def _literal(what: object) -> str:
    """Write a plain value; empty for anything else."""
    if isinstance(what, set) and what and all(isinstance(one, str) for one in what):
        return f"{{{', '.join(sorted(map(repr, what)))}}}"  # in an order that is that of the next process, too
    text = repr(what) if isinstance(what, int | float | str | bytes | list | tuple | dict | set | NoneType) else ""
    try:
        return text if text and ast.literal_eval(text) == what else ""
    except (ValueError, SyntaxError):
        return ""


def _source_of(name: str, what: Any, chain: Sequence[ast.stmt]) -> str:
    """Return the source of a definition, or the statements that made it; raises UserError."""
    if chain and not (inspect.isfunction(what) and what.__name__ == name and isinstance(chain[-1], Definition)):
        return "\n".join(map(ast.unparse, chain))
    try:
        return textwrap.dedent(inspect.getsource(what)).strip()
    except (OSError, TypeError):
        if chain:
            return "\n".join(map(ast.unparse, chain))
        raise UserError(
            f"reward: it uses {name}, {type(what).__name__}, which cannot be sent to workers by its source: no "
            "statement of the script or the cells makes it — make it within the function, or put the function into a "
            "file and name it: ./file.py:name"
        ) from None


def _cells(scope: Mapping[str, object]) -> list[str]:
    """List the cells of a notebook, as they were run: those of its history behind those that are known besides."""
    kept = [entry for place, entry in linecache.cache.items() if len(entry) == 4 and not Path(place).is_file()]
    history = scope.get("In")
    return [*("".join(entry[2]) for entry in kept), *(map(str, history) if isinstance(history, list) else ())]


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module([], [])


def _names_in(source: str) -> tuple[list[str], list[str]]:
    """List the names of the module that a source reads: as it runs, and once it is called."""
    now: dict[str, None] = {}
    later: dict[str, None] = {}

    def read(table: symtable.SymbolTable, into: dict[str, None]) -> None:
        for one in table.get_symbols():
            if one.is_referenced() and (one.is_global() or table.get_type() == "module"):
                into[one.get_name()] = None
        for child in table.get_children():
            at_once = child.get_type() == "class" or child.get_name() in _COMPREHENSIONS
            read(child, into if at_once else later)

    try:
        read(symtable.symtable(source, "<source>", "exec"), now)
    except SyntaxError:  # of a cell that awaits
        return [], []
    return _without_builtins(now), _without_builtins(later)


def _without_builtins(names: Iterable[str]) -> list[str]:
    return [name for name in names if not hasattr(builtins, name)]
