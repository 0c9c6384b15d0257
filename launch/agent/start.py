"""How processes are started that are not forked: the agent of a host, and workers of another Python.

An agent is started by `launch`, or by who notices that the one before is gone. On each host of a run one agent at a
time holds the lock `hosts/<number>.lock` for as long as it lives. Two starters need not agree with each other: of two
agents the one without the lock leaves at once.

How often that may be, or anything else be started again, is a `RestartLimit`: so many times within a window of time, so
that rare deaths never add up to a failed run.

A worker of another Python (`layout.pools.NAME.python`) runs this very code, installed there or not: a folder that
contains only a link to our package goes first on PYTHONPATH. The package's own parent folder would not do: where
distflow is installed, it contains all packages of that environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import distflow
from distflow.cluster.processes import agent_name
from distflow.comm.processes import module_command
from distflow.errors import UserError
from distflow.launch.run.exit_status import log_file
from distflow.launch.run.folder import run_word, try_lock
from distflow.launch.run.record import FILE_NAME, HOSTS


@dataclass(frozen=True, slots=True)
class RestartLimit:
    """At most `count` restarts within any `window_s` seconds.

    Example: with 3 an hour, a worker that is killed once a week is always started again; one that dies at every start
    is given up at its fourth death.
    """

    count: int
    window_s: float

    def take(self, taken: list[float], now: float) -> bool:
        """Whether one more restart is within the limit; if so it is noted in `taken`, and old ones are forgotten."""
        taken[:] = [moment for moment in taken if now - moment < self.window_s]
        if len(taken) >= self.count:
            return False
        taken.append(now)
        return True


LIMIT = RestartLimit(8, 600.0)
"""Restarts of an agent, or of a fork server: one that fails again and again is not worth more."""
LOCK_S = 1.0
"""To get the lock: others may hold it for an instant, to see whether an agent does."""
POLL_S = 0.02
OF_ANOTHER = ("PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables that would make the Python use the libraries of the current environment."""


def agent_lock(run_dir: Path, host: int) -> Path:
    """The file that the agent of a host holds locked."""
    return run_dir / HOSTS / f"{host}.lock"


def lock_host(run_dir: Path, host: int, patience_s: float = LOCK_S) -> int:
    """Be the one agent of a host, or keep any from starting; returns the descriptor that holds the lock.

    Raises UserError if somebody else has it for longer than `patience_s`.
    """
    path = agent_lock(run_dir, host)
    path.parent.mkdir(exist_ok=True)
    deadline = time.monotonic() + patience_s
    while (descriptor := try_lock(path)) is None:
        if time.monotonic() > deadline:
            raise UserError(
                f"{run_dir}: this run is still running, with an agent on this host — watch it with `distflow status "
                f"{run_word(run_dir)}`, end it with `distflow stop {run_word(run_dir)}`"
            )
        time.sleep(POLL_S)
    return descriptor


def agent_lives(run_dir: Path, host: int) -> bool:
    """Whether there is an agent of a host, or somebody who keeps any from starting."""
    path = agent_lock(run_dir, host)
    if not path.exists():
        return False
    descriptor = try_lock(path)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def agent_command(
    run_dir: Path, host: int = 0, entry: str | None = None, record: str = FILE_NAME, python: str = sys.executable
) -> list[str]:
    """The command that starts the agent of a host. `record`: file in the run folder that it begins from."""
    arguments = [str(run_dir), "--host", str(host), "--record", record, *([] if entry is None else ["--entry", entry])]
    return [*module_command(python, "distflow.launch.agent.agent"), *arguments]


def run_of(command: list[str]) -> tuple[Path, int]:
    """Run folder and host of an `agent_command`."""
    at = command.index("distflow.launch.agent.agent")
    return Path(command[at + 1]), int(command[command.index("--host") + 1])


def start_agent(run_dir: Path, command: list[str], host: int = 0, lock: int | None = None) -> subprocess.Popen[bytes]:
    """Start it in a session of its own, so that neither Ctrl-C nor our end reaches it; its output goes to its log.

    It inherits `lock`, that of the run folder, and keeps it for as long as it lives. Raises OSError.
    """
    inherited = () if lock is None else (lock,)
    more = [] if lock is None else ["--lock", str(lock)]
    with log_file(run_dir, agent_name(host)).open("ab") as log:
        return subprocess.Popen(
            [*command, *more],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=inherited,
        )


def code_folder(run_dir: Path, host: int = 0) -> Path:
    """The folder in which Python finds our package and nothing else, one per host of a run; created if missing."""
    folder = run_dir / HOSTS / f"{host}.code"
    folder.mkdir(parents=True, exist_ok=True)
    link, package = folder / "distflow", Path(distflow.__file__).resolve().parent
    if not (link.is_symlink() and link.readlink() == package):
        draft = folder / f".{os.getpid()}"
        draft.unlink(missing_ok=True)
        draft.symlink_to(package)
        draft.replace(link)
    return folder


def environment_of(python: str, given: Mapping[str, str], run_dir: Path, host: int = 0) -> dict[str, str]:
    """The variables for a process of `python`, with its virtual environment activated and our package in reach."""
    found = {name: value for name, value in given.items() if name not in OF_ANOTHER}
    before = [path for name, path in given.items() if name == "PYTHONPATH" and path]
    found["PYTHONPATH"] = os.pathsep.join([str(code_folder(run_dir, host)), *before])
    folder = Path(python).parent
    if (folder.parent / "pyvenv.cfg").is_file():
        found["VIRTUAL_ENV"] = str(folder.parent)
        # Packages install compilers and build tools beside the Python.
        found["PATH"] = os.pathsep.join([str(folder), *([given["PATH"]] if "PATH" in given else [])])
    return found


def become(
    python: str, arguments: Sequence[str], environment: Callable[[], Mapping[str, str]], failed: Callable[[str], int]
) -> NoReturn:
    """Replace this process by `python` with these arguments; if that fails, exit with the code of `failed(reason)`."""
    code = 1
    try:
        os.execve(python, [python, *arguments], environment())
    except OSError as error:
        code = failed(f"{python}: {error.strerror}")
    finally:
        os._exit(code)
