"""Replicas that train on one step together deal its groups among themselves: a state machine without sockets.

Replicas meet regularly, to agree on a round or on having their sets, and everybody hears what everybody says there.
Each says which groups it has ready, with their lengths (`news`); once these are enough for a micro-batch of every
replica, and can be dealt about evenly, or are all there will be for the step, each computes from them the same hands
(`heard`), sends the groups of its own that others got, and goes on with its hand when it is complete. A later deal of
one step is another hand.

Groups that change hands are sent until they are acknowledged, and counted once, however often they arrive. They may
arrive before the news by which they were dealt, since their sender heard it first.

Example, two replicas: 0 says {3: …}, 1 says nothing → too little. 0 says {1: …}, 1 says {2: …, 4: …}, and that is all →
0 has 1, 3 and 1 has 2, 4; or, if 3 is as long as all others together, 0 has 3, and 1 waits for 1, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from distflow.data.decoding import read
from distflow.exchange.dealing import DealOf, DealRule, Hand, Offer, deal, deal_step, in_messages, ranks
from distflow.exchange.group_transfer import GROUPS, KEPT, REPEAT_S, Send, Transfer, TransferAnswer
from distflow.parts import Lengths

UNEVEN = 1.05
"""Most that a replica may have of what is dealt before all groups are there, by its equal share."""
ReadyGroups = Sequence[tuple[int, Lengths]]
"""Groups that have become ready, by position."""


class Dealt(NamedTuple):
    """One deal as it concerns this replica."""

    own: list[int]
    """Positions of its ledgers, whoever has them now."""
    given: list[Send]


@dataclass(slots=True)
class _Sent:
    send: Send
    at: float


class DealCore:
    """Replica `me` of `members`, a list that is the same for all. `deal`: `deal_step`, or what gives the same."""

    def __init__(self, me: str, members: Sequence[str], rule: DealRule, deal: DealOf = deal_step) -> None:
        self.rule = rule
        self._deal = deal
        self.step = -1
        self.ranks: Mapping[int, int] = {}
        """Ranks of all groups of the step in their ledgers, once all have been dealt."""
        self._members = tuple(members)
        self._me = self._members.index(me)
        self._said: set[int] = set()
        self._offers: dict[int, Offer] = {}
        """Groups that have been offered and not dealt."""
        self._heard: dict[int, Lengths] = {}
        """All groups offered in this step."""
        self._hands: list[Hand] = []
        """Those not taken yet, in order."""
        self._awaited: dict[int, str] = {}
        """Who sends the groups of others in them that have not come."""
        self._here: set[int] = set()
        """Groups of others that have come and were not taken."""
        self._number = 0
        self._sent: dict[int, _Sent] = {}
        self._kept: set[tuple[str, int]] = set()

    # -- the training loop
    def begin(self, step: int) -> None:
        """Open a training step. What was sent in the one before has arrived: its receivers have trained on it."""
        assert not self._hands, f"hands of step {self.step} were not taken"
        self.step, self.ranks = step, {}
        for state in (self._said, self._offers, self._heard, self._awaited, self._here, self._sent, self._kept):
            state.clear()

    def has_news(self, ready: Mapping[int, Lengths], *, closed: bool) -> bool:
        """Whether to ask the others to hear what is new; `closed`: these are the last groups of this replica."""
        new = [lengths for position, lengths in ready.items() if position not in self._said]
        if closed or not self.rule.streamed:
            return bool(new) and closed
        return sum(map(self.rule.cost.tokens, new)) >= self.rule.cost.budget

    def news(self, ready: Mapping[int, Lengths]) -> ReadyGroups:
        """What to tell the others now."""
        new = [(position, lengths) for position, lengths in ready.items() if position not in self._said]
        self._said.update(position for position, _ in new)
        return new

    def heard(self, news: Sequence[ReadyGroups], now: float) -> Dealt | None:
        """What all replicas said at one point, in their order. Returns the deal that follows from it, if one does."""
        for owner, groups in enumerate(news):
            self._offers |= {position: Offer(owner, lengths) for position, lengths in groups}
        self._heard |= {position: offer.lengths for position, offer in self._offers.items()}
        rule, complete = self.rule, len(self._heard) == self.rule.prompts
        if not self._offers or not (complete or (rule.streamed and self._enough())):
            return None
        if complete:
            self.ranks = ranks(self._heard, rule.ledgers)
        offers, self._offers = self._offers, {}
        return self._settle(offers, now)

    def next_hand(self) -> Hand | None:
        """The next groups to train on, if they are all here."""
        if not self._hands or not self._awaited.keys().isdisjoint(self._hands[0]):
            return None
        hand = self._hands.pop(0)
        self._here.difference_update(hand)
        return hand

    @property
    def waits_for(self) -> tuple[str, ...]:
        """The replicas whose groups the next hand lacks."""
        hand = self._hands[0] if self._hands else {}
        return tuple(sorted({self._awaited[position] for position in hand.keys() & self._awaited.keys()}))

    @property
    def window(self) -> Mapping[int, Lengths]:
        """All groups of the step, of all replicas, where they are dealt only once all are there, and are dealt."""
        return self._heard if self.ranks and not self.rule.streamed else {}

    @property
    def over(self) -> bool:
        """Whether everything of the step is dealt, and taken here."""
        return bool(self.ranks) and not self._hands

    # -- groups that change hands
    def expects(self, sender: str, body: Mapping[str, Any]) -> bool:
        """Whether these GROUPS come for the first time."""
        transfer = read(body, Transfer, GROUPS)
        return transfer.step == self.step and (sender, transfer.number) not in self._kept

    def handle(self, kind: str, sender: str, body: Mapping[str, Any], groups: Sequence[int]) -> list[Send]:
        """Take GROUPS, of which `groups` were kept, or an answer to them. Raises ProtocolError for malformed ones."""
        if kind == KEPT:
            self._sent.pop(read(body, TransferAnswer, kind).number, None)
        if kind != GROUPS:
            return []
        transfer = read(body, Transfer, kind)
        if transfer.step == self.step:
            self._kept.add((sender, transfer.number))
            self._here.update(groups)
            for position in groups:
                self._awaited.pop(position, None)
        return [Send(sender, KEPT, {"number": transfer.number})]

    def tick(self, now: float) -> list[Send]:
        """Send again what was not acknowledged."""
        late = [sent for sent in self._sent.values() if now - sent.at >= REPEAT_S]
        for sent in late:
            sent.at = now
        return [sent.send for sent in late]

    # -- details
    def _enough(self) -> bool:
        """Whether what is offered keeps all replicas busy, for about as long."""
        rule, offers, members = self.rule, self._offers, len(self._members)
        if sum(rule.cost.tokens(offer.lengths) for offer in offers.values()) < rule.cost.budget * members:
            return False
        hands = deal(offers, members, rule.cost, pinned=rule.pinned)
        loads = [sum(rule.cost.cost(offers[position].lengths) for position in hand) for hand in hands]
        return max(loads) * members <= UNEVEN * sum(loads)

    def _settle(self, offers: Mapping[int, Offer], now: float) -> Dealt:
        hands = self._deal(offers, len(self._members), self.ranks, self.rule, even=not self.ranks)
        mine = hands[self._me]
        if mine:
            self._hands.append(mine)
        others = {p: self._members[offers[p].owner] for p in mine if offers[p].owner != self._me}
        self._awaited |= {p: owner for p, owner in others.items() if p not in self._here}
        own = sorted(p for p, offer in offers.items() if offer.owner == self._me)
        given = [
            self._send(member, some, now)
            for member, hand in zip(self._members, hands, strict=True)
            if member != self._members[self._me]
            for some in in_messages([p for p in hand if offers[p].owner == self._me], self._heard, self.rule.cost)
        ]
        return Dealt(own, given)

    def _send(self, to: str, positions: tuple[int, ...], now: float) -> Send:
        self._number += 1
        send = Send(to, GROUPS, {"step": self.step, "number": self._number}, positions)
        self._sent[self._number] = _Sent(send, now)
        return send
