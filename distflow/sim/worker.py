"""A generating worker in virtual time: the cores of a real one, a weight receiver, and a fluid engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from distflow.exchange.lease_client import HolderCore
from distflow.exchange.messages import Lease, Message, Outgoing, OwnerMessage
from distflow.exchange.owner_links import Home
from distflow.exchange.rollout_core import FinishedGroup, RolloutCore, Turn
from distflow.sim.account import WorkerTime
from distflow.sim.fluid_engine import FluidEngine, FluidSample
from distflow.sim.scenario import Crash, Record, Scenario
from distflow.sim.workload import Workload
from distflow.types import Version
from distflow.weights.in_place import InPlace
from distflow.weights.manifest import Manifest
from distflow.weights.receiver import WeightInbox

if TYPE_CHECKING:
    from torch import Tensor


class NoWeights:
    """Empty weights that stay readable, even after the term in which they were published."""

    def fetch(self, manifest: Manifest) -> Sequence[tuple[str, Tensor]]:
        """No tensors."""
        return ()

    def intact(self, manifest: Manifest) -> bool:
        """Always: nothing overwrites them."""
        return True

    def doubt(self, manifest: Manifest) -> None:
        """Nothing to do: nothing was found out about them."""

    def begin_term(self, term: int) -> None:
        """Nothing to do: they stay readable."""

    def close(self) -> None:
        """Nothing to release."""


class EndedGroup(NamedTuple):
    """A group whose samples have ended, and the versions of its tokens."""

    whole: FinishedGroup
    versions: set[Version]


class WorkerNetwork(Protocol):
    """The part of the network that a worker uses."""

    @property
    def scenario(self) -> Scenario:
        """The scenario."""

    @property
    def record(self) -> Record:
        """The record of the run."""

    workload: Workload
    now: float
    version: int
    term: int
    begins: dict[int, int]
    owner_names: list[str]
    versions: dict[tuple[str, int], set[Version]]
    """All versions of the tokens with which a worker finished a position."""

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Schedule an event."""

    def send(self, sender: str, outgoing: Sequence[Outgoing]) -> None:
        """Send messages."""

    def tell_lost(self, worker: str, incarnation: int) -> None:
        """Report that a worker's process has ended."""

    def train_when_ready(self) -> None:
        """Begin the training step if it can."""


