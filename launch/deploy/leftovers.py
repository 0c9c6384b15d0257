"""What dead runs have left here: sockets nobody listens on, segments nobody maps, processes without a run."""

from __future__ import annotations

import fcntl
import os
import shlex
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from distflow.errors import UserError
from distflow.launch.deploy.machine_checks import Finding
from distflow.launch.run.process_table import SEGMENTS
from distflow.launch.run.record import read_record

SOCKETS = Path("/tmp")
YOUNG_S = 10.0
"""What is younger may belong to a run that is just starting, and is left out."""
CONNECT_S = 0.2
TITLE = "distflow "


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
        client.settimeout(CONNECT_S)
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
