"""`run.json`: what a run looks like from outside. `launch` writes it first, then the host agent alone, atomically."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from distflow.comm.addresses import Address
from distflow.data.decoding import MOST, Form, Name
from distflow.errors import UserError

RunState = Literal["starting", "running", "done", "failed", "stopped"]
OnFailure = Literal["restart", "shrink", "stop"]
FINAL: frozenset[RunState] = frozenset({"done", "failed", "stopped"})
FILE_NAME = "run.json"
AGENT = "agent/0"
HOSTS = "hosts"
"""Folder of the run in which every agent leaves its own files."""


def agent_name(host: int) -> str:
    """Of the agent of a host."""
    return f"agent/{host}"


def nursery_name(host: int) -> str:
    """Of the fork server of a host."""
    return f"nursery/{host}"


class ProcessId(Form, frozen=True):
    """A process, told apart from a later one with the same number by its start (seconds since the machine's).

    Example:

        ProcessId(pid=4711, started=93.21)
    """

    pid: int
    started: Annotated[float, msgspec.Meta(ge=0.0, le=MOST)]
    space: str = ""
    """Machine and PID namespace in which `pid` means this process; empty: where it is read."""


class WorkerEntry(Form, frozen=True):
    """What the agent must know of a worker to start it and to judge its death.

    Example:

        WorkerEntry("rollout/1", trains=False, host=1, generates=True)
    """

    name: str
    trains: bool
    """Its death by a signal ends the run; other workers are started again."""
    threads: int = 1
    host: int = 0
    """Number of the host it runs on."""
    python: str = ""
    """The interpreter that executes it; "": the one of its agent."""
    generates: bool = False


class HostEntry(Form, frozen=True):
    """A host of the run: its number is that of its agent, agent/<number>.

    Example:

        HostEntry("gpu-2", "10.0.0.3", agent="tcp://10.0.0.3:40001")
    """

    name: str
    """As the hosts file has it."""
    address: str
    """What the other hosts connect to; empty in a run on one host."""
    agent: Address = ""
    """tcp address of its agent; empty in a run on one host."""
    nonce: str = ""
    """What its agent wrote into `hosts/<number>.nonce`: who reads it there has the same run folder as that agent."""


class Failure(Form, frozen=True):
    """Why a run failed. `traceback` begins with the user's frames where there are any.

    Example:

        Failure("rollout/1", 2, "StepError", "step 'reward' must write one value a sample")
    """

    worker: Name
    exit_code: int
    error: str
    message: str
    traceback: str = ""
    log: str = ""


class RunRecord(Form, frozen=True):
    """The whole of `run.json`."""

    name: str
    run_dir: str
    training_steps: int
    workers: tuple[WorkerEntry, ...]
    roster: Mapping[str, str]
    """Where each worker and agent is reached: ipc in a run on one host, else tcp, "" while nobody knows."""
    drain_s: float
    restarts: int
    restart_window_s: float = 3600.0
    connect_s: float = 120.0
    host_silence_s: float = 60.0
    no_progress_s: float = 600.0
    hosts: tuple[HostEntry, ...] = ()
    """By number; empty: this machine alone."""
    silent: tuple[int, ...] = ()
    """Numbers of hosts whose agent has not been heard of for `host_silence_s` seconds."""
    launch_term: int = 0
    """The training pool's term when the run was launched: agents of an older launch are not listened to."""
    term: int = 0
    """… and now."""
    renewed: str = ""
    """Why and from where the training workers restarted, the last time they did."""
    waits_for: str = ""
    """What the training workers wait for before they restart, if for more than a moment."""
    on_failure: OnFailure = "restart"
    """What happens when a training worker was killed."""
    state: RunState = "starting"
    exit_code: int | None = None
    pid: int | None = None
    """Of the host agent that writes this."""
    pids: Mapping[str, ProcessId] = msgspec.field(default_factory=dict)
    """Every process of the run by name: workers, agents, fork servers."""
    started: float = 0.0
    ended: float | None = None
    failure: Failure | None = None

    @property
    def over(self) -> bool:
        """Whether the run has come to its end."""
        return self.state in FINAL

    @property
    def path(self) -> Path:
        """The run folder."""
        return Path(self.run_dir)

    @property
    def numbers(self) -> range:
        """Of the hosts."""
        return range(max(1, len(self.hosts)))

    def names_on(self, host: int) -> tuple[str, ...]:
        """Every process that belongs to a host: its workers, its agent, its nursery."""
        workers = [entry.name for entry in self.workers if entry.host == host]
        return (*workers, agent_name(host), nursery_name(host))

    def as_text(self) -> str:
        """JSON with one line for each field."""
        encode = msgspec.json.encode
        lines = (f' "{name}": {encode(getattr(self, name)).decode()}' for name in self.__struct_fields__)
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def write(self) -> None:
        """Replace `run.json` in one step, so that a reader never sees half of it; raises OSError."""
        target = self.path / FILE_NAME
        scratch = target.with_name(f".{FILE_NAME}.{os.getpid()}")
        try:
            scratch.write_text(self.as_text())
            scratch.replace(target)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise


def read_record(run_dir: Path, name: str = FILE_NAME) -> RunRecord:
    """Read `run.json`; raises UserError when it is missing or is not one."""
    path = run_dir / name
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunRecord)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file — {run_dir} is not the folder of a run that was launched") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a run record of this version of distflow ({error})") from error
