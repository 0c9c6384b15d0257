"""What an owner or a holder shows to onlookers: status, named waits, the blockers of the open training step."""

from __future__ import annotations

from dataclasses import dataclass

from distflow.exchange.holder_table import Peer
from distflow.exchange.ledger import Entry


@dataclass(frozen=True, slots=True)
class OpenLease:
    """A group that has been leased and has not arrived."""

    position: int
    ledger: int
    attempt: int
    min_version: int
    workers: tuple[str, ...]
    """Who holds it; empty: it waits to be leased again."""
    tokens: int
    """Produced so far, by the newest report."""
    leased_at: float

    @classmethod
    def of(cls, entry: Entry) -> OpenLease:
        """Describe one entry of a ledger."""
        lease = entry.lease
        return cls(
            position=lease.position,
            ledger=lease.ledger,
            attempt=lease.attempt,
            min_version=lease.min_version,
            workers=tuple(entry.holders),
            tokens=entry.tokens,
            leased_at=entry.leased_at,
        )


@dataclass(frozen=True, slots=True)
class HolderState:
    """What an owner knows of one worker."""

    name: str
    incarnation: int
    heard_at: float
    """When its newest ask or progress report came in."""
    held: int
    """Leases of this owner in its hands."""
    parked: bool
    """It has an ask here that waits for something to lease."""

    @classmethod
    def of(cls, peer: Peer) -> HolderState:
        """Describe one holder."""
        return cls(peer.name, peer.incarnation, peer.heard_at, len(peer.granted_by), peer.parked > 0)


@dataclass(frozen=True, slots=True)
class AskState:
    """A holder's ask that has not been answered by a grant yet."""

    owner: str
    parked: bool
    """The owner has said that it keeps the ask; else the answer is still to come."""
    since: float
    """When the holder began to ask (at whichever owner)."""
