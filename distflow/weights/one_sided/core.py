"""What is decided about one-sided reads: which pieces come next, when a read stands still, and when to try again."""

from __future__ import annotations

from distflow.errors import ProtocolError
from distflow.weights.manifest import CHUNK_BYTES
from distflow.weights.one_sided_messages import Read

PIECE_CHUNKS = 16
IN_FLIGHT = 4
"""Pieces that are read at once. So many are hashed late, and are lost where a read is given up."""
STILL_S = 10.0
"""A read of which no piece has come for so long is given up."""
MOST_PAUSE = 64


class PieceReads:
    """The pieces of one version of `size` bytes; `now` in seconds, of one clock.

    Example: of 40 MiB, `ask` gives the pieces at 0, 16 and 32 MiB; `came(16 << 20, now)` returns chunks 16 to 31.
    """

    def __init__(self, size: int, now: float) -> None:
        self._size = size
        self._next = 0
        self._going: set[int] = set()
        self._moved_at = now

    @property
    def over(self) -> bool:
        """Whether everything that was asked for has come, and nothing more is asked for."""
        return not self._going and self._next >= self._size

    def ask(self) -> list[Read]:
        """What to ask for now."""
        found = []
        while self._next < self._size and len(self._going) < IN_FLIGHT:
            found.append(Read(self._next, min(PIECE_CHUNKS * CHUNK_BYTES, self._size - self._next)))
            self._going.add(self._next)
            self._next += PIECE_CHUNKS * CHUNK_BYTES
        return found

    def came(self, start: int, now: float) -> range:
        """A piece has come; returns its chunks. Raises ProtocolError for one that is not awaited."""
        if start not in self._going:
            raise ProtocolError(f"a piece that begins at byte {start} has come, awaited are {sorted(self._going)}")
        self._going.remove(start)
        self._moved_at = now
        first = start // CHUNK_BYTES
        return range(first, min(first + PIECE_CHUNKS, -(-self._size // CHUNK_BYTES)))

    def stop(self) -> None:
        """Ask for nothing more: the version was overwritten, or is wrong where it lies."""
        self._next = self._size

    def still_s(self, now: float) -> float:
        """For how long no piece has come."""
        return now - self._moved_at


class Pauses:
    """After 2, 3, 4, … failures in a row so many versions go without another try: 1, 2, 4, … up to MOST_PAUSE.

    They come by the swarm then, which keeps a version that is read: so there is progress even where versions are
    overwritten faster than one can be read.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._left = 0

    def over(self) -> bool:
        """Whether to try with this version. Asked once for each."""
        if self._left:
            self._left -= 1
            return False
        return True

    def note(self, *, well: bool) -> None:
        """How a try ended."""
        self._failures = 0 if well else self._failures + 1
        self._left = 0 if well else min((1 << self._failures) // 4, MOST_PAUSE)
