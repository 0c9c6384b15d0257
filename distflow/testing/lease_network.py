"""Owners and holders of leases in one process and in virtual time, over a network that misbehaves by a seed.

Messages go through their wire form and may be lost, doubled and delayed at random (which reorders them). Workers may
be slow, die and come back. The training loop, the weights and the engines are the simplest ones that obey the lease
rules: a group takes `seconds(position)` of a worker's time, and starts only on a version its lease allows.

    record = LeaseNetwork(Scenario(settings, owners=2, workers=3, loss=0.3)).run()

`run` raises StuckError, with the state of every core in its text, when the run is not over within `limit_s`.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgpack

from distflow.exchange.holder import HolderCore
from distflow.exchange.messages import HolderMessage, Lease, LeasePrompt, Message, Outgoing, Result
from distflow.exchange.owner import OwnerCore
from distflow.exchange.settings import LeaseSettings
from distflow.exchange.snapshots import merge_snapshots
from distflow.exchange.wire import from_wire, kind_of, to_wire
from distflow.types import Uid, Version


class StuckError(AssertionError):
    """The run made no progress to its end."""


@dataclass(frozen=True, slots=True)
class Crash:
    """Worker number `worker` dies at second `at` and comes back `restart_s` later (None: never)."""

    worker: int
    at: float
    restart_s: float | None = 2.0
    noticed: bool = True
    """The owners are told of the death; else they learn it from the next incarnation."""


def _one(_number: int) -> float:
    return 1.0


def _nothing_dropped(_position: int) -> str:
    return ""


def prompt_at(position: int) -> LeasePrompt:
    """An endless data order; prompt lengths 1 … 4 tokens."""
    ids = tuple(range(1, 2 + position % 4))
    return LeasePrompt(Uid(position // 100, position % 100, position), ids, f"prompt {position}", "{}")


SMALL = LeaseSettings(
    ledgers=4,
    groups_per_ledger=2,
    samples_per_prompt=4,
    max_staleness=0,
    training_steps=3,
    memory_bytes=16_000,
    group_bytes=lambda prompt_tokens: 100 * prompt_tokens,
    max_prompt_tokens=4,
)
"""Settings of a small run to vary with `dataclasses.replace`."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to simulate. Times in virtual seconds, probabilities 0 … 1 a message."""

    settings: LeaseSettings
    owners: int = 1
    workers: int = 2
    groups_at_once: int = 2
    """Groups a worker generates side by side."""
    seconds: Callable[[int], float] = _one
    """How long the group of a position takes."""
    slowness: Callable[[int], float] = _one
    """Factor on that, by worker number."""
    dropped: Callable[[int], str] = _nothing_dropped
    """Why the group of a position is dropped; empty: it is trained on."""
    crashes: Sequence[Crash] = ()
    loss: float = 0.0
    duplicates: float = 0.0
    delay_s: float = 0.01
    """Longest delay of a message."""
    colocated: bool = False
    """Workers train too: training step t begins when every worker knows that t is closed, and pauses generation."""
    lazy_take: bool = False
    """Take a step's groups only when its whole set has arrived."""
    obeys_min_version: bool = True
    """False: engines start whatever they are given (to see that the owner notices)."""
    seed: int = 0
    term: int = 0
    snapshot: Mapping[str, object] | None = None
    stop_at: int | None = None
    """End early, at this version."""
    limit_s: float = 8_000.0


@dataclass(slots=True)
class Record:
    """What happened."""

    trained: dict[int, set[int]] = field(default_factory=dict)
    """Positions by training step."""
    dropped: dict[int, str] = field(default_factory=dict)
    lags: Counter[int] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    started: int = 0
    """Groups started by engines, repetitions included."""
    peak_bytes: int = 0
    """Most bytes of results any owner held."""
    snapshot: dict[str, object] = field(default_factory=dict)
    """Of the first owner, at the end."""
    seconds: float = 0.0


