"""What `distflow doctor` looks at on this machine: what is there, and what to do if that is not enough.

And what dead runs have left here: sockets nobody listens on, segments nobody maps, processes without a run.
"""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from distflow.errors import UserError
from distflow.launch.run.process_table import SEGMENTS
from distflow.launch.run.record import read_record

Level = Literal["OK", "WARN", "FAIL"]
PYTHON = (3, 11)
GIB = 1 << 30
CGROUP = Path("/sys/fs/cgroup")
CONNECT_S = 1.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
TOOLS: Mapping[str, str] = {
    "ssh": "to start workers on other hosts",
    "sshd": "to be one of the hosts",
    "sbatch": "to start as a Slurm job",
}
SOCKETS = Path("/tmp")
YOUNG_S = 10.0
"""What is younger may belong to a run that is just starting, and is left out."""
SOCKET_CONNECT_S = 0.2
TITLE = "distflow "


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. FAIL: runs will not work; WARN: some may not, or not well."""

    name: str
    level: Level
    text: str
    cure: str = ""


@dataclass(frozen=True, slots=True)
class Threshold:
    """How much of something is enough; below `fail` nothing works."""

    warn: float
    fail: float

    def level(self, found: float) -> Level:
        """What so much of it means."""
        return "FAIL" if found < self.fail else "WARN" if found < self.warn else "OK"


def check_machine(runs_dir: Path) -> Iterator[Finding]:
    """All that concerns the machine rather than the installed packages."""
    yield check_python(sys.version_info[:3])
    yield check_cpus()
    yield check_memory()
    yield check_space(
        "shared memory", SEGMENTS, Threshold(GIB, GIB / 16), "give the container more: --shm-size=8g or so"
    )
    yield check_space("disk", _existing(runs_dir), Threshold(5 * GIB, GIB / 4), "free some, or give another --runs-dir")
    yield check_writable("runs folder", _existing(runs_dir), "give a folder of yours with --runs-dir")
    yield check_writable("/tmp", Path("/tmp"), "sockets of a run lie there: make it writable")
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE))
    yield _attempt("Unix sockets", _unix_socket, "sandboxes and some file systems forbid them: run outside")
    yield _attempt("TCP on this machine", _loopback, "bring the interface up: ip link set lo up")
    yield from check_tools()


def check_python(version: tuple[int, ...]) -> Finding:
    """Python and the system under it."""
    text = f"{'.'.join(map(str, version))} on {platform.system()} {platform.release()} ({platform.machine()})"
    if platform.system() != "Linux":
        return Finding("python", "FAIL", text, "use Linux: shared memory, process titles and signals rely on it")
    if version < PYTHON:
        return Finding("python", "FAIL", text, f"use Python {PYTHON[0]}.{PYTHON[1]} or newer")
    return Finding("python", "OK", text)


def check_cpus() -> Finding:
    """CPUs that this process may use, and variables that set numbers of threads."""
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count()
    text = f"{usable} of {there} usable" if usable != there else f"{usable}"
    limit = _cpu_limit(CGROUP / "cpu.max")
    if limit is not None and limit < usable:
        text += f", limited to the time of {limit:g}"
    variables = [f"{name}={os.environ[name]}" for name in THREAD_VARIABLES if name in os.environ]
    text += f"; {', '.join(variables)} (workers get layout.pools.NAME.threads instead)" if variables else ""
    return Finding("CPUs", "OK", text)


def check_memory() -> Finding:
    """Free memory, of the machine or of the container, whichever is less."""
    memory = psutil.virtual_memory()
    free, total = float(memory.available), float(memory.total)
    limit = _number(CGROUP / "memory.max")
    if limit is not None and limit < total:
        used = _number(CGROUP / "memory.current") or 0.0
        free, total = min(free, limit - used), limit
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    level = Threshold(2 * GIB, GIB / 2).level(free)
    return Finding("memory", level, text, "" if level == "OK" else "end other programs, or use fewer workers")


def check_space(name: str, folder: Path, need: Threshold, cure: str) -> Finding:
    """Free space of a file system."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return Finding(name, "FAIL", f"{folder}: {error.strerror}", cure)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    level = need.level(free)
    text = f"{folder}: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    return Finding(name, level, text, "" if level == "OK" else cure)


