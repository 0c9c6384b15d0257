"""Agents of many hosts on this machine, without workers: real sockets, encrypted, and real time."""

from __future__ import annotations

import queue
import shutil
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from msgspec import structs

from distflow.cluster.processes import HostEntry, agent_name
from distflow.comm.addresses import ensure_socket_dir
from distflow.comm.beats import BEAT, BEAT_S
from distflow.comm.keys import key_file, make_keys, write_keys
from distflow.comm.message import Message
from distflow.launch.agent.peer_agents import PeerAgents
from distflow.launch.agent.record_writer import make_endpoint
from distflow.launch.run.record import RunRecord

TURN_S = 0.25
START_S = 60.0
REASON = "a worker was killed"


class LiveAgent:
    """One agent, driven from outside over a pipe: it says when it has learned what."""

    def __init__(self, record: RunRecord, host: int, line: Connection) -> None:
        self._line, self._said = line, set[str]()
        self._hosts, self._about = len(record.hosts), -1
        self._inbox: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._sockets = ensure_socket_dir(record.path, host)
        self._endpoint = make_endpoint(record, host, None)
        self._endpoint.start(self._inbox.put, on_fault=self._inbox.put)
        self._peers = PeerAgents(record, host, self._endpoint)
        self._peers.publish(structs.replace(self._peers.mesh.own, entry=self._peers.open()))
        line.send(self._endpoint.network_address)

    def run(self) -> None:
        """Until it is told to die, or to end."""
        while True:
            self._listen()
            self._peers.tick(time.monotonic())
            self._say()
            if self._line.poll():
                what, about = self._line.recv()
                if what == "end":
                    self._endpoint.close(linger_s=0.0)
                    shutil.rmtree(self._sockets)
                    return
                self._do(what, about)

    def _listen(self) -> None:
        """Read all that has come before answering, as an agent of a run does: one that is late catches up."""
        patience = TURN_S
        while True:
            try:
                message = self._inbox.get(timeout=patience)
            except queue.Empty:
                return
            assert isinstance(message, Message), message
            if message.kind == BEAT:
                self._peers.hear(message, time.monotonic())
            patience = 0.0

    def _do(self, what: str, about: Any) -> None:
        mesh = self._peers.mesh
        if what == "begin":
            self._peers.begin({"agents": about})
        elif what == "publish":
            self._peers.publish(structs.replace(mesh.own, reason=REASON))
        else:
            assert what == "watch"
            self._about = about

    def _say(self) -> None:
        """What it has learned, once, with the time on the clock of this machine, and how many agents it talks to."""
        mesh = self._peers.mesh
        told = {
            "all": len(mesh.reports) == self._hosts,
            "report": any(report.reason for report in mesh.reports.values()),
            "silence": self._about >= 0 and mesh.unheard_s(self._about) >= 2 * BEAT_S,
        }
        for what in [what for what, is_so in told.items() if is_so and what not in self._said]:
            self._said.add(what)
            self._line.send((what, time.monotonic()))


def live(record: RunRecord, host: int, line: Connection) -> None:
    """The agent of a host: for a thread or a process."""
    LiveAgent(record, host, line).run()


class LiveMesh:
    """All agents. `start(target, args)` starts one, and returns what ends it at once, as if its machine were gone."""

    def __init__(
        self, folder: Path, hosts: int, start: Callable[[Callable[..., None], tuple[Any, ...]], Callable[[], None]]
    ) -> None:
        write_keys(key_file(folder), make_keys())
        entries = tuple(HostEntry(f"node{host}", "127.0.0.1") for host in range(hosts))
        roster = {agent_name(host): "" for host in range(hosts)}
        record = RunRecord(folder.name, str(folder), 1, (), roster, 30.0, 3, hosts=entries)
        self.lines: dict[int, Connection] = {}
        self._ends: dict[int, Callable[[], None]] = {}
        for host in range(hosts):
            ours, theirs = Pipe()
            self.lines[host] = ours
            self._ends[host] = start(live, (record, host, theirs))
        assert all(line.poll(START_S) for line in self.lines.values()), "all agents start"
        addresses = {str(host): line.recv() for host, line in self.lines.items()}
        for host in self.lines:
            self.tell(host, "begin", {number: at for number, at in addresses.items() if number != str(host)})

    def tell(self, host: int, what: str, about: Any = None) -> None:
        """Have an agent do something."""
        self.lines[host].send((what, about))

    def kill(self, host: int) -> None:
        """One host is gone from now on, and the others watch for it."""
        self._ends.pop(host)()
        del self.lines[host]
        for other in self.lines:
            self.tell(other, "watch", host)

    def all_know(self, what: str, within_s: float) -> float:
        """When the last agent has learned something."""
        deadline, at, missing = time.monotonic() + within_s, 0.0, set(self.lines)
        while missing:
            assert time.monotonic() < deadline, f"{what}: unknown to agents {sorted(missing)} after {within_s:g} s"
            for line in wait([self.lines[host] for host in missing], timeout=TURN_S):
                host = next(host for host in missing if self.lines[host] is line)
                told, when = self.lines[host].recv()
                if told == what:
                    missing.discard(host)
                    at = max(at, when)
        return at

    def end(self) -> None:
        """End all that live."""
        for host in self._ends:
            self.tell(host, "end")
        for end in self._ends.values():
            end()
