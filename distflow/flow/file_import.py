"""Imports plug-in files, so that they can import what lies beside them, as with `python file.py`.

The folder of a plug-in file is a package of its own, whose name follows from its path. So relative imports work, and
the `helpers.py` of two folders are two modules. `neighbours` says which absolute imports mean them.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
)
from pathlib import Path
from types import ModuleType

from distflow.errors import PluginError
from distflow.flow.neighbours import installed_at, lies_in, means_neighbour, which_one
from distflow.flow.user_frames import frames_of

_PREFIX = "distflow_plugin_"
_IMPORTING = ContextVar("importing", default="")


def import_file(path: Path, call: str) -> ModuleType:
    """Import a plug-in file, once per process; raises PluginError, with the user's frames if they tell more."""
    path = path.resolve()
    if not path.is_file():
        raise PluginError(f"{call}: there is no file {path}")
    package = _package(path.parent)
    # With a dot it would be a module of another package.
    name = f"{package}.{path.stem.replace('.', '_')}"
    _FINDER.files[name] = path
    try:
        with importing(str(path)):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # of the user's code, reported as it is
        raise PluginError(f"{call}: importing {path} raised {_told(error, package, path)}") from error


@contextmanager
def importing(what: str) -> Iterator[None]:
    """Have `plugin_being_imported` tell of a plug-in's file or module meanwhile."""
    before = _IMPORTING.set(what)
    try:
        yield
    finally:
        _IMPORTING.reset(before)


def plugin_being_imported() -> str:
    """The file or module that this thread imports as a plug-in; empty if there is none."""
    return _IMPORTING.get()


def scope_in(folder: Path) -> dict[str, object]:
    """What the globals of code must hold for its imports to find what lies in `folder`."""
    package = _package(folder.resolve())
    importing = functools.partial(_import, package, folder.resolve())
    return {"__package__": package, "__builtins__": {**vars(builtins), "__import__": importing}}


def _package(folder: Path) -> str:
    """The package of a folder. Its own `__init__.py`, if it has one, is not run."""
    name = _PREFIX + hashlib.blake2b(str(folder).encode(), digest_size=6).hexdigest()
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        package.__spec__ = ModuleSpec(name, None, is_package=True)
        sys.modules.setdefault(name, package)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    return name


def _import(
    package: str,
    folder: Path,
    name: str,
    scope: Mapping[str, object] | None = None,
    local: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """What the statement `import` does in the files of a folder."""
    top = name.partition(".")[0]
    try:
        if level or not means_neighbour(folder, top):
            return builtins.__import__(name, scope, local, fromlist or (), level)
        whole = f"{package}.{name}"
        if fromlist:
            return builtins.__import__(whole, scope, local, fromlist, 0)
        importlib.import_module(whole)
        return sys.modules[f"{package}.{top}"]
    except ModuleNotFoundError as error:
        beside = (error.name or "").startswith(f"{package}.")
        missing = beside or (error.name == name and not lies_in(folder, top))
        if error.name is None or not missing or "No module named" not in str(error):
            raise
        raise _not_found(folder, error.name.removeprefix(f"{package}."), relative=beside) from None


def _not_found(folder: Path, name: str, *, relative: bool) -> ModuleNotFoundError:
    place = folder.joinpath(*name.split(".")[:-1])
    also = "" if relative else "it is not installed, and "
    return ModuleNotFoundError(f"no module {name!r}: {also}there is no {name.split('.')[-1]}.py in {place}", name=name)


class _Finder(MetaPathFinder):
    """Finds the modules of plug-ins' folders."""

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}
        """The plug-in files themselves, by the name of their module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PREFIX) or path is None:
            return None
        if fullname in self.files:
            file = str(self.files[fullname])
            return importlib.util.spec_from_file_location(fullname, file, loader=_Loader(fullname, file))
        # New ones each time: they remember what was in the folder.
        loaders = ((_Loader, SOURCE_SUFFIXES), (ExtensionFileLoader, EXTENSION_SUFFIXES))
        found = (FileFinder(folder, *loaders).find_spec(fullname) for folder in path)
        return next((spec for spec in found if spec is not None), None)


class _Loader(SourceFileLoader):
    """Runs a file so that its imports find what lies in the plug-in's folder."""

    def exec_module(self, module: ModuleType) -> None:
        root = sys.modules[module.__name__.partition(".")[0]]
        vars(module)["__builtins__"] = scope_in(Path(root.__path__[0]))["__builtins__"]
        super().exec_module(module)


_FINDER = _Finder()


def _told(error: BaseException, package: str, path: Path) -> str:
    """The error, a hint if it is about a neighbour, and the user's frames."""
    # No user has given this name.
    text = str(error).replace(f"{package}.", "").replace(f"{package!r} (unknown location)", str(path.parent))
    frames = "".join(traceback.format_list(frames_of(error)))
    lines = f"{type(error).__name__}: {text}{_hint(error, path.parent)}", frames.rstrip()
    return "\n".join(line for line in lines if line)


def _hint(error: BaseException, folder: Path) -> str:
    if "beyond top-level package" in str(error):
        return f" — the imports of a plug-in reach {folder} and what is below it"
    top = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    hidden = top and (folder / f"{top}.py").is_file() and installed_at(top)
    return f" — {which_one(folder, top)}" if hidden else ""
