"""Where the workers of a run on this machine listen: Unix sockets in a folder that only its user may enter.

Addresses follow from the run folder and the number of the host, so that every worker and every command knows them
without asking anybody. The number is there because two hosts of a run may share a machine.
A path of a Unix socket may be 107 bytes long at most; hence the short folder outside the run folder.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Annotated

import msgspec
import xxhash

from distflow.data.decoding import read
from distflow.errors import UserError

_ROOT = Path("/tmp")
_PORT = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_TCP = rf"tcp://(\[[0-9a-zA-Z:.%]+\]|[0-9a-zA-Z_.-]+):{_PORT}"
Address = Annotated[str, msgspec.Meta(pattern=rf"\A({_TCP}(#[0-9a-f]{{64}})?|ipc:///[^\0]{{1,106}}|)\Z")]
"""The address of a socket in a form, or "": nobody knows where. Behind "#" the public key of whoever listens there."""


def socket_dir(run_dir: Path, host: int = 0) -> Path:
    """The folder of the sockets of one host of a run (it need not exist yet)."""
    # No folder above it that runs would share: one run's clean-up would race with another's start.
    return _ROOT / f"distflow-{os.getuid()}-{_digest(run_dir)}{_suffix(host)}"


def run_tag(run_dir: Path, host: int = 0) -> str:
    """Name of one host's part of a run that no other run on this machine shares, nor another host of the same run.

    What is named `distflow-<tag>-…` belongs to exactly this part: no tag goes on with a hyphen where another one ends.
    """
    return f"{run_dir.name}-{_digest(run_dir)[:8]}{_suffix(host)}"


def _suffix(host: int) -> str:
    return f".h{host}" if host else ""


def _digest(run_dir: Path) -> str:
    return xxhash.xxh3_64_hexdigest(str(run_dir.resolve()).encode())


def worker_address(run_dir: Path, name: str, host: int = 0) -> str:
    """Address of worker `pool/index`, or of `agent/<host>`, for those on the same host."""
    return f"ipc://{socket_dir(run_dir, host) / name.replace('/', '-')}"


def ensure_socket_dir(run_dir: Path, host: int = 0) -> Path:
    """Make the folder; raises UserError when somebody else's folder stands in its place."""
    folder = socket_dir(run_dir, host)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(
            f"{folder}: expected a folder of user {os.getuid()} with mode 0700, found owner {found.st_uid}, "
            f"mode {stat.S_IMODE(found.st_mode):o} — remove it, then start again"
        )
    return folder


def remove_socket_dir(run_dir: Path, host: int = 0) -> None:
    """Remove the run's sockets; fine when they are gone already."""
    folder = socket_dir(run_dir, host)
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        # There was none, or somebody else who cleans up (the agent, `distflow stop`) was quicker.
        return


def leave_socket_dir(run_dir: Path, host: int = 0) -> None:
    """Remove the folder if nobody listens in it any more: for workers that were started one by one, by hand."""
    try:
        socket_dir(run_dir, host).rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise


def check_address(text: str) -> str:
    """The same; raises ProtocolError for what no socket can connect to."""
    return read(text, Address, "address")


def place_of(address: str) -> str:
    """What to connect to."""
    return address.partition("#")[0]


def key_in(address: str) -> bytes | None:
    """The public key of whoever listens there, if the address names it."""
    text = address.partition("#")[2]
    return bytes.fromhex(text) if text else None
