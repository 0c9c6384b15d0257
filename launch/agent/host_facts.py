"""What a host is like: what the preflight, a launch on this machine, `plan` and `doctor` know of it.

`describe` looks at the host that it runs on. On other hosts it runs before distflow is known to be there: this file is
sent to them with remote_helper.py. So it uses the standard library alone, and runs on Python 3.8 too, to report that
it is too old. Example of what `describe` returns and `HostFacts` holds: {"run_dir": "/runs/x", "memory": {"free":
8589934592, "total": 17179869184}, "gpus": [{"name": "NVIDIA H100 80GB HBM3", "memory": 85520809984}], …}.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import Any

BESIDE = ("launch", "recipes", "workers")  # beside `distflow/` in a checkout, in it where it is installed
SHIPPED = (".py", ".yaml", ".json")
CGROUP = Path("/sys/fs/cgroup")
SHM = Path("/dev/shm")
VISIBLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_SMI_S = 10.0
PYTHON_S = 60.0  # for a Python to start from a cold disk and look for packages
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
"""Executed by other Pythons: any version understands it."""


@dataclass(frozen=True)
class PythonFacts:
    """A Python of a host: its version, and what it has of the packages and modules that were asked for."""

    version: tuple[int, ...] = ()
    packages: Mapping[str, str | None] = field(default_factory=dict)
    """Versions; None: not installed."""
    modules: Mapping[str, bool] = field(default_factory=dict)
    fault: str = ""
    """Why nothing is known of it."""
    absent: bool = False
    """There is no such file."""


@dataclass(frozen=True)
class CodeFacts:
    """The Python that executes the agent of a host, and the distflow that it imports, if any."""

    executable: str
    python: PythonFacts
    distflow: str | None
    digest: str | None
    package: str | None
    """Folder of the package."""


@dataclass(frozen=True)
class Space:
    """Bytes of memory or of a file system."""

    free: int
    total: int


@dataclass(frozen=True)
class Gpu:
    """A GPU that processes may use."""

    name: str
    memory: int
    """Bytes; 0: unknown."""


@dataclass(frozen=True)
class HostFacts:
    """A host, as far as a run in `run_dir` is concerned."""

    run_dir: str
    code: CodeFacts
    pythons: tuple[PythonFacts, ...]
    """In the order in which they were asked for."""
    memory: Space
    """Of the machine, or of its container if that has less."""
    disk: Space
    """Of the file system of the run folder."""
    shm: Space
    gpus: tuple[Gpu, ...]
    hidden_gpus: int
    """Further ones that processes may not use."""
    ssh_address: str | None
    """Its address, as the head reached it."""
    same_folder: bool
    """The run folder is the head's, on a shared file system."""
    taken: bool
    """Something exists at the run folder's path."""
    unwritable: str | None
    """Why the run folder cannot be created or written."""
    missing: tuple[str, ...]
    """Paths that were asked for and do not exist."""
    checkpoints: int = 0
    """Bytes of the checkpoints in the run folder."""
    clock_offset: float = 0.0
    """Seconds that its clock is ahead of the head's."""
    abandoned: tuple[str, ...] = ()
    """Files of runs in shared memory that no process seen here uses."""


def code_files(package: Path) -> Iterator[tuple[str, Path]]:
    """Files of the package in folder `package`, sorted, by the name that they have where it is installed."""
    roots = [("", package)]
    if (package.parent / "setup.cfg").is_file() and (package.parent / "workers").is_dir():
        roots += [(f"{name}/", package.parent / name) for name in BESIDE]
    found = [
        (prefix + path.relative_to(root).as_posix(), path)
        for prefix, root in roots
        for path in root.rglob("*")
        if path.suffix in SHIPPED and "__pycache__" not in path.parts
    ]
    yield from sorted(found)


