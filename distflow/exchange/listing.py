"""The list of lossless consumers, which an owner that follows goes by, and what is not said before it is on the disk.

A client of a new consumer gets its first answer, and one that closes a consumer hears so, once the list says the same:
otherwise the next life of the owner would not know what this one has promised. No I/O; under the worker's lock.

Example: changed({"all": …}) → write({"all": …}); holds(answer for "all") → True, until written(["all"]) returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from distflow.comm.message import Message as Envelope
from distflow.exchange.consumer_types import Handed

Listed = Mapping[str, Sequence[str]]
"""What lossless consumers read, by name."""


class Listing:
    """Of one owner. Where `write` is not set there is no list, and nothing waits for it."""

    def __init__(self) -> None:
        self.write: Callable[[Listed], None] | None = None
        """Begins to write a list; `written` is called with its names afterwards."""
        self._names: frozenset[str] = frozenset()
        self._answers: dict[tuple[str, str], Handed] = {}
        """The newest answer that waits, by client and consumer."""
        self._closed: dict[str, tuple[str, Envelope]] = {}
        """What each client has closed, with the message that said so."""

    def changed(self, listed: Listed) -> None:
        """There is another lossless consumer, or one less."""
        if self.write is not None:
            self.write(listed)

    def holds(self, answer: Handed) -> bool:
        """Whether the answer of a lossless consumer has to wait; `written` returns it."""
        if self.write is None or answer.consumer in self._names:
            return False
        self._answers[answer.client, answer.consumer] = answer
        return True

    def holds_word(self, client: str, consumer: str, message: Envelope) -> bool:
        """Whether the word that a consumer is closed has to wait; `written` returns the message that asks for it."""
        if self.write is None or consumer not in self._names:
            return False
        self._closed[client] = (consumer, message)
        return True

    def written(self, names: Iterable[str]) -> tuple[list[Handed], list[Envelope]]:
        """The list on the disk has these names: what may be said now."""
        self._names = frozenset(names)
        answers = [self._answers.pop(key) for key in list(self._answers) if key[1] in self._names]
        closed = [client for client, (consumer, _) in self._closed.items() if consumer not in self._names]
        return answers, [self._closed.pop(client)[1] for client in closed]
