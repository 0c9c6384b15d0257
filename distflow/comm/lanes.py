"""The ways to a peer: to oneself, through shared memory, over the sockets. An endpoint takes the first that will.

Which ones a peer has follows from its address; a lane that cannot carry a message (too small, no room, not set up yet)
leaves it to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from distflow.comm.message import Body, Buffer, Message, pack, size_of
from distflow.comm.outbox import Delivery, Outbox
from distflow.comm.shared_lane import SharedLane
from distflow.errors import ProtocolError

TO_MYSELF = b""
"""Route of a message that a worker sent to itself."""


class Lane(Protocol):
    """One way to a peer."""

    def send(self, to: str, kind: str, body: Body, payload: Sequence[Buffer]) -> Delivery | None:
        """Queue a message; None if the next lane must take it. Any thread may call it, and it never blocks.

        Raises ProtocolError for a message that no receiver accepts.
        """


class InProcessLane:
    """To oneself: the very same objects, and nothing is encoded."""

    def __init__(self, outbox: Outbox, name: str, incarnation: int) -> None:
        self._outbox = outbox
        self._name = name
        self._incarnation = incarnation

    def send(self, to: str, kind: str, body: Body, payload: Sequence[Buffer]) -> Delivery:
        """Queue it for the endpoint's own thread."""
        views = [memoryview(frame) for frame in payload]
        return self._outbox.put(to, (), Message(kind, self._name, self._incarnation, body, views, TO_MYSELF))


class SocketLane:
    """To anyone: header and payload are frames of a ZeroMQ message. Peers accept frames of at most `most_bytes`."""

    def __init__(self, outbox: Outbox, name: str, most_bytes: int) -> None:
        self._outbox = outbox
        self._name = name
        self._most_bytes = most_bytes

    def send(self, to: str | bytes, kind: str, body: Body, payload: Sequence[Buffer] = ()) -> Delivery:
        """Queue it for a peer, or back along a route."""
        header = pack(kind, body, len(payload))
        self.check([header])
        return self._outbox.put(to, [header, *payload])

    def check(self, frames: Sequence[Buffer]) -> None:
        """Raises ProtocolError if a peer would not accept these frames."""
        largest = max(map(size_of, frames), default=0)
        if largest > self._most_bytes:
            raise ProtocolError(
                f"{self._name} cannot send {largest} bytes at once: the workers of this run accept at most "
                f"{self._most_bytes} (by the largest result of the plan) — let steps write smaller fields, or "
                "raise data.max_prompt_tokens or max_new_tokens to the real lengths of the samples"
            )


class SharedMemoryLane:
    """To peers on this machine: the payload lies in shared memory, and what says where takes the sockets."""

    def __init__(self, outbox: Outbox, shared: SharedLane, sockets: SocketLane) -> None:
        self._outbox = outbox
        self._shared = shared
        self._sockets = sockets

    def send(self, to: str, kind: str, body: Body, payload: Sequence[Buffer]) -> Delivery | None:
        """Copy the payload and queue the rest; None for small payloads, and while there is no room."""
        shared = self._shared.put(to, payload) if payload else None
        if shared is None:
            return None
        try:
            header = pack(kind, body, shared.references)
            self._sockets.check([header])
        except ProtocolError:
            shared.withdraw()
            raise
        return self._outbox.put(to, [header], None, shared)
