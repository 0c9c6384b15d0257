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
from collections.abc import Callable, Sequence
from functools import partial

import msgpack
import msgspec

from distflow.exchange.deal_core import News
from distflow.exchange.intake_core import Sending
from distflow.exchange.lease_wire import from_wire, kind_of, to_wire
from distflow.exchange.ledgers import merge_snapshots
from distflow.exchange.steal_core import Send
from distflow.sim.lease_scenario import SMALL, Crash, Leave, Pause, Record, Scenario, StuckError, prompt_at
from distflow.sim.lease_trainer import LeaseTrainer
from distflow.sim.lease_worker import LeaseWorker
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
        self.began_on: dict[int, set[Version]] = {}
        self._met: dict[str, News] = {}
        self.trainers = self._new_trainers()
        self.version = self.trainers[self.owner_names[0]].owner.version
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

    def send(self, sender: str, outgoing: Sequence[Sending]) -> None:
        """Send messages; each may be lost, duplicated or reordered."""
        for item in outgoing:
            if isinstance(item, Send):
                deliver_groups = partial(self._deliver_between, self.term, sender, item)
                for _ in range(self._copies()):
                    self.after(self._rng.random() * self.scenario.delay_s, deliver_groups)
                continue
            kind = kind_of(item.message)
            self.record.messages[kind] += 1
            body, payload = to_wire(item.message)
            frames = [memoryview(bytes(frame)) for frame in payload]
            header = msgspec.msgpack.encode(body)
            self.record.largest_message = max(self.record.largest_message, len(header) + sum(map(len, frames)))
            for _ in range(self._copies()):
                deliver = partial(self._deliver, item.to, kind, header, frames)
                self.after(self._rng.random() * self.scenario.delay_s, deliver)

    def _copies(self) -> int:
        copies = 0 if self._rng.random() < self.scenario.loss else 1
        return copies + (self._rng.random() < self.scenario.duplicates)

    def _deliver_between(self, term: int, sender: str, item: Send) -> None:
        """Between replicas; those of another term are other processes."""
        if term == self.term:
            self.trainers[item.to].hear_of_groups(sender, item)

    def _deliver(self, to: str, kind: str, body: bytes, payload: Sequence[memoryview]) -> None:
        message = from_wire(kind, msgpack.unpackb(body), payload)
        if to in self._workers:
            self._workers[to].hear(message)
        elif to in self.trainers:
            self.trainers[to].hear(message)

    def _tick(self) -> None:
        for trainer in self.trainers.values():
            trainer.tick()
        for worker in self._workers.values():
            worker.tick()
        self.after(0.25, self._tick)

    # -- owners
    @property
    def called(self) -> bool:
        """Whether a replica waits for the others to meet."""
        return bool(self._met)

    def meet(self, name: str, news: News) -> None:
        """A replica waits for the others; when all have come, each hears a little later what all had to tell."""
        first = not self._met
        self._met[name] = news
        if first:
            for other in self.trainers.values():
                self.after(self._rng.random(), other.work)
        if len(self._met) == len(self.trainers):
            said = [self._met[owner] for owner in self.owner_names]
            self._met.clear()
            for trainer in self.trainers.values():
                self.after(self._rng.random(), partial(trainer.heard, said))

    def _new_trainers(self) -> dict[str, LeaseTrainer]:
        self._met.clear()
        return {name: LeaseTrainer(self, r, self._saved) for r, name in enumerate(self.owner_names)}

    def _renew(self, owners: int) -> None:
        if self._over_for_owners():
            return
        self.term += 1
        self.owner_names = [f"trainer/{r}" for r in range(owners)]
        self._training = False
        self.begins[self.term] = 0
        self.trainers = self._new_trainers()
        self.version = self.begins[self.term] = self.trainers[self.owner_names[0]].owner.version
        self.trainers = self._new_trainers()
        for step in [step for step in self.record.trained if step >= self.version]:
            del self.record.trained[step]
        for worker in self._workers.values():
            self.after(self._rng.random(), partial(worker.begin_term, self.term))

    def tell_lost(self, worker: str, incarnation: int) -> None:
        """Report that a worker's process has ended, as a host agent does."""
        for trainer in self.trainers.values():
            trainer.send(trainer.owner.worker_lost(worker, incarnation, self.now))

    def train_when_ready(self) -> None:
        """End the training step once every replica has reported (and every colocated worker has stopped)."""
        ready = all(trainer.done for trainer in self.trainers.values()) and not self._over_for_owners()
        if self.scenario.colocated:
            ready = ready and all(worker.frozen for worker in self._workers.values())
        if ready and not self._training:
            self._training = True
            self.after(0.5, partial(self._advance, self.term))

    def _advance(self, term: int) -> None:
        if term != self.term:
            return
        self._training = False
        limits = self.scenario.settings
        counts = {name: trainer.intake.groups for name, trainer in self.trainers.items()}
        assert sum(counts.values()) == limits.ledgers * limits.groups_per_ledger, f"trained on {counts}"
        self.version += 1
        for trainer in self.trainers.values():
            trainer.advance(self.version)
        self.record.snapshot = merge_snapshots([trainer.owner.snapshot() for trainer in self.trainers.values()])
        if self.version % self.scenario.save_every == 0:
            self._saved = dict(self.record.snapshot)
        if self.version == self.scenario.stop_at:
            for trainer in self.trainers.values():
                trainer.send(trainer.owner.finish(self.now))
        for trainer in self.trainers.values():
            trainer.work()
        for worker in self._workers.values():
            self.after(self._rng.random(), partial(worker.refresh, Version(self.term, self.version)))
        self.ended_at = self.ended_at or (self.now if self._over_for_owners() else 0.0)
        self.train_when_ready()

    # -- the end
    def _over_for_owners(self) -> bool:
        return all(trainer.owner.finished for trainer in self.trainers.values())

    def _over(self) -> bool:
        workers = [worker for worker in self._workers.values() if worker.alive]
        return self._over_for_owners() and all(worker.holder.run_finished for worker in workers)

    def _describe(self) -> str:
        lines = [
            f"no end by {self.scenario.limit_s} s, version {self.version} of {self.scenario.settings.training_steps}"
        ]
        for trainer in self.trainers.values():
            owner = trainer.owner
            lines.append(f"{owner.name}: {owner.holders()} open {owner.open_leases()[:5]} done {trainer.done}")
        for worker in self._workers.values():
            lines.append(f"{worker.name}: alive {worker.alive} frozen {worker.frozen} version {worker.version}")
            lines.append(f"  held {worker.holder.held()} running {[*worker.running]} ask {worker.holder.asking()}")
        return "\n".join(lines)
