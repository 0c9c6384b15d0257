"""What a client has asked its owners for, and what it has got, for one consumer. No I/O.

One ask is outstanding at each owner, at most, for all that is still wanted; so with several owners more may come than
was wanted, which is kept for the next time. An ask is repeated until its answer comes: the owner may have restarted, or
the answer was lost. Asks of one client are numbered in one row, and an owner answers a number always the same way.

Example (owners a, b; 8 rows are wanted):
    want(8)                     -> asks a (1), b (2) for 8 rows
    answer(a, 1, 8 rows)        -> take() has them; b's ask stays
    answer(b, 2, 4 rows), want(8)  -> 4 are here: asks a (3), b (4) for 4 rows
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from distflow.data.batch import Batch
from distflow.exchange.consumer_types import End
from distflow.exchange.store_channel import Asked

REPEAT_S = 2.0
"""After so long without an answer an ask is repeated: it may be lost, or whoever was asked may have restarted."""


@dataclass(frozen=True, slots=True)
class Part:
    """Groups from one owner: the answer to one ask."""

    owner: str
    number: int
    batch: Batch
    tokens: int
    """Of prompts and responses."""


class AnswerBody(msgspec.Struct, frozen=True):
    """An answer to an ask, as it travels."""

    number: int = 0
    """0: that of the ask could not be read."""
    consumer: str = ""
    end: End = ""
    missed: int = 0
    tokens: int = 0
    batch: Mapping[str, Any] | None = None
    error: str = ""

    @property
    def refusal(self) -> str:
        """Why the owner does not serve the consumer; "": it does."""
        closed = f"consumer {self.consumer!r}: another client has closed it (`forget`)" if self.end == "closed" else ""
        return self.error or closed


@dataclass(frozen=True, slots=True)
class OwnerAnswer:
    """What came from an owner."""

    owner: str
    incarnation: int
    number: int
    end: End
    missed: int
    part: Part | None
    """None: no groups."""


@dataclass(slots=True)
class _Owner:
    asked: Asked | None = None
    sent_at: float = 0.0
    end: End = ""
    incarnation: int = -1
    missed: int = 0


class ConsumerReading:
    """One consumer. `number()` gives the next number of the client's asks."""

    def __init__(
        self,
        client: str,
        consumer: str,
        fields: Sequence[str],
        owners: Sequence[str],
        number: Callable[[], int],
        *,
        lossless: bool,
    ) -> None:
        self.consumer, self.fields, self.lossless = consumer, tuple(fields), lossless
        self._client = client
        self._number = number
        self._owners = {name: _Owner() for name in owners}
        self._parts: deque[Part] = deque()
        self._rows = self._tokens = 0

    def want(self, rows: int, tokens: int) -> None:
        """What the next `take` is to reach: rows, or tokens, or (both 0) anything."""
        self._rows, self._tokens = rows, tokens
        for owner in self._owners.values():
            if owner.end in ("drained", "full"):
                # Others may have given groups back since, or this client has.
                owner.end = ""

    def asks(self, now: float) -> list[tuple[str, Asked]]:
        """The asks to send now, or again, by owner."""
        if self._full:
            return []
        found = []
        for name, owner in self._owners.items():
            if owner.end:
                continue
            stale = owner.asked is not None and owner.asked.holds != bool(self._parts)
            if owner.asked is None or stale or now - owner.sent_at >= REPEAT_S:
                owner.asked = self._ask(owner.asked)
                owner.sent_at = now
                found.append((name, owner.asked))
        return found

    def answered(self, answer: OwnerAnswer) -> None:
        """An answer has arrived, perhaps once more."""
        owner = self._owners.get(answer.owner)
        if owner is None:
            return
        if answer.incarnation != owner.incarnation:
            self._restarted(answer.owner, owner, answer.incarnation)
        if owner.asked is None or answer.number != owner.asked.number:
            return
        owner.asked, owner.missed = None, answer.missed
        owner.end = "" if answer.end == "void" else answer.end
        if answer.part is not None:
            self._parts.append(answer.part)
        if answer.end == "full" and not self._parts:
            # What filled it was of an owner that has restarted since.
            owner.end = ""

    def heard(self, name: str, incarnation: int) -> None:
        """A sign of life of an owner, which may have restarted."""
        owner = self._owners.get(name)
        if owner is not None and incarnation != owner.incarnation:
            self._restarted(name, owner, incarnation)

    def gave_back(self, name: str) -> None:
        """Groups of an owner were given back to it: there is more to come, though it has said that all was read."""
        if name in self._owners:
            self._owners[name].end = ""

    def owned_by(self, names: Sequence[str]) -> None:
        """The training workers that own samples are others now: what is here of one that is gone is not claimed."""
        self._owners = {name: self._owners.get(name, _Owner()) for name in names}
        self._parts = deque(part for part in self._parts if part.owner in self._owners)

    def take(self) -> list[Part] | None:
        """What was wanted, or less where no more will come, or an owner keeps no more; None: wait.

        One such owner is enough: others may have to wait for it with the next training step.
        """
        less = self._ended or any(owner.end == "full" for owner in self._owners.values())
        if not self._full and not (self._parts and less):
            return None
        parts, self._parts = list(self._parts), deque()
        return parts

    @property
    def over(self) -> bool:
        """Whether nothing is here and nothing will come."""
        return not self._parts and all(owner.end == "over" for owner in self._owners.values())

    @property
    def missed(self) -> int:
        """Groups that this consumer has lost so far at its owners."""
        return sum(owner.missed for owner in self._owners.values())

    @property
    def _full(self) -> bool:
        if not self._parts:
            return False
        rows, tokens = sum(part.batch.rows for part in self._parts), sum(part.tokens for part in self._parts)
        return rows >= self._rows and tokens >= self._tokens

    @property
    def _ended(self) -> bool:
        return all(owner.end for owner in self._owners.values())

    def _ask(self, before: Asked | None) -> Asked:
        rows = max(0, self._rows - sum(part.batch.rows for part in self._parts))
        tokens = max(0, self._tokens - sum(part.tokens for part in self._parts))
        number, again = (self._number(), False) if before is None else (before.number, True)
        about = (self._client, number, self.consumer, self.fields, self.lossless)
        return Asked(*about, rows, tokens, holds=bool(self._parts), again=again)

    def _restarted(self, name: str, owner: _Owner, incarnation: int) -> None:
        """What is here of the former incarnation is not claimed any more: it will come again."""
        if owner.incarnation >= 0:
            self._parts = deque(part for part in self._parts if part.owner != name)
            owner.end, owner.sent_at = "", 0.0
        owner.incarnation = incarnation
