"""Whom a worker of many sends its next heartbeat: a state machine without sockets and clocks.

Where there are no more than `FEW` peers each of them gets every beat. Where there are more, so many get one in turn, so
that what a worker sends and hears does not grow with their number; from each peer comes one in (peers / FEW) beats.
Nobody's death is found out by beats: a host's agent sees how its workers end, and all agents tell theirs. What beats
are for comes sooner to those for whom it matters:

- *Close* peers get every beat: who asks others for answers looks for another one when it hears nothing for two.
- Who has sent us something since our last beat to it gets the next one, if there is news: a training worker that has
  announced weights hears with the next beat that they have been announced.
- Of the others those come first who have not been told the news, and of these whose last beat is the oldest.

Example: a generating worker has 40 training workers as peers. Each second 16 of them get a beat, each of them one in
two or three seconds. trainer/0 announces version 7; with the next beat it is told so, and 16 others too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from zlib import crc32

FEW = 16
MOST_ANSWERED = 64
"""How many peers at most get a beat before their turn, because they have sent us something."""


@dataclass(slots=True)
class _Told:
    """One peer's last beat: its number, and which news it contained."""

    place: int
    """Breaks ties, in an order of our own: so not all workers send to the same ones in one second and to none of them
    later."""
    beat: int = -1
    news: int = -1


class BeatOrder:
    """Of worker `me`. `close(name)`: whether a peer is to get every beat."""

    def __init__(self, me: str, close: Callable[[str], bool] = lambda name: False) -> None:
        self._me = me
        self._close = close
        self._told: dict[str, _Told] = {}
        self._heard: set[str] = set()
        self._beat = 0
        self._news: object = None
        self._number = 0

    def heard(self, name: str) -> None:
        """A peer has sent us something that is no beat."""
        self._heard.add(name)

    def next(self, present: Collection[str], news: object) -> list[str]:
        """Who gets the next beat; `news`: what those that have not been told it should hear soon."""
        self._beat += 1
        if news != self._news:
            self._news, self._number = news, self._number + 1
        self._told = {name: self._told.get(name) or self._met(name) for name in present}
        chosen = list(present) if len(present) <= FEW else self._chosen(present)
        for name in chosen:
            told = self._told[name]
            told.beat, told.news = self._beat, self._number
        self._heard.difference_update(chosen)
        self._heard.intersection_update(self._told)
        return chosen

    def _chosen(self, present: Collection[str]) -> list[str]:
        close = [name for name in present if self._close(name)]
        answered = [name for name in self._heard if name in self._told and self._told[name].news != self._number]
        first = {*close, *sorted(answered, key=self._order)[:MOST_ANSWERED]}
        others = sorted((name for name in present if name not in first), key=self._order)
        return [*first, *others[:FEW]]

    def _order(self, name: str) -> tuple[bool, int, int]:
        told = self._told[name]
        return told.news == self._number, told.beat, told.place

    def _met(self, name: str) -> _Told:
        return _Told(crc32(f"{self._me} {name}".encode()))
