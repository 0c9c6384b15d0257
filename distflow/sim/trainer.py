"""A training replica in virtual time: the cores of a real one, and a training loop.

It takes a batch whenever its core says so, and computes for as long as the workload says; answers of calls come after
up to `Scenario.answer_s`. Where it is to meet the others, it waits until all have come; one that computes comes
afterwards, one with nothing to do at once. When all have reported what they trained on, the network ends the step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from distflow.exchange.deal_core import DealCore, ReadyGroups
from distflow.exchange.dealing import DealRule, Hand, Offer, deal_step
from distflow.exchange.group_transfer import GROUPS, Send
from distflow.exchange.intake_core import IntakeCore, IntakeRule, Sending, Take
from distflow.exchange.messages import HolderMessage, LeasePrompt, Message, Result
from distflow.exchange.owner import OwnerCore
from distflow.parts import CostRule
from distflow.sim.account import FIRST, LATER, TRAIN, UPDATE, ReplicaTime
from distflow.sim.event_queue import Fault
from distflow.sim.scenario import Record, Scenario
from distflow.sim.workload import Workload
from distflow.types import Version


class SharedDeal:
    """The deal that every replica computes for itself, computed once: they all deal what they heard together."""

    def __init__(self) -> None:
        self._asked: tuple[object, ...] = ()
        self._hands: list[Hand] = []

    def __call__(
        self, offers: Mapping[int, Offer], replicas: int, found: Mapping[int, int], rule: DealRule, *, even: bool
    ) -> list[Hand]:
        """Return the hands of all replicas, as `deal_step` does."""
        # Copies: a replica changes its own as it goes on.
        asked = (dict(offers), replicas, dict(found), rule, even)
        if asked != self._asked:
            self._asked, self._hands = asked, deal_step(offers, replicas, found, rule, even=even)
        return self._hands


class ReplicaNetwork(Protocol):
    """The part of the network that a replica uses."""

    scenario: Scenario
    workload: Workload
    now: float
    term: int
    begins: dict[int, int]
    owner_names: list[str]
    record: Record
    arrived: dict[int, float]
    """When the groups that are not trained yet have arrived, by position."""
    last_arrival: float
    """When the last group of those trained so far arrived."""
    versions: dict[tuple[str, int], set[Version]]
    deal: SharedDeal
    began_on: dict[int, set[Version]]
    """Versions of the tokens of what has arrived, by position."""

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Schedule an event."""

    def inject(self, what: Fault) -> None:
        """Count a fault."""

    def send(self, sender: str, outgoing: Sequence[Sending]) -> None:
        """Send messages."""

    def train_when_ready(self) -> None:
        """End the training step if all replicas have reported."""

    @property
    def released(self) -> bool:
        """Whether replicas may train."""

    @property
    def called(self) -> bool:
        """Whether another replica waits for the others to meet."""

    def meet(self, name: str, news: ReadyGroups) -> None:
        """A replica waits for the others, and has this to tell them."""


