"""What an agent leaves for the one that follows it on its host, should it be killed: `hosts/<number>.agent.json`.

It is mostly the agent's own report to the other hosts, which says all that it knows of its workers and what it is bound
to. It is written before the report goes out: what others have heard from this host holds for every later agent of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from distflow.errors import ProtocolError
from distflow.launch.agent.restart_policy import Life
from distflow.launch.cluster.host_report import Report, Seat, from_wire, to_wire
from distflow.launch.run.exit_status import Exit
from distflow.launch.run.record import HOSTS, ProcessMark, WorkerEntry
from distflow.log import logger

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Journal:
    """Where the agent of a host stands."""

    launch_term: int
    """The term in which the run was launched: an earlier launch's journal says nothing."""
    report: Report
    agents: Mapping[str, str] = field(default_factory=dict)
    """Addresses of the other hosts' agents by number."""
    first: int = 0
    """What its reports and pulses were counted from."""
    begun: bool = False
    """Whether it was told to start its workers."""
    restarted: Mapping[str, list[float]] = field(default_factory=dict)
    """When workers were started again, by the system's monotonic clock."""
    told: tuple[str, ...] = ()
    """Workers that were told to drain."""
    culprits: tuple[str, ...] = ()
    """Training workers that were killed in this term …"""
    former_culprits: tuple[str, ...] = ()
    """… and in the one before."""

    def lives(self) -> dict[str, Life]:
        """The workers of this host, as that agent knew them."""
        return {name: self._life(name, seat) for name, seat in self.report.seats.items()}

    def workers(self) -> dict[str, ProcessMark]:
        """The processes of those that lived."""
        return {name: self.report.marks[name] for name in self.report.seats if name in self.report.marks}

    def _life(self, name: str, seat: Seat) -> Life:
        ended = not seat.living
        return Life(
            WorkerEntry(name, seat.trains, seat.threads, self.report.host, seat.python, seat.generates),
            state="ended" if ended else "starting" if seat.state == "starting" else "running",
            pid=self.report.marks[name].pid if name in self.report.marks and not ended else None,
            incarnation=seat.incarnation,
            restarted=list(self.restarted.get(name, ())),
            ending=Exit(seat.code) if ended else None,
            drained=seat.state in ("draining", "left"),
            told=name in self.told,
            deaths=list(seat.deaths),
        )


def journal_file(run_dir: Path, host: int) -> Path:
    """Where the agent of a host keeps it."""
    return run_dir / HOSTS / f"{host}.agent.json"


def read_journal(run_dir: Path, host: int, launch_term: int) -> Journal | None:
    """What the agent before this one left; None if there was none since the launch."""
    try:
        values = json.loads(journal_file(run_dir, host).read_text())
        values["report"] = from_wire(values["report"])
        for name in ("told", "culprits", "former_culprits"):
            values[name] = tuple(values[name])
        found = Journal(**values)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, ProtocolError) as error:
        log.warning("%s: not an agent's journal of this version of distflow (%s)", journal_file(run_dir, host), error)
        return None
    return found if found.launch_term == launch_term else None


class JournalWriter:
    """Keeps the journal of one agent."""

    def __init__(self, run_dir: Path, host: int) -> None:
        self._path = journal_file(run_dir, host)
        self._path.parent.mkdir(exist_ok=True)
        self._written: Journal | None = None
        self._refused = False

    def write(self, journal: Journal) -> bool:
        """Write it if anything has changed, in one step; whether it is on disk."""
        if journal == self._written:
            return True
        scratch = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            scratch.write_text(json.dumps({**asdict(journal), "report": to_wire(journal.report)}))
            scratch.replace(self._path)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            if not self._refused:
                log.error("%s cannot be written (%s): it is tried again", self._path, error.strerror)
            self._refused = True
            return False
        self._written, self._refused = journal, False
        return True
