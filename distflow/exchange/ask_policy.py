"""Where a holder asks next: one ask at a time, walking over the owners.

In words: *idle* → ask the home owner → refused, ask the others in random order, each once → the last one keeps the ask
*parked* if it has nothing either. After a wait the ask goes round the others again. The wait is 1 s (± 50%) and doubles
with each owner asked in vain, up to 16 s, so that long rounds are rare; of many owners a round takes 8 at random. An
owner that is about to lease a group again, since one was dropped here, is asked next. With one owner the ask parks at
once, and the rounds become repetitions that heal a lost message. A grant ends the walk.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from distflow.exchange.lease_settings import LeaseSettings

_OWNERS_A_ROUND = 8
"""Fewer than all there are, and an ask is parked while another owner has work; more cost messages for each grant."""
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
        self._ahead: list[int] = []
        """Owners that the present round has still to ask; the last of a round parks the ask."""
        self._unanswered = 0
        self._wait = settings.park_s
        self._due = 0.0

    def begin(self, owners: Sequence[int], now: float) -> None:
        """Start to ask, at home if it is among the owners that still have work."""
        self._wait, self.since = self._settings.park_s, now
        home = [owner for owner in owners if owner == self._home]
        self._put_to_next([*home, *self._others(self._home, owners)][:_OWNERS_A_ROUND], now)

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
            self._lengthen_wait()
            self.move(owners, now)
            return True
        if not self.parked:
            self.parked = True
            self._due = now if self._ahead else now + self._jittered_wait()
        return False

    def prefer(self, owner: int, now: float) -> None:
        """This owner has work again: it is asked next, a parked ask goes there with the next tick."""
        if owner == self.owner:
            return
        self._ahead = [owner, *(other for other in self._ahead if other != owner)]
        if self.parked:
            self._due = now

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
        """Put the ask to the next owner of this round, or begin another one."""
        left = [owner for owner in self._ahead if owner in owners]
        self._put_to_next(left or self._others(self.owner, owners) or list(owners), now)

    def _others(self, but: int | None, owners: Sequence[int]) -> list[int]:
        others = [owner for owner in owners if owner != but]
        return self._rng.sample(others, min(len(others), _OWNERS_A_ROUND))

    def _put_to_next(self, ahead: list[int], now: float) -> None:
        self.owner, *self._ahead = ahead
        self.number += 1
        self.park = not self._ahead
        self.parked = False
        self._unanswered = 0
        self._due = now + self._settings.resend_s

    def _jittered_wait(self) -> float:
        wait = self._wait
        self._lengthen_wait()
        return wait * (0.5 + self._rng.random())

    def _lengthen_wait(self) -> None:
        self._wait = min(2 * self._wait, self._settings.park_limit_s)
