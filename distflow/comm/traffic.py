"""What an endpoint has sent and received."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

INPROC, SHM, ZMQ, ZSTD, GLOO, NIXL = "inproc", "shm", "zmq", "zstd", "gloo", "nixl"
"""The lanes: to oneself, nothing is encoded; through shared memory; over the sockets; over them to another site,
compressed; weights in parts, over Gloo's; weights that are read at their publisher, counted by the reader."""
_COUNTING = threading.Lock()


@dataclass(slots=True)
class LaneTraffic:
    """What was sent by one lane."""

    messages: int = 0
    bytes: int = 0
    """Of payloads; in the sockets of headers too, those of messages whose payload is in shared memory among them."""


@dataclass(slots=True)
class Traffic:
    """Bytes and messages so far, for the status."""

    sent: int = 0
    received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    dropped: int = 0
    refused: int = 0
    """Connections refused because of their key, by us or by a peer."""
    lanes: dict[str, LaneTraffic] = field(
        default_factory=lambda: {lane: LaneTraffic() for lane in (INPROC, SHM, ZMQ, ZSTD, GLOO, NIXL)}
    )

    def count_dropped(self, messages: int) -> None:
        """Add messages that were dropped. Thread-safe."""
        with _COUNTING:
            self.dropped += messages

    def count_sent(self, messages: int, nbytes: int, in_memory: Sequence[int], compressed: Sequence[int]) -> None:
        """Add what has gone into the sockets: so many messages, with bytes of the payloads of some that lie in shared
        memory, and of those that were compressed. For the thread of the sockets.
        """
        self.sent += messages
        self.bytes_sent += nbytes + sum(in_memory)
        if in_memory:
            self.count(SHM, len(in_memory), sum(in_memory))
        if compressed:
            self.count(ZSTD, len(compressed), sum(compressed))
        self.count(ZMQ, messages - len(in_memory) - len(compressed), nbytes - sum(compressed))

    def count(self, lane: str, messages: int, nbytes: int) -> None:
        """Add what a lane has taken. Thread-safe."""
        with _COUNTING:
            self.lanes[lane].messages += messages
            self.lanes[lane].bytes += nbytes
