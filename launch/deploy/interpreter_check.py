"""Whether a pool's own Python can execute its workers: asked on their host before anything is started there.

The Python is asked in a process of its own, by a program that any version of it understands and that imports nothing
heavy; what it says is judged here.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from distflow.config.plugins import LIBRARIES
from distflow.errors import Problem
from distflow.flow.plan import Plan, WorkerPlan
from distflow.launch.agent.remote_helper import ask_python
from distflow.launch.deploy.machine_checks import PYTHON, Finding
from distflow.launch.deploy.packages import requirements, satisfied

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
    "numpy",
)
"""What a worker imports of all that distflow asks for; the command line needs more."""
BESIDE = (Requirement("PyYAML"),)
"""… and what comes with a package that only the command line needs."""
WRONG = "correct the path; in a virtual environment it ends in bin/python"
PROGRAM = """
import json, sys
asked = json.loads(sys.argv[1])
told = {"version": list(sys.version_info[:3]), "packages": {}, "modules": {}}
if sys.version_info >= (3, 8):
    from importlib import metadata, util
    for name in asked["packages"]:
        try:
            told["packages"][name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            told["packages"][name] = None
    for name in asked["modules"]:
        found = util.find_spec(name)
        told["modules"][name] = found is not None and found.origin is not None
print(json.dumps(told))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that workers are executed by."""

    python: str
    """Its path on their host."""
    key: str
    """The key of the recipe that names it first."""
    libraries: tuple[str, ...]
    """Engines and backends of its workers, of those in LIBRARIES."""

    def question(self) -> dict[str, str]:
        """What `ask_python` is to be asked on the host."""
        modules = [LIBRARIES[name][0] for name in self.libraries]
        asked = {"packages": [need.name for need in needed()], "modules": modules}
        return {"python": self.python, "program": PROGRAM, "argument": json.dumps(asked)}

    def judge(self, answer: Mapping[str, Any]) -> list[tuple[str, str]]:
        """What is wrong with it, by the answer, each with its cure."""
        return list(self._judge(answer))

    def _judge(self, answer: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        if "fault" in answer:
            yield f"{self.python}: {answer['fault']}", self._make() if "absent" in answer else WRONG
            return
        version = tuple(answer["version"])
        if version < PYTHON:
            expected = ".".join(map(str, PYTHON))
            given = ".".join(map(str, version))
            yield f"{self.python} is Python {given}; expected {expected} or newer", f"use Python {expected} or newer"
            return
        found = answer["packages"]
        wrong = [need for need in needed() if not satisfied(need, found[need.name])]
        if wrong:
            have = ", ".join(f"{need} (found: {found[need.name] or 'nothing'})" for need in wrong)
            yield f"{self.python} lacks what workers import: {have}", _pip(self.python, wrong)
        for name in self.libraries:
            module, cure = LIBRARIES[name]
            if not answer["modules"][module]:
                what = f"{self.python} lacks {module!r}, which {name.rpartition(':')[2]} needs"
                yield what, cure.format(python=shlex.quote(self.python))

    def _make(self) -> str:
        path = Path(self.python)
        folder = path.parent
        if folder.name != "bin" or not path.name.startswith("python"):
            return WRONG
        cures = [LIBRARIES[name][1].format(python=shlex.quote(self.python)) for name in self.libraries]
        make = f"python3 -m venv {shlex.quote(str(folder.parent))}; {_pip(self.python, needed())}"
        return "; then ".join([f"correct the path, or make it: {make}", *cures])


def interpreters(plan: Plan, names: Collection[str] | None = None) -> list[Interpreter]:
    """Pythons that the recipe names for these workers (None: for all of them)."""
    found: dict[str, list[WorkerPlan]] = {}
    for worker in plan.workers:
        if worker.python is not None and (names is None or str(worker.name) in names):
            found.setdefault(worker.python, []).append(worker)
    return [Interpreter(python, _key(plan, workers[0]), _libraries(workers)) for python, workers in found.items()]


def problems_here(plan: Plan, where: Callable[[str], str]) -> list[Problem]:
    """Everything wrong with the Pythons of a plan whose workers all run on this machine."""
    return [
        Problem(where(one.key), one.key, message, cure)
        for one in interpreters(plan)
        for message, cure in one.judge(ask_python(**one.question()))
    ]


def check_interpreter(python: str) -> Iterator[Finding]:
    """For `distflow doctor`: whether workers could be executed by this Python, and with which engines."""
    question = Interpreter(python, "", tuple(LIBRARIES)).question()
    answer = ask_python(**question)
    wrong = Interpreter(python, "", ()).judge(answer)
    yield from (Finding("python:", "FAIL", message, cure) for message, cure in wrong)
    if not wrong:
        there = [module for module, found in answer["modules"].items() if found]
        version = ".".join(map(str, answer["version"]))
        also = f"; {', '.join(there)}" if there else ""
        yield Finding("python:", "OK", f"{python}: Python {version}, torch {answer['packages']['torch']}{also}")


def needed() -> list[Requirement]:
    """The packages of a worker, with the versions that distflow asks for."""
    return [*(need for need in requirements() if need.name in WORKER), *BESIDE]


def _libraries(workers: Sequence[WorkerPlan]) -> tuple[str, ...]:
    named = (name for worker in workers for name in (worker.engine, worker.backend) if name is not None)
    return tuple(dict.fromkeys(name for name in named if name in LIBRARIES))


def _key(plan: Plan, worker: WorkerPlan) -> str:
    key, index = f"layout.pools.{worker.name.pool}", str(worker.name.index)
    each = plan.recipe.layout.pools[worker.name.pool].each
    own = index in each and each[index].python is not None
    return f"{key}.each.{index}.python" if own else f"{key}.python"


def _pip(python: str, needs: list[Requirement]) -> str:
    return f"{shlex.quote(python)} -m pip install {' '.join(shlex.quote(str(need)) for need in needs)}"
