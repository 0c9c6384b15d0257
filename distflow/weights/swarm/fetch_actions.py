"""What a fetch is told of its connections, and what it says is to be done (`fetch_core.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from distflow.weights.manifest import Manifest, digest
from distflow.weights.swarm_messages import ChunkAsk


@dataclass(frozen=True, slots=True)
class Landing:
    """Where the bytes of one chunk go, and their digest."""

    data: memoryview
    digest: bytes
    trusted: bool
    """Whether it counts from its first byte on, or only once it is right: its sender has sent wrong ones."""

    @property
    def right(self) -> bool:
        """Whether the bytes that are there have the announced digest."""
        return digest(self.data) == self.digest


class ChunkLink:
    """One connection to a holder of weights: what has come on it."""

    def __init__(self, number: int, address: str, now: float) -> None:
        self.number = number
        self.address = address
        self.heard_at = now
        """When bytes came last."""
        self.received = 0
        """Bytes of chunks that somebody here wanted, and of those that are on their way; without wrong ones."""
        self.over = False
        """Whether it is lost; set by the core."""

    def judge(self, landing: Landing, size: int, *, genuine: bool = True) -> bool:
        """Whether a chunk that has come, in `size` bytes, is right; `genuine`: its seal is."""
        right = genuine and landing.right
        if right != landing.trusted:
            self.received += size if right else -size
        return right


L = TypeVar("L", bound=ChunkLink)


@dataclass(frozen=True, slots=True)
class SendAsk(Generic[L]):
    """Send a request."""

    link: L
    ask: ChunkAsk


@dataclass(frozen=True, slots=True)
class HangUp(Generic[L]):
    """End a connection; `lost` is called once it is over."""

    link: L


@dataclass(frozen=True, slots=True)
class Expect:
    """Tell the readers that wait for this version of bytes that are on their way, by address."""

    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Note:
    """Something for the log."""

    text: str
    warns: bool = True


Action = SendAsk[L] | HangUp[L] | Expect | Note


@dataclass(frozen=True, slots=True)
class WantedVersion:
    """A version to fetch."""

    manifest: Manifest
    into: Callable[[int], memoryview]
    """Where a chunk's bytes go."""
    arrived: Callable[[int], None]
    """Called for each chunk that is there and right, but for those that were there before."""
    no_progress_s: float
    """After so long without a byte the fetch ends."""
