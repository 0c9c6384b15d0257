"""Virtual time: events happen in the order of their times, those of one time as they were scheduled."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from distflow.sim.scenario import StuckError


class EventQueue:
    """The clock of a simulation, in seconds from its begin, and what is still to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Schedule an event."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        """Schedule an event for a time."""
        heapq.heappush(self._events, (seconds, next(self._numbers), event))

    def run_for(self, seconds: float) -> None:
        """Let everything happen that does within so many seconds."""
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self._happen()
        self.now = until

    def run_until(self, over: Callable[[], bool], limit_s: float, describe: Callable[[], str]) -> None:
        """Let one event after the other happen until it is `over`.

        Raises StuckError, with what `describe` says, if that takes longer than `limit_s`, or nothing is left to happen.
        """
        while not over():
            if not self._events or self._events[0][0] > limit_s:
                raise StuckError(describe())
            self._happen()

    def _happen(self) -> None:
        self.now, _, event = heapq.heappop(self._events)
        event()
