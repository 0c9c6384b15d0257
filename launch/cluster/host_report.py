"""What an agent says about its own host. Whoever has two reports of one host keeps the one with the higher serial.

And from which checkpoint a term can begin, by what every host says that it has: the newest one that is whole. Where
hosts have run folders of their own, each has the parts of its own training workers. A checkpoint is whole as long as
every part of it lies on one of the hosts that are left: those that lack it get it from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import structs

from distflow.comm.addresses import Address
from distflow.data.decoding import Form, Name, Whole, read
from distflow.launch.run.record import Failure, HostEntry, ProcessMark

TRACEBACK_CHARACTERS = 20_000
"""Of a failure's traceback that is sent: its beginning has the user's frames."""
HostNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class Death(Form, frozen=True):
    """The end of one life of a worker that its peers are told of.

    Example:

        Death(incarnation=0, reason="killed by signal 9")
    """

    incarnation: Whole
    reason: str


class HostedWorker(Form, frozen=True):
    """A worker, as the agent of its host knows it.

    Example:

        HostedWorker(trains=False, threads=1, state="running", address="tcp://10.0.0.3:41234", generates=True)
    """

    trains: bool
    threads: Whole
    state: str
    """starting, running, draining, ended, or left (drained: the run goes on without it)."""
    incarnation: Whole = 0
    address: Address = ""
    """Where workers on other hosts reach it; "" while it has not said so."""
    code: int | None = None
    """Exit code of a life that ended by itself."""
    deaths: tuple[Death, ...] = ()
    python: str = ""
    """The interpreter that executes it; "": the one of its agent."""
    generates: bool = False

    @property
    def living(self) -> bool:
        """Whether it runs or will."""
        return self.state not in ("ended", "left")


class DesiredWorkers(Form, frozen=True):
    """Which workers a pool shall have, and on which hosts: the last decision of `distflow scale`, on any host.

    Example:

        DesiredWorkers(stamp=(2, 0), hosts={"rollout/0": 0, "rollout/1": 1})
    """

    stamp: tuple[Whole, Whole]
    """Number of the decision, and the host that took it: the highest is the last."""
    hosts: Mapping[Name, HostNumber]
    """Host by name of worker."""


class Saved(Form, frozen=True):
    """A checkpoint, as it lies on one host.

    Example:

        Saved(step=40, term=0, missing=("model-policy-trainer-1.safetensors",))
    """

    step: Whole
    term: Whole
    """The one that wrote it."""
    missing: tuple[str, ...] = ()
    """Parts of it that this host lacks: they were written on others."""


class Successor(Form, frozen=True):
    """The term that shall follow, in all that must be the same on every host.

    Example:

        Successor(1, step=40, tries=1, members=("trainer/0", "trainer/1"), saved_by=0, begins=((1, 40),),
                  reason="trainer/1 was killed by signal 9")
    """

    number: Whole
    step: Whole
    """The training step that it begins at: the one after the checkpoint of this number."""
    tries: Whole
    """How many terms in a row began at this step with these members, with this one."""
    members: tuple[Name, ...]
    """Its training workers."""
    saved_by: Whole
    """The term that wrote the checkpoint it begins from."""
    begins: tuple[tuple[Whole, Whole], ...]
    """Number and step of every term that began since the launch, this one last."""
    reason: str
    """Why the term before is over."""

    def __str__(self) -> str:
        where = f"training step {self.step}" if self.step else "the beginning, since there is no checkpoint yet"
        return f"{self.reason}; the training workers go on from {where}, as term {self.number}"


class Term(Form, frozen=True):
    """Where the training pool of a run stands, as one host has it.

    Example:

        Term(0, broken=True, ended=True, checkpoints=(Saved(40, 0),), reason="trainer/1 was killed by signal 9")
    """

    number: Whole
    begun: Successor | None = None
    """How it began; None for the first one since the launch."""
    broken: bool = False
    """A training worker is gone, or may be: all of them restart."""
    ended: bool = False
    """No training worker of this term is left on this host: its agent has seen them end."""
    checkpoints: tuple[Saved, ...] = ()
    """What this host has of checkpoints; said when it has `ended`."""
    given_up: tuple[Name, ...] = ()
    """Workers of this host that cannot come back; said when it has `ended`."""
    proposal: Successor | None = None
    """What should follow as far as this host knows now: it may still change its mind."""
    vote: Successor | None = None
    """What this host has bound itself to: it can begin this one at once, and never names another after this term."""
    reason: str = ""
    """Broken: what happened on this host, if it was here."""
    waits: str = ""
    """Broken: what the next term waits for, if for more than a moment."""

    @property
    def step(self) -> int:
        """The training step that it began at; 0 for the first one since the launch."""
        return 0 if self.begun is None else self.begun.step

    @property
    def members(self) -> tuple[str, ...]:
        """Its training workers; none named: all that the run began with."""
        return () if self.begun is None else self.begun.members


class HostReport(Form, frozen=True):
    """All that other hosts need to know of one host.

    Example:

        HostReport(1, HostEntry("gpu-2", "10.0.0.3"), serial=17, seats={"rollout/1": HostedWorker(False, 1, "running")})
    """

    host: HostNumber
    entry: HostEntry
    serial: Whole = 0
    term: Term = Term(0)
    """Of the training pool."""
    phase: str = "running"
    """running, leaving, stopping, or failing."""
    reason: str = ""
    """Of stopping."""
    at_once: bool = False
    failure: Failure | None = None
    seats: Mapping[Name, HostedWorker] = msgspec.field(default_factory=dict)
    marks: Mapping[Name, ProcessMark] = msgspec.field(default_factory=dict)
    """Processes of this host by name."""
    wanted: Mapping[str, DesiredWorkers] = msgspec.field(default_factory=dict)
    """By pool; as decided here or learned."""
    clean: bool = False
    """Nothing of the run is left on this host but its agent."""
    collected: bool = False
    """The first host has fetched what it keeps of the others' files."""
    gone: bool = False
    """The agent leaves with this report."""

    @property
    def living(self) -> bool:
        """Whether a worker of this host runs or will."""
        return any(seat.living for seat in self.seats.values())


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
    """Where to begin. `step` 0: at the beginning, since nothing was saved; None: what was saved cannot be used."""

    step: int | None
    term: int = 0
    """The one that wrote it."""
    lacking: str = ""
    """Which newer ones (or all, if `step` is None) cannot be used, and why: a human-readable sentence."""


def choose(checkpoints: Mapping[int, Iterable[Saved]], names: Mapping[int, str]) -> Choice:
    """`checkpoints`: what each host has. All that take part give the same, so that all come to the same."""
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
    cure = "bring them back from the host that wrote them, and go on with --resume"
    return Choice(None, 0, f"{'; '.join(lacking)} — {cure}")
