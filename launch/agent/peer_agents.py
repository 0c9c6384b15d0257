"""How an agent works with the agents of other hosts: reports, and the end of the run.

`PeerAgents` exchanges reports with them, and derives from these what the own workers must be told; `OrphanedWorkers`
tells workers whose agent is silent.

`ExitBarrier` is how agents part at the end of a run on many hosts: none exits before the others know how the run ended,
and none waits for ever.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import structs

from distflow.cluster.cluster_view import addresses_on, awaited, head_of, orphaned, unseen
from distflow.cluster.gossip import Gossip
from distflow.cluster.host_report import HostedWorker, HostReport
from distflow.cluster.processes import HostEntry, agent_name
from distflow.comm.addresses import Address, worker_address
from distflow.comm.beats import BEAT, BEAT_S, STRIDE, Beat
from distflow.comm.endpoint import Endpoint
from distflow.comm.message import Message
from distflow.data.decoding import Form, Whole, read, shown
from distflow.errors import ProtocolError
from distflow.launch.agent.record_writer import Journal
from distflow.launch.agent.remote_helper import try_all
from distflow.launch.agent.restart_policy import Life, RestartPolicy, Tell
from distflow.launch.observe.file_server import FileServer
from distflow.launch.observe.file_sync import COLLECTED, FileSync
from distflow.launch.run.exit_status import read_exits
from distflow.launch.run.record import HOSTS, RunRecord
from distflow.log import logger

log = logger(__name__)
END_S = 15.0
"""For all agents to clean up, report that, and exit."""
COLLECT_S = 20.0
"""Where hosts do not share the run folder, the first host fetches the last files from the others, for as long as it
takes. It gives up when no piece has arrived for so long, and on a single host after half of that."""
SILENT_S = 5.0
"""At the end of the run, an agent that has been silent for so long is not waited for, since it could only report its
exit, and the workers of its host are told of the end by another agent."""
KEPT_LINKS, IDLE_S = 64, 15.0
"""In a mesh of many an agent talks to others one after another. It keeps so many connections, in most meshes those to
all, and closes older ones that it has not used for so long."""
NEWS_S = 0.1
"""In a mesh of many, what other agents report is concluded from at most so often: what came meanwhile at one time."""
HostName = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-zA-Z_:%-]{1,63}(\.[0-9a-zA-Z_:%-]{1,63})*\Z")]
Port = Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]


class _Begin(Form, frozen=True):
    agents: dict[Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,5}\Z")], Address]


class _Here(Form, frozen=True):
    address: Address
    has: Whole = 0
    """The number of the roster that it has."""


class AddressBook:
    """Where all workers and agents of a run listen, as one agent knows it, and what of it somebody lacks.

    Every change gets a number. Who was told everything up to a number is told only what came later: what an agent sends
    its workers at one host's news does not grow with the number of hosts. Example: a worker has number 40. rollout/7 of
    another host comes back at a new address, number 41, so the worker is sent this one address, with 40 and 41; had it
    missed number 40, it would say so by the number that it has.

    `own(name)`: the address of a process on this agent's host, if it is not that for other hosts. `first`: the number
    before the first one.
    """

    def __init__(self, mesh: Gossip, own: Callable[[str], str] | None = None, first: int = 0) -> None:
        self.number = self.first = first
        self._mesh = mesh
        self._own = own
        self._places: dict[str, tuple[int, str, int]] = {}
        """By name, the last one that changed at the end: host, address, and number of the change."""
        self._revision = mesh.revision
        for host in mesh.reports:
            self._look_at(host)

    def note(self, host: int, name: str, address: str) -> None:
        """A process of a host listens there; "": nobody knows where."""
        known = self._places.get(name)
        if known is None or known[:2] != (host, address):
            self.number += 1
            self._places.pop(name, None)
            self._places[name] = host, address, self.number

    def look(self) -> None:
        """Take up what has changed."""
        for host in self._mesh.changed_since(self._revision):
            self._look_at(host)
        self._revision = self._mesh.revision

    def since(self, number: int, *, besides: int | None = None) -> dict[str, str]:
        """Addresses that have changed after this number, perhaps without those of one host."""
        found: dict[str, str] = {}
        for name, (host, address, changed) in reversed(self._places.items()):
            if changed <= number:
                break
            if host != besides:
                found[name] = address
        return found

    def _look_at(self, host: int) -> None:
        report, own = self._mesh.report(host), self._own if host == self._mesh.host else None
        if report is None:
            return
        for name in [name for name, hosted in report.workers.items() if hosted.state == "left"]:
            # Who knows its address is not told to forget it, but nobody else needs it.
            self._places.pop(name, None)
        for name, address in addresses_on(report).items():
            if own is None:
                self.note(host, name, address)
            elif name not in self._places:
                # Never another one, and to make it asks the file system.
                self.note(host, name, own(name))


class PeerAgents:
    """All that an agent exchanges with other hosts; nothing in a run on one host."""

    def __init__(self, record: RunRecord, host: int, endpoint: Endpoint) -> None:
        self._run_dir = record.path
        self._host = host
        self._term = record.launch_term
        self._endpoint = endpoint
        self._many = bool(record.hosts)
        self._entry = record.hosts[host] if record.hosts else HostEntry("", "", gpus=record.gpus)
        others = set(record.numbers) - {host}
        self.mesh = Gossip(HostReport(host, self._entry), others, record.host_silence_s, secrets.randbelow)
        self.first = 0
        """The number that our reports and pulses are counted from."""
        self.begun = not self._many
        """Whether this agent may start its workers."""
        self._sharing: set[int] = set()
        self._told: set[tuple[str, int]] = set()
        self._told_of, self._concluded = -1, (-1, 0.0)
        """The revision of the reports whose deaths our workers have been told, and from which all else was concluded,
        and when."""
        self._agents: Mapping[str, str] = {}
        """Known addresses of the other hosts' agents, by number: another mapping when one changes."""
        self._talked_at: dict[str, float] = {}
        """By agent: when we last sent it something, the longest ago first."""
        self._here: dict[str, tuple[int, str]] = {}
        # No two agents of a host use the same numbers.
        first = secrets.randbelow(STRIDE)
        self._book = AddressBook(self.mesh, lambda name: worker_address(record.path, name, host), first)
        for other in self.mesh.others:
            self._book.note(other, agent_name(other), "")
        self._rosters: dict[str, tuple[int, int]] = {}
        """By worker: its incarnation, and the number of the roster that it was sent last."""
        self._asking: set[str] = set()
        """Workers that are to be sent a roster, even if nothing is new in it."""

    def resume(self, journal: Journal) -> None:
        """Continue from the journal of the previous agent."""
        report = journal.report
        self.first = journal.first + 1 + secrets.randbelow(STRIDE)
        self.mesh.resume(report, self.first)
        self._here = {
            name: (hosted.incarnation, hosted.address) for name, hosted in report.workers.items() if hosted.address
        }
        if journal.begun:
            self.begin({"agents": journal.agents})

    def agents(self) -> Mapping[str, str]:
        """Known addresses of the other hosts' agents by number, as `begin` takes them."""
        return self._agents

    def open(self) -> HostEntry:
        """Write our nonce, by which agents that share this folder notice it. The endpoint must have been started."""
        if self._many:
            # Keep the previous agent's: if the disk is full, it could not be written again.
            nonce = self.mesh.own.entry.nonce or secrets.token_hex(16)
            path = self._run_dir / HOSTS / f"{self._host}.nonce"
            path.parent.mkdir(exist_ok=True)
            if not path.is_file() or path.read_text() != nonce:
                path.write_text(nonce)
            self._entry = structs.replace(self._entry, agent=self._endpoint.network_address or "", nonce=nonce)
        return self._entry

    def begin(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Handle `mesh.begin`: learn the addresses of all agents, later of additional ones; returns the answer."""
        agents = read(body, _Begin, "mesh.begin").agents
        others = {number: address for number, address in agents.items() if int(number) != self._host}
        for number in others:
            self.mesh.know(int(number))
        self._endpoint.know_all({agent_name(int(number)): address for number, address in others.items()})
        self._agents = {**self._agents, **others}
        self.begun = True
        return {"begun": True, "agent": self._host}

    def hear(self, message: Message, now: float) -> None:
        """Handle a beat; one from a former launch of this run is dropped."""
        if message.incarnation != self._term:
            return
        if "from" in message.body and message.sender != f"agent/{message.body['from']}":
            raise ProtocolError(f"a beat of host {shown(message.body['from'])}, sent by {message.sender}")
        if not self.mesh.hear(message.body, now):
            return
        told = (self.mesh.report(one["host"]) for one in message.body["reports"] if one["host"] != self._host)
        agents = {one.host: one.entry.agent for one in told if one is not None and one.entry.agent}
        new = {host: address for host, address in agents.items() if self._address(host) != address}
        if new:
            learned = self._endpoint.learn_all({agent_name(host): address for host, address in new.items()})
            known = {str(host): address for host, address in new.items() if agent_name(host) in learned}
            self._agents = {**self._agents, **known}

    def here(self, message: Message) -> None:
        """Handle `here`: a worker of this host says where it listens, and which roster it has."""
        here = read(message.body, _Here, "here")
        if message.sender not in self._endpoint.roster:
            raise ProtocolError(f"{shown(message.sender)} is not a worker of this host")
        incarnation, _ = self._here.get(message.sender, (-1, ""))
        if message.incarnation >= incarnation:
            self._here[message.sender] = message.incarnation, here.address
            self._rosters[message.sender] = message.incarnation, here.has
        self._asking.add(message.sender)

    def hosted(self, life: Life) -> HostedWorker:
        """One of our workers, as other hosts are told of it."""
        return HostedWorker(
            trains=life.entry.trains,
            threads=life.entry.threads,
            state=life.standing,
            incarnation=life.incarnation,
            address=self.address(life),
            code=None if life.ending is None else life.ending.code,
            deaths=tuple(life.deaths),
            python=life.entry.python,
            generates=life.entry.generates,
            gpus=life.entry.gpus,
        )

    def address(self, life: Life) -> str:
        """The network address of a worker of this host; empty until its current incarnation has sent it."""
        incarnation, address = self._here.get(life.entry.name, (-1, ""))
        return address if incarnation == life.incarnation and life.state == "running" else ""

    def publish(self, report: HostReport) -> None:
        """Send our report to the other hosts at once, if it is new."""
        self._send(self.mesh.publish(report))

    def tick(self, now: float) -> None:
        """Send the regular beat when it is due, and answers."""
        self._send(self.mesh.tick(now))
        for name, at in list(self._talked_at.items())[: max(0, len(self._talked_at) - KEPT_LINKS)]:
            if now - at >= IDLE_S:
                del self._talked_at[name]
                self._endpoint.disconnect(name)

    def rest(self, now: float, deadline: float) -> bool:
        """Only beats were heard: answer them if nothing else follows; returns whether that was so.

        In a mesh of many they come all the time, and conclusions are drawn once a second, from news after `NEWS_S`.
        """
        if self.mesh.few or now >= deadline or not self.patience_s(now):
            return False
        self.tick(now)
        return True

    def concluded(self, now: float) -> None:
        """All that is known by now has been taken into account, and our own report was published."""
        self._concluded = self.mesh.revision, now

    def patience_s(self, now: float) -> float:
        """How long conclusions from what other agents have told can wait."""
        revision, at = self._concluded
        return max(0.0, at + (BEAT_S if self.mesh.revision == revision else NEWS_S) - now)

    def apart(self) -> frozenset[int]:
        """Hosts whose agents have another run folder than this one."""
        return frozenset(host for host in self.mesh.others if not self._shares(host))

    def deaths(self) -> Iterator[Tell]:
        """Deaths on other hosts that our workers have not been told of; each once."""
        changed, self._told_of = self.mesh.changed_since(self._told_of), self.mesh.revision
        for report in (self.mesh.report(host) for host in changed if host != self._host):
            for name, hosted in report.workers.items() if report is not None else ():
                for death in hosted.deaths:
                    if (name, death.incarnation) not in self._told:
                        self._told.add((name, death.incarnation))
                        body = {"worker": name, "incarnation": death.incarnation, "reason": death.reason}
                        yield Tell("lost", body)

    def rosters(self, lives: Mapping[str, Life]) -> Iterator[Tell]:
        """New addresses for those of our workers that lack them; none if the documents contain all of them."""
        if not self._many and not self.mesh.own.wanted:
            return
        book = self._book
        book.look()
        for name, life in lives.items():
            incarnation, has = self._rosters.get(name, (-1, 0))
            if incarnation != life.incarnation or not book.first < has <= book.number:
                has = 0
            if life.state == "running" and (has < book.number or name in self._asking):
                self._rosters[name] = life.incarnation, book.number
                self._asking.discard(name)
                yield Tell("roster", {"addresses": book.since(has), "since": has, "number": book.number}, name)

    def _shares(self, host: int) -> bool:
        report = self.mesh.report(host)
        if host not in self._sharing and report is not None and report.entry.nonce:
            path = self._run_dir / HOSTS / f"{host}.nonce"
            if path.is_file() and path.read_text() == report.entry.nonce:
                self._sharing.add(host)
        return host in self._sharing

    def _address(self, host: int) -> str:
        return self._endpoint.roster.get(agent_name(host), "")

    def _send(self, beats: list[Beat]) -> None:
        for beat in beats:
            if self._address(beat.host):
                name = agent_name(beat.host)
                self._talked_at.pop(name, None)
                self._talked_at[name] = time.monotonic()
                self._endpoint.send(name, BEAT, beat.body)


class ExitBarrier:
    """What one agent waits for before it exits, from `now` on. `orderly`: the run was neither stopped nor failed.

    Its own host has been cleaned up. `files` serves this host's files, and knows when it was last asked.
    """

    def __init__(
        self, peers: PeerAgents, record: RunRecord, host: int, now: float, files: FileServer, *, orderly: bool
    ) -> None:
        self._peers = peers
        self._apart = peers.apart() - peers.mesh.silent(SILENT_S)
        self._record = record
        self._orderly = orderly
        self._collector: threading.Thread | None = None
        head = head_of(peers.mesh)
        fetching = self._apart if host == head else self._apart & {head}
        self._deadline = now + END_S + (COLLECT_S if fetching else 0.0)
        self._files = files
        self._sync: FileSync | None = None
        if host == head and self._apart:
            self._sync = FileSync(record, self._apart, COLLECT_S / 2)
            self._collector = threading.Thread(
                target=self._sync.fetch, args=(COLLECTED,), kwargs={"final": True}, name="collector", daemon=True
            )
            self._collector.start()

    @property
    def collected(self) -> bool:
        """Whether this agent has fetched the files of other hosts that it is to keep."""
        return self._collector is None or not self._collector.is_alive()

    @property
    def collecting(self) -> dict[str, Any] | None:
        """The checkpoint that is being fetched from the other hosts, as `FileSync.collecting` tells it."""
        return None if self._sync is None else self._sync.collecting

    def waits_for(self, now: float, *, writes: bool) -> str | None:
        """What must still happen before this agent may exit; None: nothing."""
        mesh = self._peers.mesh
        what = awaited(mesh, self._peers.apart(), mesh.silent(SILENT_S), writes=writes)
        if not self.collected:
            what = "the last files of the other hosts"
        if what is None and self._orderly:
            what = self._unseen()
        if what is not None and now >= max(self._deadline, self._moved_at() + COLLECT_S):
            log.warning("no longer waiting for: %s", what)
            return None
        return what

    def _moved_at(self) -> float:
        """When files were last transferred to us, or from us to the first host (monotonic clock)."""
        if self._sync is not None:
            return self._sync.progress_at
        mesh = self._peers.mesh
        head = mesh.report(head_of(mesh)) if head_of(mesh) in self._apart - mesh.silent(SILENT_S) else None
        return -math.inf if head is None or head.collected else self._files.asked_at

    def _unseen(self) -> str | None:
        """Workers of silent hosts that share our run folder write themselves how they ended: those still missing."""
        sharing = set(self._peers.mesh.others) - self._peers.apart()
        trainers = {
            worker.name: worker.host for worker in self._record.workers if worker.trains and worker.host in sharing
        }
        missing = unseen(self._peers.mesh, trainers, read_exits(self._record.path, trainers))
        return f"a report of how {', '.join(missing)} ended" if missing else None


class _Reach(Form, frozen=True):
    nonce: str
    targets: Annotated[list[tuple[str, HostName, Port]], msgspec.Meta(max_length=4096)]
    """Name, address and port of each listener."""


def reach(message: Message, reply: Callable[[Message, Mapping[str, Any]], None]) -> None:
    """Answer `hosts.reach`, on a thread, since connecting may take seconds. Raises ProtocolError."""
    request = read(message.body, _Reach, message.kind)

    def answer() -> None:
        reply(message, {"faults": try_all(request.targets, request.nonce)})

    threading.Thread(target=answer, name="reach", daemon=True).start()


class OrphanedWorkers:
    """Workers whose host agent is silent: they go on, and the first of the other agents tells them what theirs cannot.

    That is deaths, new addresses of workers on other hosts, and the end of the run. Nothing else is concluded about
    such workers; if their agent was only slow, they are told some things twice, which is harmless.
    """

    def __init__(self) -> None:
        self._deaths: set[tuple[str, str, int]] = set()
        self._looked: dict[str, int] = {}
        """By orphan: the revision of the reports whose deaths it was told."""
        self._book: AddressBook | None = None
        """Made when there is an orphan."""
        self._rosters: dict[str, int] = {}
        """By orphan: the number of the roster that it was sent last."""
        self._stopped: set[tuple[str, str]] = set()

    def tell(self, mesh: Gossip, core: RestartPolicy, endpoint: Endpoint) -> None:
        """Send them what is new."""
        for name, address in orphan_addresses(mesh).items():
            if endpoint.roster.get(name) != address:
                endpoint.learn(name, address)
        for tell in self.tells(mesh, core):
            assert tell.to is not None, "an orphan is told by name"
            if tell.to not in endpoint.roster:
                continue
            log.info("telling %s, whose agent is silent: %s", tell.to, tell.kind)
            endpoint.send(tell.to, tell.kind, tell.body)

    def tells(self, mesh: Gossip, core: RestartPolicy) -> Iterator[Tell]:
        """What they must be told now; each thing once."""
        for name, host in orphaned(mesh, mesh.silent()):
            yield from self._deaths_for(name, mesh)
            yield from self._roster_for(name, host, mesh)
        if core.winding_up:
            for name, _ in orphaned(mesh, _quiet(mesh)):
                if (name, core.course) not in self._stopped:
                    self._stopped.add((name, core.course))
                    yield Tell("stop", {"reason": core.reason or f"the run is {core.course}"}, name)

    def _deaths_for(self, name: str, mesh: Gossip) -> Iterator[Tell]:
        changed = mesh.changed_since(self._looked[name]) if name in self._looked else list(mesh.reports)
        self._looked[name] = mesh.revision
        for report in (mesh.reports[host] for host in changed if host in mesh.reports):
            for worker, hosted in report.workers.items():
                for death in hosted.deaths:
                    if worker != name and (name, worker, death.incarnation) not in self._deaths:
                        self._deaths.add((name, worker, death.incarnation))
                        body = {"worker": worker, "incarnation": death.incarnation, "reason": death.reason}
                        yield Tell("lost", body, name)

    def _roster_for(self, name: str, host: int, mesh: Gossip) -> Iterator[Tell]:
        """Addresses on other hosts only: it knows those on its own."""
        if self._book is None:
            self._book = AddressBook(mesh)
        self._book.look()
        if self._rosters.get(name) != self._book.number:
            self._rosters[name] = self._book.number
            # All of them: it has nobody whom it could tell that it missed some.
            yield Tell("roster", {"addresses": self._book.since(0, besides=host)}, name)


def orphan_addresses(mesh: Gossip) -> dict[str, str]:
    """The addresses of workers on silent hosts."""
    return {name: mesh.reports[host].workers[name].address for name, host in orphaned(mesh, _quiet(mesh))}


def _quiet(mesh: Gossip) -> frozenset[int]:
    return mesh.silent(SILENT_S) | mesh.silent()
