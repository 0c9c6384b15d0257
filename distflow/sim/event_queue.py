"""Virtual time: events happen in the order of their times, those of one time as they were scheduled."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class StuckError(AssertionError):
    """A simulation that made no progress before its end."""


class EventQueue:
    """The clock of a simulation, in seconds from its begin, and what is still to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        """A heap of what is to happen when."""
        self._numbers = count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Schedule an event."""
        heapq.heappush(self.events, (self.now + seconds, next(self._numbers), event))

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        """Schedule an event for a time."""
        heapq.heappush(self.events, (seconds, next(self._numbers), event))

    def run_until(self, over: Callable[[], bool], limit_s: float, describe: Callable[[], str]) -> None:
        """Let one event after the other happen until it is `over`.

        Raises StuckError, with what `describe` says, if that takes longer than `limit_s`, or nothing is left to happen.
        """
        while not over():
            if not self.events or self.events[0][0] > limit_s:
                raise StuckError(describe())
            self.happen()

    def happen(self) -> None:
        """Let the next event happen."""
        self.now, _, event = heapq.heappop(self.events)
        event()
