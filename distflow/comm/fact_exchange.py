"""Every member of a group learns one fact of each other member, round by round: a state machine without sockets.

Dissemination (Hensgen, Finkel, Manber 1988): in stage k a member sends all it knows to the member 2^k places ahead and
receives from the one 2^k places behind. After ⌈log₂ R⌉ stages every member knows all R facts; there is no central
member, and each sends ⌈log₂ R⌉ messages a round.

Messages are repeated on request only: a member that misses one asks for it (`tick`), and its sender has kept it. A
member can be at most one round ahead of another, so two rounds are kept. A member that leaves for good first makes sure
that its messages of the last round were received (`leave`): nobody could ask it afterwards.

A worker may be in several groups; each message names its own.

Example, R = 3: 0 → 1, 1 → 2, 2 → 0 (stage 0: two facts each); 0 → 2, 1 → 0, 2 → 1 (stage 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from distflow.comm.membership import MemberMessage
from distflow.data.decoding import MAX_NAME_CHARACTERS, Form, Whole, read, shown
from distflow.errors import ProtocolError

Fact = Mapping[str, Any]
"""Plain values that msgpack can carry."""
TOLD, MISSING, HEARD = "agree", "agree.missing", "agree.heard"
WHAT = "agreement message"
ASK_AGAIN_S = 0.5


class _Stage(Form, frozen=True):
    group: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
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


def group_of(kind: str, body: Mapping[str, Any]) -> str:
    """The group that a message of KINDS belongs to; raises ProtocolError."""
    return read(body, _FORMS[kind], WHAT).group


class Agreement:
    """Member `me` of `members`, a list that is the same at every member, as is the name of the group."""

    def __init__(self, group: str, me: str, members: Sequence[str]) -> None:
        self._group = group
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
        """Whether another member has begun the next round and this one has not."""
        return not self._open and self._newest > self.round

    def contribute(self, fact: Fact, now: float) -> list[MemberMessage]:
        """Begin the next round with this member's fact."""
        assert not self._open, "the previous round is not over"
        self.round += 1
        self._open, self._stage, self._asked_at = True, 0, now
        self._facts = {self._rank: fact}
        self._told = {key: tell for key, tell in self._told.items() if key[0] >= self.round - 1}
        self._heard = {key: facts for key, facts in self._heard.items() if key[0] >= self.round}
        return [*self._tell_stage(), *self._go_on()]

    def agreed(self) -> list[Fact] | None:
        """All facts in the order of the members, which ends the round; None until they have arrived."""
        if not self._open or self._stage < self._stages:
            return None
        self._open = False
        return [self._facts[rank] for rank in range(len(self._members))]

    def missing(self) -> tuple[str, ...]:
        """The members whose facts have not arrived yet."""
        return tuple(name for rank, name in enumerate(self._members) if rank not in self._facts)

    def handle(self, kind: str, sender: str, body: Mapping[str, Any]) -> list[MemberMessage]:
        """Take a message of KINDS; raises ProtocolError for one that no member can send."""
        if sender not in self._members:
            raise ProtocolError(f"{sender} is not a member of the group of {', '.join(self._members)}")
        found = read(body, _FORMS[kind], WHAT)
        number, stage = found.round, found.stage
        if number > self.round + 1 or stage >= max(1, self._stages):
            raise ProtocolError(f"{WHAT} of round {number}, stage {stage}, from {sender}: this is round {self.round}")
        facts = self._facts_of(sender, stage, found) if isinstance(found, _Told) else {}
        if kind != HEARD:
            # A member that asks for a fact has begun the round too, even if its own message was lost.
            self._newest = max(self._newest, number)
        if kind == MISSING:
            told = self._told.get((number, stage))
            return [told] if told is not None and told.to == sender else []
        if kind == HEARD:
            self._unheard.pop((number, stage), None)
            return []
        out = []
        if isinstance(found, _Told) and found.leaving:
            out.append(MemberMessage(sender, HEARD, self._body(number, stage)))
        if number < self.round or stage >= self._stages or sender != self._before(stage):
            return out
        self._heard[number, stage] = facts
        return out + self._go_on()

    def leave(self, now: float) -> list[MemberMessage]:
        """Repeat the messages of the last round until they are acknowledged; nothing if that round is not over."""
        last = {} if self._open else {key: tell for key, tell in self._told.items() if key[0] == self.round}
        self._unheard = {
            key: MemberMessage(tell.to, TOLD, {**tell.body, "leaving": True}) for key, tell in last.items()
        }
        self._asked_at = now
        return list(self._unheard.values())

    def unheard(self) -> tuple[str, ...]:
        """Members that have not acknowledged the messages of the last round."""
        return tuple(dict.fromkeys(tell.to for tell in self._unheard.values()))

    def tick(self, now: float) -> list[MemberMessage]:
        """Ask for the message that the open round waits for; when leaving, repeat unacknowledged ones."""
        if now - self._asked_at < ASK_AGAIN_S:
            return []
        if not self._open or self._stage >= self._stages:
            self._asked_at = now if self._unheard else self._asked_at
            return list(self._unheard.values())
        self._asked_at = now
        return [MemberMessage(self._before(self._stage), MISSING, self._body(self.round, self._stage))]

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
        tell = MemberMessage(to, TOLD, {**self._body(self.round, self._stage), "facts": facts})
        self._told[self.round, self._stage] = tell
        return [tell]

    def _body(self, number: int, stage: int) -> dict[str, Any]:
        return {"group": self._group, "round": number, "stage": stage}

    def _facts_of(self, sender: str, stage: int, told: _Told) -> dict[int, Fact]:
        facts: dict[int, Fact] = dict(told.facts)
        rank, members = self._members.index(sender), len(self._members)
        if facts.keys() != {(rank - place) % members for place in range(1 << stage)}:
            raise ProtocolError(f"{WHAT} with the facts of members {shown([*facts])}, which {sender} cannot know yet")
        return facts

    def _before(self, stage: int) -> str:
        return self._members[(self._rank - (1 << stage)) % len(self._members)]
