"""What an owner and `Consumers` tell each other of groups, asks and answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

End = Literal["", "drained", "full", "over", "closed", "void"]
"""Why an answer names no groups: what is left is with other clients, the consumer keeps as much as it may and clients
have claimed it, nothing is left at all, somebody has closed the consumer, or the ask is a repeated one that counts no
longer, so that there has to be another."""


class Offered(NamedTuple):
    """A group as consumers see it."""

    rows: int
    tokens: int
    nbytes: int
    """Its own share of the message that it came in."""
    fields: frozenset[str]
    message: tuple[int, int] | None = None
    """By what that message is told apart from others whose groups are kept, and its bytes."""


@dataclass(frozen=True, slots=True)
class SamplesWanted:
    """What an ask is for. The answer has at least one group, and no more than reach `rows` or `tokens`."""

    consumer: str
    fields: tuple[str, ...]
    lossless: bool
    rows: int
    """0: any number."""
    tokens: int
    """Of prompts and responses together; 0: any number."""
    holds: bool
    """The client holds groups that it has not used because it waits for more: it wants to hear when none will come."""


class Handed(NamedTuple):
    """An answer to the ask `number` of a client."""

    client: str
    number: int
    consumer: str
    positions: tuple[int, ...]
    end: End
    missed: int
    """Groups that this consumer has lost so far."""
    tokens: int = 0
    """Of the groups, prompts and responses together."""


class ConsumerCounts(NamedTuple):
    """How far a consumer is at one owner."""

    name: str
    lossless: bool
    unread: int
    """Groups that nobody has claimed, whether or not they have all their fields."""
    claimed: int
    """Groups that clients have and have not acknowledged."""
    missed: int
    clients: int
    """Those that have asked for its groups and are alive."""
    kept_bytes: int
