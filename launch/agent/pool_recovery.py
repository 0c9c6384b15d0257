"""Recovers the training pool on one host: ends its training workers when one was killed anywhere, and restarts them.

What is decided, and when, is in `distflow/cluster/term_vote.py`; this file carries it out in the run folder.

If the agent of a host is silent, its training workers are asked directly, since they may be healthy although their
agent is gone. Each round of questions takes at most a few seconds, on a thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from distflow.cluster.cluster_view import Rules, View, members_of, takes_up
from distflow.cluster.gossip import Gossip, least_silence_s
from distflow.cluster.host_report import HostReport, Successor, Term
from distflow.cluster.processes import Failure
from distflow.cluster.term_vote import BEFORE_ALL, Begin, Break, Found, Pool, Stop, is_to_end
from distflow.comm.addresses import worker_address
from distflow.comm.client import ask
from distflow.comm.keys import key_file, read_keys
from distflow.config.yamlfile import yaml_text, yaml_value
from distflow.errors import DistflowError, UserError, WorkerFailed
from distflow.flow.rescaling import renewed
from distflow.launch.agent.restart_policy import Action, RestartPolicy, Tell
from distflow.launch.agent.scaling import NoGpuError, Scaling
from distflow.launch.observe.file_client import CheckpointFetch, saved_here
from distflow.launch.run.exit_status import log_file
from distflow.launch.run.process_table import sweep_term
from distflow.launch.run.record import RunRecord
from distflow.launch.run.resume import checkpoint_of, forget_drafts, forget_dumps_of
from distflow.log import logger
from distflow.runtime.checkpoint.commit import checkpoints_of, open_term
from distflow.runtime.disk import replace_file
from distflow.types import WorkerName

ROOM_BYTES = 64 << 10
"""More than a term's file and the documents of a host's workers take."""
ASK_S = 1.0
PROBE_S = 1.0
"""How often to check whether a full disk has room again."""
log = logger(__name__)
LONGEST_S = 2.0


class PoolRecovery:
    """The part that one agent takes in it."""

    def __init__(
        self,
        record: RunRecord,
        host: int,
        core: RestartPolicy,
        scaling: Scaling,
    ) -> None:
        self._scaling = scaling
        self._asked_at = float("-inf")
        """When the training workers here were last asked to save and leave."""
        self._run_dir = record.path
        self._host = host
        self._core = core
        self._hosts = {entry.name: entry.host for entry in record.workers if entry.trains}
        self._rules = Rules(record.on_failure == "shrink", record.host_silence_s, record.restarts)
        self._pool = Pool(self._rules, record.term, record.no_progress_s)
        self._liveness = LivenessProbe(record.path, record.host_silence_s) if record.hosts else None
        self._fetch = CheckpointFetch(record.path, record.no_progress_s)
        self._culprits: frozenset[str] = frozenset()
        """Training workers of this host that were killed in the previous term."""
        self._broken_at: float | None = None
        self._host_name = record.hosts[host].name if record.hosts else "this machine"
        self._unreadable: str | None = None
        """Why it cannot be told which checkpoints are valid."""
        self._refused_at: float | None = None
        """When the disk last refused the files that a term begins with; None: it has room."""
        self._members = _Members(None, self._hosts)
        """Of the current term."""
        self._whole_at = -1
        """The last revision of the reports whose terms were all whole, and none newer than ours."""

    def resume(self, term: Term, culprits: Iterable[str]) -> None:
        """Continue from the term in which the previous agent was killed. `culprits`: as `former_culprits` says."""
        self._pool.term = term
        self._culprits = frozenset(culprits)

    @property
    def former_culprits(self) -> tuple[str, ...]:
        """Training workers of this host that were killed in the previous term."""
        return tuple(sorted(self._culprits))

    @property
    def members(self) -> Mapping[str, int]:
        """The training workers of the current term, with their hosts."""
        return self._current.where

    @property
    def _current(self) -> _Members:
        begun = self._pool.term.begun
        if self._members.begun is not begun:
            self._members = _Members(begun, members_of(begun, self._hosts))
        return self._members

    @property
    def present(self) -> Term:
        """The current term, as it is to be reported."""
        if self._core.broken is not None and self._broken_at is None:
            self._broken_at = time.monotonic()
        return self._pool.note(self._core.broken, alive=self._core.trains, look=self._look)

    def has_left_behind(self, report: HostReport) -> bool:
        """Whether the report is from a part of the pool that was cut off and gave up, while the rest went on."""
        return report.term.broken and report.term.number < self._pool.term.number

    def act(self, mesh: Gossip, know: Callable[[str, str], object], now: float) -> list[Action]:
        """Do this host's part. The mesh already has our report of `present`. `know` gets addresses of new workers."""
        core = self._core
        if core.winding_up or not core.renews:
            return []
        if self._is_whole(mesh) and self._hears_all(mesh, now):
            return []
        agents = {host: report.entry.agent for host, report in mesh.reports.items()}
        terms = {host: report.term for host, report in mesh.reports.items()} | {self._host: self.present}

        if self._unreadable is not None:
            return core.fail(self._failure(self._unreadable), now)

        def lacks(term: Successor) -> str:
            ours = self._host in members_of(term, self._hosts).values()
            parts = self._fetch.lacks(term, terms, agents) if ours else ""
            if parts and self._fetch.no_room:
                return self._room
            return self._lacks_room(now) or (parts and f"{self._host_name} to fetch {parts}")

        view = self._view(mesh, terms, now)
        move = self._pool.act(view, alive=core.trains, lacks=lacks, now=now)
        if move is None and core.broken is None and is_to_end(view, self._rules):
            return self._ask_to_leave(now)
        if isinstance(move, Break):
            return core.break_up(move.reason)
        if isinstance(move, Begin):
            begun = self._try_to_begin(move.term, know, now)
            if isinstance(begun, list):
                return begun
            move = begun
        why = move.why if isinstance(move, Stop) else self._fetch.fault
        return [] if why is None else core.fail(self._failure(why), now)

    def _is_whole(self, mesh: Gossip) -> bool:
        """Whether nothing that was reported disturbs the current term; looks at what has changed since it was so."""
        own = self._pool.term
        if self._core.broken is not None or own.broken or self._unreadable is not None or self._fetch.fault is not None:
            return False
        terms = [
            report.term for host in mesh.changed_since(self._whole_at) if (report := mesh.report(host)) is not None
        ]
        if any((term.number, term.broken) > (own.number, False) for term in terms):
            return False
        self._whole_at = mesh.revision
        taken_up = {} if own.begun is None else {pool: (number, host) for pool, number, host in own.begun.scaled}
        decisions = self._scaling.training(mesh).items()
        return all(decision.stamp <= taken_up.get(pool, BEFORE_ALL) for pool, decision in decisions)

    def _hears_all(self, mesh: Gossip, now: float) -> bool:
        """Whether all hosts of training workers are heard, and have confirmed that they hear us."""
        hosts = self._current.hosts
        gone = any(hosts >> host & 1 for host in mesh.silent(self._rules.gone_s))
        return not gone and not hosts & ~mesh.confirmed(self._quiet_s(mesh), now)

    def _quiet_s(self, mesh: Gossip) -> float:
        """An agent that has not confirmed for so long that it hears us is not waited for: its workers are asked.

        Longer than it takes all that live to confirm it, which among many hosts is a while.
        """
        return max(self._rules.silence_s / 3, least_silence_s(len(mesh.others) + 1))

    def _lacks_room(self, now: float) -> str:
        """What to wait for while the files that a term begins with cannot be written; empty: nothing."""
        if self._refused_at is not None and now - self._refused_at < PROBE_S:
            return self._room
        probe = checkpoints_of(self._run_dir) / f".room-{self._host}"
        try:
            probe.write_bytes(bytes(ROOM_BYTES))
        except OSError as error:
            return self._refused(error, now)
        finally:
            probe.unlink(missing_ok=True)
        self._refused_at = None
        return ""

    def _refused(self, error: OSError, now: float) -> str:
        if self._refused_at is None:
            log.error("the next term waits for room in %s: %s", self._run_dir, error)
        self._refused_at = now
        return self._room

    @property
    def _room(self) -> str:
        return f"room on the disk of {self._host_name}"

    def _look(self) -> Found:
        """Complete checkpoints on this host; and workers that cannot return.

        A worker cannot return if it was killed in two successive terms without a new checkpoint in between.
        """
        try:
            saved = saved_here(self._run_dir)
        except UserError as error:
            self._unreadable, saved = str(error), ()
        newest = max((one.step for one in saved), default=0)
        again = self._core.culprits & self._culprits if newest <= self._pool.term.step else set()
        return saved, tuple(sorted(again))

    def _view(self, mesh: Gossip, terms: Mapping[int, Term], now: float) -> View:
        names = {host: report.entry.name for host, report in mesh.reports.items()}
        unheard = {host: mesh.unheard_s(host) for host in mesh.others}
        unseen = {host: mesh.unseen_s(host, now) for host in mesh.others}
        if self._liveness is not None:
            self._liveness.look(self._quiet(mesh, unseen), now)
            answered = {host: self._liveness.answered_s(host, now) for host in mesh.others}
            unheard = {host: min(age, answered[host]) for host, age in unheard.items()}
            unseen = {host: min(age, answered[host]) for host, age in unseen.items()}
        return View(self._host, self._hosts, names, terms, unheard, unseen, self._scaling.training(mesh))

    def _ask_to_leave(self, now: float) -> list[Action]:
        """Ask the training workers here again and again: one may have been restarted, or be restarting."""
        if now - self._asked_at < ASK_S:
            return []
        self._asked_at, self._core.asked_to_leave = now, True
        ours = [name for name, host in self.members.items() if host == self._host]
        return [Tell("end_term", {"term": self._pool.term.number}, name) for name in ours]

    def _quiet(self, mesh: Gossip, unseen: Mapping[int, float]) -> dict[int, tuple[str, ...]]:
        """Addresses of training workers, by host, where the agent has not confirmed for a while that it hears us."""
        found: dict[int, tuple[str, ...]] = {}
        quiet_s = self._quiet_s(mesh)
        for name, host in self.members.items():
            report = mesh.report(host)
            hosted = None if report is None else report.workers.get(name)
            if unseen.get(host, 0.0) > quiet_s and hosted is not None and hosted.address:
                found[host] = (*found.get(host, ()), hosted.address)
        return found

    def _try_to_begin(
        self, term: Successor, know: Callable[[str, str], object], now: float
    ) -> list[Action] | Stop | None:
        """Begin the term, or postpone it if the disk refuses; everything done so far is then repeated."""
        try:
            if not self._lacks_room(now):
                return self._begin(term, know)
        except NoGpuError as error:
            return self._pool.put_off(str(error), now)
        except (UserError, WorkerFailed) as error:
            return Stop(str(error))
        except OSError as error:
            self._refused(error, now)
        return self._pool.put_off(self._room, now)

    def _begin(self, term: Successor, know: Callable[[str, str], object]) -> list[Action]:
        core, former = self._core, self._pool.term
        joining, memory = self._scaling.joining(term, former), self._scaling.memory(term, former)
        for entry in joining:
            know(entry.name, worker_address(self._run_dir, entry.name, self._host))
        open_term(checkpoints_of(self._run_dir), term.number, term.step, term.members)
        for number in range(term.number):
            sweep_term(self._run_dir, self._host, number)
        forget_drafts(self._run_dir)
        forget_dumps_of(self._run_dir, term.step, {*self._hosts, *self.members} - set(term.members))
        for name in {*core.lives, *(entry.name for entry in joining)}:
            self._rewrite(name, term, memory)
        log.warning("%s", term)
        self._pool.began(term)
        self._culprits = frozenset(core.culprits)
        self._broken_at = None
        return core.renew(term.number, term.members, joining)

    def _rewrite(self, name: str, term: Successor, memory: Mapping[str, int]) -> None:
        """Update the document that a worker reads at its next start; running ones are told by training workers."""
        path = self._run_dir / "workers" / f"{WorkerName.parse(name).file_stem}.yaml"
        document = yaml_value(path.read_text())
        if takes_up(term, self._pool.term):
            document = renewed(document, members_of(term, self._hosts), memory)
        checkpoint = checkpoint_of(self._run_dir, term.step)
        document |= {"term": term.number, "members": list(term.members), "broken_at": self._broken_at}
        document["begins"] = [list(pair) for pair in term.begins]
        document |= {"resume": None if checkpoint is None else str(checkpoint)}
        replace_file(path, yaml_text(document))

    def _failure(self, message: str) -> Failure:
        worker = next((name for name, host in self._hosts.items() if host == self._host), next(iter(self._hosts)))
        return Failure(worker, 3, "WorkerFailed", message, "", str(log_file(self._run_dir, worker)))


