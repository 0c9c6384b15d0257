"""Hosts and processes of a run, and how they end: what its agents speak of."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from distflow.comm.addresses import Address
from distflow.data.decoding import MOST, Form, Name, Site
from distflow.errors import DeviceFault

RunState = Literal["starting", "running", "done", "failed", "stopped"]
STOPPED = 130
FAULTY = DeviceFault.exit_code
"""Exit code of a worker whose GPU has failed: counts as killed."""


def agent_name(host: int) -> str:
    """Name of the agent of a host."""
    return f"agent/{host}"


def nursery_name(host: int) -> str:
    """Name of the fork server of a host."""
    return f"nursery/{host}"


class ProcessId(Form, frozen=True):
    """Identifies a process; its start time (seconds since boot) distinguishes it from a later one with the same pid.

    Example:

        ProcessId(pid=4711, started=93.21)
    """

    pid: int
    started: Annotated[float, msgspec.Meta(ge=-1.0, le=MOST)]
    """−1: it had ended before its start could be read."""
    space: str = ""
    """Machine and PID namespace in which `pid` is valid; empty: those of the reader."""


class HostEntry(Form, frozen=True):
    """A host of the run: its number is that of its agent, agent/<number>.

    Example:

        HostEntry("gpu-2", "10.0.0.3", agent="tcp://10.0.0.3:40001")
    """

    name: str
    """As in the hosts file."""
    address: str
    """Address the other hosts connect to; empty in a run on one host."""
    agent: Address = ""
    """tcp address of its agent; empty in a run on one host."""
    nonce: str = ""
    """Content of `hosts/<number>.nonce`, written by its agent: a host that reads it shares that agent's run folder."""
    gpus: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0
    """How many GPUs its workers may use."""
    site: Site = ""
    """Where it stands, as in the hosts file."""


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


@dataclass(frozen=True, slots=True)
class Exit:
    """How one process of a worker ended: `Exit(0)`, `Exit(None, 9)`, `Exit(None, early=0)`.

    Example:

        Exit(None, signal=9)
    """

    code: int | None
    """Exit code of a process that finished or failed; None: something else ended it."""
    signal: int | None = None
    """The signal that killed it, if known."""
    early: int | None = None
    """Exit code that claims success, of a process that had not finished: `os._exit` in a reward, say."""
    term: int | None = None
    """Term of the training workers in which a generating worker learned that no more samples are needed."""

    @property
    def accident(self) -> bool:
        """Whether something else than its own code ended it: a signal, or its GPU, which has failed."""
        return self.code in (None, FAULTY)

    def __str__(self) -> str:
        if self.code is not None:
            return f"exit code {self.code}{' (its GPU has failed)' if self.code == FAULTY else ''}"
        if self.early is not None:
            return f"exit code {self.early} before its work was done (does a plug-in call os._exit?)"
        if self.signal is None:
            return "an unknown signal"
        hint = ", often the system running out of memory" if self.signal == signal.SIGKILL else ""
        return f"signal {self.signal} ({signal.Signals(self.signal).name}{hint})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    state: RunState
    exit_code: int
    failure: Failure | None = None
