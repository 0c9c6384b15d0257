"""Who writes `run.json`, and what stands in it: the agent that has the folder's lock writes what all agents know.

`launch` takes the lock first and its agent inherits it. On a shared folder the other agents try for it from time to
time, so that one of them goes on writing when that agent dies, or no longer hears most of the others and therefore lays
the lock down; without a shared folder, each agent has one to itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import count, takewhile

from distflow.comm.addresses import worker_address
from distflow.launch.cluster.gossip import Mesh
from distflow.launch.run.folder import try_claim
from distflow.launch.run.record import (
    AGENT,
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


class Recorder:
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
            log.warning("most hosts cannot be heard here: if they go on, they write run.json from now on")
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

    def update(self, mesh: Mesh, state: RunState, pid: int, now: float) -> None:
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
            self.record = replace(self.record, state=state)

    def composed(self, mesh: Mesh, pid: int) -> RunRecord:
        """The record as of now, also for an agent that does not write it."""
        return compose(self.record, mesh, self.record.state, pid)

    def save(self, record: RunRecord) -> None:
        """Write what has changed, if it is us who write; raises OSError when the disk refuses."""
        if self.record.over or (record == self.record and self._refused_at is None):
            return
        self.record = record
        if self.writes:
            record.write()


def compose(before: RunRecord, mesh: Mesh, state: RunState, pid: int) -> RunRecord:
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
    return replace(
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


def _unreported(before: RunRecord, mesh: Mesh) -> dict[str, ProcessMark]:
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


def _hosts(before: RunRecord, mesh: Mesh) -> tuple[HostEntry, ...]:
    if not before.hosts:
        return ()
    known = dict(enumerate(before.hosts)) | {host: report.entry for host, report in mesh.reports.items()}
    # Of two hosts that join at once, the second may be heard of first.
    return tuple(known[number] for number in takewhile(known.__contains__, count()))


def _roster(before: RunRecord, mesh: Mesh, entries: dict[str, WorkerEntry]) -> Iterator[tuple[str, str]]:
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
