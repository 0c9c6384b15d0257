"""What lies beside a plug-in file: which of its imports mean that, and the files that it needs.

An absolute import in a plug-in's folder is looked up in this order; nothing else sees the folder.

    the standard library, installed packages ─▶ the plug-in's folder ─▶ PYTHONPATH and the rest of sys.path
"""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from distflow.errors import PluginError

Import = tuple[int, tuple[str, ...]]
"""An import statement: the number of its dots, and the dotted names in it that may be modules."""


def means_neighbour(folder: Path, top: str) -> bool:
    """Whether `import top` in a plug-in's folder means what lies there."""
    return not installed_at(top) and lies_in(folder, top)


def lies_in(folder: Path, top: str) -> bool:
    """Whether a folder has a module `top`, or a folder of this name with Python files."""
    if (folder / f"{top}.py").is_file():
        return True
    return next((folder / top).glob("*.py"), None) is not None


@functools.cache
def installed_at(top: str) -> str:
    """Where a module of the standard library or of an installed package is; empty if there is none.

    What PYTHONPATH or the current folder provide is not installed, apart from distflow itself.
    """
    if top in sys.stdlib_module_names:
        return "the standard library"
    if top == "distflow":
        return top
    given = {*map(_absolute, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[:1], ""}
    places = [place for place in sys.path if place not in given]
    for finder in sys.meta_path:
        spec = finder.find_spec(top, places, None)
        if spec is not None and spec.loader is not None:
            return spec.origin or "sys.path"
    return ""


def _absolute(place: str) -> str:
    try:
        return os.path.abspath(place)
    except FileNotFoundError:  # the current folder is gone
        return place


def which_one(folder: Path, top: str) -> str:
    """What to do about a neighbour with the name of an installed module."""
    return (
        f"`import {top}` means that of {installed_at(top)}, not the one in {folder}, which would be "
        f"`from . import {top}` or `from .{top} import …`"
    )


def neighbours(file: Path) -> dict[str, Path]:
    """Files in a plug-in's folder and below that it imports, and so on from these; by their path from the folder.

    They are found in the source: import statements, wherever they stand. Raises PluginError for one that is no Python.
    """
    file = file.resolve()
    found: dict[str, Path] = {}
    waiting = [file]
    while waiting:
        one = waiting.pop()
        for level, names in _imports_of(one):
            for path in _files(file.parent, one, level, names):
                name = path.relative_to(file.parent).as_posix()
                if path != file and name not in found:
                    found[name] = path
                    waiting.append(path)
    return dict(sorted(found.items()))


def mistakable(file: Path) -> Iterator[str]:
    """A sentence for each neighbour that an import seems to mean, while an installed module has its name."""
    file = file.resolve()
    told = {file.stem}
    for one in (file, *neighbours(file).values()):
        for level, names in _imports_of(one):
            top = names[0].partition(".")[0]
            if not level and top not in told and (file.parent / f"{top}.py").is_file() and installed_at(top):
                told.add(top)
                yield f"{one}: {which_one(file.parent, top)}"


def _imports_of(file: Path) -> tuple[Import, ...]:
    stat = file.stat()
    return _read_imports(file, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=256)
def _read_imports(file: Path, changed_ns: int, size: int) -> tuple[Import, ...]:
    """The imports of a file; its time and size are part of the cache's key."""
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        raise PluginError(f"{file}:{error.lineno}: {error.msg}") from error
    except ValueError as error:
        raise PluginError(f"{file}: {error}") from error
    found: list[Import] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(0, (alias.name,)) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            inside = [f"{module}.{alias.name}".removeprefix(".") for alias in node.names]
            found.append((node.level, (module, *inside)))
    return tuple(found)


def _files(folder: Path, importer: Path, level: int, names: Iterable[str]) -> Iterator[Path]:
    """The files of a plug-in's folder that an import statement runs."""
    start = importer.parents[level - 1] if level else folder
    for name in names if start.is_relative_to(folder) else ():
        parts = name.split(".") if name else []
        if level or means_neighbour(folder, parts[0]):
            for depth in range(len(parts) + 1):
                yield from _file_of(folder, start.joinpath(*parts[:depth]))


def _file_of(folder: Path, module: Path) -> Iterator[Path]:
    """The file of a module below a folder, whose own `__init__.py` is not run; none for names in a module."""
    for path in (module / "__init__.py", module.with_name(f"{module.name}.py")):
        if module != folder and path.is_file():
            yield path
            return
