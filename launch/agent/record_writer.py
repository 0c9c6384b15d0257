"""What an agent writes down: the run's record, `run.json`, and its own journal.

`run.json` is written by the agent that holds the run folder's lock, from the reports of all agents. `launch` takes the
lock first, and its agent inherits it. On a shared folder the other agents try to get it from time to time, so that one
of them takes over when that agent dies, or has lost contact with most hosts and releases it. Without a shared folder,
each agent has a lock of its own.

The journal, `hosts/<number>.agent.json`, is for the next agent of the host, in case this one is killed. It is mostly
the agent's own report to the other hosts, which contains all that it knows of its workers and what it has committed to.
It is written before the report is sent, so whatever other hosts have heard from this host binds its later agents, too.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from distflow.cluster.cluster_view import wanted
from distflow.cluster.gossip import Gossip
from distflow.cluster.host_report import HostedWorker, HostReport, shortened
from distflow.cluster.processes import Exit, HostEntry, ProcessId, RunState, agent_name, nursery_name
from distflow.comm.addresses import place_of, worker_address
from distflow.comm.endpoint import Endpoint
from distflow.comm.keys import NetworkListener, key_file, own_keys, read_keys
from distflow.data.decoding import Form
from distflow.launch.agent.restart_policy import Action, Life, RestartPolicy
from distflow.launch.run.folder import try_claim
from distflow.launch.run.record import AGENT, HOSTS, BadGpu, RunRecord, WorkerEntry, read_record
from distflow.log import logger
from distflow.runtime.disk import replace_file
from distflow.types import WorkerName

if TYPE_CHECKING:
    from distflow.launch.agent.peer_agents import PeerAgents
    from distflow.launch.agent.pool_recovery import PoolRecovery

TRY_S = 2.0
OFFER_S = 3 * TRY_S
"""How long the lock stays released: enough for other agents, if there are any, to take it."""
SPARE = 10
"""Of many workers `run.json` is long: writing it takes at most one part in so many of the agent's time."""
BAD_AFTER = 2
"""A GPU that has failed so often in a run is called bad: once may be chance, or a kernel's fault."""
_parsed = lru_cache(1 << 16)(WorkerName.parse)
log = logger(__name__)