def check_writable(name: str, folder: Path, cure: str) -> Finding:
    """Whether a file can be made in a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding(name, "FAIL", f"{folder} cannot be written ({error.strerror})", cure)
    return Finding(name, "OK", f"{folder} can be written")


def check_open_files(limits: tuple[int, int]) -> Finding:
    """The limit of open files; a worker needs some dozens and a few for each peer."""
    soft, hard = limits
    infinite = soft == resource.RLIM_INFINITY
    level = "OK" if infinite else Threshold(1024, 256).level(soft)
    text = "unlimited" if infinite else f"{soft} (at most {'unlimited' if hard < 0 else hard})"
    return Finding("open files", level, text, "" if level == "OK" else "raise it: ulimit -n 4096")


def check_tools() -> Iterator[Finding]:
    """Programs that only runs on several hosts need."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    for name, purpose in TOOLS.items():
        found = shutil.which(name, path=path)
        yield Finding(name, "OK", found if found is not None else f"not here; needed only {purpose}")


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists already."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _attempt(name: str, action: Callable[[], str], cure: str) -> Finding:
    try:
        return Finding(name, "OK", action())
    except OSError as error:
        return Finding(name, "FAIL", f"cannot be used: {error}", cure)


def _unix_socket() -> str:
    with tempfile.TemporaryDirectory(prefix="distflow-doctor-", dir="/tmp") as folder:
        address = f"{folder}/door"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            _greet(server, address)
    return "work"


def _loopback() -> str:
    with socket.socket(socket.AF_INET) as server:
        server.bind(("127.0.0.1", 0))
        _greet(server, server.getsockname())
    return "works"


def _greet(server: socket.socket, address: str | tuple[str, int]) -> None:
    server.listen(1)
    with socket.socket(server.family) as client:
        client.settimeout(CONNECT_S)
        client.connect(address)


def _cpu_limit(path: Path) -> float | None:
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        # No such group, or no limit ("max").
        return None


def check_leftovers(sockets: Path = SOCKETS, segments: Path = SEGMENTS) -> list[Finding]:
    """A line for each remainder of this user's, or one that says that there is none."""
    found = [*dead_sockets(sockets), *dead_segments(segments), *lost_processes()]
    return found or [Finding("leftovers", "OK", "none of dead runs")]


def dead_sockets(root: Path) -> Iterator[Finding]:
    """Folders of sockets in which nobody listens any more, and files for exit codes that nobody will write."""
    for path in filter(_is_old, sorted(root.glob(f"distflow-{os.getuid()}-*"))):
        if path.suffix == ".exit":
            if not _is_locked(path):
                yield Finding("leftovers", "WARN", f"{path}: the process of a job that made it is gone", _removal(path))
        elif not any(map(_listens, path.iterdir())):
            yield Finding("leftovers", "WARN", f"sockets {path}: nobody listens there", _removal(path))


def dead_segments(root: Path) -> Iterator[Finding]:
    """Shared segments that no process maps."""
    old = [path for path in sorted(root.glob("distflow-*")) if _is_old(path)]
    mapped = _mapped_files() if old else ""
    for path in old:
        if str(path) not in mapped:
            size = path.stat().st_size / 2**20
            yield Finding("leftovers", "WARN", f"shared segment {path} ({size:.1f} MiB): unused", _removal(path))


def lost_processes() -> Iterator[Finding]:
    """Processes titled as a run's whose run is over, or whose run folder is gone."""
    for process in psutil.process_iter():
        try:
            title = " ".join(process.cmdline()).strip()
            mine = process.uids().real == os.getuid() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if not (mine and title.startswith(TITLE)):
            continue
        run_dir = _run_of(process.pid)
        if run_dir is not None and _is_over(run_dir):
            text = f"process {process.pid} ({title}): its run in {run_dir} is over"
            here = (run_dir / "run.json").exists()
            cure = f"distflow stop {shlex.quote(str(run_dir))}" if here else f"kill {process.pid}"
            yield Finding("leftovers", "WARN", text, cure)


def _is_old(path: Path) -> bool:
    """Of this user, and there for a while."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.getuid() and time.time() - found.st_mtime > YOUNG_S


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(SOCKET_CONNECT_S)
        try:
            client.connect(str(path))
        except TimeoutError:
            # Somebody is there, and is slow.
            return True
        except OSError:
            return False
    return True


def _mapped_files() -> str:
    maps = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            maps.append(path.read_text(errors="replace"))
        except OSError:
            # Ended meanwhile, or another user's.
            continue
    return "\n".join(maps)


def _run_of(pid: int) -> Path | None:
    """The run folder whose logs a process writes; None if it writes none."""
    for descriptor in ("1", "2"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except OSError:
            continue
        log = Path(target.removesuffix(" (deleted)"))
        if log.suffix == ".log" and log.parent.name == "logs":
            return log.parent.parent
    return None


def _is_over(run_dir: Path) -> bool:
    try:
        return read_record(run_dir).over
    except UserError:
        # Its folder was removed, or is no longer one of a run.
        return True


def _removal(path: Path) -> str:
    return f"rm -r {shlex.quote(str(path))}"
