"""Owners and holders of leases in one process and in virtual time, and the network between them.

Messages are delayed at random. Workers may be slow, die and come back. All decisions are those of the cores; what takes
time is given by the scenario's workload. A training loop ends its step when all replicas have reported.

    record = LeaseNetwork(Scenario(settings, workload, owners=2, workers=3)).run()

`run` raises StuckError when the run is not over within `limit_s`.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from distflow.exchange.deal_core import ReadyGroups
from distflow.exchange.group_transfer import Send
from distflow.exchange.intake_core import Sending
from distflow.exchange.lease_wire import kind_of
from distflow.exchange.messages import Grant, HandBack, Message, Progress, Result
from distflow.metrics.batch_cost import BatchCost
from distflow.sim.account import SimulatedTraffic, Totals
from distflow.sim.event_queue import EventQueue
from distflow.sim.scenario import Record, Scenario
from distflow.sim.trainer import SharedDeal, SimulatedReplica
from distflow.sim.worker import SimulatedWorker
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

    def __init__(self, scenario: Scenario, *, timeline: bool = False, term: int = 0) -> None:
        super().__init__()
        self.scenario = scenario
        self.workload = scenario.workload
        self.record = Record()
        self.traffic = SimulatedTraffic()
        self.totals: list[Totals] = []
        """When each training step had ended."""
        self.versions: dict[tuple[str, int], set[Version]] = {}
        self.term = term
        self.begins: dict[int, int] = {}
        self.owner_names = [f"trainer/{r}" for r in range(scenario.owners)]
        self.deal = SharedDeal()
        self.began_on: dict[int, set[Version]] = {}
        self.arrived: dict[int, float] = {}
        self.last_arrival = 0.0
        self._met: dict[str, ReadyGroups] = {}
        self._timeline = timeline
        self.trainers = self.new_trainers()
        self.version = self.trainers[self.owner_names[0]].owner.version
        self.workers = {f"rollout/{i}": self.new_worker(i) for i in range(scenario.workers)}
        if timeline:
            for worker in self.workers.values():
                worker.time.spans = []
        self.owners_finished = self._finished_for_owners()
        self.rng = random.Random(scenario.seed)
        self._hub_free = 0.0
        self.training = False
        self.ended_at = 0.0
        """When the last training step ended; the run is over when all workers know that."""

    def new_worker(self, number: int) -> SimulatedWorker:
        """Make a generating worker."""
        return SimulatedWorker(self, number)

    def new_replica(self, number: int) -> SimulatedReplica:
        """Make a training replica."""
        return SimulatedReplica(self, number)

    def run(self, enough: Callable[[int], bool] = never) -> Record:
        """Simulate the whole run. Raises StuckError if it does not end.

        `enough` is asked every few milliseconds with the number of training steps that have ended; true ends it there.
        """
        events = count(1)

        def over() -> bool:
            return self.over() or (not next(events) % ASK_EVERY and enough(len(self.totals)))

        scenario = self.scenario
        for worker in self.workers.values():
            worker.start()
        self.plan_faults()
        for trainer in self.trainers.values():
            trainer.begin_ticks()
        self.run_until(over, scenario.limit_s, self.describe)
        for worker in self.workers.values():
            if worker.alive:
                self.record.produced += worker.engine.produced
        return self.record

    def plan_faults(self) -> None:
        """Schedule what goes wrong."""
        workers = list(self.workers.values())
        for crash in self.scenario.crashes:
            self.after(crash.at, partial(workers[crash.worker].die, crash))

    # -- the network
    def send(self, sender: str, outgoing: Sequence[Sending]) -> None:
        """Send messages; they may overtake each other."""
        for item in outgoing:
            if isinstance(item, Send):
                nbytes = MESSAGE + sum(map(self.workload.result_bytes, item.positions))
                wait_s = 0.0
            else:
                self.record.messages[kind_of(item.message)] += 1
                nbytes = message_bytes(item.message)
                wait_s = self._through_hub(item.message)
            self.traffic.note(sender, item.to, nbytes)
            self.carry(sender, item, wait_s)

    def carry(self, sender: str, item: Sending, wait_s: float) -> None:
        """Let a message arrive a little later than in `wait_s` seconds."""
        late_s = wait_s + self.rng.random() * self.scenario.delay_s
        if isinstance(item, Send):
            self.after(late_s, partial(self.trainers[item.to].hear_of_groups, sender, item))
        else:
            self.after(late_s, partial(self._hear, item.to, item.message))

    def _through_hub(self, message: Message) -> float:
        """Seconds until the one process that all samples go through has dealt with a message; 0: there is none."""
        taken = self.scenario.hub_s(message)
        if not taken:
            return 0.0
        self._hub_free = max(self.now, self._hub_free) + taken
        self.record.hub_s += taken
        return self._hub_free - self.now

    def _hear(self, to: str, message: Message) -> None:
        if to in self.workers:
            self.workers[to].hear(message)
        elif to in self.trainers:
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
                self.after(self.rng.random() * spread_s, other.work)
        if len(self._met) == len(self.trainers):
            said = [self._met[owner] for owner in self.owner_names]
            self._met.clear()
            for trainer in self.trainers.values():
                self.after(self.rng.random() * spread_s, partial(trainer.heard, said))

    def new_trainers(self) -> dict[str, SimulatedReplica]:
        """Make all training replicas."""
        self._met.clear()
        self._not_done: SimulatedReplica | None = None
        self._not_frozen: SimulatedWorker | None = None
        self._released = (-1, -1)
        trainers = {name: self.new_replica(number) for number, name in enumerate(self.owner_names)}
        if self._timeline:
            for trainer in trainers.values():
                trainer.time.spans = []
        return trainers

    def tell_lost(self, worker: str, incarnation: int) -> None:
        """Report that a worker's process has ended, as a host agent does."""
        for trainer in self.trainers.values():
            trainer.send(trainer.owner.worker_lost(worker, incarnation, self.now))

    @property
    def released(self) -> bool:
        """Whether replicas may train: colocated ones only once all workers have stopped generating."""
        return not self.scenario.colocated or self._released == (self.term, self.version)

    def train_when_ready(self) -> None:
        """End the training step once every replica has reported; colocated workers begin it when all have stopped."""
        if self.training or self.owners_finished:
            return
        if not self.released:
            if not self._all_frozen():
                return
            self._released = (self.term, self.version)
            for trainer in self.trainers.values():
                trainer.work()
        if self.training or not self._all_done():
            return
        self.training = True
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
        self.training = False
        limits = self.scenario.settings
        counts = {name: trainer.intake.groups for name, trainer in self.trainers.items()}
        assert sum(counts.values()) == limits.ledgers * limits.groups_per_ledger, f"trained on {counts}"
        self.version += 1
        for trainer in self.trainers.values():
            trainer.advance(self.version)
        self.step_ended()
        self.owners_finished = self._finished_for_owners()
        for trainer in self.trainers.values():
            trainer.work()
        newest = Version(self.term, self.version)
        for worker in self.workers.values():
            self.after(self.rng.random() * self.scenario.spread_s, partial(worker.refresh, newest))
        self.ended_at = self.ended_at or (self.now if self.owners_finished else 0.0)
        self.totals.append(self._totals())
        self.train_when_ready()

    def step_ended(self) -> None:
        """Do what follows a training step: nothing here."""

    # -- the end
    def _finished_for_owners(self) -> bool:
        return all(trainer.owner.finished for trainer in self.trainers.values())

    def over(self) -> bool:
        """Say whether it has ended. That all workers hear of that would be R · N messages, which tell nothing."""
        return self.owners_finished

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

    def describe(self) -> str:
        """Say how far it is."""
        limits = self.scenario.settings
        return f"no end by {self.scenario.limit_s} s, version {self.version} of {limits.training_steps}"


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
