"""How long a reader waits for chunks that are under way: a state machine without sockets and clocks.

What counts as progress is bytes, not chunks: over a slow link one chunk takes long. It counts here, and at the readers
from which this one gets what they were given. Each tells those that follow it how many bytes it has received, and what
it was told of others (`Says.COMING`), so that one hears of readers that it is not connected to. The numbers only rise:
what goes round in a ring of readers soon tells nobody anything new, and keeps nobody waiting.

Example: A was given all chunks of a version, which takes 20 s on its link. B, beside it, hears five times a second that
A has received more, and waits. A is stopped: 2 s later B asks the publisher for what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

RETRY_S = 2.0
"""After this long without a byte, here or at a reader that tells of itself, the publisher is asked for what it gave to
others. A connection that owes chunks is replaced if nothing has come on it, and on no other one, for as long."""
SLOW_FACTOR = 4.0
"""Where bytes come with pauses: after this many times as long as the last pause, the first round trip included."""
MOST_PATIENCE_S = 16.0
MISSING_S = 0.3
"""After this long without a byte, the publisher is asked for chunks that no present reader was given."""
TELL_S = 0.2
"""How often others are told of bytes: often enough that they see none missing."""


class Patience:
    """Of the reader that serves at `own`; `received`: bytes that it has received so far, of whatever it was."""

    def __init__(self, own: str, received: int, now: float) -> None:
        self.wait_s = RETRY_S
        """How long nothing may come."""
        self.moved_at = now
        """When bytes came here last."""
        self.progress_at = now
        """The same, here or at a reader that tells of itself."""
        self._counts = {own: received}
        self._urge_at = now + MISSING_S
        self._own = own
        self._tell_at = now
        self._untold = False

    def received(self, count: int, now: float) -> None:
        """So many bytes of chunks have been received here by now; less again if they were wrong."""
        if count > self._counts[self._own]:
            self._counts[self._own] = count
            self.moved_at = now
            self._progress(now)

    def heard(self, counts: Mapping[str, int], now: float) -> None:
        """Another reader tells how many bytes readers have received."""
        new = {
            name: count for name, count in counts.items() if count > self._counts.get(name, -1) and name != self._own
        }
        if new:
            self._counts.update(new)
            self._progress(now)

    def stood_still(self, seconds: float) -> None:
        """This process was stopped for so long, or its clock jumped: in that time nothing could come."""
        self.moved_at += seconds
        self.progress_at += seconds
        self._urge_at += seconds

    def silence_s(self, now: float) -> float:
        """Seconds since bytes came last, here or at a reader that tells of itself."""
        return now - self.progress_at

    def stalled(self, now: float) -> bool:
        """Whether nothing comes from anywhere."""
        return self.silence_s(now) > RETRY_S

    def tells(self, now: float) -> dict[str, int] | None:
        """What to tell others, if it is time to."""
        if not self._untold or now < self._tell_at:
            return None
        self._untold, self._tell_at = False, now + TELL_S
        return self._counts.copy()

    def urges(self, now: float) -> Literal["want", "again"] | None:
        """Whether to ask the publisher for what is missing (`ChunkAsk`)."""
        if now < self._urge_at:
            return None
        if self.silence_s(now) <= self.wait_s:
            self._urge_at = now + MISSING_S
            return "want"
        self._urge_at = now + self.wait_s
        self.wait_s = min(2 * self.wait_s, MOST_PATIENCE_S)
        return "again"

    def _progress(self, now: float) -> None:
        pause = now - self.progress_at
        self.wait_s = min(max(RETRY_S, SLOW_FACTOR * pause), max(RETRY_S, MOST_PATIENCE_S))
        self.progress_at, self._urge_at, self._untold = now, now + MISSING_S, True
