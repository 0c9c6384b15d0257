"""Executes a worker by another Python (`layout.pools.NAME.python`), with this very code, installed there or not.

A folder that contains only a link to our package goes first on PYTHONPATH. The package's own parent folder would not
do: where distflow is installed, it contains all packages of that environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import distflow
from distflow.launch.run.record import HOSTS

OF_ANOTHER = ("PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables that would make the Python use the libraries of the current environment."""


def code_folder(run_dir: Path, host: int = 0) -> Path:
    """The folder in which Python finds our package and nothing else, one per host of a run; created if missing."""
    folder = run_dir / HOSTS / f"{host}.code"
    folder.mkdir(parents=True, exist_ok=True)
    link, package = folder / "distflow", Path(distflow.__file__).resolve().parent
    if not (link.is_symlink() and link.readlink() == package):
        draft = folder / f".{os.getpid()}"
        draft.unlink(missing_ok=True)
        draft.symlink_to(package)
        draft.replace(link)
    return folder


def environment_of(python: str, given: Mapping[str, str], code: Path | None = None) -> dict[str, str]:
    """The variables for a process of `python`, with its virtual environment activated; `code`: from `code_folder`."""
    found = {name: value for name, value in given.items() if name not in OF_ANOTHER}
    if code is not None:
        before = [path for name, path in given.items() if name == "PYTHONPATH" and path]
        found["PYTHONPATH"] = os.pathsep.join([str(code), *before])
    folder = Path(python).parent
    if (folder.parent / "pyvenv.cfg").is_file():
        found["VIRTUAL_ENV"] = str(folder.parent)
        # Packages install compilers and build tools beside the Python.
        found["PATH"] = os.pathsep.join([str(folder), *([given["PATH"]] if "PATH" in given else [])])
    return found


def become(
    python: str, arguments: Sequence[str], environment: Callable[[], Mapping[str, str]], failed: Callable[[str], int]
) -> NoReturn:
    """Replace this process by `python` with these arguments; if that fails, exit with the code of `failed(reason)`."""
    code = 1
    try:
        os.execve(python, [python, *arguments], environment())
    except OSError as error:
        code = failed(f"{python}: {error.strerror}")
    finally:
        os._exit(code)
