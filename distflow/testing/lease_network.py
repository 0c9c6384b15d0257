"""Owners and holders of leases in one process and in virtual time, over a network with seeded faults.

Messages go through their wire form and may be lost, doubled and delayed at random (which reorders them). Workers may
be slow, die and come back. The training loop, the weights and the engines are the simplest ones that obey the lease
rules: a group takes `seconds(position)` of a worker's time, and starts only on a version its lease allows.

    record = LeaseNetwork(Scenario(settings, owners=2, workers=3, loss=0.3)).run()

`run` raises StuckError, with the state of every core in its text, when the run is not over within `limit_s`.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgpack

from distflow.exchange.lease_wire import from_wire, kind_of, to_wire
from distflow.exchange.ledger import Entry
from distflow.exchange.ledgers import LedgerSet, merge_snapshots
from distflow.exchange.messages import HolderMessage, LeasePrompt, Message, Outgoing, Result
from distflow.exchange.owner import OwnerCore
from distflow.testing.lease_scenario import SMALL, Crash, Leave, Pause, Record, Scenario, StuckError, prompt_at
from distflow.testing.lease_worker import LeaseWorker
from distflow.types import Version

__all__ = [
    "SMALL",
    "Crash",
    "LeaseNetwork",
    "Leave",
    "Pause",
    "Record",
    "Scenario",
    "StuckError",
    "prompt_at",
]


def open_entries(ledgers: LedgerSet) -> Iterator[Entry]:
    """Leased positions that some worker holds."""
    return (entry for ledger in ledgers for entry in ledger.entries.values() if entry.state == "open")


class LeaseNetwork:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.record = Record()
        self.versions: dict[tuple[str, int], set[Version]] = {}
        self.histories: dict[tuple[int, int], list[list[int]]] = {}
        self.term = scenario.term
        self.begins: dict[int, int] = {}
        self._saved: dict[str, object] | None = dict(scenario.snapshot) if scenario.snapshot is not None else None
        self.owner_names = [f"trainer/{r}" for r in range(scenario.owners)]
        self.owners = {name: self._new_owner(r) for r, name in enumerate(self.owner_names)}
        self.version = self.owners[self.owner_names[0]].version
        self._stored: dict[str, dict[int, Result]] = {name: {} for name in self.owner_names}
        self._produced_on: dict[int, set[Version]] = {}
        self._workers = {f"rollout/{i}": LeaseWorker(self, i) for i in range(scenario.workers)}
        self._rng = random.Random(scenario.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._training = False
        self.ended_at = 0.0
        """When the last training step ended; the run is over when all workers know that."""

    def run(self) -> Record:
        """Simulate the whole run. Raises StuckError if it does not end."""
        for worker in self._workers.values():
            worker.start()
        for crash in self.scenario.crashes:
            self.after(crash.at, partial(self._workers[f"rollout/{crash.worker}"].die, crash))
        for pause in self.scenario.pauses:
            self.after(pause.at, partial(self._workers[f"rollout/{pause.worker}"].pause, pause))
        for leave in self.scenario.leaves:
            self.after(leave.at, partial(self._workers[f"rollout/{leave.worker}"].leave, leave))
        for renewal in self.scenario.renewals:
            self.after(renewal.at, partial(self._renew, renewal.owners))
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
        """Schedule an event."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, event))

    def send(self, sender: str, outgoing: Sequence[Outgoing]) -> None:
        """Send messages; each may be lost, duplicated or reordered."""
        for item in outgoing:
            kind = kind_of(item.message)
            self.record.messages[kind] += 1
            body, payload = to_wire(item.message)
            frames = [memoryview(bytes(frame)) for frame in payload]
            header = msgpack.packb(body)
            self.record.largest_message = max(self.record.largest_message, len(header) + sum(map(len, frames)))
            copies = 0 if self._rng.random() < self.scenario.loss else 1
            copies += self._rng.random() < self.scenario.duplicates
            for _ in range(copies):
                deliver = partial(self._deliver, item.to, kind, header, frames)
                self.after(self._rng.random() * self.scenario.delay_s, deliver)

    def _deliver(self, to: str, kind: str, body: bytes, payload: Sequence[memoryview]) -> None:
        message = from_wire(kind, msgpack.unpackb(body), payload)
        if to in self._workers:
            self._workers[to].hear(message)
        elif to in self.owners:
            self._owner_hears(to, message)

    def _tick(self) -> None:
        for name, owner in self.owners.items():
            self.send(name, owner.tick(self.now))
            for entry in open_entries(owner._ledgers):
                assert entry.kept is None or entry.kept.nbytes <= entry.reserved, "more tokens kept than reserved"
        for worker in self._workers.values():
            worker.tick()
        self.after(0.25, self._tick)

    # -- owners
    def _new_owner(self, number: int) -> OwnerCore:
        scenario = self.scenario
        name, ledgers = self.owner_names[number], range(number, scenario.settings.ledgers, len(self.owner_names))
        read: dict[int, bool] = {}

        def arrive(position: int) -> None:
            read[position] = True
            if self.owners.get(name) is owner:
                self.send(name, owner.prompts_arrived(self.now))

        def slow(position: int) -> LeasePrompt | None:
            if position not in read:
                read[position] = False
                self.after(self._rng.random() * scenario.read_s, partial(arrive, position))
            return prompt_at(position) if read[position] else None

        owner = OwnerCore(
            name,
            scenario.settings,
            list(ledgers),
            slow if scenario.read_s else prompt_at,
            term=self.term,
            snapshot=self._saved,
            begins=self.begins,
        )
        return owner

    def _renew(self, owners: int) -> None:
        if self._over_for_owners():
            return
        self.term += 1
        self.owner_names = [f"trainer/{r}" for r in range(owners)]
        self._training = False
        self.begins[self.term] = 0
        self.owners = {name: self._new_owner(r) for r, name in enumerate(self.owner_names)}
        self.version = self.begins[self.term] = self.owners[self.owner_names[0]].version
        self.owners = {name: self._new_owner(r) for r, name in enumerate(self.owner_names)}
        self._stored = {name: {} for name in self.owner_names}
        for step in [step for step in self.record.trained if step >= self.version]:
            del self.record.trained[step]
        for worker in self._workers.values():
            self.after(self._rng.random(), partial(worker.begin_term, self.term))

    def tell_lost(self, worker: str, incarnation: int) -> None:
        """Report that a worker's process has ended, as a host agent does."""
        for name, owner in self.owners.items():
            self.send(name, owner.worker_lost(worker, incarnation, self.now))

    def _owner_hears(self, name: str, message: Message) -> None:
        owner = self.owners[name]
        assert isinstance(message, HolderMessage), f"{name} was sent {message}"
        if isinstance(message, Result) and message.term != self.term and not self._owns(owner, message.position):
            return  # A worker drops messages that its owner cannot decode.
        if isinstance(message, Result) and not owner.finished:
            self._note_result(owner, message)
        self.send(name, owner.handle(message, self.now))
        if owner.exhausted is not None:
            raise owner.exhausted
        self._take(owner)
        self.train_when_ready()

    def _owns(self, owner: OwnerCore, position: int) -> bool:
        number = self.scenario.settings.owner_of(position, len(self.owner_names))
        return self.owner_names[number] == owner.name

    def _note_result(self, owner: OwnerCore, result: Result) -> None:
        stored = self._stored[owner.name]
        if owner.keeps(result):
            assert result.position not in stored, f"position {result.position} stored twice"
            stored[result.position] = result
            self._produced_on[result.position] = self.versions[result.worker, result.position]
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
            versions = self._produced_on.pop(position)
            assert all(version.survives(self.begins) for version in versions), f"{position}: {versions}, {self.begins}"
            trained.add(position)
            self.record.lags[owner.version - oldest.number] += 1
        self.send(owner.name, owner.take(positions, self.now))

    def train_when_ready(self) -> None:
        """Begin the training step once every owner has taken its groups (and every colocated worker has stopped)."""
        ready = all(owner.step_complete() for owner in self.owners.values()) and not self._over_for_owners()
        if self.scenario.colocated:
            ready = ready and all(worker.frozen for worker in self._workers.values())
        if ready and not self._training:
            self._training = True
            self.after(0.5, partial(self._advance, self.term))

    def _advance(self, term: int) -> None:
        if term != self.term:
            return
        self._training = False
        self.version += 1
        for owner in self.owners.values():
            self.send(owner.name, owner.advance(self.version, self.now))
        self.record.snapshot = merge_snapshots([owner.snapshot() for owner in self.owners.values()])
        if self.version % self.scenario.save_every == 0:
            self._saved = dict(self.record.snapshot)
        if self.version == self.scenario.stop_at:
            for owner in self.owners.values():
                self.send(owner.name, owner.finish(self.now))
        for owner in self.owners.values():
            self._take(owner)
        for worker in self._workers.values():
            self.after(self._rng.random(), partial(worker.refresh, Version(self.term, self.version)))
        self.ended_at = self.ended_at or (self.now if self._over_for_owners() else 0.0)
        self.train_when_ready()

    # -- the end
    def _over_for_owners(self) -> bool:
        return all(owner.finished for owner in self.owners.values())

    def _over(self) -> bool:
        workers = [worker for worker in self._workers.values() if worker.alive]
        return self._over_for_owners() and all(worker.holder.run_finished for worker in workers)

    def _describe(self) -> str:
        lines = [
            f"no end by {self.scenario.limit_s} s, version {self.version} of {self.scenario.settings.training_steps}"
        ]
        lines += [f"{o.name}: {o.holders()} open {o.open_leases()[:5]}" for o in self.owners.values()]
        for worker in self._workers.values():
            lines.append(f"{worker.name}: alive {worker.alive} frozen {worker.frozen} version {worker.version}")
            lines.append(f"  held {worker.holder.held()} running {[*worker.running]} ask {worker.holder.asking()}")
        return "\n".join(lines)
