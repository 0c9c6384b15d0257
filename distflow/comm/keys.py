"""The keys of a run: only their holders may connect to sockets that leave the machine.

All workers, agents and commands of a run share one CURVE key pair, which authenticates listeners and commands. It is
stored in `<run_dir>/keys/run.key`, readable only by its user. Each worker and agent has another pair of its own, so
that it can only send in its own name: its address includes the public half, and peers accept that key under this one
name.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from distflow.errors import UserError

_FIELDS = ("public", "secret")


@dataclass(frozen=True, slots=True)
class Keys:
    """A CURVE key pair, both halves in Z85 (40 bytes each)."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class NetworkListener:
    """Where a worker listens for peers on other hosts: the IP address of this host, IPv6 with or without brackets."""

    host: str
    keys: Keys
    """The run's."""
    own: Keys = field(default_factory=lambda: make_keys())
    """This worker's or agent's."""
    before: str = ""
    """Address that others know already, such as that of the process which this one replaces: used if possible."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses to try in order; the system chooses the port of the last."""
        return tuple(filter(None, (self.before, listening_on(self.host))))


def listening_on(host: str, port: int | None = None) -> str:
    """Return `tcp://host:port` (`*`: any port), with the brackets that an IPv6 address needs."""
    bare = host.strip("[]")
    return f"tcp://[{bare}]:{port or '*'}" if ":" in bare else f"tcp://{bare}:{port or '*'}"


def public_hex(keys: Keys) -> str:
    """Return the public half as addresses name it, after `#`."""
    return bytes(z85.decode(keys.public)).hex()


def make_keys() -> Keys:
    """A new pair, at random."""
    return Keys(*zmq.curve_keypair())


def key_file(run_dir: Path) -> Path:
    """Where a run keeps its key."""
    return run_dir / "keys" / "run.key"


def own_keys(run_dir: Path, stem: str) -> Keys:
    """Return the keys of one agent or worker (`agent-0`, `trainer-0`), made at the first call and reused afterwards."""
    path = run_dir / "keys" / f"{stem}.key"
    if not path.exists():
        write_keys(path, make_keys())
    return read_keys(path)


def write_keys(path: Path, keys: Keys) -> None:
    """Write atomically, readable only by this user; creates the folder."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(b"public %b\nsecret %b\n" % (keys.public, keys.secret))
    scratch.replace(path)


def read_keys(path: Path) -> Keys:
    """Read the keys; raises UserError if the file is missing, readable by others, or does not hold a key pair."""
    try:
        with path.open("rb") as file:
            found, text = os.fstat(file.fileno()), file.read(1024)
    except OSError as error:
        raise UserError(
            f"{path}: cannot read the run's key ({error.strerror}) — every host of a run needs the same file there; "
            f"copy it from the host where the run was launched"
        ) from error
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UserError(
            f"{path}: expected a file of user {os.getuid()} with mode 0600, found owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):04o} — others may know this key: stop the run and launch it again"
        )
    return _parse(path, text)


def _parse(path: Path, text: bytes) -> Keys:
    lines = [line.split(b" ", 1) for line in text.splitlines()]
    if [line[0].decode(errors="replace") for line in lines] == list(_FIELDS) and all(len(line) == 2 for line in lines):
        keys = Keys(lines[0][1], lines[1][1])
        try:
            if zmq.curve_public(keys.secret) == keys.public:
                return keys
        except (zmq.ZMQError, ValueError):
            # Not Z85, or of another length: reported below, like every other malformed pair.
            pass
    raise UserError(f"{path}: does not hold a key pair — copy it again from the host where the run was launched")
