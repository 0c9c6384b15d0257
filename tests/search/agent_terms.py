"""Agents, the network between them and the terms of their training workers, in virtual time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgpack

from distflow.cluster.cluster_view import Rules, View, members_of, wanted
from distflow.cluster.gossip import Gossip
from distflow.cluster.host_report import DesiredWorkers, HostReport, Saved, Successor
from distflow.cluster.processes import HostEntry
from distflow.cluster.term_vote import SCALED, Begin, Break, Pool, Stop, is_to_end
from distflow.comm.beats import Beat
from distflow.types import in_pool
from tests.search.fault_queue import Fault

EVENTS = ("cut", "cut", "unheard", "heal", "heal", "kill", "crash", "sleep", "scale", "scale", "wait", "wait")
LAYOUTS = ([0], [0, 0], [0, 1], [0, 1, 2], [0, 0, 1], [0, 0, 1, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4])
"""The host of each training worker."""
SILENCE_S = 10.0


@dataclass
class SimulatedAgent:
    """One host's agent, and what it did with the workers there."""

    mesh: Gossip
    pool: Pool
    live: dict[str, int] = field(default_factory=dict)
    """Term by name of those that live."""
    broken: str | None = None
    stopped: bool = False
    dead: bool = False
    asleep_until: float = 0.0
    saved: dict[int, int] = field(default_factory=dict)
    kills: list[str] = field(default_factory=list)
    decided: dict[str, DesiredWorkers] = field(default_factory=dict)
    """What it was asked to scale, by pool."""


