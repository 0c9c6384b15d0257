"""What `Consumers` knows of each client and of each consumer."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from distflow.exchange.consumer_types import SamplesWanted


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
    nbytes: int = 0
    missed: int = 0
    full: bool = False
    """Claims leave no room, so that a group was let go which nobody has seen."""

    def holds_up(self, limit: int) -> bool:
        """Whether nothing may be leased until it has read."""
        return self.lossless and not self.owned and self.nbytes >= limit
