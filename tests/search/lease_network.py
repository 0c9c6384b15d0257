"""Owners and holders of leases in virtual time, over a network with seeded faults.

It is the network of the predictor. Besides, messages go through their wire form and may be lost and doubled; workers
may be stopped, or drained; training may begin again from a checkpoint; prompts are read late, rewards and calls take
time. Each token names the worker that produced it, and every sample that any worker ever had is remembered: a lease
that comes with tokens must come with one of these, from one worker and what that one went on from.

    record = FaultyNetwork(FaultScenario(settings, owners=2, workers=3, loss=0.3)).run()

`run` raises StuckError, with the state of every core in its text, when the run is not over within `limit_s`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgpack
import msgspec

from distflow.exchange.group_transfer import GROUPS, Send
from distflow.exchange.intake_core import IntakeRule, Sending, Take
from distflow.exchange.lease_wire import from_wire, kind_of, to_wire
from distflow.exchange.ledgers import merge_snapshots
from distflow.exchange.messages import Lease, LeasePrompt, Message, Outgoing, OwnerMessage, Result
from distflow.exchange.owner import OwnerCore
from distflow.sim.fluid_engine import FluidEngine, FluidSample
from distflow.sim.network import LeaseNetwork, never
from distflow.sim.scenario import Crash
from distflow.sim.trainer import SimulatedReplica
from distflow.sim.worker import EndedGroup, SimulatedWorker
from distflow.types import BegunSample, Version
from tests.search.fault_queue import Fault, FaultQueue
from tests.search.lease_scenario import FaultRecord, FaultScenario, Leave, Pause

Had = tuple[FluidEngine, FluidSample]


class FaultyNetwork(LeaseNetwork, FaultQueue):
    """One run of a scenario."""

    scenario: FaultScenario
    record: FaultRecord

    def __init__(self, scenario: FaultScenario, *, injected: Counter[Fault] | None = None) -> None:
        """`injected`: where to count faults."""
        self.saved = None if scenario.snapshot is None else dict(scenario.snapshot)
        """The last checkpoint."""
        super().__init__(scenario, term=scenario.term)
        if injected is not None:
            injected.update(self.injected)
            self.injected = injected
        self.record = FaultRecord()
        self.histories: dict[tuple[int, int], list[Had]] = {}
        """All samples that workers had, by position and sample."""
        self.unfinished: list[SimulatedWorker] = list(self.workers.values())
        """Workers of which some may not know yet that the run has ended."""

    def new_worker(self, number: int) -> FaultyWorker:
        """Make a generating worker."""
        return FaultyWorker(self, number)

    def new_replica(self, number: int) -> FaultyReplica:
        """Make a training replica, which goes on from the last checkpoint."""
        return FaultyReplica(self, number)

    def run(self, enough: Callable[[int], bool] = never) -> FaultRecord:
        """Simulate the whole run. Raises StuckError if it does not end."""
        super().run(enough)
        self.record.seconds = self.now
        return self.record

    def plan_faults(self) -> None:
        """Schedule what goes wrong."""
        scenario = self.scenario
        workers = [worker for worker in self.workers.values() if isinstance(worker, FaultyWorker)]
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
    def carry(self, sender: str, item: Sending, wait_s: float) -> None:
        """Let a message arrive a little later, twice, or not at all."""
        if isinstance(item, Send):
            deliver: Callable[[], None] = partial(self._deliver_between, self.term, sender, item)
        else:
            deliver = self._encoded(item, partial(self._arrive, sender, self._life(sender)))
        for _ in range(self._copies()):
            late_s = wait_s + self.rng.random() * self.scenario.delay_s
            self.note_arrival((sender, item.to), late_s)
            self.after(late_s, deliver)

    def _encoded(self, item: Outgoing, hear: Callable[[str, Message], None]) -> Callable[[], None]:
        kind = kind_of(item.message)
        body, payload = to_wire(item.message)
        frames = [memoryview(bytes(frame)) for frame in payload]
        header = msgspec.msgpack.encode(body)
        self.record.largest_message = max(self.record.largest_message, len(header) + sum(map(len, frames)))
        return lambda: hear(item.to, from_wire(kind, msgpack.unpackb(header), frames))

    def _copies(self) -> int:
        scenario = self.scenario
        lost = bool(scenario.loss and self.rng.random() < scenario.loss)
        doubled = bool(scenario.duplicates and self.rng.random() < scenario.duplicates)
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

    def _arrive(self, sender: str, life: tuple[int, int], to: str, message: Message) -> None:
        if to in self.workers:
            self.workers[to].hear(message)
            return
        worker = self.workers.get(sender)
        # A connection ends with either end: nothing of a process that is gone reaches one that began later.
        gone = worker is not None and not (worker.alive and worker.incarnation == life[1])
        if to in self.trainers and not (gone and life[0] != self.term):
            self.trainers[to].hear(message)

    # -- owners
    def _renew(self, owners: int) -> None:
        if self.owners_finished:
            return
        self.inject("new_terms")
        self.term += 1
        self.owner_names = [f"trainer/{r}" for r in range(owners)]
        self.training = False
        self.begins[self.term] = 0
        self.trainers = self.new_trainers()
        self.version = self.begins[self.term] = self.trainers[self.owner_names[0]].owner.version
        self.trainers = self.new_trainers()
        for trainer in self.trainers.values():
            trainer.begin_ticks()
        for step in [step for step in self.record.trained if step >= self.version]:
            del self.record.trained[step]
            self.record.tokens.pop(step, None)
        self.unfinished = list(self.workers.values())
        for worker in self.workers.values():
            assert isinstance(worker, FaultyWorker)
            self.after(self.rng.random(), partial(worker.begin_term, self.term))

    def step_ended(self) -> None:
        """Save, and end early where the scenario says so."""
        self.record.snapshot = merge_snapshots([trainer.owner.snapshot() for trainer in self.trainers.values()])
        if self.version % self.scenario.save_every == 0:
            self.saved = dict(self.record.snapshot)
        if self.version == self.scenario.stop_at:
            for trainer in self.trainers.values():
                trainer.send(trainer.owner.finish(self.now))

    # -- the end
    def over(self) -> bool:
        """Say whether the run has ended, and all workers know that."""
        if not self.owners_finished:
            return False
        left = self.unfinished
        while left and (not left[-1].alive or left[-1].holder.run_finished):
            left.pop()
        return not left

    def describe(self) -> str:
        """Say in what state every core is."""
        lines = [super().describe()]
        for trainer in self.trainers.values():
            owner = trainer.owner
            lines.append(f"{owner.name}: {owner.holders()} open {owner.open_leases()[:5]} done {trainer.done}")
        for worker in self.workers.values():
            lines.append(f"{worker.name}: alive {worker.alive} frozen {worker.frozen} version {worker.version}")
            lines.append(f"  held {worker.holder.held()} running {[*worker.leases]} ask {worker.holder.asking()}")
        return "\n".join(lines)


class FaultyReplica(SimulatedReplica):
    """Replica `number` of one term, which reads prompts late, and calls other pools."""

    network: FaultyNetwork

    def __init__(self, network: FaultyNetwork, number: int) -> None:
        self.term = network.term
        self._read: dict[int, bool] = {}
        super().__init__(network, number)

    def new_owner(self) -> OwnerCore:
        """Make the owner of its ledgers, which goes on from the last checkpoint."""
        network = self.network
        return OwnerCore(
            self.name,
            network.scenario.settings,
            self.ledgers,
            self._prompt_at if network.scenario.read_s else network.workload.prompt,
            term=network.term,
            snapshot=network.saved,
            begins=network.begins,
        )

    def rule(self) -> IntakeRule:
        """Say how it takes groups."""
        return replace(super().rule(), calls=self.network.scenario.calls)

    def hear(self, message: Message) -> None:
        """A message of a holder."""
        if isinstance(message, Result) and message.term != self.term and not self.owns(message.position):
            return  # A worker drops messages that its owner cannot decode.
        super().hear(message)

    def receive(self, message: Message) -> None:
        """Hand a message of a holder to the cores."""
        super().receive(message)
        if isinstance(message, Result):
            # After a drop, too: the open step may take groups that came before.
            self._call()
        self.check_memory()

    def hear_of_groups(self, sender: str, item: Send) -> None:
        """A message of another replica."""
        mine = item.kind == GROUPS and self.intake.expects(sender, item.body)
        if mine and self._cannot_read():
            self.send(self.intake.decline(sender, item.body))
            self.work()
        else:
            super().hear_of_groups(sender, item)

    def _cannot_read(self) -> bool:
        share = self.network.scenario.unreadable
        return share > 0.0 and self.rng.random() < share

    @property
    def phase_s(self) -> float:
        """Seconds until it first looks at what is due: all at once."""
        return 0.0

    def tick(self) -> None:
        """Do what is due, until a later term begins."""
        if self.term == self.network.term:
            super().tick()
            self.check_memory()

    def work(self) -> None:
        """Take what there is, one batch at a time."""
        if self.term == self.network.term:
            super().work()

    def next_take(self) -> Take | None:
        """Say what it trains on next, if anything."""
        while not self.own_over and (wanted := self.intake.wants_here()) is not None:
            edge, positions = wanted
            assert positions, f"{self.name}: {edge} over nothing"
            assert set(positions) <= set(self.owner.consumable()), f"{positions} are not of the open step"
            for position in positions:
                self.send(self.intake.answered(position, edge))
        return super().next_take()

    def advance(self, version: int) -> None:
        """The step is over: open the next one."""
        super().advance(version)
        if not self.owner.finished:
            self._call()

    def send(self, out: Sequence[Sending]) -> None:
        """Send messages, unless its term is over."""
        if self.term == self.network.term:
            super().send(out)

    def check_memory(self) -> None:
        """No position's memory is lost or counted twice, and no ledger takes more than it has."""
        reserved = 0
        for ledger in self.owner.ledgers:
            held = sum(entry.reserved for entry in ledger.entries.values())
            assert ledger.reserved == held, f"{self.name}, ledger {ledger.index}: {ledger.reserved} for {held} bytes"
            reserved += held
            for entry in ledger.entries.values():
                assert entry.kept is None or entry.kept.nbytes <= entry.reserved, "more tokens kept than reserved"
        self.network.record.peak_bytes = max(self.network.record.peak_bytes, reserved)

    def _prompt_at(self, position: int) -> LeasePrompt | None:
        if position not in self._read:
            self._read[position] = False
            self.network.inject("slow_reads")
            self.network.after(self.rng.random() * self.network.scenario.read_s, partial(self._read_now, position))
        return self.network.workload.prompt(position) if self._read[position] else None

    def _read_now(self, position: int) -> None:
        self._read[position] = True
        self.send(self.owner.prompts_arrived(self.network.now))

    def _call(self) -> None:
        for edge, position in self.intake.wants_calls():
            delay = self.rng.random() * self.network.scenario.answer_s
            self.network.after(delay, partial(self._answered, edge, position))

    def _answered(self, edge: str, position: int) -> None:
        if self.term == self.network.term:
            self.send(self.intake.answered(position, edge))
            self.work()


