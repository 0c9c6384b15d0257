"""Every member of a group learns one fact of each other member, round by round: a state machine without sockets.

Dissemination (Hensgen, Finkel, Manber 1988): in stage k a member tells the member 2^k places further on all it knows,
and hears from the one 2^k places back. After ⌈log₂ R⌉ stages everybody knows all R facts; nobody is in the middle, and
a member sends ⌈log₂ R⌉ messages a round, however large the group.

Nothing is sent again unasked: who misses a message asks for it (`tick`), and its sender has kept it. A member can be at
most one round ahead of another, so two rounds are kept. Who leaves for good first makes sure that what it told in its
last round has been heard (`leave`): nobody could ask it afterwards.

Example, R = 3: 0 tells 1, 1 tells 2, 2 tells 0 (stage 0: two facts each); 0 tells 2, 1 tells 0, 2 tells 1 (stage 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distflow.comm.membership import MemberMessage
from distflow.data.decoding import Form, Whole, read, shown
from distflow.errors import ProtocolError

Fact = Mapping[str, Any]
"""Plain values that msgpack can carry."""
TOLD, MISSING, HEARD = "agree", "agree.missing", "agree.heard"
WHAT = "agreement message"
ASK_AGAIN_S = 0.5


class _Stage(Form, frozen=True):
    round: Whole
    stage: Whole


class _Told(_Stage, frozen=True):
    facts: tuple[tuple[Whole, dict[str, Any]], ...]
    """Facts by the member's number."""
    leaving: bool = False
    """The sender leaves once this is acknowledged."""


_FORMS: Mapping[str, type[_Stage]] = {TOLD: _Told, MISSING: _Stage, HEARD: _Stage}
KINDS = frozenset(_FORMS)
"""Message kinds that belong here."""


class Agreement:
    """Member `me` of `members` (the same list, in the same order, at every member)."""

    def __init__(self, me: str, members: Sequence[str]) -> None:
        self._members = tuple(members)
        self._rank = self._members.index(me)
        self._stages = (len(members) - 1).bit_length()
        self.round = 0
        self._stage = 0
        self._facts: dict[int, Fact] = {}
        self._heard: dict[tuple[int, int], dict[int, Fact]] = {}
        self._told: dict[tuple[int, int], MemberMessage] = {}
        self._asked_at = 0.0
        self._open = False
        self._newest = 0
        self._unheard: dict[tuple[int, int], MemberMessage] = {}

    @property
    def opened(self) -> bool:
        """Whether another member has begun the next round, and this one has not."""
        return not self._open and self._newest > self.round

    def contribute(self, fact: Fact, now: float) -> list[MemberMessage]:
        """Give this member's fact and so begin its part of the next round."""
        assert not self._open, "the round before is not over"
        self.round += 1
        self._open, self._stage, self._asked_at = True, 0, now
        self._facts = {self._rank: fact}
        self._told = {key: tell for key, tell in self._told.items() if key[0] >= self.round - 1}
        self._heard = {key: facts for key, facts in self._heard.items() if key[0] >= self.round}
        return [*self._tell_stage(), *self._go_on()]

    def agreed(self) -> list[Fact] | None:
        """All facts in the order of the members, once they are here: then the round is over; None until then."""
        if not self._open or self._stage < self._stages:
            return None
        self._open = False
        return [self._facts[rank] for rank in range(len(self._members))]

    def missing(self) -> tuple[str, ...]:
        """The members whose facts are not here yet."""
        return tuple(name for rank, name in enumerate(self._members) if rank not in self._facts)

    def handle(self, kind: str, sender: str, body: Mapping[str, Any]) -> list[MemberMessage]:
        """Take a message of KINDS; raises ProtocolError for one that no member can have sent."""
        if sender not in self._members:
            raise ProtocolError(f"{sender} takes no part in what {', '.join(self._members)} agree on")
        found = read(body, _FORMS[kind], WHAT)
        number, stage = found.round, found.stage
        if number > self.round + 1 or stage >= max(1, self._stages):
            raise ProtocolError(f"{WHAT} of round {number}, stage {stage}, from {sender}: this is round {self.round}")
        facts = self._facts_of(sender, stage, found) if isinstance(found, _Told) else {}
        if kind != HEARD:
            # Who asks for a fact has begun the round too, even if what it told was lost.
            self._newest = max(self._newest, number)
        if kind == MISSING:
            told = self._told.get((number, stage))
            return [told] if told is not None and told.to == sender else []
        if kind == HEARD:
            self._unheard.pop((number, stage), None)
            return []
        out = []
        if isinstance(found, _Told) and found.leaving:
            out.append(MemberMessage(sender, HEARD, {"round": number, "stage": stage}))
        if number < self.round or stage >= self._stages or sender != self._before(stage):
            return out
        self._heard[number, stage] = facts
        return out + self._go_on()

    def leave(self, now: float) -> list[MemberMessage]:
        """Tell once more what was told in the last round, until it is heard; nothing if that round is not over."""
        last = {} if self._open else {key: tell for key, tell in self._told.items() if key[0] == self.round}
        self._unheard = {
            key: MemberMessage(tell.to, TOLD, {**tell.body, "leaving": True}) for key, tell in last.items()
        }
        self._asked_at = now
        return list(self._unheard.values())

    def unheard(self) -> tuple[str, ...]:
        """Members that have not said that they have heard the last round."""
        return tuple(dict.fromkeys(tell.to for tell in self._unheard.values()))

    def tick(self, now: float) -> list[MemberMessage]:
        """Ask for the message that the open round waits for, now and then; when leaving, tell once more."""
        if now - self._asked_at < ASK_AGAIN_S:
            return []
        if not self._open or self._stage >= self._stages:
            self._asked_at = now if self._unheard else self._asked_at
            return list(self._unheard.values())
        self._asked_at = now
        return [MemberMessage(self._before(self._stage), MISSING, {"round": self.round, "stage": self._stage})]

    def _go_on(self) -> list[MemberMessage]:
        out: list[MemberMessage] = []
        while self._open and (self.round, self._stage) in self._heard:
            self._facts.update(self._heard.pop((self.round, self._stage)))
            self._stage += 1
            out += self._tell_stage()
        return out

    def _tell_stage(self) -> list[MemberMessage]:
        if self._stage >= self._stages:
            return []
        facts = [[rank, dict(fact)] for rank, fact in sorted(self._facts.items())]
        to = self._members[(self._rank + (1 << self._stage)) % len(self._members)]
        tell = MemberMessage(to, TOLD, {"round": self.round, "stage": self._stage, "facts": facts})
        self._told[self.round, self._stage] = tell
        return [tell]

    def _facts_of(self, sender: str, stage: int, told: _Told) -> dict[int, Fact]:
        facts: dict[int, Fact] = dict(told.facts)
        rank, members = self._members.index(sender), len(self._members)
        if facts.keys() != {(rank - place) % members for place in range(1 << stage)}:
            raise ProtocolError(f"{WHAT} with the facts of members {shown([*facts])}, which {sender} cannot have yet")
        return facts

    def _before(self, stage: int) -> str:
        return self._members[(self._rank - (1 << stage)) % len(self._members)]
