"""Agents of a mesh and the network between them, in virtual time: messages take a while, are lost, or come twice."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import msgpack
from msgspec import structs

from distflow.cluster.gossip import Gossip
from distflow.cluster.host_report import HostReport
from distflow.cluster.processes import HostEntry
from distflow.comm.beats import STRIDE, Beat
from distflow.comm.probes import RUMOUR_BEATS
from tests.search.fault_queue import Fault, FaultQueue

SILENCE_S = 15.0
TURN_S = 1.0
"""An agent's loop waits for so long at most."""
KNOWN_S = 5.0
"""Within so long all that live know of a death, and of a silence."""
SETTLED_S = 10.0
"""Within so long all that live have the same reports, whatever was lost before."""
HOSTS = 20
GONE = 4
"""So many hosts die at most, or sleep, or join."""
EVENTS = ("publish", "publish", "crash", "sleep", "wake", "restart", "join", "split", "heal", "cut")
Spoken = Mapping[int, float]
"""By host, when it said the last of what is known of it, in seconds of the simulation."""
ROUNDING_S = 1e-6


class ProofAudit:
    """What the agents of a mesh have really heard: is what they take for proven true?

    Who is said to have heard a host has, directly or through others. Every message carries, unseen by the agents, when
    its sender last heard of each host, as of when that host spoke.
    """

    def __init__(self) -> None:
        self._heard: dict[int, dict[int, float]] = {}
        self._beats: dict[int, tuple[list[float], list[float]]] = {}
        """Of the present agent of a host: its beats, on its own clock and on that of the simulation."""

    def starts(self, host: int) -> None:
        """An agent begins, the first of its host or not."""
        self._beats[host] = ([], [])

    def turns(self, host: int, clock: float, now: float) -> None:
        """An agent has looked at what is due, by its own clock."""
        clocks, times = self._beats[host]
        if not clocks or clocks[-1] != clock:
            clocks.append(clock)
            times.append(now)

    def speaks(self, host: int, now: float) -> Spoken:
        """What goes with a message."""
        heard = self._heard.setdefault(host, {})
        heard[host] = now
        return dict(heard)

    def hears(self, host: int, spoken: Spoken) -> None:
        """A message has come."""
        heard = self._heard.setdefault(host, {})
        for other, at in spoken.items():
            heard[other] = max(at, heard.get(other, at))

    def check(self, agent: Gossip) -> None:
        """Raises AssertionError if another host has not heard what it is said to have heard."""
        clocks, times = self._beats[agent.host]
        for other in agent.others:
            seen_at = agent.seen_at(other)
            if seen_at <= 0.0:
                continue
            since = times[bisect_left(clocks, seen_at - ROUNDING_S)]
            heard = self._heard.get(other, {}).get(agent.host, -1.0)
            assert heard >= since - ROUNDING_S, (
                f"host {agent.host} takes it for proven that {other} has heard it at {since:.1f} s or later, which has "
                f"heard nothing of it that is later than {heard:.1f} s"
            )


