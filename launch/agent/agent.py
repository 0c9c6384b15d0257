"""The host agent: one light process per host that starts and restarts its workers, informs other hosts, and cleans up.

`python -m distflow.launch.agent.agent RUN_DIR [--host H] [--entry module:function]`. Workers do not need it for their
work. When it is killed, `launch` or the fork server starts another one, which reads its journal and takes over the
workers.

In a run on many hosts each host has an agent, and none of them is in charge: what they know spreads as reports
(`distflow/cluster/`). It prints {"agent": H, "address": "tcp://…"}, and starts workers once `mesh.begin` came.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import queue
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from distflow.cluster import cluster_view
from distflow.cluster.host_report import HostReport
from distflow.cluster.processes import STOPPED, Failure, Outcome, agent_name
from distflow.cluster.report_totals import ReportTotals
from distflow.comm.addresses import ensure_socket_dir
from distflow.comm.beats import BEAT
from distflow.comm.message import Message
from distflow.comm.processes import name_process
from distflow.data.decoding import Form, read
from distflow.errors import DistflowError, UserError
from distflow.launch.agent.peer_agents import ExitBarrier, OrphanedWorkers, PeerAgents, reach
from distflow.launch.agent.pool_recovery import PoolRecovery
from distflow.launch.agent.record_writer import Journal, RecordWriter, Succession, make_endpoint, read_journal
from distflow.launch.agent.restart_policy import RestartPolicy
from distflow.launch.agent.scaling import Scaling
from distflow.launch.agent.start import RestartLimit, lock_host
from distflow.launch.agent.worker_group import ENTRY, WorkerGroup, note_checkpointed
from distflow.launch.observe.file_server import FileServer
from distflow.launch.run.exit_status import explain, finish, has_unsaved, log_file, read_exits
from distflow.launch.run.process_table import end_all, host_part, process_id, sweep
from distflow.launch.run.record import FILE_NAME, RunRecord, read_record
from distflow.log import configure, logger
from distflow.runtime.disk import set_aside, spare_output

LINGER_S = 0.1
EXIT_LINGER_S = 1.0
_PR_SET_CHILD_SUBREAPER = 36
log = logger(__name__)


class _Stop(Form, frozen=True):
    reason: str
    now: bool = False


class Agent:
    """Drives the workers of one host with sockets and the clock, and exchanges reports with the other agents."""

    def __init__(self, record: RunRecord, host: int, entry: str, lock: int | None, journal: Journal | None) -> None:
        self._host = host
        self._many = bool(record.hosts)
        self._run_dir = record.path
        self._recorder = RecordWriter(record, lock)
        self._name = agent_name(host)
        own = [worker for worker in record.workers if worker.host == host]
        self._core = RestartPolicy(
            own,
            RestartLimit(record.restarts, record.restart_window_s),
            record.drain_s,
            lambda name, how: explain(self._run_dir, name, how),
            renews=record.on_failure != "stop",
            unsaved=lambda: has_unsaved(self._run_dir),
        )
        self._inbox: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._terminated = 0
        self._heard = 0
        self._leave = False
        self._clean = False
        self._exit_barrier: ExitBarrier | None = None
        self._endpoint = make_endpoint(record, host, journal)
        self._peers = PeerAgents(record, host, self._endpoint)
        self._totals = ReportTotals(self._peers.mesh)
        self._running = False
        self._entry = self._peers.mesh.own.entry
        self._worker_group = WorkerGroup(record, host, entry, self._core, self._endpoint.send)
        self._scaling = Scaling(record, host, self._core)
        self._terms = PoolRecovery(record, host, self._core, self._scaling)
        self._succession = Succession(record, host, journal, self._core, self._peers, self._terms)
        self._orphaned = OrphanedWorkers()
        self._files = FileServer(self._run_dir, lambda: [*self._core.lives, self._name])
        self._handlers: dict[str, Callable[[Message], Mapping[str, Any] | None]] = {
            "status": lambda message: self._status(),
            "record": lambda message: {"record": self._recorder.composed(self._peers.mesh, os.getpid()).as_text()},
            "stop": self._on_stop,
            "checkpointed": lambda message: note_checkpointed(message, self._core),
            "scale": lambda message: self._scaling.ask(message.body, self._peers.mesh),
            "hosts.reserve": lambda asked: self._scaling.reserve(asked.body, self._peers.mesh, time.monotonic()),
            "hosts.release": lambda message: self._scaling.release(),
            "hosts.reach": lambda message: reach(message, self._endpoint.reply),
            "here": lambda message: self._peers.here(message),
            BEAT: lambda message: self._peers.hear(message, time.monotonic()),
            "mesh.begin": lambda message: self._peers.begin(message.body),
            "files.list": lambda message: self._files.list(message.body),
            "files.read": lambda message: self._files.read(message.body),
        }

    def run(self, record_name: str) -> int:
        """Run until the end of the run; returns its exit code. `record_name`: the file to begin from."""
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_terminate)
        signal.signal(signal.SIGUSR1, self._on_leave)
        ensure_socket_dir(self._run_dir, self._host)
        set_aside(self._run_dir)
        self._endpoint.start(self._on_message, on_fault=self._on_message)
        again = self._succession.take_over()
        self._entry = self._peers.open()
        self._worker_group.pids[self._name] = process_id(os.getpid())
        self._succession.keep(self._report())
        self._worker_group.open(record_name, self._succession.workers)
        if self._many:
            self._announce()
        self._recorder.try_for_lock(time.monotonic())
        if not self._await_begin():
            return self._end(self._unbegun())
        self._totals.look()
        self._core.elsewhere = cluster_view.elsewhere(self._totals, self._terms.members)
        self._worker_group.do(again)
        self._worker_group.begin()
        self._publish()
        while self._core.outcome is None:
            patience_s = self._peers.patience_s(time.monotonic())
            if self._listen(patience_s) or not self._peers.rest(time.monotonic(), self._core.deadline):
                self._conclude()
                self._worker_group.do(self._core.tick(time.monotonic()))
                self._publish()
                self._peers.concluded(time.monotonic())
        return self._close(self._core.outcome)

    def _announce(self) -> None:
        """Print our address for the process that started us; from then on our output goes to our log."""
        print(json.dumps({"agent": self._host, "address": self._endpoint.network_address}), flush=True)
        handle = os.open(log_file(self._run_dir, self._name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.close(handle)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _await_begin(self) -> bool:
        deadline = time.monotonic() + self._recorder.record.connect_s
        while not self._peers.begun and self._core.phase == "running" and time.monotonic() < deadline:
            self._listen()
        # A run that has begun is ended properly, even if the previous agent was already winding it up.
        return self._peers.begun

    def _unbegun(self) -> Outcome:
        failure = self._core.failure
        if failure is not None:
            return Outcome("failed", failure.exit_code, failure)
        if self._core.phase != "running":
            return Outcome("stopped", STOPPED)
        limit = self._recorder.record.connect_s
        why = f"{self._name} received no start signal within limits.connect_s ({limit:g} s) — launch the run again"
        log.error("%s", why)
        return Outcome("failed", 3, Failure(self._name, 3, "DistflowError", why, "", self._log()))

    def _log(self) -> str:
        return str(log_file(self._run_dir, self._name))

    # -- incoming

    def _on_message(self, message: Message | BaseException) -> None:
        self._inbox.put(message)
        with suppress(BlockingIOError):
            # A full pipe wakes it, too.
            os.write(self._wake_w, b"m")

    def _on_terminate(self, number: int, frame: object) -> None:
        self._terminated += 1

    def _on_leave(self, number: int, frame: object) -> None:
        self._leave = True

    def _listen(self, patience_s: float = 1.0) -> bool:
        """Wait up to a second for something to happen, and handle it; returns False if only beats have arrived."""
        patience = min(patience_s, max(0.0, self._core.deadline - time.monotonic()))
        if self._exit_barrier is not None:
            patience = 0.1
        ready, _, _ = select.select([self._wake_r, *self._worker_group.inputs], [], [], patience)
        # A byte for each message, and the number of each signal.
        woken = os.read(self._wake_r, 65536) if self._wake_r in ready else b""
        self._worker_group.hear()
        only_beats = self._hear_messages() and ready == [self._wake_r] and not woken.strip(b"m")
        if self._leave:
            self._leave = False
            self._stop("the launch command was told to terminate", at_once=False)
        if self._terminated > self._heard:
            self._heard = self._terminated
            self._stop("the host agent was told to terminate", at_once=self._heard > 1)
        return not only_beats

    def _hear_messages(self) -> bool:
        """Handle what has arrived; returns whether all of it were beats."""
        kinds: set[str] = set()
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return kinds <= {BEAT}
            if isinstance(message, BaseException):
                # An agent without its endpoint is useless: the workers go on, and the next agent takes over.
                raise message
            kinds.add(message.kind)
            if message.kind in self._handlers:
                self._handle(message)
            elif message.kind not in ("hello", "welcome", "beat"):
                log.warning("dropped a message of kind %r from %r", message.kind, message.sender)

    def _handle(self, message: Message) -> None:
        try:
            answer = self._handlers[message.kind](message)
            if message.kind in ("stop", "scale"):
                # The requester is about to be told that it will be done: by the next agent, if this one is killed.
                self._succession.keep(self._report())
        except DistflowError as error:
            # A bad message must not end the agent of healthy workers.
            log.warning("refused a message of kind %r from %r: %s", message.kind, message.sender, error)
            answer = {"error": str(error)}
        if answer is not None:
            self._endpoint.reply(message, answer)

    def _on_stop(self, message: Message) -> Mapping[str, Any]:
        request = read(message.body, _Stop, "stop")
        self._stop(request.reason, at_once=request.now)
        return {"stopping": True}

    def _stop(self, reason: str, *, at_once: bool) -> None:
        log.info("stopping%s: %s", " at once" if at_once else "", reason)
        self._worker_group.do(self._core.stop(reason, time.monotonic(), at_once=at_once))

    def _status(self) -> dict[str, Any]:
        told = {"state": self._recorder.record.state, **cluster_view.status(self._peers.mesh)}
        collecting = self._exit_barrier.collecting if self._exit_barrier is not None else None
        return told if collecting is None else {**told, "collecting": collecting}

    # -- consequences of the other agents' reports

    def _conclude(self) -> None:
        mesh, now = self._peers.mesh, time.monotonic()
        for tell in self._peers.deaths():
            self._worker_group.tell(tell)
        if self._core.broken is not None:
            # Decisions are a function of the reports of all hosts, including ours.
            self._succession.publish(self._report())
        self._worker_group.do(self._terms.act(mesh, self._endpoint.know, now))
        self._totals.look()
        goes_on = self._core.phase in ("running", "leaving")
        for host in sorted(self._totals.ending if goes_on else self._totals.at_once):
            self._follow(mesh.reports[host], now)
        self._orphaned.tell(mesh, self._core, self._endpoint)
        try:
            self._worker_group.do(self._scaling.apply(mesh, self._endpoint.know, now))
        except UserError as error:
            failure = Failure(self._name, error.exit_code, type(error).__name__, str(error), "", self._log())
            self._worker_group.do(self._core.fail(failure, now))
        if self._many:
            self._worker_group.do(self._core.heard(cluster_view.elsewhere(self._totals, self._terms.members), now))

    def _follow(self, report: HostReport, now: float) -> None:
        """Wind up if another host does."""
        core = self._core
        if core.phase not in ("running", "leaving"):
            if report.at_once and not core.at_once:
                self._stop(report.reason, at_once=True)
        elif report.phase == "failing" and report.failure is not None and not self._terms.has_left_behind(report):
            failure = structs.replace(report.failure, log=str(log_file(self._run_dir, report.failure.worker)))
            log.error("%s failed on host %d: %s", failure.worker, report.host, failure.message)
            self._worker_group.do(core.fail(failure, now))
        elif report.phase == "stopping":
            self._stop(report.reason, at_once=report.at_once)

    # -- outgoing

    def _publish(self) -> None:
        """Inform the other agents and our workers, and update run.json."""
        now = time.monotonic()
        self._succession.publish(self._report())
        self._peers.tick(now)
        for tell in self._peers.rosters(self._core.lives):
            self._worker_group.tell(tell)
        mesh = self._peers.mesh
        self._recorder.try_for_lock(now, outnumbered=mesh.is_outnumbered())
        started = self._core.all_started and self._totals.all_started
        self._running = self._running or started or self._recorder.record.state == "running"
        self._recorder.update(mesh, "running" if self._running else "starting", os.getpid(), now)

    def _report(self, *, gone: bool = False) -> HostReport:
        core, mesh = self._core, self._peers.mesh
        return HostReport(
            host=self._host,
            entry=self._entry,
            term=self._terms.present,
            phase=core.course,
            reason=core.reason,
            at_once=core.at_once,
            failure=core.failure,
            workers={name: self._peers.hosted(life) for name, life in core.lives.items()},
            marks=dict(self._worker_group.pids),
            wanted=self._scaling.wanted(mesh),
            saved=core.saved,
            clean=self._clean,
            collected=self._exit_barrier is not None and self._exit_barrier.collected,
            gone=gone,
        )

    # -- the end

    def _close(self, outcome: Outcome) -> int:
        if not self._many:
            return self._end(outcome)
        self._clean_up()
        orderly = self._core.course in ("running", "leaving")
        now = time.monotonic()
        record = self._recorder.composed(self._peers.mesh, os.getpid())
        self._exit_barrier = ExitBarrier(self._peers, record, self._host, now, self._files, orderly=orderly)
        self._publish()
        while self._exit_barrier.waits_for(time.monotonic(), writes=self._recorder.writes) is not None:
            self._listen()
            self._publish()
        trainers = self._terms.members
        return self._end(cluster_view.outcome(self._peers.mesh, trainers, read_exits(self._run_dir, trainers)))

    def _clean_up(self) -> None:
        """End processes and remove files, so that nothing is left when `run.json` says that the run is over."""
        self._worker_group.dismiss()
        record = self._recorder.composed(self._peers.mesh, os.getpid())
        part = host_part(structs.replace(record, pids=self._worker_group.pids), self._host)
        for line in end_all(part, patience_s=1.0):
            log.info("ended %s", line)
        for line in sweep(self._run_dir, self._host):
            log.info("removed %s", line)
        self._clean = True

    def _end(self, outcome: Outcome) -> int:
        if outcome.failure is not None:
            # The path of the log on this host.
            log_here = str(log_file(self._run_dir, outcome.failure.worker))
            outcome = replace(outcome, failure=structs.replace(outcome.failure, log=log_here))
        self._peers.publish(self._report(gone=True))
        # Nobody is left to talk to; only the reply to a last `stop` may still be on its way.
        self._endpoint.close(linger_s=EXIT_LINGER_S if self._many else LINGER_S)
        self._clean_up()
        if self._recorder.writes and not self._recorder.record.over:
            finish(self._recorder.composed(self._peers.mesh, os.getpid()), outcome)
        log.info("the run is over: %s", outcome.state)
        return outcome.exit_code


def main(arguments: Sequence[str]) -> int:
    """`RUN_DIR [--host H] [--entry module:function] [--record FILE] [--lock DESCRIPTOR]`."""
    parser = argparse.ArgumentParser(prog="distflow.launch.agent.agent", allow_abbrev=False)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--host", type=int, default=0, help="number of this host")
    parser.add_argument("--entry", default=ENTRY, help="what the workers' processes run")
    parser.add_argument("--record", default=FILE_NAME, help="file in the run folder to begin from, for a late host")
    parser.add_argument("--lock", type=int, help="inherited descriptor that holds the lock of the run folder")
    given = parser.parse_args(arguments)
    name = agent_name(given.host)
    name_process(f"distflow {given.run_dir.name} {name}")
    spare_output()
    configure(name)
    # Workers whose fork server dies become our children instead of init's, so that we still see their exits.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        # Held until this process has ended.
        lock_host(given.run_dir, given.host)
    except UserError as error:
        # Another process noticed earlier that the previous agent is gone, and started one.
        log.error("%s", error)
        return error.exit_code
    record = read_record(given.run_dir, given.record)
    if record.over:
        return record.exit_code or 0
    journal = read_journal(given.run_dir, given.host, record.launch_term)
    return Agent(record, given.host, given.entry, given.lock, journal).run(given.record)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