class FaultyWorker(SimulatedWorker):
    """A generating worker that may be stopped, and drained, and lives through terms."""

    network: FaultyNetwork

    def __init__(self, network: FaultyNetwork, number: int) -> None:
        super().__init__(network, number)
        self.term = 0
        self.leaving = False
        self.paused_until = 0.0
        self.mail: list[Message] = []
        self.judging: list[EndedGroup] = []
        """Groups whose reward it computes, and does nothing else meanwhile."""

    def start(self) -> None:
        """Start an incarnation."""
        self.term = self.network.term
        self.mail.clear()
        self.judging.clear()
        self.network.unfinished.append(self)
        super().start()

    @property
    def phase_s(self) -> float:
        """Seconds until it first looks at what is due: all at once."""
        return 0.0

    @property
    def mark(self) -> int:
        """The token that its engine writes, so that it is known who wrote it."""
        return 100 * self.number + self.incarnation

    @property
    def paused(self) -> bool:
        """True while it is suspended."""
        return self.network.now < self.paused_until

    @property
    def halted(self) -> bool:
        """True while something keeps its engine from running."""
        return self.paused or bool(self.judging) or self.leaving or self.frozen

    # -- faults
    def die(self, crash: Crash) -> None:
        """Crash."""
        if not self.leaving:
            super().die(crash)

    def pause(self, pause: Pause) -> None:
        """Suspend it."""
        self.paused_until = max(self.paused_until, self.network.now + pause.seconds)
        self.network.after(pause.seconds, self._resume)
        self.let_run()

    def _resume(self) -> None:
        if not self.paused and self.alive:
            mail, self.mail = self.mail, []
            for message in mail:
                self.hear(message)
            self.work()

    def leave(self, leave: Leave) -> None:
        """Be drained."""
        if not self.alive or self.leaving:
            return
        if self.paused:
            self.network.after(1.0, partial(self.leave, leave))
            return
        outputs = self.engine.close(self.network.now)
        self.leaving = True
        self.leases.clear()
        self.judging.clear()
        self.count_engine()
        self.network.send(self.name, self.core.hand_back(outputs, self.network.now).train)

    def _go_when_done(self) -> None:
        if not self.core.released:
            return
        self.network.send(self.name, self.holder.leave())
        self.alive = False
        self.network.after(0.5, partial(self.network.tell_lost, self.name, self.incarnation))

    def begin_term(self, term: int) -> None:
        """The owners have restarted; a little later their weights arrive, too."""
        network = self.network
        if not self.alive or term != network.term:
            return
        if self.paused:
            network.after(1.0, partial(self.begin_term, term))
            return
        self.term, self.told = term, None
        before = set(self.holder.held())
        self.inbox.begin_term(term, network.begins)
        out = self.holder.begin_term(term, network.owner_names, network.begins, self.inbox.loaded, network.now)
        if not self.leaving:
            network.record.kept += len(before & set(self.holder.held()))
        self.generate_for(network.version)
        network.send(self.name, out)
        network.after(0.5 + network.scenario.load_s, partial(self.refresh, Version(term, network.version)))
        network.after(network.scenario.step_s, self.go_on)

    # -- as a worker that may be stopped
    def hear(self, message: Message) -> None:
        """Receive a message; a suspended worker reads it later."""
        if self.alive and self.paused:
            self.mail.append(message)
        elif isinstance(message, OwnerMessage) and message.term == self.term:
            # A message of another term: from a process that has ended, or that is not known yet.
            super().hear(message)

    def look(self) -> None:
        """Report, and do what is due."""
        if not self.paused:
            super().look()

    def go_on(self) -> None:
        """Take up what has changed."""
        if not self.paused:
            super().go_on()

    def work(self) -> None:
        """Do what the worker's loop does before a decode step."""
        if self.leaving:
            self.holder.take_acked()
            self._go_when_done()
        else:
            super().work()

    def judge(self, found: Sequence[EndedGroup]) -> None:
        """Compute the rewards of groups."""
        if step_s := self.network.scenario.step_s:
            self.judging += found
            self.let_run()
            self.network.after(step_s, partial(self._judged, self.incarnation))
        else:
            super().judge(found)

    def _judged(self, incarnation: int) -> None:
        if self.alive and incarnation == self.incarnation:
            found, self.judging = self.judging, []
            self.deliver(found)

    def samples_of(self, lease: Lease) -> list[FluidSample]:
        """Make the samples of a group, for the engine."""
        self._check_begun(lease.position, lease.begun)
        samples = super().samples_of(lease)
        for number, sample in enumerate(samples):
            self.network.histories.setdefault((lease.position, number), []).append((self.engine, sample))
        return samples

    def _check_begun(self, position: int, begun: Sequence[BegunSample]) -> None:
        for sample in begun:
            known = self.network.histories[position, sample.sample]
            tokens = len(sample.token_ids)
            same = any(engine.wrote(had)[:tokens] == sample.token_ids for engine, had in known)
            assert same, "tokens were mixed"
            assert sample.logprobs == tuple(map(float, range(tokens))), "log-probs were mixed"
