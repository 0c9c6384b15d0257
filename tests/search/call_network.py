"""Callers and servers of steps in one process and in virtual time, over a network with seeded faults.

Messages go through their wire form and may be lost, doubled and delayed at random (which reorders them). Servers may be
slow, suspended, cut off, drained, die and come back; others join. Callers may die and come back, too. Two steps are
called: one of a frozen model, and one that needs the version of its training step, t. Version t + 1 exists once all
callers have all that they asked for t; they ask for t + 1 before that.

    record = CallNetwork(CallScenario(clients=2, servers=3, loss=0.3)).run()

`run` raises StuckError, with what every caller waits for, when not everything is answered within `limit_s`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import msgpack

from distflow.exchange.call_messages import CallAnswer, CallMessage, from_wire, kind_of, to_wire
from distflow.types import Version, WorkerName
from tests.search.call_scenario import FROZEN, VERSIONED, CallRecord, CallScenario
from tests.search.call_workers import AnsweringWorker, AskingWorker, SimulatedProcess
from tests.search.fault_queue import Fault, FaultQueue

TRAIN_S = 0.5
"""Seconds between the last answer for a training step and the next version."""


class CallNetwork(FaultQueue):
    """One run of a scenario."""

    def __init__(self, scenario: CallScenario, injected: Counter[Fault] | None = None) -> None:
        super().__init__(injected)
        self.scenario = scenario
        self.record = CallRecord()
        self.version = Version(0, 0)
        self.begins: dict[int, int] = {}
        """Training steps at which terms began."""
        self.pools = {step: FROZEN if scenario.shared else step for step in scenario.called}
        self.clients = {f"trainer/{i}": AskingWorker(self, i) for i in range(scenario.clients)}
        self.servers: dict[str, AnsweringWorker] = {}
        for pool, servers in scenario.pools.items():
            for index in range(servers):
                self._add(f"{pool}/{index}")
        self._rng = random.Random(scenario.seed)
        self._opened = -1
        self._training = False

    def run(self) -> CallRecord:
        """Simulate until everything is answered. Raises StuckError if that does not happen."""
        for process in [*self.servers.values(), *self.clients.values()]:
            process.start()
        self._schedule()
        self._open_steps()
        self.run_until(self._over, self.scenario.limit_s, self._describe)
        self.record.seconds = self.now
        self.record.unused += sum(client.core.unused for client in self.clients.values())
        return self.record

    # -- the network
    def delay(self) -> float:
        """How long a message takes, or weights."""
        return self._rng.random() * self.scenario.delay_s

    def send(self, sender: SimulatedProcess, to: str, message: CallMessage) -> None:
        """Send a message, which may be lost, duplicated or reordered."""
        kind, incarnation = kind_of(message), sender.incarnation
        self.record.messages[kind] += 1
        body = msgpack.packb(to_wire(message))
        receiver = self.clients[to] if to in self.clients else self.servers[to]

        def hear() -> None:
            receiver.hear(sender.name, incarnation, from_wire(kind, msgpack.unpackb(body)))

        self.deliver(sender, receiver, hear)
        if self._rng.random() < self.scenario.duplicates:
            self.inject("messages_doubled")
            self.deliver(sender, receiver, hear)

    def deliver(self, sender: SimulatedProcess, receiver: SimulatedProcess, hear: Callable[[], None]) -> None:
        """Hand something over a little later, unless it is lost: to whatever has the receiver's name by then."""
        if self._rng.random() < self.scenario.loss or self._cut(sender.name, receiver.name):
            self.inject("messages_lost")
            return
        late_s = self.delay()
        self.note_arrival((sender.name, receiver.name), late_s)
        self.after(late_s, partial(receiver.when_awake, hear))

    def _cut(self, sender: str, receiver: str) -> bool:
        clients, servers = list(self.clients), list(self.servers)
        return any(
            cut.at <= self.now < cut.at + cut.seconds
            and clients[cut.client] in (sender, receiver)
            and servers[cut.server] in (sender, receiver)
            for cut in self.scenario.cuts
        )

    def tell_lost(self, name: str, incarnation: int) -> None:
        """Report that a process has ended, as a host agent does."""
        others = self.clients if name in self.servers else self.servers
        for process in others.values():
            process.when_awake(partial(process.hear_lost, name, incarnation))

    # -- training steps
    def answered(self, call: tuple[int, str, int, int], need: Version | None, answer: CallAnswer) -> None:
        """A call of a caller was answered for the first time; is it what was asked for?"""
        assert answer.batch == [list(call), None if need is None else list(need)], f"{answer} for {call}"
        self.record.answers[call] += 1
        self.look()

    def look(self) -> None:
        """Begin to train once everything for the open step is answered."""
        t = self.version.number
        waits = any(key[1] == t for client in self.clients.values() for key in client.wanted)
        if not waits and not self._training and t < self.scenario.steps:
            self._training = True
            self.after(TRAIN_S, self._advance)

    def is_home(self, server: str) -> bool:
        """Whether it runs the step that needs a version."""
        return VERSIONED in self.pools and WorkerName.parse(server).pool == self.pools[VERSIONED]

    def _advance(self) -> None:
        self._training = False
        self._publish(Version(self.version.term, self.version.number + 1))
        self._open_steps()
        self.look()

    def _renew(self) -> None:
        self.inject("new_terms")
        self.begins[self.version.term + 1] = self.version.number
        self._publish(Version(self.version.term + 1, self.version.number))
        for client in self.clients.values():
            client.after(self._rng.random(), partial(client.begin_term, self.version.term))

    def _publish(self, version: Version) -> None:
        self.version = version
        for server in self.servers.values():
            if server.alive and self.is_home(server.name):
                server.after(self.delay(), server.load)

    def _open_steps(self) -> None:
        last = min(self.scenario.steps - 1, self.version.number + self.scenario.ahead)
        while self._opened < last:
            self._opened += 1
            for client in self.clients.values():
                client.open_step(self._opened, self._rng)

    # -- faults
    def _schedule(self) -> None:
        scenario, servers, clients = self.scenario, list(self.servers.values()), list(self.clients.values())
        for at in scenario.joins:
            self.after(at, self._join)
        for crash in scenario.crashes:
            self.befall(crash.at, "crashes", servers[crash.worker], partial(servers[crash.worker].die, crash))
        for crash in scenario.client_crashes:
            self.befall(crash.at, "crashes", clients[crash.worker], partial(clients[crash.worker].die, crash))
        for pause in scenario.pauses:
            self.befall(pause.at, "pauses", servers[pause.worker], partial(servers[pause.worker].pause, pause))
        for pause in scenario.client_pauses:
            self.befall(pause.at, "pauses", clients[pause.worker], partial(clients[pause.worker].pause, pause))
        for leave in scenario.leaves:
            self.befall(leave.at, "leaves", servers[leave.worker], partial(self._drain, servers[leave.worker]))
        for cut in scenario.cuts:
            self.after(cut.at, partial(self.inject, "cuts"))
        for cancel in scenario.cancels:
            self.after(cancel.at, partial(self._cancel, clients[cancel.client]))
        for at in scenario.renewals:
            self.after(at, self._renew)

    def _add(self, name: str) -> AnsweringWorker:
        number, slowness = len(self.servers), self.scenario.slowness
        slow = slowness[number] if number < len(slowness) else 1.0
        self.injected["slow_workers"] += slow > 1.0
        server = AnsweringWorker(self, name, slow)
        self.servers[name] = server
        return server

    def _join(self) -> None:
        self.inject("joins")
        pool = next(iter(self.scenario.pools))
        there = sum(WorkerName.parse(name).pool == pool for name in self.servers)
        self._add(f"{pool}/{there}").start()

    def _drain(self, server: AnsweringWorker) -> None:
        if server.alive:
            server.when_awake(server.drain)

    def _cancel(self, client: AskingWorker) -> None:
        if client.alive:
            client.when_awake(client.cancel)

    # -- the end
    def _over(self) -> bool:
        return self.version.number == self.scenario.steps

    def _describe(self) -> str:
        lines = [f"no end by {self.scenario.limit_s} s, version {self.version} of {self.scenario.steps}"]
        lines += [f"{c.name} wants {sorted(c.wanted)[:5]}, waits for {c.core.waiting()}" for c in self.clients.values()]
        lines += [f"{s.name}: alive {s.alive} version {s.version} load {s.core.load}" for s in self.servers.values()]
        return "\n".join(lines)
