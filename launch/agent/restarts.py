"""How often something may be started again within a window of time: so rare deaths never add up to a failed run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartLimit:
    """At most `count` restarts within any `window_s` seconds.

    Example: with 3 an hour, a worker that is killed once a week is always started again; one that dies at every start
    is given up at its fourth death.
    """

    count: int
    window_s: float

    def take(self, taken: list[float], now: float) -> bool:
        """Whether one more restart is within the limit; if so it is noted in `taken`, and old ones are forgotten."""
        taken[:] = [moment for moment in taken if now - moment < self.window_s]
        if len(taken) >= self.count:
            return False
        taken.append(now)
        return True
