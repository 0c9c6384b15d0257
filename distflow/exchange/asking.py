"""Where a holder asks next: one ask at a time, walking over the owners.

In words: *idle* → ask the home owner → refused, ask a random other one → refused, ask a second one, which keeps the
ask *parked* if it has nothing either. A parked ask moves on to a random owner after 1, 2, 4 … 16 s (± 50%). With one
owner it parks at once, and the moves become repetitions that heal a lost message. A grant ends the walk.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from distflow.exchange.settings import LeaseSettings

_HOPS_BEFORE_PARKING = 2
_UNANSWERED_LIMIT = 3


class AskWalk:
    """The one ask in flight. `owner` is its number 0 … R−1, or None when idle."""

    def __init__(self, home: int, settings: LeaseSettings, rng: random.Random) -> None:
        self.owner: int | None = None
        self.number = 0
        """Of the present ask; a new one for each owner it is put to."""
        self.park = False
        self.parked = False
        self.since = 0.0
        self._home = home
        self._settings = settings
        self._rng = rng
        self._hops = 0
        self._unanswered = 0
        self._wait = settings.park_s
        self._due = 0.0

    def begin(self, owners: Sequence[int], now: float) -> None:
        """Start to ask, at home if it is among the owners that still have work."""
        self._hops, self._wait, self.since = 0, self._settings.park_s, now
        self._put_to(self._home if self._home in owners else self._rng.choice(owners), len(owners), now)

    def end(self) -> None:
        """Answered, or nothing is wanted any more."""
        self.owner = None
        self.parked = False

    def settle(self, home: int) -> None:
        """The owners are others now, or count otherwise: no ask is in flight, the next one goes `home` first."""
        self.end()
        self._home = home

    def is_answer(self, owner: int, number: int) -> bool:
        """Does a grant or refusal of this owner answer the present ask?"""
        return owner == self.owner and number == self.number

    def refused(self, parked: bool, owners: Sequence[int], now: float) -> bool:
        """The owner has nothing now. True: the ask went on to another owner and is to be sent there."""
        if not parked:
            self.move(owners, now)
            return True
        if not self.parked:
            self.parked = True
            self._due = now + self._jittered_wait()
        return False

    def due(self, now: float) -> bool:
        """Is it time to repeat the ask, or to move on with it?"""
        return self.owner is not None and now >= self._due

    def go_on(self, owners: Sequence[int], now: float) -> bool:
        """It is due: move on (True), or repeat it where it is."""
        lonely = list(owners) == [self.owner]
        self._unanswered += not self.parked
        if not lonely and (self.parked or self._unanswered >= _UNANSWERED_LIMIT):
            self.move(owners, now)
            return True
        self._due = now + (self._jittered_wait() if self.parked else self._settings.resend_s)
        return False

    def move(self, owners: Sequence[int], now: float) -> None:
        """Put the ask to a random other owner."""
        self._hops += 1
        others = [owner for owner in owners if owner != self.owner]
        self._put_to(self._rng.choice(others or list(owners)), len(owners), now)

    def _put_to(self, owner: int, owners: int, now: float) -> None:
        self.owner = owner
        self.number += 1
        self.park = owners == 1 or self._hops >= _HOPS_BEFORE_PARKING
        self.parked = False
        self._unanswered = 0
        self._due = now + self._settings.resend_s

    def _jittered_wait(self) -> float:
        wait = self._wait
        self._wait = min(2 * wait, self._settings.park_limit_s)
        return wait * (0.5 + self._rng.random())
