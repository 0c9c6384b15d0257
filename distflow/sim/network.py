"""Owners and holders of leases in one process and in virtual time, over a network with seeded faults.

Messages may be lost, doubled and delayed at random (which reorders them); where a scenario is audited they go through
their wire form. Workers may be slow, die and come back. All decisions are those of the cores; what takes time is given
by the scenario's workload. A training loop ends its step when all replicas have reported.

    record = LeaseNetwork(Scenario(settings, owners=2, workers=3, loss=0.3)).run()

`run` raises StuckError, with the state of every core in its text, when the run is not over within `limit_s`.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import msgpack
import msgspec

from distflow.exchange.deal_core import ReadyGroups
from distflow.exchange.group_transfer import Send
from distflow.exchange.intake_core import Sending
from distflow.exchange.lease_wire import from_wire, kind_of, to_wire
from distflow.exchange.ledgers import merge_snapshots
from distflow.exchange.messages import Grant, HandBack, Message, Outgoing, Progress, Result
from distflow.metrics.batch_cost import BatchCost
from distflow.sim.account import SimulatedTraffic, Totals
from distflow.sim.event_queue import EventQueue, Fault
from distflow.sim.scenario import Record, Scenario
from distflow.sim.trainer import SharedDeal, SimulatedReplica
from distflow.sim.worker import Had, SimulatedWorker
from distflow.types import Version

MESSAGE = 150
"""Approximate bytes of a message without leases, tokens or results."""
GROUP_HELD = 12
"""And for each group that a report lists."""


ASK_EVERY = 200
"""Events of a simulation, between two questions whether it may end."""


def never(ended: int) -> bool:
    """Let a simulation go on to its end."""
    return False


class LeaseNetwork(EventQueue):
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, *, timeline: bool = False, injected: Counter[Fault] | None = None) -> None:
        super().__init__(injected)
        self.scenario = scenario
        self.workload = scenario.work()
        self.record = Record()
        self.traffic = SimulatedTraffic()
        self.totals: list[Totals] = []
        """When each training step had ended."""
        self.versions: dict[tuple[str, int], set[Version]] = {}
        self.histories: dict[tuple[int, int], list[Had]] = {}
        self.term = scenario.term
        self.begins: dict[int, int] = {}
        self._saved: dict[str, object] | None = dict(scenario.snapshot) if scenario.snapshot is not None else None
        self.owner_names = [f"trainer/{r}" for r in range(scenario.owners)]
        self.deal = SharedDeal()
        self.began_on: dict[int, set[Version]] = {}
        self.arrived: dict[int, float] = {}
        self.last_arrival = 0.0
        self._met: dict[str, ReadyGroups] = {}
        self._timeline = timeline
        self.trainers = self._new_trainers()
        self.version = self.trainers[self.owner_names[0]].owner.version
        self.workers = {f"rollout/{i}": SimulatedWorker(self, i) for i in range(scenario.workers)}
        if timeline:
            for worker in self.workers.values():
                worker.time.spans = []
        self._unfinished = list(self.workers.values())
        self._owners_finished = self._finished_for_owners()
        self._rng = random.Random(scenario.seed)
        self._hub_free = 0.0
        self._training = False
        self.ended_at = 0.0
        """When the last training step ended; the run is over when all workers know that."""

    def run(self, enough: Callable[[int], bool] = never) -> Record:
        """Simulate the whole run. Raises StuckError if it does not end.

        `enough` is asked every few milliseconds with the number of training steps that have ended; true ends it there.
        """
        events = count(1)

        def over() -> bool:
            return self._over() or (not next(events) % ASK_EVERY and enough(len(self.totals)))

        scenario = self.scenario
        for worker in self.workers.values():
            worker.start()
        self._plan_faults()
        for trainer in self.trainers.values():
            trainer.begin_ticks()
        self.run_until(over, scenario.limit_s, self._describe)
        for worker in self.workers.values():
            if worker.alive:
                self.record.produced += worker.engine.produced
        self.record.seconds = self.now
        return self.record

    def _plan_faults(self) -> None:
        scenario, workers = self.scenario, list(self.workers.values())
        for crash in scenario.crashes:
            self.befall(crash.at, "crashes", workers[crash.worker], partial(workers[crash.worker].die, crash))
        for pause in scenario.pauses:
            self.befall(pause.at, "pauses", workers[pause.worker], partial(workers[pause.worker].pause, pause))
        for leave in scenario.leaves:
            self.befall(leave.at, "leaves", workers[leave.worker], partial(workers[leave.worker].leave, leave))
        self.injected["slow_workers"] += sum(scenario.slowness(number) > 1.0 for number in range(scenario.workers))
        for renewal in scenario.renewals:
            self.after(renewal.at, partial(self._renew, renewal.owners))

    # -- the network
    def send(self, sender: str, outgoing: Sequence[Sending]) -> None:
        """Send messages; each may be lost, duplicated or reordered."""
        deliver: Callable[[], None]
        for item in outgoing:
            if isinstance(item, Send):
                deliver = partial(self._deliver_between, self.term, sender, item)
                nbytes = MESSAGE + sum(map(self.workload.result_bytes, item.positions))
                wait_s = 0.0
            else:
                self.record.messages[kind_of(item.message)] += 1
                hear = partial(self._hear, sender, self._life(sender))
                deliver = self._encoded(item, hear) if self.scenario.audited else partial(hear, item.to, item.message)
                nbytes = message_bytes(item.message)
                wait_s = self._through_hub(item.message)
            self.traffic.note(sender, item.to, nbytes)
            for _ in range(self._copies()):
                late_s = wait_s + self._rng.random() * self.scenario.delay_s
                if self.scenario.audited:
                    self.note_arrival((sender, item.to), late_s)
                self.after(late_s, deliver)

    def _encoded(self, item: Outgoing, hear: Callable[[str, Message], None]) -> Callable[[], None]:
        kind = kind_of(item.message)
        body, payload = to_wire(item.message)
        frames = [memoryview(bytes(frame)) for frame in payload]
        header = msgspec.msgpack.encode(body)
        self.record.largest_message = max(self.record.largest_message, len(header) + sum(map(len, frames)))
        return lambda: hear(item.to, from_wire(kind, msgpack.unpackb(header), frames))

    def _through_hub(self, message: Message) -> float:
        """Seconds until the one process that all samples go through has dealt with a message; 0: there is none."""
        taken = self.scenario.hub_s(message)
        if not taken:
            return 0.0
        self._hub_free = max(self.now, self._hub_free) + taken
        self.record.hub_s += taken
        return self._hub_free - self.now

    def _copies(self) -> int:
        scenario = self.scenario
        lost = bool(scenario.loss and self._rng.random() < scenario.loss)
        doubled = bool(scenario.duplicates and self._rng.random() < scenario.duplicates)
        if lost != doubled:
            self.inject("messages_lost" if lost else "messages_doubled")
        return 1 - lost + doubled

    def _deliver_between(self, term: int, sender: str, item: Send) -> None:
        """Between replicas; those of another term are other processes."""
        if term == self.term:
            self.trainers[item.to].hear_of_groups(sender, item)

    def _life(self, sender: str) -> tuple[int, int]:
        """The term, and which incarnation of a worker sends."""
        worker = self.workers.get(sender)
        return self.term, -1 if worker is None else worker.incarnation

    def _hear(self, sender: str, life: tuple[int, int], to: str, message: Message) -> None:
        if to in self.workers:
            self.workers[to].hear(message)
            return
        worker = self.workers.get(sender)
        # A connection ends with either end: nothing of a process that is gone reaches one that began later.
        gone = worker is not None and not (worker.alive and worker.incarnation == life[1])
        if to in self.trainers and not (gone and life[0] != self.term):
            self.trainers[to].hear(message)

    # -- owners
    @property
    def called(self) -> bool:
        """Whether a replica waits for the others to meet."""
        return bool(self._met)

    def meet(self, name: str, news: ReadyGroups) -> None:
        """A replica waits for the others; when all have come, each hears a little later what all had to tell."""
        first = not self._met
        self._met[name] = news
        spread_s = min(1.0, self.scenario.spread_s)
        if first:
            for other in self.trainers.values():
                self.after(self._rng.random() * spread_s, other.work)
        if len(self._met) == len(self.trainers):
            said = [self._met[owner] for owner in self.owner_names]
            self._met.clear()
            for trainer in self.trainers.values():
                self.after(self._rng.random() * spread_s, partial(trainer.heard, said))

    def _new_trainers(self) -> dict[str, SimulatedReplica]:
        self._met.clear()
        self._not_done: SimulatedReplica | None = None
        self._not_frozen: SimulatedWorker | None = None
        self._released = (-1, -1)
        trainers = {name: SimulatedReplica(self, r, self._saved) for r, name in enumerate(self.owner_names)}
        if self._timeline:
            for trainer in trainers.values():
                trainer.time.spans = []
        return trainers

    def _renew(self, owners: int) -> None:
        if self._owners_finished:
            return
        self.inject("new_terms")
        self.term += 1
        self.owner_names = [f"trainer/{r}" for r in range(owners)]
        self._training = False
        self.begins[self.term] = 0
        self.trainers = self._new_trainers()
        self.version = self.begins[self.term] = self.trainers[self.owner_names[0]].owner.version
        self.trainers = self._new_trainers()
        for trainer in self.trainers.values():
            trainer.begin_ticks()
        for step in [step for step in self.record.trained if step >= self.version]:
            del self.record.trained[step]
            self.record.tokens.pop(step, None)
        self._unfinished = list(self.workers.values())
        for worker in self.workers.values():
            self.after(self._rng.random(), partial(worker.begin_term, self.term))

    def tell_lost(self, worker: str, incarnation: int) -> None:
        """Report that a worker's process has ended, as a host agent does."""
        for trainer in self.trainers.values():
            trainer.send(trainer.owner.worker_lost(worker, incarnation, self.now))

    def started(self, worker: SimulatedWorker) -> None:
        """A worker has come back."""
        self._unfinished.append(worker)

    @property
    def released(self) -> bool:
        """Whether replicas may train: colocated ones only once all workers have stopped generating."""
        return not self.scenario.colocated or self._released == (self.term, self.version)

    def train_when_ready(self) -> None:
        """End the training step once every replica has reported; colocated workers begin it when all have stopped."""
        if self._training or self._owners_finished:
            return
        if not self.released:
            if not self._all_frozen():
                return
            self._released = (self.term, self.version)
            for trainer in self.trainers.values():
                trainer.work()
        if self._training or not self._all_done():
            return
        self._training = True
        for trainer in self.trainers.values():
            trainer.end_step()
        self.after(self.workload.end_s, partial(self._advance, self.term))

    def _all_done(self) -> bool:
        # One that was not done a moment ago answers for all.
        if self._not_done is None or self._not_done.done:
            self._not_done = next((trainer for trainer in self.trainers.values() if not trainer.done), None)
        return self._not_done is None

    def _all_frozen(self) -> bool:
        if self._not_frozen is None or self._not_frozen.frozen:
            self._not_frozen = next((worker for worker in self.workers.values() if not worker.frozen), None)
        return self._not_frozen is None

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
        if self.scenario.audited or self.version == limits.training_steps:
            self.record.snapshot = merge_snapshots([trainer.owner.snapshot() for trainer in self.trainers.values()])
        if self.version % self.scenario.save_every == 0:
            self._saved = dict(self.record.snapshot)
        if self.version == self.scenario.stop_at:
            for trainer in self.trainers.values():
                trainer.send(trainer.owner.finish(self.now))
        self._owners_finished = self._finished_for_owners()
        for trainer in self.trainers.values():
            trainer.work()
        for worker in self.workers.values():
            self.after(self._rng.random() * self.scenario.spread_s, partial(worker.refresh, self._newest))
        self.ended_at = self.ended_at or (self.now if self._owners_finished else 0.0)
        self.totals.append(self._totals())
        self.train_when_ready()

    @property
    def _newest(self) -> Version:
        return Version(self.term, self.version)

    # -- the end
    def _finished_for_owners(self) -> bool:
        return all(trainer.owner.finished for trainer in self.trainers.values())

    def _over(self) -> bool:
        if not self._owners_finished:
            return False
        if not self.scenario.audited:
            return True  # That all workers hear of it would be R · N messages which tell nothing of a step.
        left = self._unfinished
        while left and (not left[-1].alive or left[-1].holder.run_finished):
            left.pop()
        return not left

    def _totals(self) -> Totals:
        generating: defaultdict[str, float] = defaultdict(float)
        training: defaultdict[str, float] = defaultdict(float)
        slot_s = stalled_s = loading_s = 0.0
        produced = self.record.produced
        for worker in self.workers.values():
            worker.time.settle(self.now)
            worker.engine.advance(self.now)
            for state, seconds in worker.time.seconds.items():
                generating[state] += seconds
            slot_s += worker.time.slot_s + worker.engine.slot_s
            stalled_s += worker.time.stalled_s + worker.engine.stalled_s
            loading_s += worker.time.loading_s + worker.engine.loading_s
            produced += worker.engine.produced
        for trainer in self.trainers.values():
            trainer.time.settle(self.now)
            for state, seconds in trainer.time.seconds.items():
                training[state] += seconds
        batch = BatchCost.of(each.batch for worker in self.workers.values() for each in (worker.time, worker.engine))
        messages, nbytes, lags = self.traffic.count, self.traffic.total, self.record.lags.copy()
        spent = (generating, training, slot_s, stalled_s, loading_s, batch)
        return Totals(self.now, *spent, messages, nbytes, produced, lags)

    def _describe(self) -> str:
        lines = [
            f"no end by {self.scenario.limit_s} s, version {self.version} of {self.scenario.settings.training_steps}"
        ]
        for trainer in self.trainers.values():
            owner = trainer.owner
            lines.append(f"{owner.name}: {owner.holders()} open {owner.open_leases()[:5]} done {trainer.done}")
        for worker in self.workers.values():
            lines.append(f"{worker.name}: alive {worker.alive} frozen {worker.frozen} version {worker.version}")
            lines.append(f"  held {worker.holder.held()} running {[*worker.leases]} ask {worker.holder.asking()}")
        return "\n".join(lines)


def message_bytes(message: Message) -> int:
    """About how many bytes a message has, payload included."""
    match message:
        case Result():
            return MESSAGE + (0 if message.dropped else message.nbytes)
        case Grant():
            return MESSAGE + sum(128 + 4 * len(lease.prompt_ids) + len(lease.prompt_text) for lease in message.leases)
        case Progress() | HandBack():
            pieces = sum(piece.nbytes for piece in message.pieces)
            return MESSAGE + GROUP_HELD * len(message.report.held) + pieces
    return MESSAGE