class SimulatedReplica:
    """Replica `number` in the network's present term."""

    def __init__(self, network: ReplicaNetwork, number: int, saved: dict[str, object] | None) -> None:
        scenario = network.scenario
        self.network = network
        self.name = network.owner_names[number]
        self._term = network.term
        self.time = ReplicaTime()
        self._number = number
        self._batch: list[int] = []
        """Groups of the batch under way."""
        self._read: dict[int, bool] = {}
        self._busy = self._own_over = self._meeting = False
        self._rng = random.Random(scenario.seed * 31 + number)
        self.owner = OwnerCore(
            self.name,
            scenario.settings,
            list(range(number, scenario.settings.ledgers, len(network.owner_names))),
            self._prompt_at if scenario.read_s else network.workload.prompt,
            term=network.term,
            snapshot=saved,
            begins=network.begins,
        )
        self.intake = self._new_intake()
        self.intake.begin(self.owner.version)

    def _new_intake(self) -> IntakeCore:
        scenario, names = self.network.scenario, self.network.owner_names
        streamed = not scenario.lazy_take
        cost = CostRule(scenario.budget, self.network.workload.quadratic)
        rule = IntakeRule(cost, streamed, scenario.calls)
        if scenario.dealing and len(names) > 1:
            prompts = scenario.settings.ledgers * scenario.settings.groups_per_ledger
            deal = DealRule(prompts, scenario.settings.ledgers, cost, streamed=streamed)
            return IntakeCore(self.owner, rule, dealing=DealCore(self.name, names, deal, self.network.deal))
        others = [name for name in names if name != self.name] if scenario.stealing and streamed else []
        return IntakeCore(self.owner, rule, others, self._rng)

    # -- events
    def hear(self, message: Message) -> None:
        """A message of a holder."""
        owner, now = self.owner, self.network.now
        assert isinstance(message, HolderMessage), f"{self.name} was sent {message}"
        if isinstance(message, Result) and message.term != self._term and not self._owns(message.position):
            return  # A worker drops messages that its owner cannot decode.
        kept = isinstance(message, Result) and owner.keeps(message)
        if isinstance(message, Result) and message.dropped and not kept and not owner.finished:
            self.network.record.dropped[message.position] = message.dropped
        self.send(owner.handle(message, now))
        if owner.exhausted is not None:
            raise owner.exhausted
        if isinstance(message, Result) and kept:
            self.network.began_on[message.position] = self.network.versions[message.worker, message.position]
            self.network.arrived[message.position] = now
            self.send(self.intake.arrived({message.position: self.network.workload.rows(message.position)}))
        if isinstance(message, Result):
            # After a drop, too: the open step may take groups that came before.
            self._call()
        if self.network.scenario.audited:
            self.check_memory()
        self.work()

    def hear_of_groups(self, sender: str, item: Send) -> None:
        """A message of another replica."""
        mine = item.kind == GROUPS and self.intake.expects(sender, item.body)
        if mine and self._cannot_read():
            self.send(self.intake.decline(sender, item.body))
        else:
            now, groups = self.network.now, item.positions if mine else ()
            self.send(self.intake.handle(item.kind, sender, item.body, now, groups))
        self.work()

    def _cannot_read(self) -> bool:
        share = self.network.scenario.unreadable
        return share > 0.0 and self._rng.random() < share

    def begin_ticks(self) -> None:
        """Look from time to time at what is due, until a later term begins."""
        scenario = self.network.scenario
        self.time.enter(FIRST, self.network.now)
        phase = 0.0 if scenario.audited else scenario.tick_s * (self._number * 0.618 % 1.0)
        self.network.after(phase, self._tick)

    def _tick(self) -> None:
        if self._term != self.network.term:
            return
        self.send([*self.owner.tick(self.network.now), *self.intake.tick(self.network.now)])
        if self.network.scenario.audited:
            self.check_memory()
        self.network.after(self.network.scenario.tick_s, self._tick)

    # -- the training loop
    @property
    def done(self) -> bool:
        """Whether it has trained on all that it has, and reported it."""
        return self.intake.reported and not self._busy and not self._meeting

    def work(self) -> None:
        """Take what there is, one batch at a time."""
        if self._term != self.network.term or not self.network.released:
            return
        while not self._busy and not self._meeting and not self.owner.finished:
            taken = self._next()
            if taken is None:
                break
            if taken.meet:
                self._meeting = True
                self.network.meet(self.name, self.intake.news())
                break
            self.send(taken.messages)
            self._train_on(taken.positions)
            self._own_over = self._own_over or taken.over
            if taken.train:
                self._compute()
        if self._own_over and not self._busy and not self._meeting and not self.owner.finished:
            self.send(self.intake.search(self.network.now))
        self.network.train_when_ready()

    def _compute(self) -> None:
        batch, self._batch = self._batch, []
        seconds = self.network.workload.train_s(self._number, batch)
        if seconds:
            self._busy = True
            self.time.enter(TRAIN, self.network.now)
            self.network.after(seconds, self._computed)

    def end_step(self) -> None:
        """All replicas are done: optimizer step, and publishing."""
        self.time.wait_for_others(self.network.last_arrival, self.network.now)
        self.time.enter(UPDATE, self.network.now)

    def _next(self) -> Take | None:
        called = self.network.called
        if not self._own_over:
            while (wanted := self.intake.wants_here()) is not None:
                edge, positions = wanted
                assert positions, f"{self.name}: {edge} over nothing"
                assert set(positions) <= set(self.owner.consumable()), f"{positions} are not of the open step"
                for position in positions:
                    self.send(self.intake.answered(position, edge))
            return self.intake.take(self.network.now, called=called)
        return self.intake.rest() or (Take(meet=True) if called else None)

    def heard(self, news: Sequence[ReadyGroups]) -> None:
        """All replicas have met."""
        self._meeting = False
        self.send(self.intake.heard(news, self.network.now))
        self.work()

    def advance(self, version: int) -> None:
        """The step is over: open the next one."""
        self.send(self.owner.advance(version, self.network.now))
        self.intake.forget()
        self._own_over = False
        self.time.enter(FIRST if not self.owner.finished else "", self.network.now)
        if not self.owner.finished:
            self.send(self.intake.begin(version))
            self._call()

    def send(self, out: Sequence[Sending]) -> None:
        """Send messages, unless its term is over."""
        if self._term == self.network.term:
            self.network.send(self.name, out)

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

    # -- details
    def _owns(self, position: int) -> bool:
        number = self.network.scenario.settings.owner_of(position, len(self.network.owner_names))
        return self.network.owner_names[number] == self.name

    def _prompt_at(self, position: int) -> LeasePrompt | None:
        if position not in self._read:
            self._read[position] = False
            self.network.inject("slow_reads")
            self.network.after(self._rng.random() * self.network.scenario.read_s, partial(self._read_now, position))
        return self.network.workload.prompt(position) if self._read[position] else None

    def _read_now(self, position: int) -> None:
        self._read[position] = True
        self.send(self.owner.prompts_arrived(self.network.now))

    def _call(self) -> None:
        for edge, position in self.intake.wants_calls():
            delay = self._rng.random() * self.network.scenario.answer_s
            self.network.after(delay, partial(self._answered, edge, position))

    def _answered(self, edge: str, position: int) -> None:
        if self._term == self.network.term:
            self.send(self.intake.answered(position, edge))
            self.work()

    def _computed(self) -> None:
        self._busy = False
        if self._term == self.network.term:
            self.time.enter(LATER, self.network.now)
        self.work()

    def _train_on(self, positions: Sequence[int]) -> None:
        network, version = self.network, self.owner.version
        self._batch += positions
        trained = network.record.trained.setdefault(version, set())
        tokens = sum(sum(network.workload.lengths(position)) for position in positions)
        network.record.tokens[version] = network.record.tokens.get(version, 0) + tokens
        for position in positions:
            assert position not in trained, f"position {position} trained twice"
            trained.add(position)
            network.record.moved += not self._owns(position)
            network.last_arrival = max(network.last_arrival, network.arrived.pop(position))
            versions = network.began_on.pop(position)
            assert all(one.survives(network.begins) for one in versions), f"{position}: {versions}, {network.begins}"
            network.record.lags[version - min(versions).number] += 1