class Mesh(FaultQueue):
    """`loss`, `doubling`: shares of the messages. What is sent takes up to `late_s`."""

    def __init__(
        self,
        hosts: int,
        seed: int = 0,
        *,
        loss: float = 0.0,
        doubling: float = 0.0,
        late_s: float = 0.02,
        injected: Counter[Fault] | None = None,
        audit: ProofAudit | None = None,
    ) -> None:
        super().__init__(injected)
        self._audit = audit
        self.random = random.Random(seed)
        self.loss, self.doubling, self.late_s = loss, doubling, late_s
        self.hosts = hosts
        """At the beginning."""
        # One object for each number, whose references all agents keep.
        numbers = list(range(hosts))
        self.agents = {host: self.agent(host, numbers) for host in numbers}
        self.group = dict.fromkeys(range(hosts), 0)
        """Hosts of one group hear each other."""
        self.cut: set[tuple[int, int]] = set()
        """Sender and receiver."""
        self.asleep: set[int] = set()
        self.messages = self.bytes = 0
        self._waiting: dict[int, list[tuple[bytes, Spoken | None]]] = {}
        """What arrived at hosts that are asleep."""
        for host in self.agents:
            self.at(self.random.random(), partial(self._loop, host))

    def agent(self, host: int, hosts: Iterable[int]) -> Gossip:
        """One that has just started."""
        if self._audit is not None:
            self._audit.starts(host)
        own = HostReport(host, HostEntry(f"node{host}", f"10.0.0.{host}", f"tcp://10.0.0.{host}:1"))
        return Gossip(own, set(hosts) - {host}, SILENCE_S, self.random.randrange)

    def everybody_knows_everything(self) -> None:
        """Skip the first moments, in which all reports are spread."""
        first = next(iter(self.agents.values()))._news
        for agent in self.agents.values():
            if agent.host not in first.reports:
                first.take(agent.own, -RUMOUR_BEATS)
        for agent in self.agents.values():
            news = agent._news
            news.reports.update(first.reports)
            news._came = dict.fromkeys(first.reports, -RUMOUR_BEATS)
            news.checksum = first.checksum

    def join(self, host: int, *, knows: Iterable[int]) -> None:
        """A host is added to the run."""
        self.agents[host] = self.agent(host, knows)
        self.group[host] = 0
        self.after(0.0, partial(self._loop, host))

    def restart(self, host: int) -> None:
        """The agent of a host is followed by another one, which knows what was last written down."""
        before = self.agents[host]
        self.agents[host] = self.agent(host, before.others)
        self.agents[host].resume(before.own, before.own.serial + 1 + self.random.randrange(STRIDE))

    def publish(self, host: int, **changes: object) -> None:
        """A host has something new to report."""
        agent = self.agents[host]
        self._send(host, agent.publish(structs.replace(agent.own, **changes)))

    def wake(self, host: int) -> None:
        """An agent that was stopped goes on, and reads what arrived meanwhile."""
        self.asleep.discard(host)
        for body, spoken in self._waiting.pop(host, []):
            self._arrive(host, body, spoken)
        self._turn(host)

    def _loop(self, host: int) -> None:
        """A turn of the agent's loop, in which it has heard nothing, and the next one."""
        if host in self.agents:
            self.after(TURN_S * (1 + 0.05 * self.random.random()), partial(self._loop, host))
            if host not in self.asleep:
                self._turn(host)

    def _comes(self, host: int, body: bytes, spoken: Spoken | None) -> None:
        if host in self.asleep:
            self._waiting.setdefault(host, []).append((body, spoken))
        elif host in self.agents:
            self._arrive(host, body, spoken)
            self._turn(host)

    def _arrive(self, host: int, body: bytes, spoken: Spoken | None) -> None:
        beat = msgpack.unpackb(body)
        sender = beat["from"]
        if self.group[sender] == self.group[host] and (sender, host) not in self.cut:
            self.agents[host].hear(beat, self.now)
            if self._audit is not None and spoken is not None:
                self._audit.hears(host, spoken)

    def _turn(self, host: int) -> None:
        beats = self.agents[host].tick(self.now)
        if self._audit is not None:
            self._audit.turns(host, self.agents[host].clock, self.now)
        self._send(host, beats)

    def _send(self, host: int, beats: Sequence[Beat]) -> None:
        spoken = self._audit.speaks(host, self.now) if self._audit is not None and beats else None
        for beat in beats:
            body = msgpack.packb(dict(beat.body))
            self.messages += 1
            self.bytes += len(body)
            if self.random.random() < self.loss:
                self.inject("messages_lost")
                continue
            copies = 1 + (self.random.random() < self.doubling)
            self.injected["messages_doubled"] += copies - 1
            for _ in range(copies):
                late_s = self.late_s * self.random.random()
                if self.doubling:
                    # Thousands of agents, of which something is measured, have a better network.
                    self.note_arrival((host, beat.host), late_s)
                self.after(late_s, partial(self._comes, beat.host, body, spoken))

    def serials(self) -> set[tuple[tuple[int, int], ...]]:
        """What the agents know of all reports: one element if they agree."""
        return {
            tuple(sorted((host, report.serial) for host, report in agent.reports.items()))
            for host, agent in self.agents.items()
            if host not in self.asleep
        }


