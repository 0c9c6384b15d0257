"""A generating worker in virtual time: the cores of a real one, a weight receiver, and a fluid engine.

Where the scenario is audited, each token names the worker that produced it, and every sample that any worker ever had
is remembered: a lease that comes with tokens must come with one of these, from one worker and what that one went on
from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from distflow.exchange.lease_client import HolderCore
from distflow.exchange.messages import Lease, Message, Outgoing, OwnerMessage
from distflow.exchange.owner_links import Home
from distflow.exchange.rollout_core import FinishedGroup, RolloutCore, Turn
from distflow.sim.account import WorkerTime
from distflow.sim.fluid_engine import FluidEngine, FluidSample
from distflow.sim.no_weights import NoWeights, manifest_of
from distflow.sim.scenario import Crash, Leave, Pause, Record, Scenario
from distflow.sim.workload import Workload
from distflow.types import BegunSample, Version
from distflow.weights.in_place import InPlace
from distflow.weights.receiver import WeightInbox

if TYPE_CHECKING:
    from torch import Tensor

Had = tuple[FluidEngine, FluidSample]


class WorkerNetwork(Protocol):
    """The part of the network that a worker uses."""

    scenario: Scenario
    workload: Workload
    now: float
    version: int
    term: int
    begins: dict[int, int]
    owner_names: list[str]
    record: Record
    versions: dict[tuple[str, int], set[Version]]
    """All versions of the tokens with which a worker finished a position."""
    histories: dict[tuple[int, int], list[Had]]
    """All samples that workers had, by position and sample, where the scenario is audited."""

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Schedule an event."""

    def send(self, sender: str, outgoing: Sequence[Outgoing]) -> None:
        """Send messages."""

    def tell_lost(self, worker: str, incarnation: int) -> None:
        """Report that a worker's process has ended."""

    def train_when_ready(self) -> None:
        """Begin the training step if it can."""

    def started(self, worker: SimulatedWorker) -> None:
        """A worker has come back."""


