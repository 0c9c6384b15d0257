"""What an agent reports about its own host. Of two reports of one host, the one with the higher serial is newer.

And from which checkpoint a term can begin: the newest complete one, by what all hosts report to have. If hosts have run
folders of their own, each has the parts of its own training workers. A checkpoint is complete as long as every part is
on one of the remaining hosts: the others fetch it from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import structs

from distflow.cluster.processes import Failure, HostEntry, ProcessId
from distflow.comm.addresses import Address
from distflow.comm.beats import HostNumber
from distflow.data.decoding import Form, Name, Whole, read

TRACEBACK_CHARACTERS = 20_000
"""How much of a failure's traceback is sent: it begins with the user's frames."""


class Death(Form, frozen=True):
    """The death of one incarnation of a worker, of which its peers are told.

    Example:

        Death(incarnation=0, reason="killed by signal 9")
    """

    incarnation: Whole
    reason: str
    gpus: tuple[HostNumber, ...] = ()
    """Numbers of the GPUs, on its host, of which one has failed under it."""


class HostedWorker(Form, frozen=True):
    """A worker, as its host's agent knows it.

    Example:

        HostedWorker(trains=False, threads=1, state="running", address="tcp://10.0.0.3:41234", generates=True)
    """

    trains: bool
    threads: Whole
    state: str
    """starting, running, draining, ended, or left (drained: the run goes on without it)."""
    incarnation: Whole = 0
    address: Address = ""
    """Its network address; empty until it has reported one."""
    code: int | None = None
    """Its exit code, if it ended by itself."""
    deaths: tuple[Death, ...] = ()
    python: str = ""
    """The interpreter that executes it; empty: that of its agent."""
    generates: bool = False
    gpus: tuple[HostNumber, ...] = ()
    """Numbers of the GPUs that it uses."""

    @property
    def living(self) -> bool:
        """Whether it runs or will run."""
        return self.state not in ("ended", "left")


class DesiredWorkers(Form, frozen=True):
    """The workers that a pool is to have, and their hosts: a decision of `distflow scale`.

    Example:

        DesiredWorkers(stamp=(2, 0), hosts={"rollout/0": 0, "rollout/1": 1})
    """

    stamp: tuple[Whole, Whole]
    """Number of the decision, and the host that made it; the highest is the last."""
    hosts: Mapping[Name, HostNumber]
    """By name of the worker."""


class Saved(Form, frozen=True):
    """A checkpoint on one host.

    Example:

        Saved(step=40, term=0, missing=("model-policy-trainer-1.safetensors",))
    """

    step: Whole
    term: Whole
    """The term that wrote it."""
    missing: tuple[str, ...] = ()
    """Parts that this host lacks, since they were written on others."""


class Successor(Form, frozen=True):
    """The term that is to follow: all that must be the same on every host.

    Example:

        Successor(1, step=40, tries=1, members=("trainer/0", "trainer/1"), saved_by=0, begins=((1, 40),),
                  reason="trainer/1 was killed by signal 9", hosts=(0, 1))
    """

    number: Whole
    step: Whole
    """The checkpoint that it begins from, by its training step."""
    tries: Whole
    """How many terms in a row, including this one, began at this step with these members."""
    members: tuple[Name, ...]
    """Its training workers."""
    saved_by: Whole
    """The term that wrote the checkpoint it begins from."""
    begins: tuple[tuple[Whole, Whole], ...]
    """Number and step of every term since the launch, this one last."""
    reason: str
    """Why the previous term is over."""
    hosts: tuple[HostNumber, ...] = ()
    """Of its members, in their order; empty: where they were when the run began."""
    scaled: tuple[tuple[str, Whole, HostNumber], ...] = ()
    """By pool, the stamp of the last decision of `distflow scale` that it takes up, be it to drop it."""

    def __str__(self) -> str:
        where = f"training step {self.step}" if self.step else "the beginning, since there is no checkpoint yet"
        return f"{self.reason}; the training workers go on from {where}, as term {self.number}"


class Term(Form, frozen=True):
    """The state of the training pool, as one host knows it.

    Example:

        Term(0, broken=True, ended=True, checkpoints=(Saved(40, 0),), reason="trainer/1 was killed by signal 9")
    """

    number: Whole
    begun: Successor | None = None
    """How it began; None: it is the first one since the launch."""
    broken: bool = False
    """A training worker is gone, or may be, so all of them restart."""
    ended: bool = False
    """All training workers of this term on this host have ended: its agent has reaped them."""
    checkpoints: tuple[Saved, ...] = ()
    """Checkpoints on this host, once it has `ended`."""
    given_up: tuple[Name, ...] = ()
    """Workers of this host that cannot return, once it has `ended`."""
    proposal: Successor | None = None
    """What should follow as far as this host knows; it may still change."""
    vote: Successor | None = None
    """What this host has committed to: it can begin this term at once, and never votes for another one."""
    reason: str = ""
    """If broken: what happened on this host, if it happened here."""
    waits: str = ""
    """If broken: what the next term waits for, if for more than a moment."""

    @property
    def step(self) -> int:
        """The training step that it began from; 0 for the first one since the launch."""
        return 0 if self.begun is None else self.begun.step

    @property
    def members(self) -> tuple[str, ...]:
        """Its training workers; empty: all that the run began with."""
        return () if self.begun is None else self.begun.members


class HostReport(Form, frozen=True):
    """All that other hosts need to know about one host.

    Example:

        HostReport(1, HostEntry("gpu-2", "10.0.0.3"), 17, workers={"rollout/1": HostedWorker(False, 1, "running")})
    """

    host: HostNumber
    entry: HostEntry
    serial: Whole = 0
    term: Term = Term(0)
    phase: str = "running"
    """running, leaving, stopping, or failing."""
    reason: str = ""
    """Why the run is stopping."""
    at_once: bool = False
    failure: Failure | None = None
    workers: Mapping[Name, HostedWorker] = msgspec.field(default_factory=dict)
    marks: Mapping[Name, ProcessId] = msgspec.field(default_factory=dict)
    """Processes of this host, by name."""
    wanted: Mapping[str, DesiredWorkers] = msgspec.field(default_factory=dict)
    """By pool, as decided here or by another host."""
    saved: Whole = 0
    """Bytes of checkpoints that its workers have read or written since the run is ending."""
    clean: bool = False
    """Nothing of the run is left on this host except its agent."""
    collected: bool = False
    """Only from the first host: it has fetched the files of other hosts that it is to keep."""
    gone: bool = False
    """The agent exits after this report."""

    @property
    def living(self) -> bool:
        """Whether a worker of this host runs or will run."""
        return any(hosted.living for hosted in self.workers.values())


def shortened(report: HostReport) -> HostReport:
    """The report with at most TRACEBACK_CHARACTERS of the failure's traceback."""
    failure = report.failure
    if failure is None or len(failure.traceback) <= TRACEBACK_CHARACTERS:
        return report
    failure = structs.replace(failure, traceback=failure.traceback[:TRACEBACK_CHARACTERS])
    return structs.replace(report, failure=failure)


