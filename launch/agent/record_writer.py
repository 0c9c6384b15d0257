"""Who writes `run.json`, and what stands in it: the agent that has the folder's lock writes what all agents know.

`launch` takes the lock first and its agent inherits it. On a shared folder the other agents try for it from time to
time, so that one of them goes on writing when that agent dies, or no longer hears most of the others and therefore lays
the lock down; without a shared folder, each agent has one to itself.

What an agent leaves for the one that follows it on its host, should it be killed, is its journal:
`hosts/<number>.agent.json`. It is mostly the agent's own report to the other hosts, which says all that it knows of its
workers and what it is bound to. It is written before the report goes out: what others have heard from this host holds
for every later agent of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import count, takewhile
from pathlib import Path

import msgspec
from msgspec import structs

from distflow.comm.addresses import worker_address
from distflow.data.decoding import Form
from distflow.launch.agent.restart_policy import Life
from distflow.launch.cluster.gossip import Gossip
from distflow.launch.cluster.host_report import HostedWorker, HostReport, shortened
from distflow.launch.run.exit_status import Exit
from distflow.launch.run.folder import try_claim
from distflow.launch.run.record import (
    AGENT,
    HOSTS,
    HostEntry,
    ProcessMark,
    RunRecord,
    RunState,
    WorkerEntry,
    agent_name,
    nursery_name,
    read_record,
)
from distflow.log import logger
from distflow.types import WorkerName

TRY_S = 2.0
OFFER_S = 3 * TRY_S
"""The lock is laid down for so long: enough for the others to take it, if there are any."""
_parsed = lru_cache(1 << 13)(WorkerName.parse)
log = logger(__name__)


class RecordWriter:
    """Keeps `run.json` for one agent; `lock` is the inherited descriptor of the folder's lock, if there is one."""

    def __init__(self, record: RunRecord, lock: int | None) -> None:
        self.record = record
        self._lock = lock
        self._written: object = None
        """What the last record was composed from."""
        self._refused_at: float | None = None
        """When the disk refused the last record, if it did."""
        self._tried_at: float | None = None
        self._offered = False

    @property
    def writes(self) -> bool:
        """Whether it is us who write `run.json`."""
        return self._lock is not None

    def try_for_lock(self, now: float, *, outnumbered: bool = False) -> None:
        """Take over the folder if nobody has it; asks the file system at most every `TRY_S` seconds.

        `outnumbered`: most hosts cannot be heard from here. They may go on without us, so they are offered the folder,
        once; if nobody takes it, they are dead.
        """
        if not outnumbered:
            self._offered = False
        elif self._lock is not None and not self._offered:
            log.warning("lost contact with most hosts; releasing the run.json lock so the majority can take over")
            os.close(self._lock)
            self._offered, self._lock, self._tried_at = True, None, now + OFFER_S - TRY_S
        if self._lock is not None or (self._tried_at is not None and now - self._tried_at < TRY_S):
            return
        first, self._tried_at = self._tried_at is None, now
        self._lock = try_claim(self.record.path)
        if self._lock is not None and not first:
            log.warning("nobody writes run.json any more: this agent does from now on")
            # An end of the run that is written there stays; else what differs from ours is written anew.
            self.record = read_record(self.record.path)
            self._written = None

    def update(self, mesh: Gossip, state: RunState, pid: int, now: float) -> None:
        """Write what is new, if it is us who write; who does not only keeps the state of the run.

        A turn of an agent's loop in which nothing new was heard composes nothing. What the disk refuses is tried again
        every `TRY_S` seconds.
        """
        news = (mesh.revision, mesh.silent(), state)
        if news == self._written or (self._refused_at is not None and now - self._refused_at < TRY_S):
            return
        if self.writes:
            try:
                self.save(compose(self.record, mesh, state, pid))
            except OSError as error:
                if self._refused_at is None:
                    log.error("run.json cannot be written, the run goes on: %s", error)
                self._refused_at = now
            else:
                self._written, self._refused_at = news, None
        elif not self.record.over:
            self.record = structs.replace(self.record, state=state)

    def composed(self, mesh: Gossip, pid: int) -> RunRecord:
        """The record as of now, also for an agent that does not write it."""
        return compose(self.record, mesh, self.record.state, pid)

    def save(self, record: RunRecord) -> None:
        """Write what has changed, if it is us who write; raises OSError when the disk refuses."""
        if self.record.over or (record == self.record and self._refused_at is None):
            return
        self.record = record
        if self.writes:
            record.write()


