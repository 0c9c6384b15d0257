"""`run.json`: the state of a run. `launch` writes it first, then only the host agent; always atomically."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import structs

from distflow.cluster.processes import Failure, HostEntry, ProcessId, RunState, agent_name, nursery_name
from distflow.data.decoding import Form
from distflow.errors import UserError
from distflow.runtime.disk import replace_file

OnFailure = Literal["restart", "shrink", "stop"]
FINAL: frozenset[RunState] = frozenset({"done", "failed", "stopped"})
FILE_NAME = "run.json"
JOB = "job.json"
AGENT = "agent/0"
HOSTS = "hosts"
"""Folder of the run in which every agent leaves its own files."""


class WorkerEntry(Form, frozen=True):
    """What the agent must know about a worker to start it and to react to its death.

    Example:

        WorkerEntry("rollout/1", trains=False, host=1, generates=True)
    """

    name: str
    trains: bool
    """Whether it is a training worker: if one is killed, `on_failure` applies; other workers are restarted."""
    threads: int = 1
    host: int = 0
    """Number of the host it runs on."""
    python: str = ""
    """The interpreter that runs it; "": that of its agent."""
    generates: bool = False
    gpus: tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)], ...] = ()
    """Numbers of the GPUs that it uses on its host."""


class BadGpu(Form, frozen=True):
    """A GPU that has failed again and again under the run's workers.

    Example:

        BadGpu(host=1, number=3, faults=2)
    """

    host: int
    number: int
    """As CUDA counts the GPUs that workers of its host may use."""
    faults: int


def sites_of(hosts: Sequence[HostEntry]) -> dict[str, str]:
    """Where the hosts stand that have a site, by number."""
    return {str(number): host.site for number, host in enumerate(hosts) if host.site}


class RunRecord(Form, frozen=True):
    """The whole of `run.json`."""

    name: str
    run_dir: str
    training_steps: int
    workers: tuple[WorkerEntry, ...]
    roster: Mapping[str, str]
    """Address of each worker and agent: ipc in a run on one host, else tcp; "" while it is unknown."""
    drain_s: float
    restarts: int
    restart_window_s: float = 3600.0
    connect_s: float = 120.0
    host_silence_s: float = 60.0
    no_progress_s: float = 600.0
    hosts: tuple[HostEntry, ...] = ()
    """By number; empty: this machine alone."""
    gpus: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0
    """How many GPUs there are on this machine, in a run on it alone."""
    silent: tuple[int, ...] = ()
    """Numbers of hosts whose agent has not been heard of for `host_silence_s` seconds."""
    launch_term: int = 0
    """The training pool's term when the run was launched: agents of an older launch are ignored."""
    term: int = 0
    """The training pool's current term."""
    renewed: str = ""
    """Why and from which checkpoint the training workers last restarted."""
    waits_for: str = ""
    """What the training workers wait for before they restart, if for more than a moment."""
    bad_gpus: tuple[BadGpu, ...] = ()
    """GPUs that have failed at least twice since the launch."""
    on_failure: OnFailure = "restart"
    """What happens when a training worker is killed."""
    state: RunState = "starting"
    exit_code: int | None = None
    pid: int | None = None
    """pid of the host agent that writes this file."""
    pids: Mapping[str, ProcessId] = msgspec.field(default_factory=dict)
    """Every process of the run by name: workers, agents, fork servers."""
    started: float = 0.0
    ended: float | None = None
    failure: Failure | None = None

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.state in FINAL

    @property
    def path(self) -> Path:
        """The run folder."""
        return Path(self.run_dir)

    @property
    def numbers(self) -> range:
        """Host numbers."""
        return range(max(1, len(self.hosts)))

    @property
    def trainers(self) -> tuple[str, ...]:
        """Names of the training workers."""
        return tuple(entry.name for entry in self.workers if entry.trains)

    def names_on(self, host: int) -> tuple[str, ...]:
        """Names of all processes of a host: workers, agent, fork server."""
        workers = [entry.name for entry in self.workers if entry.host == host]
        return (*workers, agent_name(host), nursery_name(host))

    def as_text(self) -> str:
        """JSON with one line for each field."""
        encode = msgspec.json.encode
        lines = (f' "{name}": {encode(getattr(self, name)).decode()}' for name in self.__struct_fields__)
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def write(self) -> None:
        """Replace `run.json` atomically, so that readers never see half of it; raises OSError."""
        replace_file(self.path / FILE_NAME, self.as_text())


class SubmittedJob(Form, frozen=True):
    """A job of Slurm that will start a run or go on with it, `job.json` in the folder of the run.

    Example:

        SubmittedJob("4711", "/runs/quickstart/logs/slurm-4711.log", 1.7e9)
    """

    number: str
    """As commands of Slurm take it; 4711_2 in an array."""
    log: str
    submitted: float
    """When, in seconds since 1970."""

    def write(self, run_dir: Path) -> None:
        """Replace `job.json` atomically; raises OSError."""
        replace_file(run_dir / JOB, msgspec.json.encode(self).decode() + "\n")


def read_job(run_dir: Path) -> SubmittedJob | None:
    """Read `job.json`; None: no job was submitted for the run. Raises UserError if it is invalid."""
    path = run_dir / JOB
    try:
        return msgspec.json.decode(path.read_bytes(), type=SubmittedJob)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a job of this version of distflow ({error})") from error


def read_record(run_dir: Path, name: str = FILE_NAME) -> RunRecord:
    """Read `run.json`; raises UserError if it is missing or invalid.

    A folder may have been moved or copied since: `run_dir` of the record is the one that it was read from.
    """
    path = run_dir / name
    try:
        found = msgspec.json.decode(path.read_bytes(), type=RunRecord)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file — {run_dir} is not the folder of a launched run") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a run record of this version of distflow ({error})") from error
    here = run_dir.resolve()
    return found if found.path.resolve() == here else structs.replace(found, run_dir=str(here))
