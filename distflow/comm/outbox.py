"""The queue from any thread to the one that owns the sockets.

A message is *under way* from `put` until the kernel has taken its last byte, or until it is dropped. The bytes under
way to one peer are bounded: a peer that is gone, stopped or slow costs no more than that. The newest messages are
dropped, but some room is reserved for small ones.

What waits for one receiver leaves in *bundles*, in order: many messages for the price of one.

Example: results of 2 MiB for a worker that is not there: 32 of them wait, the 33rd is dropped and its Delivery says so,
a heartbeat is still queued behind them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import zmq

from distflow.comm.message import MAX_BUNDLED, Buffer, Message, size_of
from distflow.comm.shared_sending import SharedPayload

QUEUE_BYTES = 64 << 20
"""Most bytes under way to one peer; a larger message is sent if there is no other."""
SMALL_BYTES = 64 << 10
"""Smaller frames are copied into the socket's buffers, which is faster than sharing them."""
BUNDLE_BYTES = 1 << 20
"""Most bytes of several messages that travel as one; larger ones travel alone."""
SMALL_QUEUE_BYTES = 4 << 20
"""Room for small messages beyond `QUEUE_BYTES`."""
OWN_BYTES = 512
"""What a message to oneself counts for beside its payload."""
LOOK_AT = 32


class Delivery:
    """The state of one message, for its sender. Thread-safe."""

    __slots__ = ("_shared", "_trackers", "dropped")

    def __init__(self, shared: SharedPayload | None = None) -> None:
        self._shared = shared
        self.dropped = False
        """There was no room for it, or its receiver could not be reached."""
        self._trackers: Sequence[zmq.MessageTracker] | None = None

    @property
    def left(self) -> bool:
        """Whether it was sent or dropped, so that it takes no memory here any more, in shared memory either."""
        return self.sent and (self._shared is None or self._shared.released)

    @property
    def sent(self) -> bool:
        """Whether the sockets need nothing of it any more."""
        trackers = self._trackers
        return trackers is not None and (not trackers or all([tracker.done for tracker in trackers]))

    @property
    def settled(self) -> bool:
        """Whether it was handed to the socket, or dropped."""
        return self._trackers is not None

    def hand_over(self, trackers: Sequence[zmq.MessageTracker] = ()) -> None:
        """The socket has it; `trackers` say when the socket has released it."""
        self._trackers = trackers

    def drop(self) -> None:
        """It will not be sent."""
        self.dropped, self._trackers = True, ()
        if self._shared is not None:
            self._shared.withdraw()


def delivered() -> Delivery:
    """The Delivery of a message that needed no transport."""
    delivery = Delivery()
    delivery.hand_over()
    return delivery


class Posted:
    """A message for a peer (by name) or back along a route (bytes): its packed entry, then its payload.

    Without frames: end the connection to the peer. `own`: a message to oneself, which is handed over as it is.
    """

    __slots__ = ("compressed", "delivery", "frames", "nbytes", "own", "shared_bytes", "to")

    def __init__(
        self,
        to: str | bytes,
        frames: Sequence[Buffer],
        own: Message | None = None,
        shared: SharedPayload | None = None,
        *,
        compressed: bool = False,
    ) -> None:
        self.compressed = compressed
        self.to = to
        self.frames = frames
        self.own = own
        self.delivery = Delivery(shared)
        self.nbytes = sum(map(size_of, frames))
        """Size of all frames."""
        self.shared_bytes = 0 if shared is None else shared.nbytes
        """Of what lies in shared memory."""
        if own is not None:
            self.nbytes = OWN_BYTES + sum([frame.nbytes for frame in own.payload])

    @property
    def small(self) -> bool:
        """Whether it is only a header, and a short one."""
        return len(self.frames) <= 1 and self.nbytes < SMALL_BYTES


def bundles(posted: Iterable[Posted]) -> Iterator[list[Posted]]:
    """What travels as one: messages to one receiver in order, at most `BUNDLE_BYTES` and `MAX_BUNDLED` of them.

    The end of a connection, and a message to oneself, is a bundle of its own.
    """
    waiting: dict[str | bytes, list[Posted]] = {}
    sizes: dict[str | bytes, int] = {}
    for one in posted:
        alone = not one.frames
        size = sizes.get(one.to, 0) + one.nbytes
        if one.to in waiting and (alone or size > BUNDLE_BYTES or len(waiting[one.to]) == MAX_BUNDLED):
            yield waiting.pop(one.to)
            size = one.nbytes
        if alone:
            sizes.pop(one.to, None)
            yield [one]
        else:
            waiting.setdefault(one.to, []).append(one)
            sizes[one.to] = size
    yield from waiting.values()


