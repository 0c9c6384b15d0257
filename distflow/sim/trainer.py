"""A training replica in virtual time: the cores of a real one, and a training loop.

It takes a batch whenever its core says so, and computes for as long as the workload says. Where it is to meet the
others, it waits until all have come; one that computes comes afterwards, one with nothing to do at once. When all have
reported what they trained on, the network ends the step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from distflow.exchange.deal_core import DealCore, ReadyGroups
from distflow.exchange.dealing import DealRule, Hand, Offer, deal_step
from distflow.exchange.group_transfer import GROUPS, Send
from distflow.exchange.intake_core import IntakeCore, IntakeRule, Sending, Take
from distflow.exchange.messages import HolderMessage, Message, Result
from distflow.exchange.owner import OwnerCore
from distflow.parts import CostRule
from distflow.sim.account import FIRST, LATER, TRAIN, UPDATE, ReplicaTime
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

    @property
    def scenario(self) -> Scenario:
        """The scenario."""

    @property
    def record(self) -> Record:
        """The record of the run."""

    workload: Workload
    now: float
    term: int
    begins: dict[int, int]
    owner_names: list[str]
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

    def __init__(self, network: ReplicaNetwork, number: int) -> None:
        self.network = network
        self.name = network.owner_names[number]
        self.time = ReplicaTime()
        self.number = number
        self._batch: list[int] = []
        """Groups of the batch under way."""
        self._busy = self.own_over = self._meeting = False
        self.rng = random.Random(network.scenario.seed * 31 + number)
        self.owner = self.new_owner()
        self.intake = self._new_intake()
        self.intake.begin(self.owner.version)

    @property
    def ledgers(self) -> list[int]:
        """Those that it owns."""
        return list(range(self.number, self.network.scenario.settings.ledgers, len(self.network.owner_names)))

    def new_owner(self) -> OwnerCore:
        """Make the owner of its ledgers."""
        return OwnerCore(self.name, self.network.scenario.settings, self.ledgers, self.network.workload.prompt)

    def rule(self) -> IntakeRule:
        """Say how it takes groups."""
        scenario = self.network.scenario
        cost = CostRule(scenario.budget, self.network.workload.quadratic)
        return IntakeRule(cost, not scenario.lazy_take)

    def _new_intake(self) -> IntakeCore:
        scenario, names, rule = self.network.scenario, self.network.owner_names, self.rule()
        cost, streamed = rule.cost, rule.streamed
        if scenario.dealing and len(names) > 1:
            prompts = scenario.settings.ledgers * scenario.settings.groups_per_ledger
            deal = DealRule(prompts, scenario.settings.ledgers, cost, streamed=streamed)
            return IntakeCore(self.owner, rule, dealing=DealCore(self.name, names, deal, self.network.deal))
        others = [name for name in names if name != self.name] if scenario.stealing and streamed else []
        return IntakeCore(self.owner, rule, others, self.rng)

    # -- events
    def hear(self, message: Message) -> None:
        """A message of a holder."""
        self.receive(message)
        self.work()

    def receive(self, message: Message) -> None:
        """Hand a message of a holder to the cores."""
        owner, now = self.owner, self.network.now
        assert isinstance(message, HolderMessage), f"{self.name} was sent {message}"
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

    def hear_of_groups(self, sender: str, item: Send) -> None:
        """A message of another replica."""
        mine = item.kind == GROUPS and self.intake.expects(sender, item.body)
        now, groups = self.network.now, item.positions if mine else ()
        self.send(self.intake.handle(item.kind, sender, item.body, now, groups))
        self.work()

    @property
    def phase_s(self) -> float:
        """Seconds until it first looks at what is due: not all replicas at once."""
        return self.network.scenario.tick_s * (self.number * 0.618 % 1.0)

    def begin_ticks(self) -> None:
        """Look from time to time at what is due."""
        self.time.enter(FIRST, self.network.now)
        self.network.after(self.phase_s, self.tick)

    def tick(self) -> None:
        """Do what is due."""
        self.send([*self.owner.tick(self.network.now), *self.intake.tick(self.network.now)])
        self.network.after(self.network.scenario.tick_s, self.tick)

    # -- the training loop
    @property
    def done(self) -> bool:
        """Whether it has trained on all that it has, and reported it."""
        return self.intake.reported and not self._busy and not self._meeting

    def work(self) -> None:
        """Take what there is, one batch at a time."""
        if not self.network.released:
            return
        while not self._busy and not self._meeting and not self.owner.finished:
            taken = self.next_take()
            if taken is None:
                break
            if taken.meet:
                self._meeting = True
                self.network.meet(self.name, self.intake.news())
                break
            self.send(taken.messages)
            self._train_on(taken.positions)
            self.own_over = self.own_over or taken.over
            if taken.train:
                self._compute()
        if self.own_over and not self._busy and not self._meeting and not self.owner.finished:
            self.send(self.intake.search(self.network.now))
        self.network.train_when_ready()

    def _compute(self) -> None:
        batch, self._batch = self._batch, []
        seconds = self.network.workload.train_s(self.number, batch)
        if seconds:
            self._busy = True
            self.time.enter(TRAIN, self.network.now)
            self.network.after(seconds, self._computed)

    def end_step(self) -> None:
        """All replicas are done: optimizer step, and publishing."""
        self.time.wait_for_others(self.network.last_arrival, self.network.now)
        self.time.enter(UPDATE, self.network.now)

    def next_take(self) -> Take | None:
        """Say what it trains on next, if anything."""
        called = self.network.called
        if not self.own_over:
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
        self.own_over = False
        self.time.enter(FIRST if not self.owner.finished else "", self.network.now)
        if not self.owner.finished:
            self.send(self.intake.begin(version))

    def send(self, out: Sequence[Sending]) -> None:
        """Send messages."""
        self.network.send(self.name, out)

    # -- details
    def owns(self, position: int) -> bool:
        """Say whether it owns the ledger of a position."""
        number = self.network.scenario.settings.owner_of(position, len(self.network.owner_names))
        return self.network.owner_names[number] == self.name

    def _computed(self) -> None:
        self._busy = False
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
            network.record.moved += not self.owns(position)
            network.last_arrival = max(network.last_arrival, network.arrived.pop(position))
            versions = network.began_on.pop(position)
            assert all(one.survives(network.begins) for one in versions), f"{position}: {versions}, {network.begins}"
            network.record.lags[version - min(versions).number] += 1
