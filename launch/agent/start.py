"""How a host agent is started, whoever does it: `launch`, or who notices that the one before is gone.

On each host of a run one agent at a time holds the lock `hosts/<number>.lock` for as long as it lives. Two starters
need not agree with each other: of two agents the one without the lock leaves at once.

How often that may be, or anything else be started again, is a `RestartLimit`: so many times within a window of time, so
that rare deaths never add up to a failed run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from distflow.errors import UserError
from distflow.launch.run.exit_status import log_file
from distflow.launch.run.folder import try_lock
from distflow.launch.run.record import FILE_NAME, HOSTS, agent_name


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
                f"{run_dir.name}`, end it with `distflow stop {run_dir.name}`"
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
    command = [python, "-m", "distflow.launch.agent.agent", str(run_dir), "--host", str(host), "--record", record]
    return command if entry is None else [*command, "--entry", entry]


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