def split(mesh: Mesh, part: set[int]) -> None:
    """From now on the hosts of a part hear each other alone, and so do the others."""
    mesh.group = {host: int(host in part) for host in mesh.group}


def near(agent: Gossip, now: float) -> set[int]:
    """Hosts that have confirmed a pulse of this agent lately, and itself."""
    return {agent.host, *(host for host in agent.others if agent.unseen_s(host, now) < SILENCE_S)}


def happens(mesh: Mesh, kind: str, number: int) -> None:
    """One of `EVENTS`, to a host or the network by a number."""
    host = sorted(mesh.agents)[number % len(mesh.agents)]
    if kind in ("split", "heal", "cut"):
        befalls_the_network(mesh, kind, number)
    elif kind == "publish" and host not in mesh.asleep:
        mesh.publish(host, reason=str(mesh.now))
    elif kind == "crash" and len(mesh.agents) > max(1, mesh.hosts - GONE):
        mesh.inject("crashes")
        mesh.wake(host)
        del mesh.agents[host]
    elif kind == "sleep" and len(mesh.asleep) < GONE:
        mesh.injected["pauses"] += host not in mesh.asleep
        mesh.asleep.add(host)
    elif kind == "wake":
        for sleeping in sorted(mesh.asleep):
            mesh.wake(sleeping)
    elif kind == "restart" and host not in mesh.asleep:
        mesh.inject("crashes")
        mesh.restart(host)
    elif kind == "join" and len(mesh.group) < mesh.hosts + GONE:
        mesh.inject("joins")
        mesh.join(len(mesh.group), knows=range(len(mesh.group)))


def befalls_the_network(mesh: Mesh, kind: str, number: int) -> None:
    """Hosts that no longer hear each other, or not in one direction, or do again."""
    mesh.injected["cuts"] += kind != "heal"
    part = {one for one in mesh.group if (one * 7 + number) % 5 < 2}
    if kind == "split":
        split(mesh, part)
    elif kind == "heal":
        mesh.group, mesh.cut = dict.fromkeys(mesh.group, 0), set()
    elif kind == "cut":
        mesh.cut |= {(one, other) for one in part for other in mesh.group.keys() - part}


def check_events(
    seed: int,
    loss: float,
    events: Iterable[tuple[str, int, int]],
    hosts: int = HOSTS,
    injected: Counter[Fault] | None = None,
) -> None:
    """Whatever happens, in the end all have the same reports, and only the dead are silent; and at no time is a host
    said to have heard another one that has not. Raises AssertionError.
    """
    audit = ProofAudit()
    mesh = Mesh(hosts, seed, loss=loss, doubling=0.1, late_s=0.3, injected=injected, audit=audit)
    for kind, number, seconds in events:
        happens(mesh, kind, number)
        for _ in range(seconds):
            mesh.run_for(1)
            for agent in mesh.agents.values():
                audit.check(agent)
    for kind in ("heal", "wake"):
        happens(mesh, kind, 0)
    mesh.loss = 0.0
    mesh.run_for(2 * SETTLED_S)
    assert len(mesh.serials()) == 1
    dead = set(mesh.group) - mesh.agents.keys()
    for host, agent in mesh.agents.items():
        assert {other for other in agent.others if agent.unheard_s(other) >= KNOWN_S} == dead
        assert near(agent, mesh.now) == set(mesh.agents)
        assert agent.report(host) == agent.own