def to_wire(report: HostReport) -> dict[str, Any]:
    """As plain data."""
    body: dict[str, Any] = msgspec.to_builtins(shortened(report))
    return body


def from_wire(body: object) -> HostReport:
    """The inverse; raises ProtocolError for what is no report of this version."""
    return read(body, HostReport, "report of a host agent")


@dataclass(frozen=True, slots=True)
class Choice:
    """The checkpoint to begin from. `step` 0: the beginning, nothing was saved; None: nothing saved is usable."""

    step: int | None
    term: int = 0
    """The term that wrote it."""
    lacking: str = ""
    """Which newer ones (all, if `step` is None) are unusable, and why, in words."""


def choose(checkpoints: Mapping[int, Iterable[Saved]], names: Mapping[int, str]) -> Choice:
    """Choose by the checkpoints of each host: a pure function, so all hosts choose the same."""
    found: dict[tuple[int, int], list[set[str]]] = {}
    for saved in (saved for host in sorted(checkpoints) for saved in checkpoints[host]):
        found.setdefault((saved.step, saved.term), []).append(set(saved.missing))
    lacking: list[str] = []
    for (step, term), missing in sorted(found.items(), reverse=True):
        nowhere = sorted(set.intersection(*missing))
        if not nowhere:
            return Choice(step, term, "; ".join(lacking))
        where = ", ".join(name for host, name in sorted(names.items()) if name)
        on = f" on {where}" if where else ""
        lacking.append(f"the checkpoint of training step {step} lacks {', '.join(nowhere)}{on}")
    if not found:
        return Choice(0)
    hint = "copy them back from the host that wrote them, and continue with --resume"
    return Choice(None, 0, f"{'; '.join(lacking)} — {hint}")