class _Members:
    """The training workers of the term that began so, with their hosts: `hosts` are these as bits."""

    def __init__(self, begun: Successor | None, where: Mapping[str, int]) -> None:
        self.begun, self.where = begun, where
        self.hosts = sum(1 << host for host in set(where.values()))


class LivenessProbe:
    """Asks training workers whose agent is silent. `silence_s`: the limit within which one must have answered."""

    def __init__(self, run_dir: Path, silence_s: float) -> None:
        self._run_dir = run_dir
        self._every_s = silence_s / 5
        self._answered: dict[int, float] = {}
        """When the last answered question was asked, by host."""
        self._next = 0.0
        self._thread: threading.Thread | None = None

    def answered_s(self, host: int, now: float) -> float:
        """Seconds since the last question that a training worker of this host has answered."""
        return now - self._answered.get(host, float("-inf"))

    def look(self, addresses: Mapping[int, tuple[str, ...]], now: float) -> None:
        """Ask training workers at these addresses (by host), if it is time."""
        busy = self._thread is not None and self._thread.is_alive()
        if not addresses or busy or now < self._next:
            return
        self._next = now + self._every_s
        self._thread = threading.Thread(target=self._ask_all, args=(dict(addresses),), name="liveness", daemon=True)
        self._thread.start()

    def _ask_all(self, addresses: Mapping[int, tuple[str, ...]]) -> None:
        keys = read_keys(key_file(self._run_dir))
        limit_s = min(LONGEST_S, self._every_s)
        for host, candidates in addresses.items():
            for address in candidates:
                asked = time.monotonic()
                try:
                    answer = ask(address, "status", {}, limit_s, keys)
                except DistflowError:
                    # Another process listens there by now.
                    continue
                if answer is not None:
                    self._answered[host] = asked
                    break
