"""Installed packages against what distflow asks for and is tested with; torch and its devices, asked from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import distflow
from distflow.launch.deploy.machine_checks import Finding

DISTRIBUTION = "distflow-rl"
TORCH_S = 2.4
"""An import of torch takes about two seconds; the report is to come within three."""
PROGRAM = """
import json, torch
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"cuda": torch.version.cuda, "devices": names, "threads": torch.get_num_threads()}))
"""
_ROOT = Path(distflow.__file__).parents[1]


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
        return subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=pipe, stderr=pipe, text=True)


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
