"""How long servers take for a step, by the tokens that they compute at once: what a caller expects of a request.

Every answer says how many tokens were computed with it, and in what time; queueing and the network are no part of it.
A batch is expected to take as long as the usual one, or in proportion to its tokens, whichever is longer: small batches
cost more than their tokens, and large ones at most those.

Example: note("reference/0", "reference", 4096, 0.5) → expected_s("reference/0", "reference", 8192, before=0) = 1.0.
"""

from __future__ import annotations

from collections import deque
from statistics import median

USUAL_OF = 32
"""Batches that count, of one step at one server."""


class _Pace:
    """The last batches of one step: tokens and seconds of each."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, float]] = deque(maxlen=USUAL_OF)
        self.usual = self.a_token = 0.0
        """Seconds for the usual batch, and for a token."""

    def note(self, tokens: int, seconds: float) -> None:
        # All requests of a batch are answered with the same.
        if not self._batches or self._batches[-1] != (tokens, seconds):
            self._batches.append((tokens, seconds))
            self.usual = median(took for _, took in self._batches)
            self.a_token = sum(took for _, took in self._batches) / max(1, sum(count for count, _ in self._batches))

    def seconds(self, tokens: int) -> float:
        return max(self.usual, tokens * self.a_token)


class Paces:
    """What all servers of one caller take for each step."""

    def __init__(self) -> None:
        self._of: dict[str, _Pace] = {}
        """By step, over all servers: for those that have not answered it yet."""
        self._at: dict[str, dict[str, _Pace]] = {}
        """By server, then step."""

    def note(self, server: str, step: str, tokens: int, seconds: float) -> None:
        """A server has computed a batch."""
        for paces in (self._of, self._at.setdefault(server, {})):
            paces.setdefault(step, _Pace()).note(tokens, seconds)

    def forget(self, server: str) -> None:
        """Another process has its name now, perhaps on another machine."""
        self._at.pop(server, None)

    def expected_s(self, server: str, step: str, tokens: int, before: int) -> float | None:
        """What a server is expected to take for so many tokens, after so many of whatever it has to do before.

        Those are taken to be of its slowest step. None: nobody has computed this step yet.
        """
        mine = self._at.get(server, {})
        pace = mine.get(step) or self._of.get(step)
        if pace is None:
            return None
        return before * max(one.a_token for one in (pace, *mine.values())) + pace.seconds(tokens)