class SimulatedWorker:
    """A generating worker: its cores, a weight receiver, and an engine that takes time."""

    def __init__(self, network: WorkerNetwork, number: int) -> None:
        self.network = network
        self.number = number
        self.name = f"rollout/{number}"
        self.incarnation = -1
        self.alive = False
        self.leaving = False
        self.paused_until = 0.0
        self.term = 0
        self.version = Version(0, 0)
        """Version of the weights in its engine."""
        self.fetched = False
        """Whether the weights announced can be loaded."""
        self.leases: dict[int, tuple[Lease, Version]] = {}
        """Groups in the engine, with the version under which each was started here."""
        self.mail: list[Message] = []
        self.judging: list[tuple[FinishedGroup, set[Version]]] = []
        """Groups whose reward it computes, and does nothing else meanwhile."""
        self.time = WorkerTime()
        self.inbox: WeightInbox
        self.holder: HolderCore
        self.core: RolloutCore
        self.engine: FluidEngine
        self._armed, self._armed_at = 0, -1.0
        self._told: object = None
        """What was known at the last report: while an environment computes, the next would say the same."""

    def start(self) -> None:
        """Start an incarnation."""
        scenario = self.network.scenario
        self.incarnation += 1
        self.alive, self.fetched, self._told = True, False, None
        self.term = self.network.term
        self.engine = self._new_engine()
        self.inbox = WeightInbox(InPlace(NoWeights()))
        self.inbox.begin_term(self.term, self.network.begins)
        self.inbox.announce(manifest_of(Version(self.term, self.network.version)))
        self.inbox.load(self)
        for kept in (self.leases, self.mail, self.judging):
            kept.clear()
        self.holder = HolderCore(
            self.name,
            self.incarnation,
            self.network.owner_names,
            scenario.settings,
            home=Home(self.number),
            term=self.network.term,
            seed=scenario.seed * 1000 + self.number,
        )
        self.core = RolloutCore(self.holder, scenario.refresh)
        self._generate_for(self.network.version)
        self.time.settle(self.network.now)
        self.network.started(self)
        self.work()
        phase = 0.0 if scenario.audited else scenario.tick_s * (self.number * 0.618 % 1.0)
        self.network.after(phase, partial(self.tick, self.incarnation))

    def _new_engine(self) -> FluidEngine:
        scenario = self.network.scenario
        decode, slow = self.network.workload.decode(self.number)
        mark = 100 * self.number + self.incarnation if scenario.audited else None
        engine = FluidEngine(scenario.slots, decode, slow, mark, self.network.workload.turns)
        engine.advance(self.network.now)
        return engine

    def die(self, crash: Crash) -> None:
        """Crash."""
        if not self.alive or self.leaving:
            return
        self.alive = False
        self.engine.close(self.network.now)
        self._count_engine()
        if crash.noticed:
            self.network.after(0.5, partial(self.network.tell_lost, self.name, self.incarnation))
        if crash.restart_s is not None:
            self.network.after(crash.restart_s, self.start)

    def pause(self, pause: Pause) -> None:
        """Suspend it."""
        self.paused_until = max(self.paused_until, self.network.now + pause.seconds)
        self.network.after(pause.seconds, self._resume)
        self._let_run()

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
        self._count_engine()
        self.network.send(self.name, self.core.hand_back(outputs, self.network.now).train)

    @property
    def paused(self) -> bool:
        """Whether it is suspended now."""
        return self.network.now < self.paused_until

    @property
    def frozen(self) -> bool:
        """Whether it leaves its engine alone to train: it knows that the set of its training step is closed."""
        return not self.core.endless and self.core.over and not self.holder.run_finished

    def hear(self, message: Message) -> None:
        """Receive a message; a suspended worker reads it later."""
        if self.alive and self.paused:
            self.mail.append(message)
        elif self.alive and isinstance(message, OwnerMessage) and message.term == self.term:
            # A message of another term: from a process that has ended, or that is not known yet.
            self.network.send(self.name, self.holder.handle(message, self.network.now))
            self.work()

    def tick(self, incarnation: int) -> None:
        """Let the core act on the time that has passed."""
        if not self.alive or incarnation != self.incarnation:
            return
        if not self.paused:
            if not (self.frozen or self.judging or self.leaving):
                self._report()
            self.network.send(self.name, self.holder.tick(self.network.now))
            self.work()
        self.network.after(self.network.scenario.tick_s, partial(self.tick, incarnation))

    def begin_term(self, term: int) -> None:
        """The owners have restarted; a little later their weights arrive, too."""
        network = self.network
        if not self.alive or term != network.term:
            return
        if self.paused:
            network.after(1.0, partial(self.begin_term, term))
            return
        self.term, self._told = term, None
        before = set(self.holder.held())
        self.inbox.begin_term(term, network.begins)
        out = self.holder.begin_term(term, network.owner_names, network.begins, self.inbox.loaded, network.now)
        if not self.leaving:
            network.record.kept += len(before & set(self.holder.held()))
        self._generate_for(network.version)
        network.send(self.name, out)
        network.after(0.5 + network.scenario.load_s, partial(self.refresh, Version(term, network.version)))
        network.after(network.scenario.step_s, self._go_on)

    def refresh(self, version: Version) -> None:
        """New weights are announced and loaded a little later; a colocated worker generates again."""
        if self.alive:
            self.inbox.announce(manifest_of(version))
            # Two announcements may overtake each other; the worker's own steps follow one another.
            if self.inbox.newest == version:
                self._generate_for(version.number)
            self.network.after(self.network.scenario.load_s, self._fetch)

    def begin_update(self, version: Version) -> None:
        """What was generated so far came from the former weights."""
        self.engine.advance(self.network.now)
        self.version = version

    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """There are no tensors."""

    def end_update(self) -> None:
        """The engine continues."""
        self.engine.load(self.version)

    def _fetch(self) -> None:
        self.fetched = self.inbox.waiting
        self._go_on()

    def _generate_for(self, step: int) -> None:
        self.core.until(step if self.network.scenario.colocated else None)

    def work(self) -> None:
        """Do what the worker's loop does before a decode step."""
        self.holder.take_acked()
        if self.leaving:
            self._go_when_done()
            return
        if self.frozen:
            self._let_run()
            self.network.train_when_ready()
        elif not (self.judging or self.paused) and self.core.open():
            self.engine.advance(self.network.now)
            turn = self._turn()
            while turn.load or turn.abort:
                if turn.load:
                    self.inbox.load(self)
                    self.engine.change_weights(self.network.now, self.network.workload.swap_s)
                    self.fetched = False
                if turn.abort:
                    self.engine.abort(turn.abort)
                for position in turn.abort:
                    del self.leases[position]
                turn = self._turn()
            for lease in turn.start:
                self.begin(lease)
        self._let_run()

    def _turn(self) -> Turn:
        newer, free = self.fetched and self.inbox.waiting, self.engine.free_slots
        turn = self.core.turn(free, self.version, self.inbox.loaded, newer, self.network.now)
        self.network.send(self.name, turn.messages.train)
        return turn

    def begin(self, lease: Lease) -> None:
        """Start a group, or continue one."""
        network, position = self.network, lease.position
        assert position not in self.leases, f"{self.name} started {position} twice"
        begun = {sample.sample: sample for sample in lease.begun}
        rate, prompt = network.workload.rate(position, self.number), len(lease.prompt_ids)
        samples = [
            FluidSample(position, number, length, prompt, rate, begun.get(number))
            for number, length in enumerate(network.workload.lengths(position))
        ]
        if network.scenario.audited:
            self._check_begun(position, lease.begun)
            for number, sample in enumerate(samples):
                network.histories.setdefault((position, number), []).append((self.engine, sample))
        had = sum(sample.had for sample in samples)
        network.record.started += 1
        network.record.continued += had
        network.record.copies += lease.copy
        if prefill_s := network.workload.prefill_s * (prompt + had):
            self.engine.stall(network.now, prefill_s)
        self.leases[position] = (lease, self.version)
        self.engine.add(samples)
        self.core.report({position: 1}, None, self.inbox.loaded)

    def _check_begun(self, position: int, begun: Sequence[BegunSample]) -> None:
        for sample in begun:
            known = self.network.histories[position, sample.sample]
            tokens = len(sample.token_ids)
            same = any(engine.wrote(had)[:tokens] == sample.token_ids for engine, had in known)
            assert same, "tokens were mixed"
            assert sample.logprobs == tuple(map(float, range(tokens))), "log-probs were mixed"

    # -- the engine
    def _let_run(self) -> None:
        """The engine runs unless something keeps it from it; there is an event when its next sample ends."""
        engine = self.engine
        halted = self.paused or bool(self.judging) or self.leaving or self.frozen
        if halted != engine.paused:
            engine.pause(self.network.now, paused=halted)
        self.time.look(self.network.now, engine, self._idle_for)
        at = engine.next_end()
        if at is not None and at != self._armed_at:
            self._armed, self._armed_at = self._armed + 1, at
            self.network.after(at - self.network.now, partial(self._sample_ended, self._armed, self.incarnation))

    def _idle_for(self) -> str:
        return "weights" if self.core.reason(self.inbox.loaded)[1] is None else "leases"

    def _sample_ended(self, armed: int, incarnation: int) -> None:
        if not self.alive or armed != self._armed or incarnation != self.incarnation or self.engine.paused:
            return
        self._armed_at = -1.0
        engine, size = self.engine, self.network.scenario.settings.samples_per_prompt
        before = engine.free_slots // size
        whole = self.core.collect(engine.take_ended(self.network.now))
        if whole:
            self.finish(whole)
        elif engine.free_slots // size != before:
            self.work()
        else:
            self._let_run()

    def finish(self, groups: Sequence[FinishedGroup]) -> None:
        """These groups are generated; now they are judged."""
        found = [(whole, self._versions(whole)) for whole in groups]
        self.network.send(self.name, self.core.ask(self.engine.free_slots, self.network.now).train)
        if step_s := self.network.scenario.step_s:
            self.judging += found
            self._let_run()
            self.network.after(step_s, partial(self._judged, self.incarnation))
        else:
            self._deliver(found)

    def _versions(self, whole: FinishedGroup) -> set[Version]:
        _, started = self.leases.pop(whole.lease.position)
        spans = (span for sample in whole.samples for call in sample.calls for span in call.spans)
        return {started, *(Version(span.term, span.version) for span in spans)}

    def _judged(self, incarnation: int) -> None:
        if self.alive and incarnation == self.incarnation:
            found, self.judging = self.judging, []
            self._deliver(found)

    def _deliver(self, found: Sequence[tuple[FinishedGroup, set[Version]]]) -> None:
        network = self.network
        for whole, versions in found:
            position = whole.lease.position
            network.versions[self.name, position] = versions
            nbytes, reason = network.workload.result_bytes(position), network.scenario.dropped(position)
            self.holder.report(position, network.workload.result_tokens(position), min(versions).number)
            out = self.holder.finished(position, min(versions), nbytes, reason, network.now)
            self.core.sent([position])
            network.send(self.name, out)
        self.work()

    def _report(self) -> None:
        """Do what the worker's loop does after a decode step."""
        self.engine.advance(self.network.now)
        due = self.core.wants_partials(self.network.now)
        if (known := (self.engine.news, self.inbox.loaded)) == self._told:
            return
        if due or not self.network.scenario.settings.partial_rollouts:
            self._told = known
        self.core.report(self.engine.progress(), self.engine.partials() if due else None, self.inbox.loaded)

    def _count_engine(self) -> None:
        self.network.record.produced += self.engine.produced
        self.time.close(self.network.now, self.engine)
        self.engine.produced = 0

    def _resume(self) -> None:
        if not self.paused and self.alive:
            mail, self.mail = self.mail, []
            for message in mail:
                self.hear(message)
            self.work()

    def _go_on(self) -> None:
        if self.alive and not self.paused:
            self.work()

    def _go_when_done(self) -> None:
        if not self.core.released:
            return
        self.network.send(self.name, self.holder.leave())
        self.alive = False
        self.network.after(0.5, partial(self.network.tell_lost, self.name, self.incarnation))
