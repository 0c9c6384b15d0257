"""Whether a Python can run workers: which packages distflow needs, and what a pool's own Python lacks."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import distflow
from distflow.config.plugins import LIBRARIES
from distflow.launch.agent.host_facts import PythonFacts

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PYTHON = (3, 11)
WORKER = (
    "torch",
    "transformers",
    "safetensors",
    "pyzmq",
    "msgpack",
    "msgspec",
    "pydantic",
    "psutil",
    "setproctitle",
    "xxhash",
    "blake3",
    "cryptography",
    "zstandard",
    "numpy",
)
"""The dependencies of distflow that a worker imports; the command line needs more."""
BESIDE = ("PyYAML",)
"""… and one that is installed with a package which only the command line needs."""
DISTRIBUTION = "distflow-rl"
WRONG_PATH = "correct the path; in a virtual environment it ends in bin/python"
ROOT = Path(distflow.__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python, other than the host's own, that runs workers."""

    python: str
    """Its path on their host."""
    key: str
    """The key of the recipe that names it first."""
    libraries: tuple[str, ...]
    """Engines, backends and optimizers of its workers that are in LIBRARIES."""

    def question(self) -> dict[str, Any]:
        """Arguments for `ask_python` on the host."""
        modules = [LIBRARIES[name].module for name in self.libraries]
        return {"python": self.python, "packages": [need.name for need in needed()], "modules": modules}

    def judge(self, facts: PythonFacts) -> list[tuple[str, str]]:
        """What is wrong with it, and how to fix each."""
        return list(self._judge(facts))

    def summary(self, facts: PythonFacts) -> str:
        """Versions to show if nothing is wrong with it."""
        modules = "".join(f"; {module}" for module, found in facts.modules.items() if found)
        return f"{self.python}: Python {dotted(facts.version)}, torch {facts.packages['torch']}{modules}"

    def _judge(self, facts: PythonFacts) -> Iterator[tuple[str, str]]:
        if facts.fault:
            yield f"{self.python}: {facts.fault}", self._create() if facts.absent else WRONG_PATH
            return
        if facts.version < PYTHON:
            oldest = dotted(PYTHON)
            text = f"{self.python} is Python {dotted(facts.version)}; expected {oldest} or newer"
            yield text, f"use Python {oldest} or newer"
            return
        if wrong := unsatisfied(needed(), facts.packages):
            text = f"{self.python} lacks packages that workers import: {with_versions(wrong, facts.packages)}"
            yield text, pip_install(self.python, wrong)
        for name in self.libraries:
            module, install = LIBRARIES[name].module, LIBRARIES[name].install
            if not facts.modules[module]:
                text = f"{self.python} lacks {module!r}, which {name.rpartition(':')[2]} needs"
                yield text, install.format(python=shlex.quote(self.python))

    def _create(self) -> str:
        """How to create it, if its path looks like that of a virtual environment."""
        path = Path(self.python)
        if path.parent.name != "bin" or not path.name.startswith("python"):
            return WRONG_PATH
        create = f"python3 -m venv {shlex.quote(str(path.parents[1]))}; {pip_install(self.python, needed())}"
        installs = [LIBRARIES[name].install.format(python=shlex.quote(self.python)) for name in self.libraries]
        return "; then ".join([f"correct the path, or create it: {create}", *installs])


def requirements() -> list[Requirement]:
    """The dependencies of distflow: from the checkout it runs from, else from the installed metadata."""
    from packaging.requirements import Requirement  # most plans do not need it

    project = ROOT / "pyproject.toml"
    if project.is_file():
        texts = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        texts = [text for text in metadata.requires(DISTRIBUTION) or [] if "extra ==" not in text]
    return [Requirement(text) for text in texts]


def needed() -> list[Requirement]:
    """The packages a worker needs, with version ranges."""
    from packaging.requirements import Requirement

    return [*(need for need in requirements() if need.name in WORKER), *map(Requirement, BESIDE)]


def is_installed(package: str) -> bool:
    """Tell whether this Python has a package, in any version."""
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def unsatisfied(needs: Sequence[Requirement], found: Mapping[str, str | None]) -> list[Requirement]:
    """Requirements that are missing (None), or found in an unsuitable version."""
    return [
        need
        for need in needs
        if (version := found[need.name]) is None or not need.specifier.contains(version, prereleases=True)
    ]


def with_versions(needs: Sequence[Requirement], found: Mapping[str, str | None]) -> str:
    """Each requirement with the version found, for messages."""
    return ", ".join(f"{need} (found: {found[need.name] or 'nothing'})" for need in needs)


def pip_install(python: str, needs: Sequence[Requirement]) -> str:
    """The command that installs them."""
    return f"{shlex.quote(python)} -m pip install {' '.join(shlex.quote(str(need)) for need in needs)}"


def dotted(version: Sequence[int]) -> str:
    """A version as text, as in 3.11.7."""
    return ".".join(map(str, version))