def compose(before: RunRecord, mesh: Gossip, state: RunState, pid: int) -> RunRecord:
    """The record as the reports of all hosts have it. Hosts that never reported are as `before` has them."""
    newest = max((report.term for report in mesh.reports.values()), key=lambda term: (term.number, not term.broken))
    waits = [r.term.waits for r in mesh.reports.values() if r.term.number == newest.number and r.term.waits]
    entries = {entry.name: entry for entry in before.workers}
    marks = _unreported(before, mesh)
    for host, report in mesh.reports.items():
        marks |= report.marks
        for name, seat in report.seats.items():
            entries[name] = WorkerEntry(name, seat.trains, seat.threads, host, seat.python, seat.generates)
            if seat.state == "left" or (seat.trains and newest.members and name not in newest.members):
                del entries[name]
    return structs.replace(
        before,
        state=state,
        term=newest.number,
        renewed=before.renewed if newest.begun is None else str(newest.begun),
        waits_for=waits[0] if waits else "",
        pid=pid,
        workers=_ordered(before, entries),
        pids=marks,
        silent=tuple(sorted(mesh.silent())),
        hosts=_hosts(before, mesh),
        roster=dict(_roster(before, mesh, entries)),
    )


def _unreported(before: RunRecord, mesh: Gossip) -> dict[str, ProcessMark]:
    """Processes of hosts of which there is no report yet."""
    where = {entry.name: entry.host for entry in before.workers}
    for host in before.numbers:
        where |= {agent_name(host): host, nursery_name(host): host}
    return {name: mark for name, mark in before.pids.items() if where.get(name) not in mesh.reports}


def _ordered(before: RunRecord, entries: Mapping[str, WorkerEntry]) -> tuple[WorkerEntry, ...]:
    """By pool, in the order in which they were, and by number."""
    pools: dict[str, int] = {}
    for name in (*(entry.name for entry in before.workers), *entries):
        pools.setdefault(_parsed(name).pool, len(pools))
    places = {(pools[_parsed(name).pool], _parsed(name).index): entry for name, entry in entries.items()}
    return tuple(places[place] for place in sorted(places))


def _hosts(before: RunRecord, mesh: Gossip) -> tuple[HostEntry, ...]:
    if not before.hosts:
        return ()
    known = dict(enumerate(before.hosts)) | {host: report.entry for host, report in mesh.reports.items()}
    # Of two hosts that join at once, the second may be heard of first.
    return tuple(known[number] for number in takewhile(known.__contains__, count()))


def _roster(before: RunRecord, mesh: Gossip, entries: dict[str, WorkerEntry]) -> Iterator[tuple[str, str]]:
    if not before.hosts:
        path, known = before.path, before.roster
        # Finding an address asks the file system.
        yield from ((name, known.get(name) or worker_address(path, name)) for name in (AGENT, *entries))
    for host, entry in enumerate(before.hosts):
        report = mesh.report(host)
        yield agent_name(host), entry.agent if report is None else report.entry.agent
    for name, worker in entries.items() if before.hosts else ():
        report = mesh.report(worker.host)
        yield name, report.seats[name].address if report is not None and name in report.seats else ""


class Journal(Form, frozen=True):
    """Where the agent of a host stands."""

    launch_term: int
    """The term in which the run was launched: an earlier launch's journal says nothing."""
    report: HostReport
    agents: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Addresses of the other hosts' agents by number."""
    first: int = 0
    """What its reports and pulses were counted from."""
    begun: bool = False
    """Whether it was told to start its workers."""
    restarted: Mapping[str, list[float]] = msgspec.field(default_factory=dict)
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

    def _life(self, name: str, seat: HostedWorker) -> Life:
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
        found = msgspec.json.decode(journal_file(run_dir, host).read_bytes(), type=Journal)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
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
            scratch.write_bytes(msgspec.json.encode(structs.replace(journal, report=shortened(journal.report))))
            scratch.replace(self._path)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            if not self._refused:
                log.error("%s cannot be written (%s): it is tried again", self._path, error.strerror)
            self._refused = True
            return False
        self._written, self._refused = journal, False
        return True
