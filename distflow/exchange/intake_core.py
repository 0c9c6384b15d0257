"""What a training replica takes next for the open step, and when that is enough for a batch.

Groups are known here by position and by the lengths of their samples; rows, sockets and clocks are the driver's. Under
the lock of `OwnerCore`, the driver tells what has arrived and been answered, asks what to `take` until there is no more
for the step, then for the `rest` until all replicas agree that nothing is left.

The life of a group here: arrived → complete (the answers of all calls are there) → ready (the open step may take it,
too) → in the batch under way. Or it goes to another replica: an idle one steals it, and keeps it or returns it; or the
replicas deal all their groups (`DealCore`), where they go through a step together. Only ready groups are taken, stolen
or dealt, so all answers travel with a group.

Example, b = 2, budget 8: arrived({0: ((1, 2), (0, 3))}) → take → Take([0], train=True)  2 · 4 tokens are a batch
                          arrived({1: ((1, 0), (1, 0))}) → take → Take([1], train=True, over=True)   the last
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distflow.exchange.deal_core import DealCore, ReadyGroups
from distflow.exchange.dealing import ranks
from distflow.exchange.group_transfer import Send
from distflow.exchange.messages import Outgoing
from distflow.exchange.owner import OwnerCore
from distflow.exchange.steal_core import StealCore
from distflow.parts import CostRule, Lengths

Sending = Outgoing | Send


@dataclass(frozen=True, slots=True)
class IntakeCall:
    """What completes every group: a call, asked when it arrives; with `in_window`, when the open step may take it."""

    edge: str
    in_window: bool = False
    here: bool = False
    """This replica computes it itself while it waits for samples."""
    outside: bool = False
    """Clients outside the run come for it by themselves."""


class Take(NamedTuple):
    """What the training loop does next."""

    positions: Sequence[int] = ()
    """Groups for the batch under way, in this order."""
    train: bool = False
    """Train on the batch under way; the next groups begin another one."""
    over: bool = False
    """Of `take`: the own ledgers have no more groups for this step."""
    parts: Mapping[int, Sequence[int]] | None = None
    """The micro-batch of each row, by position, where the replicas have agreed on it."""
    meet: bool = False
    """Of `take`: meet the other replicas, to tell them `news` and hear theirs."""
    report: bool = False
    """Of `rest`: tell the others how many groups this replica trains on; what it still gets it has stolen."""
    messages: Sequence[Sending] = ()


@dataclass(frozen=True, slots=True)
class IntakeRule:
    """How one replica takes groups."""

    cost: CostRule
    """Its budget is what a batch holds at least, and the most that an idle replica is given at once."""
    streamed: bool = True
    """Take groups as they arrive; otherwise the whole set of the step at once, which stays reserved until `advance`."""
    calls: Sequence[IntakeCall] = ()


class IntakeCore:
    """Takes the groups of `owner` for one replica, which steals from `others` and they from it, or deals with all."""

    def __init__(
        self,
        owner: OwnerCore,
        rule: IntakeRule,
        others: Sequence[str] = (),
        rng: random.Random | None = None,
        dealing: DealCore | None = None,
    ) -> None:
        assert not (others and dealing), "replicas that deal have nothing to steal"
        self.step = -1
        self.groups = 0
        """Groups that this replica has taken to train on in the open step."""
        self.reported = False
        """Whether `rest` has asked for the report of the open step."""
        self._owner = owner
        self._rule = rule
        self._steal = StealCore(others, self._backlog, self._give, rng or random.Random(0)) if others else None
        self._dealing = dealing
        self._shares = 1 + len(others)
        self._lengths: dict[int, Lengths] = {}
        """Of all groups that have arrived and are not taken or kept by others; handed over ones among them."""
        self._lacking: dict[int, set[str]] = {}
        """Calls without an answer, by position."""
        self._unasked: dict[str, set[int]] = {call.edge: set() for call in rule.calls if not call.outside}
        self._given: set[int] = set()
        self._returned: list[int] = []
        self._stolen: list[int] = []
        self._batch = 0
        """Tokens of the batch under way, and whether there is one."""
        self._under_way = False
        self._ranks: Mapping[int, int] = {}
        self._window: Mapping[int, Lengths] = {}
        self._now = 0.0
        self._leasing: list[Outgoing] = []
        """What the owner has to say since a group was given away."""

    # -- arrivals
    def arrived(self, groups: Mapping[int, Lengths]) -> list[Sending]:
        """Results were accepted; `groups` are those that were stored."""
        assert not self._lengths.keys() & groups.keys(), f"of {sorted(groups)} some have arrived before"
        self._lengths.update(groups)
        if self._rule.calls:
            for position in groups:
                self._lacking[position] = {call.edge for call in self._rule.calls}
            for unasked in self._unasked.values():
                unasked.update(groups)
        return self._offer()

    def wants_calls(self) -> list[tuple[str, int]]:
        """Calls to make now, as (edge, position); each is named once. Ask after arrivals and at the start of a step."""
        wanted: list[tuple[str, int]] = []
        window: set[int] | None = None
        for call in self._rule.calls:
            if call.here or call.outside:
                continue
            unasked = self._unasked[call.edge]
            if call.in_window and unasked:
                window = set(self._owner.consumable()) if window is None else window
            now = sorted(unasked if not call.in_window or window is None else unasked & window)
            unasked.difference_update(now)
            wanted += [(call.edge, position) for position in now]
        return wanted

    def wants_here(self) -> tuple[str, list[int]] | None:
        """Groups that this replica is to compute now, and with which call; None: wait. Each is named once.

        They fill a micro-batch, or are the last of the step.
        """
        for call in self._rule.calls:
            if not call.here or not (unasked := self._unasked[call.edge]):
                continue
            there = [position for position in self._owner.consumable() if position in unasked]
            enough = (
                sum(self._rule.cost.tokens(self._lengths[position]) for position in there) >= self._rule.cost.budget
            )
            if there and (enough or self._owner.set_complete()):
                now = self._within(there, self._rule.cost.budget)
                unasked.difference_update(now)
                return call.edge, now
        return None

    def answered(self, position: int, edge: str) -> list[Sending]:
        """The first answer of a call is there."""
        lacking = self._lacking[position]
        lacking.discard(edge)
        if lacking:
            return []
        del self._lacking[position]
        return self._offer()

    def outside(self) -> tuple[str, int] | None:
        """A step that clients outside the run have yet to write, and for how many groups of the open step."""
        for call in self._rule.calls:
            if call.outside:
                count = sum(call.edge in self._lacking.get(position, ()) for position in self._owner.consumable())
                if count:
                    return call.edge, count
        return None

    # -- the training loop
    def begin(self, step: int) -> list[Sending]:
        """Open a training step; call `forget` before."""
        self.step, self.groups = step, 0
        self._batch, self._under_way, self.reported = 0, False, False
        self._ranks, self._window = {}, {}
        if self._steal is not None:
            self._steal.begin(step)
        if self._dealing is not None:
            self._dealing.begin(step)
        return self._offer()

    def forget(self) -> list[int]:
        """Positions that other replicas have kept in the step that is over: their rows are not needed any more."""
        kept, self._given = sorted(self._given), set()
        for position in kept:
            del self._lengths[position]
        return kept

    def take(self, now: float, *, called: bool = False) -> Take | None:
        """What to take; None: wait. `called`: another replica wants to meet, to agree on a round of a divided model."""
        if self._dealing is not None:
            return self._take_hand(self._dealing, called)
        positions = self._ready()
        if not self._rule.streamed and not (self._owner.set_complete() and self._all_complete()):
            return None
        if self._steal is not None:
            # Other replicas can still steal the rest.
            positions = self._within(positions, self._rule.cost.budget - self._batch)
        if not positions and not self._owner.step_complete():
            return None
        messages = self._owner.take(positions, now, keep=not self._rule.streamed)
        if not self._rule.streamed and positions:
            self._ranks = ranks(positions, self._owner.settings.ledgers)
            self._window = {position: self._lengths[position] for position in positions}
        self._add(positions)
        over = self._owner.step_complete()
        enough = self._rule.streamed and self._batch >= self._rule.cost.budget
        return self._go_on(positions, train=over or enough, over=over, messages=messages)

    def search(self, now: float) -> list[Sending]:
        """Look for groups of others: this replica has none left of its own."""
        return [] if self._steal is None else [*self._steal.search(now)]

    def rest(self) -> Take | None:
        """What to take or do after `take` was over; None: wait for the other replicas.

        A replica reports once the groups that it gave away are kept or have come back and were taken. So whatever is
        stolen arrives before all have reported.
        """
        if self._returned:
            positions, self._returned = self._returned, []
            self._add(positions)
            return self._go_on(positions, train=True)
        if not self.reported and (self._steal is None or self._steal.settled):
            self.reported = True
            return Take(report=True)
        if self._stolen:
            positions, self._stolen = self._stolen, []
            self.groups += len(positions)
            return Take(positions, train=True)
        return None

    # -- dealing
    def news(self) -> ReadyGroups:
        """What to tell the other replicas where they meet."""
        if self._dealing is None or self._owner.version != self.step:
            return []
        return self._dealing.news(self._offered())

    def heard(self, news: Sequence[ReadyGroups], now: float) -> list[Sending]:
        """What all replicas said where they met, in their order."""
        dealt = None if self._dealing is None else self._dealing.heard(news, now)
        if dealt is None:
            return []
        given = {position for send in dealt.given for position in send.positions}
        self._given |= given
        keep = not self._rule.streamed
        return [*self._owner.take(dealt.own, now, keep=keep), *dealt.given]

    @property
    def waits_for(self) -> tuple[str, ...]:
        """Replicas that have yet to send groups which were dealt to this one."""
        return () if self._dealing is None else self._dealing.waits_for

    @property
    def awaits_others(self) -> bool:
        """Whether all groups of this replica are there, but not those of the others, with which they are dealt."""
        return self._dealing is not None and not self._dealing.ranks and self._owner.set_complete()

    def rank(self, position: int) -> int:
        """The rank of a group among those of its ledger in the open step, where the whole set is taken."""
        return (self._ranks if self._dealing is None else self._dealing.ranks)[position]

    @property
    def window(self) -> Mapping[int, Lengths]:
        """All groups of the open step, of all replicas, where the whole set is awaited and taken; else none."""
        return self._window if self._dealing is None else self._dealing.window

    # -- groups that change hands
    def expects(self, sender: str, body: Mapping[str, Any]) -> bool:
        """Whether these GROUPS will be kept: read their rows, then call `handle`, or `decline` if that fails."""
        core = self._dealing or self._steal
        return core is not None and core.expects(sender, body)

    def handle(
        self, kind: str, sender: str, body: Mapping[str, Any], now: float, groups: Sequence[int] = ()
    ) -> list[Sending]:
        """Take a message of another replica; `groups`: the positions of expected GROUPS. Raises ProtocolError."""
        if self._dealing is not None:
            return [*self._dealing.handle(kind, sender, body, groups)]
        assert self._steal is not None, "handlers are for replicas that steal"
        self._now = now
        out: list[Sending] = [*self._steal.handle(kind, sender, body, now)]
        self._stolen += groups
        returned = self._steal.take_returned()
        self._given.difference_update(returned)
        self._returned += returned
        leasing, self._leasing = self._leasing, []
        return [*leasing, *out, *(self._offer() if returned else ())]

    def decline(self, sender: str, body: Mapping[str, Any]) -> list[Sending]:
        """Return expected GROUPS whose rows cannot be read."""
        return [] if self._steal is None else [*self._steal.decline(sender, body)]

    def tick(self, now: float) -> list[Sending]:
        """Send again what was not answered."""
        if self._dealing is not None:
            return [*self._dealing.tick(now)]
        return [] if self._steal is None else [*self._steal.tick(now)]

    # -- details
    def _take_hand(self, dealing: DealCore, called: bool) -> Take | None:
        """A replica whose groups are still on their way goes to no round: it would have nothing to compute there."""
        hand = dealing.next_hand()
        if hand is not None:
            self.groups += len(hand)
            for position in hand:
                self._lengths.pop(position, None)
            return Take([*hand], train=True, over=dealing.over, parts=hand if dealing.rule.divided else None)
        if dealing.waits_for:
            return None
        if dealing.over:
            return Take(over=True)
        closed = self._owner.set_complete() and self._all_complete()
        news = dealing.has_news(self._offered(), closed=closed)
        return Take(meet=True) if news or (called and self._rule.streamed) else None

    def _offered(self) -> dict[int, Lengths]:
        return {position: self._lengths[position] for position in self._ready()}

    def _ready(self) -> list[int]:
        consumable = self._owner.consumable()
        return [position for position in consumable if position not in self._lacking] if self._lacking else consumable

    def _all_complete(self) -> bool:
        return self._lacking.keys().isdisjoint(self._owner.consumable())

    def _within(self, positions: Sequence[int], budget: int) -> list[int]:
        chosen: list[int] = []
        for position in positions:
            if budget <= 0:
                break
            chosen.append(position)
            budget -= self._rule.cost.tokens(self._lengths[position])
        return chosen

    def _add(self, positions: Sequence[int]) -> None:
        self._batch += sum(self._rule.cost.tokens(self._lengths.pop(position)) for position in positions)
        self._under_way = self._under_way or bool(positions)
        self.groups += len(positions)

    def _go_on(
        self, positions: Sequence[int] = (), *, train: bool, over: bool = False, messages: Sequence[Sending] = ()
    ) -> Take:
        train = train and self._under_way
        if train:
            self._batch, self._under_way = 0, False
        return Take(positions, train, over, messages=messages)

    def _offer(self) -> list[Sending]:
        return [] if self._steal is None else [*self._steal.offer()]

    def _idle(self) -> list[int]:
        """Groups that the open step may take and that no replica has begun, in the order of training."""
        own = self._ready() if self._owner.version == self.step else []
        return [*own, *self._returned]

    def _backlog(self) -> int:
        return len(self._idle())

    def _give(self, _requester: str) -> tuple[int, ...]:
        """Give away the requester's equal share, of the last groups."""
        idle = self._idle()
        share, tokens = -(-len(idle) // self._shares), 0
        chosen: list[int] = []
        for position in reversed(idle[len(idle) - share :]):
            tokens += self._rule.cost.tokens(self._lengths[position])
            if chosen and tokens > self._rule.cost.budget:
                break
            chosen.append(position)
        returned = set(self._returned)
        self._leasing += self._owner.take([position for position in chosen if position not in returned], self._now)
        self._returned = [position for position in self._returned if position not in chosen]
        self._given.update(chosen)
        return tuple(chosen)
