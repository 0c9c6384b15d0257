"""Messages on their way from any thread to the one that owns the sockets, and out of the process.

A message is *under way* from `put` until the kernel has taken its last byte, or until it is dropped. What is under way
to one peer is bounded in bytes: a peer that is gone, stopped or slow costs no more than that. The newest messages are
dropped, except that small ones still find some room when large ones have taken theirs.

Example: results of 2 MiB for a worker that is not there: 32 of them wait, the 33rd is dropped and says so, a heartbeat
still goes behind them.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import zmq

from distflow.comm.message import Buffer

QUEUE_BYTES = 64 << 20
"""Under way to one peer at most; a larger message goes when there is no other."""
SMALL_BYTES = 64 << 10
"""Messages below this, without a payload, are copied into the socket's own buffers: faster than sharing them."""
SMALL_QUEUE_BYTES = 4 << 20
"""What small messages may take beyond `QUEUE_BYTES`."""


class Delivery:
    """One message, as its sender sees it. Any thread may look."""

    __slots__ = ("_trackers", "dropped")

    def __init__(self) -> None:
        self.dropped = False
        """There was no room for it, or no way to its receiver."""
        self._trackers: Sequence[zmq.MessageTracker] | None = None

    @property
    def left(self) -> bool:
        """It takes no memory here any more: it was sent, or dropped."""
        return self._trackers is not None and all(tracker.done for tracker in self._trackers)

    def hand_over(self, trackers: Sequence[zmq.MessageTracker] = ()) -> None:
        """The socket has it; `trackers` say when the socket has let go of it."""
        self._trackers = trackers

    def drop(self) -> None:
        """It will not be sent."""
        self.dropped, self._trackers = True, ()


def delivered() -> Delivery:
    """Of a message that took no way at all."""
    delivery = Delivery()
    delivery.hand_over()
    return delivery


@dataclass(slots=True)
class Posted:
    """A message for a peer (by name) or back along a route (bytes). Without frames: end the connection to the peer."""

    to: str | bytes
    frames: Sequence[Buffer]
    delivery: Delivery

    @property
    def nbytes(self) -> int:
        """Of all frames."""
        return sum(memoryview(frame).nbytes for frame in self.frames)

    @property
    def small(self) -> bool:
        """Whether it is a header alone, and a short one."""
        return len(self.frames) <= 1 and self.nbytes < SMALL_BYTES


@dataclass(slots=True)
class _UnderWay:
    """To one receiver: bytes not yet handed over, and what was handed over and is still held."""

    queued: int = 0
    held: deque[tuple[Delivery, int]] = field(default_factory=deque)
    held_bytes: int = 0

    def let_go(self) -> int:
        """Forget what has left, in the order in which it was sent; returns the bytes that are still under way."""
        while self.held and self.held[0][0].left:
            self.held_bytes -= self.held.popleft()[1]
        return self.queued + self.held_bytes


class Outbox:
    """`put` from any thread, all else by the thread that sends. `fileno` becomes readable when there is something."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[Posted] = deque()
        self._under_way: dict[str | bytes, _UnderWay] = {}
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._awake = False
        self._accepts = self._open = True

    def fileno(self) -> int:
        """For a poller."""
        return self._read

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, to: str | bytes, frames: Sequence[Buffer]) -> Delivery:
        """Queue a message, or drop it if there is no room (or the outbox takes no more)."""
        posted = Posted(to, frames, Delivery())
        with self._lock:
            if self._accepts and self._has_room(posted):
                self._under_way.setdefault(to, _UnderWay()).queued += posted.nbytes
                self._queue.append(posted)
                self._wake()
            else:
                posted.delivery.drop()
        return posted.delivery

    def wake(self) -> None:
        """Make `fileno` readable."""
        with self._lock:
            self._wake()

    def refuse(self) -> None:
        """From now on nothing more is taken; what is queued can still be sent."""
        with self._lock:
            self._accepts = False

    def woken(self) -> None:
        """`fileno` was readable: read it empty."""
        # Read first: a byte written after the flag is cleared must stay in the pipe for the next round.
        os.read(self._read, 4096)
        with self._lock:
            self._awake = False

    def take(self) -> Posted | None:
        """The oldest message; tell `handed_over` when its delivery has been settled."""
        return self._queue.popleft() if self._queue else None

    def handed_over(self, posted: Posted) -> None:
        """This message was sent or dropped; it counts until it has left."""
        with self._lock:
            under_way = self._under_way.setdefault(posted.to, _UnderWay())
            under_way.queued -= posted.nbytes
            if not posted.delivery.left:
                under_way.held.append((posted.delivery, posted.nbytes))
                under_way.held_bytes += posted.nbytes

    def sweep(self) -> None:
        """Forget receivers to which nothing is under way."""
        with self._lock:
            for to in [to for to, under_way in self._under_way.items() if not under_way.let_go()]:
                if not self._under_way[to].queued:
                    del self._under_way[to]

    def close(self) -> None:
        """Drop what is queued and let go of the descriptors, whose numbers may name something else from here on."""
        with self._lock:
            self._accepts = False
            for posted in self._queue:
                posted.delivery.drop()
            self._queue.clear()
            if self._open:
                self._open = False
                os.close(self._read)
                os.close(self._write)

    def _wake(self) -> None:
        if self._open and not self._awake:
            self._awake = True
            os.write(self._write, b"x")

    def _has_room(self, posted: Posted) -> bool:
        if posted.to not in self._under_way or not posted.frames:
            return True
        before = self._under_way[posted.to].let_go()
        limit = QUEUE_BYTES + (SMALL_QUEUE_BYTES if posted.small else 0)
        return not before or before + posted.nbytes <= limit


class SentOnce:
    """For what is sent again and again until it is answered: which of it is under way, so that no copy joins it."""

    def __init__(self) -> None:
        self._deliveries: dict[str, dict[Hashable, Delivery]] = {}

    def under_way(self, to: str, key: Hashable) -> bool:
        """Whether the last copy of this has not left yet."""
        return to in self._deliveries and key in self._deliveries[to] and not self._deliveries[to][key].left

    def note(self, to: str, key: Hashable, delivery: Delivery) -> None:
        """A copy was sent."""
        others = self._deliveries[to].items() if to in self._deliveries else ()
        self._deliveries[to] = {other: one for other, one in others if not one.left} | {key: delivery}