class _Worker:
    """A generating worker: a core, and an engine that needs time."""

    def __init__(self, network: LeaseNetwork, number: int) -> None:
        self.network = network
        self.number = number
        self.name = f"rollout/{number}"
        self.incarnation = -1
        self.alive = False
        self.frozen = False
        self.version = 0
        self.queue: deque[Lease] = deque()
        self.running: dict[int, int] = {}
        self.core: HolderCore

    def start(self) -> None:
        scenario = self.network.scenario
        self.incarnation += 1
        self.alive, self.frozen = True, False
        self.version = self.network.version
        self.queue.clear()
        self.running.clear()
        self.core = HolderCore(
            self.name,
            self.incarnation,
            self.network.owner_names,
            scenario.settings,
            home=self.number,
            term=scenario.term,
            seed=scenario.seed * 1000 + self.number,
        )
        self.work()

    def die(self, crash: Crash) -> None:
        if not self.alive:
            return
        self.alive = False
        if crash.noticed:
            self.network.after(0.5, partial(self.network.tell_lost, self.name, self.incarnation))
        if crash.restart_s is not None:
            self.network.after(crash.restart_s, self.start)

    def hear(self, message: Message) -> None:
        if self.alive:
            self.network.send(self.name, self.core.handle(message, self.network.now))
            self.work()

    def tick(self) -> None:
        if self.alive:
            self.network.send(self.name, self.core.tick(self.network.now))
            self.work()

    def refresh(self, version: int) -> None:
        """New weights are here; a colocated worker generates again."""
        if self.alive and version >= self.version:
            self.version, self.frozen = version, False
            self.work()

    def work(self) -> None:
        """Whatever the engine can do now."""
        now, scenario = self.network.now, self.network.scenario
        if self.core.closed(self.network.version) and scenario.colocated and not self.core.run_finished:
            self.frozen = True
            self.network.train_when_ready()
        for position in self.core.take_cancelled():
            self.running.pop(position, None)
            self.queue = deque(lease for lease in self.queue if lease.position != position)
        self.core.take_acked()
        self.queue.extend(self.core.take_granted())
        while self.queue and len(self.running) < scenario.groups_at_once and not self.frozen:
            if scenario.obeys_min_version and self.queue[0].min_version > self.version:
                break
            self.begin(self.queue.popleft())
        groups = scenario.groups_at_once - len(self.running) - len(self.queue)
        self.network.send(self.name, self.core.want(groups * scenario.settings.samples_per_prompt, now))

    def begin(self, lease: Lease) -> None:
        scenario = self.network.scenario
        assert lease.position not in self.running, f"{self.name} started {lease.position} twice"
        self.running[lease.position] = self.version
        self.network.record.started += 1
        self.core.report(lease.position, 1, self.version)
        seconds = scenario.seconds(lease.position) * scenario.slowness(self.number)
        self.network.after(seconds, partial(self.end, lease.position, self.incarnation))

    def end(self, position: int, incarnation: int) -> None:
        if not self.alive or incarnation != self.incarnation or position not in self.running:
            return
        if self.frozen:
            self.network.after(0.25, partial(self.end, position, incarnation))
            return
        scenario = self.network.scenario
        oldest = Version(scenario.term, self.running.pop(position))
        nbytes = scenario.settings.group_bytes(len(prompt_at(position).prompt_ids))
        reason = scenario.dropped(position)
        self.network.send(self.name, self.core.finished(position, oldest, nbytes, reason, self.network.now))
        self.work()