def code_digest(package: Path) -> str:
    """Of all Python files of the package: the same wherever it lies, in a checkout or installed."""
    digest = hashlib.blake2b(digest_size=8)
    for name, path in code_files(package):
        if name.endswith(".py"):
            content = path.read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def describe(
    run_dir: str,
    nonce: str,
    paths: Sequence[str],
    packages: Sequence[str],
    modules: Sequence[str],
    pythons: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The fields of `HostFacts` for this host.

    The head has a file named after `nonce` in its run folder; `pythons` are arguments of `ask_python`.
    """
    folder = Path(run_dir)
    existing = existing_part(folder)
    found = installed_gpus()
    usable = visible(found)
    return {
        "run_dir": run_dir,
        "code": describe_code(packages, modules),
        "pythons": [ask_python(**asked) for asked in pythons],
        "memory": memory(),
        "disk": space(existing),
        "shm": space(SHM),
        "gpus": usable,
        "hidden_gpus": len(found) - len(usable),
        "ssh_address": _ssh_address(),
        "same_folder": (folder / f".nonce.{nonce}").is_file(),
        "taken": folder.exists(),
        "unwritable": unwritable(existing),
        "missing": [path for path in paths if not os.path.exists(path)],
        "checkpoints": _bytes_of(folder.glob("checkpoints/*/*")),
        "abandoned": abandoned(),
    }


def abandoned() -> list[str]:
    """This user's files of runs in shared memory that no process seen here maps: what killed runs have left."""
    own: dict[str, os.stat_result] = {}
    for path in SHM.glob("distflow-*"):
        # Runs come and go meanwhile.
        with suppress(FileNotFoundError):
            about = path.stat()
            if S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
                own[str(path)] = about
    used: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps") if own else ():
        # Processes end meanwhile, and those of others may not be looked at.
        with suppress(OSError):
            used.update(line.partition("/")[2] for line in maps.read_text().splitlines() if "distflow-" in line)
    return sorted(path for path, about in own.items() if path[1:] not in used and about.st_size)


def describe_code(packages: Sequence[str], modules: Sequence[str]) -> dict[str, Any]:
    """The fields of `CodeFacts` for this process's Python."""
    importlib.invalidate_caches()
    python = {
        "version": list(sys.version_info[:3]),
        "packages": {name: _version(name) for name in packages},
        "modules": {name: _found(name) for name in modules},
    }
    own = {"executable": sys.executable, "python": python}
    spec = importlib.util.find_spec("distflow")
    if spec is None or spec.origin is None:
        return {**own, "distflow": None, "digest": None, "package": None}
    package = Path(spec.origin).resolve().parent
    line = next((text for text in Path(spec.origin).read_text().splitlines() if text.startswith("__version__")), "")
    version = line.partition('"')[2].rstrip('"')
    return {**own, "distflow": version, "digest": code_digest(package), "package": str(package)}


def ask_python(python: str, packages: Sequence[str], modules: Sequence[str]) -> dict[str, Any]:
    """The fields of `PythonFacts` for another Python of this host."""
    if os.path.isdir(python):
        return {"fault": "it is a folder"}
    if not os.path.isfile(python):
        return {"fault": "there is no such file", "absent": True}
    if not os.access(python, os.X_OK):
        return {"fault": "it is not executable"}
    pipe, environment = subprocess.PIPE, {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    try:
        # In a session of its own: if it is a script, what that has started is ended with it.
        process = subprocess.Popen(
            [python, "-c", PROGRAM, json.dumps({"packages": packages, "modules": modules})],
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            encoding="utf-8",
            errors="replace",
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        return {"fault": f"it cannot be executed: {error.strerror}"}
    try:
        said, complaint = process.communicate(timeout=PYTHON_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"fault": f"it did not answer within {PYTHON_S:g} s"}
    try:
        told = json.loads(said) if process.returncode == 0 else None
    except ValueError:
        return {"fault": f"not a Python interpreter: expected JSON on its standard output, got {said[:80]!r}"}
    if not isinstance(told, dict):
        last = (complaint.strip().splitlines() or ["nothing"])[-1]
        return {"fault": f"it is not a working Python: it ended with {process.returncode} and said {last!r}"}
    return told


def _found(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> dict[str, int]:
    """Free and total bytes, of this machine or of its container if that has less."""
    lines = (line.split() for line in meminfo.read_text().splitlines())
    size = {words[0]: int(words[1]) * 1024 for words in lines}
    free, total = size["MemAvailable:"], size["MemTotal:"]
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        details = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        # Not in a container, or in one without a limit ("max").
        return {"free": free, "total": total}
    # Cached files count as used until the memory is needed for something else.
    return {"free": min(free, limit - used + int(details["inactive_file"])), "total": min(total, limit)}


def gpus() -> list[dict[str, Any]]:
    """Name and bytes (0: unknown) of each GPU that a process may use here."""
    return visible(installed_gpus())


def installed_gpus() -> list[dict[str, Any]]:
    """The same of all GPUs; importing torch would take seconds."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=NVIDIA_SMI_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = []
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        name, comma, mebibytes = line.rpartition(", ")
        if not comma:
            continue  # a warning or the like
        found.append({"name": name, "memory": int(mebibytes) << 20 if mebibytes.isdecimal() else 0})
    return found


def visible(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the GPUs that CUDA_VISIBLE_DEVICES lets a process use."""
    if VISIBLE not in os.environ:
        return found
    named = [part.strip() for part in os.environ[VISIBLE].split(",") if part.strip() not in ("", "-1")]
    if all(part.isdecimal() for part in named):
        return [found[int(part)] for part in named if int(part) < len(found)]
    return found[: len(named)]


def existing_part(folder: Path) -> Path:
    """The folder, or the nearest of its parents that exists."""
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def space(folder: Path) -> dict[str, int]:
    """Free and total bytes of a file system; 0 if there is none."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return {"free": 0, "total": 0}
    return {"free": found.f_bavail * found.f_frsize, "total": found.f_blocks * found.f_frsize}


def _bytes_of(files: Iterable[Path]) -> int:
    """Together; a run may be removing some of them."""
    size = 0
    for path in files:
        with suppress(OSError):
            size += path.stat().st_size
    return size


def _ssh_address() -> str | None:
    words = os.environ["SSH_CONNECTION"].split() if "SSH_CONNECTION" in os.environ else []
    return words[2] if len(words) == 4 else None


def unwritable(folder: Path) -> str | None:
    """Why nothing can be created in a folder. Tried out, since permissions alone do not tell."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".distflow-", dir=folder))
    except OSError as error:
        return f"nothing can be created in {folder}: {error.strerror}"
    return None
