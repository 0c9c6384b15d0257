"""One leased position of a ledger, and what is told of it while it has not arrived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from msgspec import structs

from distflow.errors import ProtocolError
from distflow.exchange.messages import Lease
from distflow.exchange.partials import TOKEN_BYTES, Kept
from distflow.types import Version

State = Literal["open", "back", "arrived", "taken", "dropped"]
LEASE_BYTES = 128
"""Approximate size of a lease in a grant, without its texts and tokens."""


@dataclass(slots=True)
class Entry:
    """One leased position."""

    lease: Lease
    reserved: int
    """Bytes set aside for its result; after arrival its true size."""
    leased_at: float
    state: State = "open"
    holders: dict[str, int] = field(default_factory=dict)
    """Workers (with their incarnation) that have this lease, as far as is known."""
    tokens: int = 0
    """Of all samples so far, as reported; after arrival all of them."""
    step: int = 0
    """The training step that takes it, or an earlier one, as known when it was leased."""
    predicted: float = 0.0
    """Tokens expected of a sample, where a schedule looks at them."""
    started: bool = False
    """A holder has reported that it runs."""
    oldest: Version | None = None
    worker: str = ""
    """The worker whose copy arrived first."""
    kept: Kept | None = None
    """Tokens of its samples so far, for the next worker."""

    def forbids(self, version: int) -> bool:
        """Whether this version, on which a group was begun (−1: not begun), is too old for this lease."""
        return 0 <= version < self.lease.min_version

    def voids(self, oldest: Version | None, term: int, begins: Mapping[int, int]) -> bool:
        """Whether a result was begun before the owner's `term`, on weights too old for this lease or abandoned."""
        if oldest is None or oldest.term >= term:
            return False
        return self.forbids(oldest.number) or not oldest.survives(begins)

    def check_lag(self, version: int, bound: int | None) -> None:
        """Taken by training step `version`: raises ProtocolError if a worker broke the staleness bound."""
        assert self.oldest is not None, f"position {self.lease.position} arrived without a version"
        lag = version - self.oldest.number
        if bound is not None and lag > bound:
            raise ProtocolError(
                f"{self.worker} started position {self.lease.position} on version {self.oldest.number} (its lease "
                f"says ≥ {self.lease.min_version}); training step {version + 1} with max_staleness "
                f"{bound} allows ≥ {version - bound}"
            )

    @property
    def grant_bytes(self) -> int:
        """Approximate size in a grant."""
        lease, kept = self.lease, 0 if self.kept is None else self.kept.nbytes
        return LEASE_BYTES + TOKEN_BYTES * len(lease.prompt_ids) + len(lease.prompt_text) + len(lease.task) + kept

    def to_grant(self) -> Lease:
        """The lease as it is granted now, with samples that other workers began."""
        if self.kept is None and len(self.holders) < 2:
            return self.lease
        return structs.replace(self.lease, begun=self.kept.begun() if self.kept else (), copy=len(self.holders) > 1)


@dataclass(frozen=True, slots=True)
class OpenLease:
    """A group that has been leased and has not arrived."""

    position: int
    ledger: int
    attempt: int
    min_version: int
    workers: tuple[str, ...]
    """Its holders; empty: it waits to be leased again."""
    tokens: int
    """Tokens produced so far, from the newest report."""
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