class LeaseNetwork:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.record = Record()
        self.owner_names = [f"trainer/{r}" for r in range(scenario.owners)]
        self.owners = {name: self._new_owner(r) for r, name in enumerate(self.owner_names)}
        self.version = self.owners[self.owner_names[0]].version
        self._stored: dict[str, dict[int, Result]] = {name: {} for name in self.owner_names}
        self._workers = {f"rollout/{i}": _Worker(self, i) for i in range(scenario.workers)}
        self._rng = random.Random(scenario.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._training = False

    def run(self) -> Record:
        """Simulate to the end of the run. Raises StuckError when it does not come."""
        for worker in self._workers.values():
            worker.start()
        for crash in self.scenario.crashes:
            self.after(crash.at, partial(self._workers[f"rollout/{crash.worker}"].die, crash))
        self._tick()
        while not self._over():
            at, _, event = heapq.heappop(self._events)
            if at > self.scenario.limit_s:
                raise StuckError(self._describe())
            self.now = at
            event()
        self.record.seconds = self.now
        return self.record

    # -- virtual time and the network
    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Let something happen later."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, event))

    def send(self, sender: str, outgoing: Sequence[Outgoing]) -> None:
        """Put messages on the wire; each may get lost, or arrive twice, and later than the next."""
        for item in outgoing:
            kind = kind_of(item.message)
            self.record.messages[kind] += 1
            body = msgpack.packb(to_wire(item.message))
            copies = 0 if self._rng.random() < self.scenario.loss else 1
            copies += self._rng.random() < self.scenario.duplicates
            for _ in range(copies):
                deliver = partial(self._deliver, item.to, kind, body)
                self.after(self._rng.random() * self.scenario.delay_s, deliver)

    def _deliver(self, to: str, kind: str, body: bytes) -> None:
        message = from_wire(kind, msgpack.unpackb(body))
        if to in self._workers:
            self._workers[to].hear(message)
        else:
            self._owner_hears(to, message)

    def _tick(self) -> None:
        for name, owner in self.owners.items():
            self.send(name, owner.tick(self.now))
        for worker in self._workers.values():
            worker.tick()
        self.after(0.25, self._tick)

    # -- owners
    def _new_owner(self, number: int) -> OwnerCore:
        scenario = self.scenario
        ledgers = range(number, scenario.settings.ledgers, scenario.owners)
        return OwnerCore(
            self.owner_names[number],
            scenario.settings,
            list(ledgers),
            prompt_at,
            term=scenario.term,
            snapshot=scenario.snapshot,
        )

    def tell_lost(self, worker: str, incarnation: int) -> None:
        """A host agent has seen the process end."""
        for name, owner in self.owners.items():
            self.send(name, owner.worker_lost(worker, incarnation, self.now))

    def _owner_hears(self, name: str, message: Message) -> None:
        owner = self.owners[name]
        assert isinstance(message, HolderMessage), f"{name} was sent {message}"
        if isinstance(message, Result) and not owner.finished:
            self._note_result(owner, message)
        self.send(name, owner.handle(message, self.now))
        if owner.exhausted is not None:
            raise owner.exhausted
        self._take(owner)
        self.train_when_ready()

    def _note_result(self, owner: OwnerCore, result: Result) -> None:
        stored = self._stored[owner.name]
        if owner.keeps(result):
            assert result.position not in stored, f"position {result.position} stored twice"
            stored[result.position] = result
            self.record.peak_bytes = max(self.record.peak_bytes, sum(kept.nbytes for kept in stored.values()))
        elif result.dropped:
            self.record.dropped[result.position] = result.dropped

    def _take(self, owner: OwnerCore) -> None:
        positions = owner.consumable()
        if owner.finished or not positions or (self.scenario.lazy_take and not owner.set_complete()):
            return
        trained = self.record.trained.setdefault(owner.version, set())
        for position in positions:
            oldest = self._stored[owner.name].pop(position).oldest
            assert oldest is not None, f"position {position} has no version"
            assert position not in trained, f"position {position} trained twice"
            trained.add(position)
            self.record.lags[owner.version - oldest.number] += 1
        self.send(owner.name, owner.take(positions, self.now))

    def train_when_ready(self) -> None:
        """Begin the training step when every owner has taken its set (and every colocated worker has stopped)."""
        ready = all(owner.step_complete() for owner in self.owners.values()) and not self._over_for_owners()
        if self.scenario.colocated:
            ready = ready and all(worker.frozen for worker in self._workers.values())
        if ready and not self._training:
            self._training = True
            self.after(0.5, self._advance)

    def _advance(self) -> None:
        self._training = False
        self.version += 1
        for owner in self.owners.values():
            self.send(owner.name, owner.advance(self.version, self.now))
        self.record.snapshot = merge_snapshots([owner.snapshot() for owner in self.owners.values()])
        if self.version == self.scenario.stop_at:
            for owner in self.owners.values():
                self.send(owner.name, owner.finish(self.now))
        for owner in self.owners.values():
            self._take(owner)
        for worker in self._workers.values():
            self.after(self._rng.random(), partial(worker.refresh, self.version))
        self.train_when_ready()

    # -- the end
    def _over_for_owners(self) -> bool:
        return all(owner.finished for owner in self.owners.values())

    def _over(self) -> bool:
        workers = [worker for worker in self._workers.values() if worker.alive]
        return self._over_for_owners() and all(worker.core.run_finished for worker in workers)

    def _describe(self) -> str:
        lines = [
            f"no end by {self.scenario.limit_s} s, version {self.version} of {self.scenario.settings.training_steps}"
        ]
        lines += [f"{o.name}: {o.holders()} open {o.open_leases()[:5]}" for o in self.owners.values()]
        for worker in self._workers.values():
            lines.append(f"{worker.name}: alive {worker.alive} frozen {worker.frozen} version {worker.version}")
            lines.append(f"  held {worker.core.held()} queue {len(worker.queue)} ask {worker.core.asking()}")
        return "\n".join(lines)