@dataclass(slots=True)
class _UnderWay:
    """One receiver's messages: bytes not yet handed over, and messages that the socket still holds."""

    queued: int = 0
    held: deque[tuple[Delivery, int]] = field(default_factory=deque)
    held_bytes: int = 0

    def let_go(self) -> int:
        """Forget messages that have left, in the order they were sent; returns the bytes still under way."""
        while self.held and self.held[0][0].sent:
            self.held_bytes -= self.held.popleft()[1]
        return self.queued + self.held_bytes


class Outbox:
    """Any thread may call `put`, only the sending thread the rest. `fileno` is readable when another thread has put
    a message.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: list[Posted] = []
        self._under_way: dict[str | bytes, _UnderWay] = {}
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._awake = False
        self._sending: int | None = None
        self._accepts = self._open = True

    def sent_by_this_thread(self) -> None:
        """The calling thread sends: it looks for messages before it waits, so that its own need not wake it."""
        self._sending = threading.get_ident()

    def fileno(self) -> int:
        """For a poller."""
        return self._read

    def __len__(self) -> int:
        return len(self._queue)

    def put(
        self,
        to: str | bytes,
        frames: Sequence[Buffer],
        own: Message | None = None,
        shared: SharedPayload | None = None,
        *,
        compressed: bool = False,
    ) -> Delivery:
        """Queue a message, or drop it if there is no room or `refuse` was called."""
        posted = Posted(to, frames, own, shared, compressed=compressed)
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

    def nudge(self) -> None:
        """`wake` without waiting for anybody: not if another thread is at work here, or this one further up."""
        if self._lock.acquire(blocking=False):
            try:
                self._wake()
            finally:
                self._lock.release()

    def refuse(self) -> None:
        """Drop all further messages; those already queued can still be sent."""
        with self._lock:
            self._accepts = False

    def woken(self) -> None:
        """Drain `fileno` after it was readable."""
        # Read first: a byte written after the flag is cleared must stay in the pipe for the next round.
        os.read(self._read, 4096)
        with self._lock:
            self._awake = False

    def take(self) -> list[Posted]:
        """All that is queued, oldest first; call `handed_over` once they were sent or dropped."""
        with self._lock:
            taken, self._queue = self._queue, []
        return taken

    def handed_over(self, bundle: Sequence[Posted]) -> None:
        """These messages to one receiver were sent or dropped; they count as under way until they have left."""
        with self._lock:
            under_way = self._under_way.setdefault(bundle[0].to, _UnderWay())
            for posted in bundle:
                under_way.queued -= posted.nbytes
                if not posted.delivery.sent:
                    under_way.held.append((posted.delivery, posted.nbytes))
                    under_way.held_bytes += posted.nbytes

    def sweep(self) -> None:
        """Forget receivers without messages under way."""
        with self._lock:
            for to in [to for to, under_way in self._under_way.items() if not under_way.let_go()]:
                if not self._under_way[to].queued:
                    del self._under_way[to]

    def close(self) -> None:
        """Drop what is queued and close the descriptors, whose numbers may be used again from here on."""
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
        if self._open and not self._awake and threading.get_ident() != self._sending:
            self._awake = True
            os.write(self._write, b"x")

    def _has_room(self, posted: Posted) -> bool:
        if posted.to not in self._under_way or not (posted.frames or posted.own):
            return True
        before = self._under_way[posted.to].let_go()
        limit = QUEUE_BYTES + (SMALL_QUEUE_BYTES if posted.small else 0)
        return not before or before + posted.nbytes <= limit


class SentOnce:
    """For messages that are repeated until they are answered: which copies are still under way.

    A copy that has left this process may be in buffers of the network for a while: of a slow link these hold seconds.
    For `settle_s` from when it was first seen to have left, it counts as under way.
    """

    def __init__(self, settle_s: float = 0.0) -> None:
        self._settle_s = settle_s
        self._deliveries: dict[str, dict[Hashable, Delivery]] = {}
        self._left_at: dict[Delivery, float] = {}
        self._look_at: dict[str, int] = {}
        """How many copies to one receiver there may be before those that have settled are looked for and forgotten."""

    def under_way(self, to: str, key: Hashable) -> bool:
        """Whether the last copy has not left yet, or only just."""
        return to in self._deliveries and key in self._deliveries[to] and not self._settled(self._deliveries[to][key])

    def note(self, to: str, key: Hashable, delivery: Delivery) -> None:
        """Remember that a copy was sent."""
        copies = self._deliveries.setdefault(to, {})
        if key in copies:
            self._left_at.pop(copies[key], None)
        copies[key] = delivery
        if len(copies) > self._look_at.setdefault(to, LOOK_AT):
            for settled in [other for other, one in copies.items() if self._settled(one)]:
                self._left_at.pop(copies.pop(settled), None)
            self._look_at[to] = 2 * len(copies) + LOOK_AT

    def _settled(self, delivery: Delivery) -> bool:
        if not delivery.left:
            return False
        if delivery.dropped or not self._settle_s:
            return True
        now = time.monotonic()
        return now - self._left_at.setdefault(delivery, now) >= self._settle_s