class World:
    """Agents with their meshes, the network between them, and workers that train when all of their term can."""

    def __init__(
        self,
        layout: list[int],
        *,
        shrinks: bool,
        seed: int,
        critics: int = 0,
        hosts: int = 0,
        injected: Counter[Fault] | None = None,
    ) -> None:
        """`hosts`: there are so many at least, whether they train or not."""
        self.random = random.Random(seed)
        self.injected = Counter[Fault]() if injected is None else injected
        self.now = 0.0
        # The last `critics` of them train another model.
        last = len(layout) - critics
        self.trainers = {f"trainer/{i}" if i < last else f"critic/{i - last}": host for i, host in enumerate(layout)}
        count = max(hosts, *(host + 1 for host in layout))
        self.rules = Rules(shrinks, SILENCE_S, restarts=1000)
        self.agents = [self._agent(host, count) for host in range(count)]
        self.group = dict.fromkeys(range(count), 0)
        """Hosts of one group hear each other."""
        self.unheard: set[tuple[int, int]] = set()
        """Sender and receiver, though the sender may hear the receiver."""
        self.flying: list[tuple[float, int, int, bytes]] = []
        self.commits: list[tuple[float, int, tuple[str, ...]]] = []
        self.begun: dict[int, Successor] = {}
        self.slept = False
        self.leaving: set[int] = set()
        """Terms whose training workers were asked to save and leave."""

    def _agent(self, host: int, count: int) -> SimulatedAgent:
        mesh = Gossip(HostReport(host, HostEntry(f"h{host}", "")), set(range(count)) - {host}, SILENCE_S)
        own = [name for name, where in self.trainers.items() if where == host]
        return SimulatedAgent(mesh, Pool(self.rules, 0, 1e9), dict.fromkeys(own, 0), saved={0: 0})

    def happens(self, kind: str, a: int, b: int) -> None:
        """One of `EVENTS`, to an agent, a worker or the network by numbers."""
        agent = self.agents[a % len(self.agents)]
        self._count(kind, agent)
        if kind == "cut":
            self.group = {host: (b >> host) & 1 for host in self.group}
        elif kind == "unheard":
            part = {host for host in self.group if (b >> host) & 1}
            self.unheard |= {(host, other) for host in part for other in self.group.keys() - part}
        elif kind == "heal":
            self.group, self.unheard = dict.fromkeys(self.group, 0), set()
        elif kind == "kill" and agent.live:
            self._die(agent, sorted(agent.live)[b % len(agent.live)])
        elif kind == "crash":
            agent.dead, agent.live = True, {}
        elif kind == "scale":
            self.scale(agent, b)
        elif kind == "sleep":
            agent.asleep_until, self.slept = self.now + b % 40, True
        for _ in range(b % 25):
            self.second()

    def _count(self, kind: str, agent: SimulatedAgent) -> None:
        self.injected["cuts"] += kind in ("cut", "unheard")
        self.injected["crashes"] += (kind == "kill" and bool(agent.live)) or (kind == "crash" and not agent.dead)
        self.injected["pauses"] += kind == "sleep" and not agent.dead

    def scale(self, agent: SimulatedAgent, b: int) -> dict[str, int]:
        """Somebody asks for other workers of a pool: some that there are, and some on any host."""
        pools = sorted({name.partition("/")[0] for name in self.trainers})
        pool, draw = pools[b % len(pools)], random.Random(b)
        members = self._view(agent).members
        kept = {name: members[name] for name in in_pool(pool, members) if draw.random() < 0.5}
        hosts = {f"{pool}/{10 * host + n}": host for host in range(len(self.agents)) for n in range(2)}
        new = draw.sample(sorted(hosts), draw.randint(0 if kept else 1, 2))
        number = max((one.stamp[0] for one in self._wanted(agent).values()), default=0) + 1
        chosen = kept | {name: hosts[name] for name in new if name not in members}
        if chosen:
            self.injected["scalings"] += 1
            agent.decided[pool] = DesiredWorkers((number, agent.mesh.host), chosen)
        return chosen

    def _wanted(self, agent: SimulatedAgent) -> dict[str, DesiredWorkers]:
        found = wanted(agent.mesh)
        for pool, decision in agent.decided.items():
            if pool not in found or decision.stamp > found[pool].stamp:
                found[pool] = decision
        return found

    def where(self, number: int) -> dict[str, int]:
        """The members of a term, and their hosts."""
        return dict(members_of(self.begun.get(number), self.trainers))

    def _die(self, agent: SimulatedAgent, name: str) -> None:
        del agent.live[name]
        if agent.broken is None:
            agent.kills.append(name)
            agent.broken = f"{name} was killed"

    def second(self) -> None:
        """A second of all agents and of the network."""
        self.now += 1.0
        for host, agent in enumerate(self.agents):
            if not agent.dead and self.now >= agent.asleep_until:
                self._send(host, agent.mesh.tick(self.now))
        for _ in range(4):
            self._deliver()
            for host in self.random.sample(range(len(self.agents)), len(self.agents)):
                self._act(host, self.agents[host])
        self._train()

    def _send(self, host: int, beats: Iterable[Beat]) -> None:
        for beat in beats:
            late = self.random.choice([0.0, 0.0, 0.5, 1.0, 3.0])
            lost = self.random.random() <= 0.1
            self.injected["messages_lost"] += lost
            if not lost:
                self.injected["messages_late"] += late > 0.0
                self.flying.append((self.now + late, host, beat.host, msgpack.packb(dict(beat.body))))

    def _deliver(self) -> None:
        due, self.flying = [f for f in self.flying if f[0] <= self.now], [f for f in self.flying if f[0] > self.now]
        self.random.shuffle(due)
        for _, source, to, body in due:
            agent = self.agents[to]
            if not self._hears(to, source) or agent.dead:
                continue
            if self.now < agent.asleep_until:
                self.flying.append((agent.asleep_until, source, to, body))
            else:
                agent.mesh.hear(msgpack.unpackb(body))

    def _hears(self, host: int, other: int) -> bool:
        return self.group[host] == self.group[other] and (other, host) not in self.unheard

    def _act(self, host: int, agent: SimulatedAgent) -> None:
        if agent.dead or agent.stopped or self.now < agent.asleep_until:
            return
        self._publish(host, agent)
        view = self._view(agent)
        move = agent.pool.act(view, alive=bool(agent.live), lacks=lambda term: "", now=self.now)
        if move is None and agent.broken is None and is_to_end(view, self.rules):
            self.leaving.add(agent.pool.term.number)
        if isinstance(move, Break):
            agent.broken = move.reason
            agent.live = {}
        elif isinstance(move, Stop):
            agent.stopped, agent.live = True, {}
        elif isinstance(move, Begin):
            self._begin(agent, move)
        self._publish(host, agent)

    def _begin(self, agent: SimulatedAgent, move: Begin) -> None:
        term = move.term
        assert self.begun.setdefault(term.number, term) == term, "a term with two contents"
        homes = {name.partition("/")[0] for name in self.trainers}
        assert {name.partition("/")[0] for name in term.members} == homes, f"a home is empty in {term}"
        if not self.slept:
            old = [n for other in self.agents for n, number in other.live.items() if number < term.number]
            assert not old, f"term {term.number} begins while {old} of former terms live"
        agent.broken = None
        agent.pool.began(term)
        agent.live = {name: term.number for name, host in self.where(term.number).items() if host == agent.mesh.host}

    def _publish(self, host: int, agent: SimulatedAgent) -> None:
        if agent.broken is not None and agent.live:
            agent.live = {}

        def look() -> tuple[tuple[Saved, ...], tuple[str, ...]]:
            saved = tuple(Saved(step, term) for step, term in sorted(agent.saved.items()) if step)
            return saved, tuple(name for name in sorted(set(agent.kills)) if agent.kills.count(name) > 1)

        term = agent.pool.note(agent.broken, alive=bool(agent.live), look=look)
        report = HostReport(host, agent.mesh.own.entry, term=term, wanted=self._wanted(agent))
        self._send(host, agent.mesh.publish(report))

    def _view(self, agent: SimulatedAgent) -> View:
        mesh = agent.mesh
        return View(
            mesh.host,
            self.trainers,
            {},
            {host: report.term for host, report in mesh.reports.items()},
            {host: mesh.unheard_s(host) for host in mesh.others},
            {host: mesh.unseen_s(host, self.now) for host in mesh.others},
            self._wanted(agent),
        )

    def _train(self) -> None:
        """A term trains, and saves, when all of its members live in it and reach each other."""
        numbers = {number for agent in self.agents for number in agent.live.values()}
        for number in sorted(numbers):
            members = self.where(number)
            live = all(self.agents[host].live.get(name) == number for name, host in members.items())
            hosts = set(members.values())
            if not live or not all(self._hears(one, other) for one in hosts for other in hosts):
                continue
            self.commits.append((self.now, number, tuple(members)))
            for host in hosts:
                agent = self.agents[host]
                agent.saved[len(self.commits)] = number
                if number in self.leaving:
                    agent.live, agent.broken = {}, agent.broken or SCALED

    def check(self) -> None:
        """Raises AssertionError if two terms have trained at once, or an earlier one beside a later one."""
        terms = [number for _, number, _ in self.commits]
        assert terms == sorted(terms), "a former term trains beside a later one"
        for at in {at for at, _, _ in self.commits}:
            assert len([1 for when, _, _ in self.commits if when == at]) == 1, "two terms train at once"