class RecordWriter:
    """Keeps `run.json` for one agent; `lock`: the inherited descriptor of the folder's lock, if any."""

    def __init__(self, record: RunRecord, lock: int | None) -> None:
        self.record = record
        self._lock = lock
        self._written: object = None
        """What the last record was composed from."""
        self._rests_until = float("-inf")
        """When the next one may be written."""
        self._refused_at: float | None = None
        """When the disk refused the last record; None: it did not."""
        self._tried_at: float | None = None
        self._offered = False

    @property
    def writes(self) -> bool:
        """Whether this agent writes `run.json`."""
        return self._lock is not None

    def try_for_lock(self, now: float, *, outnumbered: bool = False) -> None:
        """Take the lock if it is free; tries at most every `TRY_S` seconds.

        `outnumbered`: contact with most hosts is lost. They may go on without this one, so it releases the lock once;
        if no agent takes it, they are dead.
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
            log.warning("taking over run.json: its previous writer is gone")
            # If the record says that the run is over, it stays; otherwise it is rewritten where it differs from ours.
            self.record = read_record(self.record.path)
            self._written = None

    def update(self, mesh: Gossip, state: RunState, pid: int, now: float) -> None:
        """Write what is new, if this agent writes; otherwise only remember the state of the run.

        Nothing is composed unless there was news since the last call. Among many hosts, after each record comes a
        rest (`SPARE`), and what is new then is in the next one; so the caller must keep calling. What the disk
        refuses is tried again every `TRY_S` seconds.
        """
        news = (mesh.revision, mesh.silent(), state)
        refused = self._refused_at is not None and now - self._refused_at < TRY_S
        if news == self._written or refused or (self.writes and now < self._rests_until):
            return
        if self.writes:
            began = time.monotonic()
            try:
                self.save(compose(self.record, mesh, state, pid))
            except OSError as error:
                if self._refused_at is None:
                    log.error("cannot write run.json; the run goes on: %s", error)
                self._refused_at = now
            else:
                self._written, self._refused_at = news, None
            if not mesh.few:
                self._rests_until = now + SPARE * (time.monotonic() - began)
        elif not self.record.over:
            self.record = structs.replace(self.record, state=state)

    def composed(self, mesh: Gossip, pid: int) -> RunRecord:
        """The current record, also for an agent that does not write it."""
        return compose(self.record, mesh, self.record.state, pid)

    def save(self, record: RunRecord) -> None:
        """Write the record if it has changed and this agent writes; raises OSError when the disk refuses."""
        if self.record.over or (record == self.record and self._refused_at is None):
            return
        self.record = record
        if self.writes:
            record.write()


def compose(before: RunRecord, mesh: Gossip, state: RunState, pid: int) -> RunRecord:
    """The record according to the reports of all hosts, and to `before` for hosts that have not reported."""
    newest = max((report.term for report in mesh.reports.values()), key=lambda term: (term.number, not term.broken))
    waits = [r.term.waits for r in mesh.reports.values() if r.term.number == newest.number and r.term.waits]
    entries = {entry.name: entry for entry in before.workers}
    marks, silent, decided = _unreported(before, mesh), mesh.silent(), wanted(mesh)
    for host, report in mesh.reports.items():
        marks |= report.marks
        for name, hosted in report.workers.items():
            entries[name] = _entry(name, hosted, host)
            pool = decided.get(_parsed(name).pool) if host in silent else None
            replaced = pool is not None and name not in pool.hosts
            left = hosted.state == "left" or (hosted.trains and newest.members and name not in newest.members)
            if left or (replaced and not hosted.trains):
                del entries[name]
    return structs.replace(
        before,
        state=state,
        term=newest.number,
        renewed=before.renewed if newest.begun is None else str(newest.begun),
        waits_for=waits[0] if waits else "",
        bad_gpus=_bad_gpus(before, mesh),
        pid=pid,
        workers=_ordered(before, entries),
        pids=marks,
        silent=tuple(sorted(silent)),
        hosts=_hosts(before, mesh),
        roster=dict(_roster(before, mesh, entries)),
    )


def _bad_gpus(before: RunRecord, mesh: Gossip) -> tuple[BadGpu, ...]:
    """Those under which workers of the launch have failed often enough that chance is no longer the likeliest cause."""
    faults = Counter(
        (host, number)
        for host, report in mesh.reports.items()
        for hosted in report.workers.values()
        for death in hosted.deaths
        for number in death.gpus
    )
    known = [bad for bad in before.bad_gpus if bad.host not in mesh.reports]
    found = [BadGpu(host, number, count) for (host, number), count in faults.items() if count >= BAD_AFTER]
    return tuple(sorted((*known, *found), key=lambda bad: (bad.host, bad.number)))


def _unreported(before: RunRecord, mesh: Gossip) -> dict[str, ProcessId]:
    """Processes of hosts that have not reported yet."""
    where = {entry.name: entry.host for entry in before.workers}
    for host in before.numbers:
        where |= {agent_name(host): host, nursery_name(host): host}
    return {name: mark for name, mark in before.pids.items() if where.get(name) not in mesh.reports}


def _ordered(before: RunRecord, entries: Mapping[str, WorkerEntry]) -> tuple[WorkerEntry, ...]:
    """By pool, in their previous order, and by index."""
    if [entry.name for entry in before.workers if entry.name in entries] == list(entries):
        # Nobody is new.
        return tuple(entries.values())
    pools: dict[str, int] = {}
    for name in (*(entry.name for entry in before.workers), *entries):
        pools.setdefault(_parsed(name).pool, len(pools))
    places = {(pools[_parsed(name).pool], _parsed(name).index): entry for name, entry in entries.items()}
    return tuple(places[place] for place in sorted(places))


def _hosts(before: RunRecord, mesh: Gossip) -> tuple[HostEntry, ...]:
    if not before.hosts:
        return ()
    known = dict(enumerate(before.hosts)) | {host: report.entry for host, report in mesh.reports.items()}
    # Of two hosts that join at once, the second may report first.
    return tuple(known[number] for number in takewhile(known.__contains__, count()))


def _roster(before: RunRecord, mesh: Gossip, entries: dict[str, WorkerEntry]) -> Iterator[tuple[str, str]]:
    if not before.hosts:
        path, known = before.path, before.roster
        # Known addresses first: making one asks the file system.
        yield from ((name, known.get(name) or worker_address(path, name)) for name in (AGENT, *entries))
    for host, entry in enumerate(before.hosts):
        report = mesh.report(host)
        yield agent_name(host), entry.agent if report is None else report.entry.agent
    for name, worker in entries.items() if before.hosts else ():
        report = mesh.report(worker.host)
        yield name, report.workers[name].address if report is not None and name in report.workers else ""


def _entry(name: str, hosted: HostedWorker, host: int) -> WorkerEntry:
    return WorkerEntry(name, hosted.trains, hosted.threads, host, hosted.python, hosted.generates, hosted.gpus)


class Journal(Form, frozen=True):
    """The state of the agent of a host."""

    launch_term: int
    """The term in which the run was launched: the journal of an earlier launch is ignored."""
    report: HostReport
    agents: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Addresses of the other hosts' agents by number."""
    first: int = 0
    """The number that its reports and pulses were counted from."""
    begun: bool = False
    """Whether it was told to start its workers."""
    restarted: Mapping[str, list[float]] = msgspec.field(default_factory=dict)
    """When workers were restarted, by the system's monotonic clock."""
    told: tuple[str, ...] = ()
    """Workers that were told to drain."""
    culprits: tuple[str, ...] = ()
    """Training workers that were killed in this term."""
    former_culprits: tuple[str, ...] = ()
    """Training workers that were killed in the previous term."""

    def lives(self) -> dict[str, Life]:
        """The workers of this host, as the agent knew them."""
        return {name: self._life(name, hosted) for name, hosted in self.report.workers.items()}

    def workers(self) -> dict[str, ProcessId]:
        """The processes of the workers that were alive."""
        return {name: self.report.marks[name] for name in self.report.workers if name in self.report.marks}

    def _life(self, name: str, hosted: HostedWorker) -> Life:
        ended = not hosted.living
        return Life(
            _entry(name, hosted, self.report.host),
            state="ended" if ended else "starting" if hosted.state == "starting" else "running",
            pid=self.report.marks[name].pid if name in self.report.marks and not ended else None,
            incarnation=hosted.incarnation,
            restarted=list(self.restarted.get(name, ())),
            ending=Exit(hosted.code) if ended else None,
            drained=hosted.state in ("draining", "left"),
            told=name in self.told,
            deaths=list(hosted.deaths),
        )