class SimulatedWorker:
    """A generating worker: its cores, a weight receiver, and an engine that takes time."""

    def __init__(self, network: WorkerNetwork, number: int) -> None:
        self.network = network
        self.number = number
        self.name = f"rollout/{number}"
        self.incarnation = -1
        self.alive = False
        self.version = Version(0, 0)
        """Version of the weights in its engine."""
        self.fetched = False
        """Whether the weights announced can be loaded."""
        self.leases: dict[int, tuple[Lease, Version]] = {}
        """Groups in the engine, with the version under which each was started here."""
        self.time = WorkerTime()
        self.inbox: WeightInbox
        self.holder: HolderCore
        self.core: RolloutCore
        self.engine: FluidEngine
        self._armed, self._armed_at = 0, -1.0
        self.told: object = None
        """What was known at the last report: while an environment computes, the next would say the same."""

    def start(self) -> None:
        """Start an incarnation."""
        scenario = self.network.scenario
        self.incarnation += 1
        self.alive, self.fetched, self.told = True, False, None
        self.engine = self.new_engine()
        self.inbox = WeightInbox(InPlace(NoWeights()))
        self.inbox.begin_term(self.network.term, self.network.begins)
        self.inbox.announce(manifest_of(Version(self.network.term, self.network.version)))
        self.inbox.load(self)
        self.leases.clear()
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
        self.generate_for(self.network.version)
        self.time.settle(self.network.now)
        self.work()
        self.network.after(self.phase_s, partial(self.tick, self.incarnation))

    @property
    def phase_s(self) -> float:
        """Seconds until it first looks at what is due: not all workers at once."""
        return self.network.scenario.tick_s * (self.number * 0.618 % 1.0)

    @property
    def mark(self) -> int | None:
        """The token that its engine writes; None: token i of any sample is i."""
        return None

    def new_engine(self) -> FluidEngine:
        """Make an engine without samples."""
        decode, slow = self.network.workload.decode(self.number)
        engine = FluidEngine(self.network.scenario.slots, decode, slow, self.mark, self.network.workload.turns)
        engine.advance(self.network.now)
        return engine

    def die(self, crash: Crash) -> None:
        """Crash."""
        if not self.alive:
            return
        self.alive = False
        self.engine.close(self.network.now)
        self.count_engine()
        if crash.noticed:
            self.network.after(0.5, partial(self.network.tell_lost, self.name, self.incarnation))
        if crash.restart_s is not None:
            self.network.after(crash.restart_s, self.start)

    @property
    def frozen(self) -> bool:
        """Whether it leaves its engine alone to train: it knows that the set of its training step is closed."""
        return not self.core.endless and self.core.over and not self.holder.run_finished

    @property
    def halted(self) -> bool:
        """True while something keeps its engine from running."""
        return self.frozen

    def hear(self, message: Message) -> None:
        """Receive a message."""
        if self.alive and isinstance(message, OwnerMessage):
            self.network.send(self.name, self.holder.handle(message, self.network.now))
            self.work()

    def tick(self, incarnation: int) -> None:
        """Let the core act on the time that has passed."""
        if not self.alive or incarnation != self.incarnation:
            return
        self.look()
        self.network.after(self.network.scenario.tick_s, partial(self.tick, incarnation))

    def look(self) -> None:
        """Report, and do what is due."""
        if not self.halted:
            self._report()
        self.network.send(self.name, self.holder.tick(self.network.now))
        self.work()

    def refresh(self, version: Version) -> None:
        """New weights are announced and loaded a little later; a colocated worker generates again."""
        if self.alive:
            self.inbox.announce(manifest_of(version))
            # Two announcements may overtake each other; the worker's own steps follow one another.
            if self.inbox.newest == version:
                self.generate_for(version.number)
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
        self.go_on()

    def go_on(self) -> None:
        """Take up what has changed."""
        if self.alive:
            self.work()

    def generate_for(self, step: int) -> None:
        """Generate up to this training step, if it trains, too."""
        self.core.until(step if self.network.scenario.colocated else None)

    def work(self) -> None:
        """Do what the worker's loop does before a decode step."""
        self.holder.take_acked()
        if self.frozen:
            self.let_run()
            self.network.train_when_ready()
        elif not self.halted and self.core.open():
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
        self.let_run()

    def _turn(self) -> Turn:
        newer, free = self.fetched and self.inbox.waiting, self.engine.free_slots
        turn = self.core.turn(free, self.version, self.inbox.loaded, newer, self.network.now)
        self.network.send(self.name, turn.messages.train)
        return turn

    def begin(self, lease: Lease) -> None:
        """Start a group, or continue one."""
        network, position = self.network, lease.position
        assert position not in self.leases, f"{self.name} started {position} twice"
        samples, prompt = self.samples_of(lease), len(lease.prompt_ids)
        had = sum(sample.had for sample in samples)
        network.record.started += 1
        network.record.continued += had
        network.record.copies += lease.copy
        if prefill_s := network.workload.prefill_s * (prompt + had):
            self.engine.stall(network.now, prefill_s)
        self.leases[position] = (lease, self.version)
        self.engine.add(samples)
        self.core.report({position: 1}, None, self.inbox.loaded)

    def samples_of(self, lease: Lease) -> list[FluidSample]:
        """Make the samples of a group, for the engine."""
        position, prompt = lease.position, len(lease.prompt_ids)
        begun = {sample.sample: sample for sample in lease.begun}
        rate = self.network.workload.rate(position, self.number)
        return [
            FluidSample(position, number, length, prompt, rate, begun.get(number))
            for number, length in enumerate(self.network.workload.lengths(position))
        ]

    # -- the engine
    def let_run(self) -> None:
        """Let the engine run unless something keeps it from it, up to the event in which its next sample ends."""
        engine, halted = self.engine, self.halted
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
            self.let_run()

    def finish(self, groups: Sequence[FinishedGroup]) -> None:
        """These groups are generated; now they are judged."""
        found = [EndedGroup(whole, self._versions(whole)) for whole in groups]
        self.network.send(self.name, self.core.ask(self.engine.free_slots, self.network.now).train)
        self.judge(found)

    def judge(self, found: Sequence[EndedGroup]) -> None:
        """Compute the rewards of groups, which takes no time here."""
        self.deliver(found)

    def _versions(self, whole: FinishedGroup) -> set[Version]:
        _, started = self.leases.pop(whole.lease.position)
        spans = (span for sample in whole.samples for call in sample.calls for span in call.spans)
        return {started, *(Version(span.term, span.version) for span in spans)}

    def deliver(self, found: Sequence[EndedGroup]) -> None:
        """Hand over the results of groups."""
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
        if (known := (self.engine.news, self.inbox.loaded)) == self.told:
            return
        if due or not self.network.scenario.settings.partial_rollouts:
            self.told = known
        self.core.report(self.engine.progress(), self.engine.partials() if due else None, self.inbox.loaded)

    def count_engine(self) -> None:
        """Note what the engine of this incarnation did."""
        self.network.record.produced += self.engine.produced
        self.time.close(self.network.now, self.engine)
        self.engine.produced = 0


def manifest_of(version: Version) -> Manifest:
    """What is announced of a version."""
    return Manifest("policy", version, "", 0, (), ())
