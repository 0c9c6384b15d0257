"""Where the workers of a run on this machine listen: Unix sockets in a folder that only its user may enter.

Addresses follow from the run folder alone, so that every worker and every command knows them without asking anybody.
A path of a Unix socket may be 107 bytes long at most; hence the short folder outside the run folder.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import xxhash

from distflow.errors import UserError

_ROOT = Path("/tmp")


def socket_dir(run_dir: Path) -> Path:
    """The folder of a run's sockets (it need not exist yet)."""
    digest = xxhash.xxh3_64_hexdigest(str(run_dir.resolve()).encode())
    return _ROOT / f"distflow-{os.getuid()}" / digest


def run_tag(run_dir: Path) -> str:
    """Name of a run that no other run on this machine shares, not even one of the same name in another folder."""
    return f"{run_dir.name}-{socket_dir(run_dir).name[:8]}"


def worker_address(run_dir: Path, name: str) -> str:
    """Address of worker `pool/index`, or of `agent/0`."""
    return f"ipc://{socket_dir(run_dir) / name.replace('/', '-')}"


def ensure_socket_dir(run_dir: Path) -> Path:
    """Make the folder; raises UserError when somebody else's folder stands in its place."""
    folder = socket_dir(run_dir)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise UserError(
                f"{path}: expected a folder of user {os.getuid()} with mode 0700, found owner {found.st_uid}, "
                f"mode {stat.S_IMODE(found.st_mode):o} — remove it, then start again"
            )
    return folder


def remove_socket_dir(run_dir: Path) -> None:
    """Remove the run's sockets; fine when they are gone already."""
    folder = socket_dir(run_dir)
    if folder.is_dir():
        shutil.rmtree(folder)
    if folder.parent.is_dir() and not any(folder.parent.iterdir()):
        folder.parent.rmdir()
