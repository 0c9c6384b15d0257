"""What `Consumers` knows of each client and of each consumer."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from distflow.exchange.consumer_types import Offered, SamplesWanted


@dataclass(slots=True)
class ClientState:
    """A client that has asked for something."""

    heard_at: float
    silent: bool = False
    """It may be dead, or a computer that sleeps: its claims are its own until another client wants them."""
    asks: dict[str, tuple[int, SamplesWanted]] = field(default_factory=dict)
    """The ask that waits, by consumer."""
    last: dict[str, int] = field(default_factory=dict)
    """The number of the newest ask, by consumer."""
    done: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Numbers of claims that were acknowledged."""


class PinnedBytes:
    """Of some groups. A group is rows of the message that it came in, and all of this stays as long as one of them
    does; what is written about a group later counts besides.

    Example: two groups of one message of 4 MiB keep 4 MiB, until both are let go.
    """

    __slots__ = ("_groups", "_messages", "total")

    def __init__(self) -> None:
        self.total = 0
        self._groups: dict[int, tuple[int, int]] = {}
        """By position: the message, and the bytes that were written later."""
        self._messages: dict[int, tuple[int, int]] = {}
        """How many of its groups are here, and its bytes."""

    def __contains__(self, position: int) -> bool:
        return position in self._groups

    def add(self, position: int, group: Offered) -> None:
        """Keep a group; one that tells of no message counts alone."""
        message, nbytes = (~position, group.nbytes) if group.message is None else group.message
        count, nbytes = self._messages.get(message, (0, nbytes))
        self.total += 0 if count else nbytes
        self._messages[message] = count + 1, nbytes
        self._groups[position] = message, 0

    def write(self, position: int, nbytes: int) -> None:
        """A group that may be here has got further fields."""
        if position in self._groups:
            message, before = self._groups[position]
            self._groups[position] = message, before + nbytes
            self.total += nbytes

    def let_go(self, position: int) -> None:
        """Keep a group no longer."""
        message, later = self._groups.pop(position)
        count, nbytes = self._messages.pop(message)
        self.total -= later + (nbytes if count == 1 else 0)
        if count > 1:
            self._messages[message] = count - 1, nbytes


@dataclass(slots=True)
class ConsumerState:
    """A consumer, and where its groups are: lacking a field, ready, or claimed."""

    name: str
    fields: frozenset[str]
    lossless: bool
    owned: bool = False
    """Opened by the owner, which waits for what is written about each group."""
    ready: OrderedDict[int, None] = field(default_factory=OrderedDict)
    partial: dict[int, None] = field(default_factory=dict)
    """Groups that lack a field."""
    claims: OrderedDict[tuple[str, int], tuple[int, ...]] = field(default_factory=OrderedDict)
    """By client and number of the ask."""
    pinned: PinnedBytes = field(default_factory=PinnedBytes)
    missed: int = 0
    full: bool = False
    """Claims leave no room, so that a group was let go which nobody has seen."""
    unread_since: float = math.inf
    """Since when it has had no client that is there."""

    def holds_up(self, limit: int) -> bool:
        """Whether nothing may be leased until it has read."""
        return self.lossless and not self.owned and self.pinned.total >= limit
