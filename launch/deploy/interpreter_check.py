"""Whether a pool's own Python can execute its workers: asked on their host before anything is started there.

The Python is asked in a process of its own, by a program that any version of it understands and that imports nothing
heavy; what it says is judged here.

Our own Python's packages are compared with what distflow asks for and is tested with here too, and torch's devices are
asked of a process of their own.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import distflow
from distflow.config.plugins import LIBRARIES
from distflow.errors import Problem
from distflow.flow.plan import Plan, WorkerPlan
from distflow.launch.agent.remote_helper import ask_python
from distflow.launch.deploy.machine_checks import PYTHON, Finding

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
DISTRIBUTION = "distflow-rl"
TORCH_S = 2.4
"""An import of torch takes about two seconds; the report is to come within three."""
TORCH_PROGRAM = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"cuda": torch.version.cuda, "devices": names, "threads": torch.get_num_threads()}))
"""
_ROOT = Path(distflow.__file__).parents[1]


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


def requirements() -> list[Requirement]:
    """What distflow asks for, by the checkout it runs from or else by what was installed."""
    project = _ROOT / "pyproject.toml"
    if project.is_file():
        texts = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        texts = [text for text in metadata.requires(DISTRIBUTION) or [] if "extra ==" not in text]
    return [Requirement(text) for text in texts]


def check_packages(needed: list[Requirement], pins: dict[str, str]) -> Iterator[Finding]:
    """One line for what is missing or too old, one for what differs from the tested versions; or that all is well."""
    found = {need.name: _version(need.name) for need in needed}
    wrong = [need for need in needed if not satisfied(need, found[need.name])]
    if wrong:
        have = ", ".join(f"{need} (found: {found[need.name] or 'nothing'})" for need in wrong)
        cure = f"{sys.executable} -m pip install {' '.join(repr(str(need)) for need in wrong)}"
        yield Finding("packages", "FAIL", f"needed: {have}", cure)
        return
    yield Finding("packages", "OK", f"all {len(needed)} that are needed")
    other = [
        f"{name} {version} (tested: {pins[name]})"
        for name, version in found.items()
        if name in pins and version is not None and version.partition("+")[0] != pins[name]
    ]
    if other:
        cure = "nothing, unless something fails; `make venv` installs the tested versions"
        yield Finding("versions", "WARN", ", ".join(other), cure)


def pinned_versions() -> dict[str, str]:
    """Pins by package: for machines with a GPU where there is one, else for those without; empty if installed alone."""
    kind = "cuda" if has_gpu() else "cpu"
    path = _ROOT / "requirements" / f"constraints-{kind}.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def has_gpu() -> bool:
    """Whether the driver shows a GPU."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


class TorchProbe:
    """Asks torch in a process of its own, which is started at once and waited for at the end."""

    def __init__(self) -> None:
        self._version = _version("torch")
        self._deadline = time.monotonic() + TORCH_S
        self._process = self._start() if self._version is not None else None

    def finding(self) -> Finding:
        """What it said; a process that has said nothing in time is ended."""
        if self._process is None:
            return Finding("torch", "FAIL", "not installed", "see requirements/ for the build to install")
        try:
            out, err = self._process.communicate(timeout=max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            text = f"{self._version}; it was not imported within {TORCH_S:g} s"
            return Finding("torch", "WARN", text, "a busy machine or a slow disk: try again")
        if self._process.returncode != 0:
            last = (err.strip().splitlines() or ["no message"])[-1]
            return Finding("torch", "FAIL", f"{self._version} cannot be imported: {last}", "install it anew")
        return _torch_line(str(self._version), json.loads(out))

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", TORCH_PROGRAM], stdout=pipe, stderr=pipe, text=True)


def _torch_line(version: str, told: dict[str, object]) -> Finding:
    devices = told["devices"]
    assert isinstance(devices, list), "the program above prints a list"
    build = f"CUDA {told['cuda']}" if told["cuda"] else "CPU build"
    text = f"{version} ({build}), {', '.join(devices) or 'no GPU'}, {told['threads']} threads by default"
    if has_gpu() and not devices:
        return Finding("torch", "WARN", text, "a GPU is there: install the build of requirements/constraints-cuda.txt")
    return Finding("torch", "OK", text)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def satisfied(need: Requirement, version: str | None) -> bool:
    """Whether this version (None: none at all) will do."""
    return version is not None and need.specifier.contains(version, prereleases=True)