def journal_file(run_dir: Path, host: int) -> Path:
    """The path of the journal of a host's agent."""
    return run_dir / HOSTS / f"{host}.agent.json"


def read_journal(run_dir: Path, host: int, launch_term: int) -> Journal | None:
    """The journal of the previous agent; None if there was none since the launch."""
    try:
        found = msgspec.json.decode(journal_file(run_dir, host).read_bytes(), type=Journal)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("ignoring %s: not a journal of this version of distflow (%s)", journal_file(run_dir, host), error)
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
        """Write it atomically if anything has changed; returns whether it is on disk."""
        if journal == self._written:
            return True
        try:
            replace_file(self._path, msgspec.json.encode(structs.replace(journal, report=shortened(journal.report))))
        except OSError as error:
            if not self._refused:
                log.error("cannot write %s (%s); trying again", self._path, error.strerror)
            self._refused = True
            return False
        self._written, self._refused = journal, False
        return True


class Succession:
    """How an agent takes over from the previous one, and prepares for the next one. `before`: the previous journal."""

    def __init__(
        self,
        record: RunRecord,
        host: int,
        before: Journal | None,
        core: RestartPolicy,
        peers: PeerAgents,
        terms: PoolRecovery,
    ) -> None:
        self._launch_term = record.launch_term
        self._before = before
        self._writer = JournalWriter(record.path, host)
        self._core = core
        self._peers = peers
        self._terms = terms

    @property
    def workers(self) -> Mapping[str, ProcessId] | None:
        """Processes of the previous agent's workers; None if there was no previous agent."""
        return None if self._before is None else self._before.workers()

    def take_over(self) -> list[Action]:
        """Continue from where the previous agent was killed; returns what is left to do for it."""
        if self._before is None:
            return []
        log.warning("the previous agent was killed; taking over its workers")
        self._peers.resume(self._before)
        self._terms.resume(self._before.report.term, self._before.former_culprits)
        return self._core.resume(self._before.lives(), self._before.report, self._before.culprits, time.monotonic())

    def keep(self, report: HostReport) -> bool:
        """Write the journal; returns whether it is on disk."""
        lives, core = self._core.lives.items(), self._core
        journal = Journal(
            launch_term=self._launch_term,
            report=report,
            first=self._peers.first,
            agents=self._peers.agents(),
            begun=self._peers.begun,
            restarted={name: list(life.restarted) for name, life in lives if life.restarted},
            told=tuple(name for name, life in lives if life.told),
            culprits=tuple(sorted(core.culprits)),
            former_culprits=self._terms.former_culprits,
        )
        return self._writer.write(journal)

    def publish(self, report: HostReport) -> None:
        """Tell the other hosts what is new here; a vote only once it is on disk, so that no later agent forgets it."""
        published = self._peers.mesh.own.term
        if not self.keep(report) and report.term.vote != published.vote:
            report = structs.replace(report, term=structs.replace(report.term, vote=published.vote))
        self._peers.publish(report)


def make_endpoint(record: RunRecord, host: int, before: Journal | None) -> Endpoint:
    """The agent's endpoint, at the address of the previous agent, by which other hosts know it."""
    name, roster = agent_name(host), _own_roster(record, host, before)
    if not record.hosts:
        return Endpoint(name, record.launch_term, roster)
    own, former = own_keys(record.path, f"agent-{host}"), _former_address(before)
    listener = NetworkListener(record.hosts[host].address, read_keys(key_file(record.path)), own, former)
    return Endpoint(name, record.launch_term, roster, listener=listener)


def _former_address(before: Journal | None) -> str:
    """The network address of the previous agent; empty: it had none."""
    return "" if before is None else place_of(before.report.entry.agent)


def _own_roster(record: RunRecord, host: int, before: Journal | None) -> dict[str, str]:
    """The local addresses of a host's agent and workers, including workers that were added during the run."""
    planned = [worker.name for worker in record.workers if worker.host == host]
    later = [] if before is None else before.report.workers
    return {name: worker_address(record.path, name, host) for name in (*planned, *later, agent_name(host))}
