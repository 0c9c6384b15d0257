"""An agent among those of the other hosts: passes beats on to the mesh, and says what its own workers must know."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from distflow.comm.addresses import Address, worker_address
from distflow.comm.endpoint import Endpoint
from distflow.comm.message import Message
from distflow.data.decoding import read, shown
from distflow.errors import ProtocolError
from distflow.launch.agent.journal import Journal
from distflow.launch.agent.restart_policy import Life, Tell
from distflow.launch.cluster import cluster_view as standing
from distflow.launch.cluster.gossip import STRIDE, Beat, Mesh
from distflow.launch.cluster.host_report import Report, Seat
from distflow.launch.run.record import HOSTS, HostEntry, RunRecord, agent_name
from distflow.log import logger

log = logger(__name__)


class _Begin(msgspec.Struct, frozen=True):
    agents: dict[Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,5}\Z")], Address]


class _Here(msgspec.Struct, frozen=True):
    address: Address


class Neighbours:
    """Everything an agent knows and says beyond its own host; in a run on one host there is nobody to say it to."""

    def __init__(self, record: RunRecord, host: int, endpoint: Endpoint) -> None:
        self._run_dir = record.path
        self._host = host
        self._term = record.launch_term
        self._endpoint = endpoint
        self._many = bool(record.hosts)
        self._entry = record.hosts[host] if record.hosts else HostEntry("", "")
        self.mesh = Mesh(Report(host, self._entry), set(record.numbers) - {host}, record.host_silence_s)
        self.first = 0
        """What our reports and pulses are counted from."""
        self.begun = not self._many
        """Whether this agent may start its workers."""
        self._sharing: set[int] = set()
        self._told: set[tuple[str, int]] = set()
        self._here: dict[str, tuple[int, str]] = {}
        self._rosters: dict[str, tuple[int, int]] = {}
        """Life of a worker, and number of the addresses that it was sent."""
        self._addresses: Mapping[str, str] = {}
        self._addresses_number = 0
        self._addresses_of = -1
        """The mesh's revision that the addresses are of."""

    def resume(self, journal: Journal) -> None:
        """Follow another agent of this host, which was killed."""
        report = journal.report
        self.first = journal.first + 1 + secrets.randbelow(STRIDE)
        self.mesh.resume(report, self.first)
        self._here = {name: (seat.incarnation, seat.address) for name, seat in report.seats.items() if seat.address}
        if journal.begun:
            self.begin({"agents": journal.agents})

    def agents(self) -> dict[str, str]:
        """Addresses of the other hosts' agents by number, as `begin` takes them, as far as they are known."""
        return {str(host): address for host in self.mesh.others if (address := self._address(host))}

    def open(self) -> HostEntry:
        """Once the endpoint has started: leave the nonce, by which others see whose folder this is."""
        if self._many:
            # That of the agent before us stays, which a full disk could not take once more.
            nonce = self.mesh.own.entry.nonce or secrets.token_hex(16)
            path = self._run_dir / HOSTS / f"{self._host}.nonce"
            path.parent.mkdir(exist_ok=True)
            if not path.is_file() or path.read_text() != nonce:
                path.write_text(nonce)
            self._entry = replace(self._entry, agent=self._endpoint.network_address or "", nonce=nonce)
        return self._entry

    def begin(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Take the addresses of all agents, later also those of further ones; the answer to who sent them."""
        agents = read(body, _Begin, "mesh.begin").agents
        for number, address in ((int(number), address) for number, address in agents.items()):
            if number != self._host:
                self.mesh.know(number)
                self._endpoint.know(agent_name(number), address)
        self.begun = True
        return {"begun": True, "agent": self._host}

    def hear(self, message: Message) -> None:
        """A beat; one of a former term of this run is dropped."""
        if message.incarnation != self._term:
            return
        if "from" in message.body and message.sender != f"agent/{message.body['from']}":
            raise ProtocolError(f"a beat of host {shown(message.body['from'])}, sent by {message.sender}")
        if not self.mesh.hear(message.body):
            return
        for host in self.mesh.others:
            report = self.mesh.report(host)
            if report is not None and report.entry.agent and self._address(host) != report.entry.agent:
                self._endpoint.learn(agent_name(host), report.entry.agent)

    def here(self, message: Message) -> None:
        """A worker of this host says where others reach it, until it has got a roster that lists it."""
        address = read(message.body, _Here, "here").address
        if message.sender not in self._endpoint.roster:
            raise ProtocolError(f"{shown(message.sender)} is no worker of this host")
        incarnation, _ = self._here.get(message.sender, (-1, ""))
        if message.incarnation >= incarnation:
            self._here[message.sender] = message.incarnation, address
        self._rosters.pop(message.sender, None)

    def seat(self, life: Life) -> Seat:
        """What others are told of a worker of ours."""
        return Seat(
            trains=life.entry.trains,
            threads=life.entry.threads,
            state=life.standing,
            incarnation=life.incarnation,
            address=self.address(life),
            code=None if life.ending is None else life.ending.code,
            deaths=tuple(life.deaths),
            python=life.entry.python,
            generates=life.entry.generates,
        )

    def address(self, life: Life) -> str:
        """Where a worker of this host is reached from others; "" while it has not said so in this life."""
        incarnation, address = self._here.get(life.entry.name, (-1, ""))
        return address if incarnation == life.incarnation and life.state == "running" else ""

    def publish(self, report: Report) -> None:
        """Say what is new about this host, at once."""
        self._send(self.mesh.publish(report))

    def tick(self, now: float) -> None:
        """The regular beat."""
        self._send(self.mesh.tick(now))

    def apart(self) -> frozenset[int]:
        """Hosts whose agents have another run folder than we, as far as they have said which."""
        return frozenset(host for host in self.mesh.others if not self._shares(host))

    def deaths(self) -> Iterator[Tell]:
        """What our workers have not been told yet of deaths on other hosts; each life once."""
        for host in self.mesh.others:
            report = self.mesh.report(host)
            for name, seat in report.seats.items() if report is not None else ():
                for death in seat.deaths:
                    if (name, death.incarnation) not in self._told:
                        self._told.add((name, death.incarnation))
                        body = {"worker": name, "incarnation": death.incarnation, "reason": death.reason}
                        yield Tell("lost", body)

    def rosters(self, lives: Mapping[str, Life]) -> Iterator[Tell]:
        """Addresses for those of our workers that do not have the newest; none where the documents say it all."""
        if not self._many and not self.mesh.own.wanted:
            return
        self._note_addresses()
        for name, life in lives.items():
            newest = (life.incarnation, self._addresses_number)
            if life.state == "running" and self._rosters.get(name) != newest:
                self._rosters[name] = newest
                yield Tell("roster", {"addresses": self._addresses}, name)

    def _note_addresses(self) -> None:
        if self._addresses_of == self.mesh.revision:
            return
        self._addresses_of = self.mesh.revision
        addresses = standing.roster(self.mesh, lambda name: worker_address(self._run_dir, name, self._host))
        if addresses != self._addresses:
            self._addresses, self._addresses_number = addresses, self._addresses_number + 1

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
                self._endpoint.send(agent_name(beat.host), "mesh.beat", beat.body)
