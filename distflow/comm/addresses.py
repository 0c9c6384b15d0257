"""Addresses of a run's workers on this machine: Unix sockets in a folder that only its user may enter.

Addresses are derived from the run folder and the number of the host, so that every worker and every command knows them
without asking. The number is included because two hosts of a run may share a machine.
The path of a Unix socket may be at most 107 bytes long; hence the short folder outside the run folder.
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
"""The address of a socket in a form, or "" if it is not known. After "#": the public key of the listening process."""


def socket_dir(run_dir: Path, host: int = 0) -> Path:
    """The folder of the sockets of one host of a run (it need not exist yet)."""
    # No parent folder shared by runs: one run's clean-up would race with another's start.
    return _ROOT / f"distflow-{os.getuid()}-{_digest(run_dir)}{_suffix(host)}"


def run_tag(run_dir: Path, host: int = 0) -> str:
    """A name for one host's part of a run, unique among the runs and hosts on this machine.

    Names of the form `distflow-<tag>-…` belong to exactly this part: no tag is another tag followed by a hyphen.
    """
    return f"{run_dir.name}-{_digest(run_dir)[:8]}{_suffix(host)}"


def _suffix(host: int) -> str:
    return f".h{host}" if host else ""


def _digest(run_dir: Path) -> str:
    return xxhash.xxh3_64_hexdigest(str(run_dir.resolve()).encode())


def worker_address(run_dir: Path, name: str, host: int = 0) -> str:
    """Address of worker `pool/index`, or of `agent/<host>`, for those on the same host."""
    return f"ipc://{socket_dir(run_dir, host) / name.replace('/', '-')}"


def port_beforehand(run_dir: Path, number: int) -> int:
    """Return a TCP port for the process of this number in a run whose addresses are written before it starts.

    Below those that Linux chooses from (32768 and above); runs in other folders are likely to have others.
    """
    return 20_000 + (int(_digest(run_dir), 16) + number) % 12_000


def ensure_socket_dir(run_dir: Path, host: int = 0) -> Path:
    """Create the folder; raises UserError if another user's folder is in its place."""
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
    """Remove the run's sockets, if they still exist."""
    folder = socket_dir(run_dir, host)
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        # There was none, or the agent or `distflow stop` has removed it already.
        return


def leave_socket_dir(run_dir: Path, host: int = 0) -> None:
    """Remove the folder if no worker listens in it any more: for workers that were started one by one, by hand."""
    try:
        socket_dir(run_dir, host).rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise


def check_address(text: str) -> str:
    """Return the address; raises ProtocolError if no socket can connect to it."""
    return read(text, Address, "address")


def place_of(address: str) -> str:
    """The address without the key."""
    return address.partition("#")[0]


def key_in(address: str) -> bytes | None:
    """The public key in the address, if there is one."""
    text = address.partition("#")[2]
    return bytes.fromhex(text) if text else None
