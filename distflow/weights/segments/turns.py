"""Which segment a publisher writes next: each in its turn, but not the one that is being read. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence

PIN_S = 3.0
"""After this long without a request, a version is no longer considered being read."""


class SegmentTurns:
    """The turns of a publisher's segments, by name."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._turn = 0

    def next(self, pinned: str | None) -> int:
        """Number of the segment for the next version; not the one that is `pinned`."""
        slot = self._turn % len(self._names)
        if pinned == self._names[slot]:
            slot = (slot + 1) % len(self._names)
        self._turn = slot + 1
        return slot


class Pin:
    """The segment that readers are fetching: the one that was read first, as long as somebody goes on."""

    def __init__(self) -> None:
        self._pin: tuple[str, float] | None = None

    def read(self, name: str, now: float) -> None:
        """Something is about to be sent from a segment; `now` in seconds, of one clock."""
        if self.pinned(now) in (None, name):
            self._pin = (name, now + PIN_S)

    def pinned(self, now: float) -> str | None:
        """The segment that is not to be overwritten."""
        return None if self._pin is None or now > self._pin[1] else self._pin[0]
