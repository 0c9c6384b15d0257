"""The lane through shared memory, for payloads to peers on the same machine: copied once, and read where they lie.

For each peer a sender has one segment, which it offers the first time that it has something for it. Until the peer has
mapped it, and whenever it is full or all segments of the worker take as much as they may, payloads take the sockets.
The frames of a message lie in blocks of about 1 MiB, and the message names them: segment, offset, generation and
lengths. The receiver checks each against the bounds of the segment and against the generation that stands in front of
the block, and makes read-only views. When the last view of a block is gone, on whichever thread, the block is released
with the next batch, and the sender uses it again.

A block is written again only after that: when a peer is gone, or says that it knows nothing of a segment, the segment
as a whole is given up, and the next payload begins another one. So a reader that was taken for dead still reads what
was sent to it. Neither end waits for the other.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from distflow.comm.message import Buffer, Message
from distflow.comm.outbox import Delivery
from distflow.comm.shared_reading import IncomingSegments, SegmentOffer, numbers_in
from distflow.comm.shared_segment import MOST_BYTES
from distflow.comm.shared_sending import WORKER_BYTES, OutgoingSegment, Room, SegmentUse, SharedPayload
from distflow.data.decoding import MOST, Form, Whole, read
from distflow.errors import ProtocolError
from distflow.log import logger

LEAST_BYTES = 16 << 10
"""Smaller payloads take the sockets: copying them there costs less than two messages about them."""
OFFER_EVERY_S = 1.0
"""An offer that was not answered is repeated after this time, if there is something to send."""
FREE_AGAIN_S = 0.1
"""How often what was told of free blocks is looked at: it may have been dropped, like any message."""
OFFER, TAKEN, DECLINED, UNKNOWN, FREED = "lane.offer", "lane.taken", "lane.declined", "lane.unknown", "lane.freed"
KINDS = frozenset({OFFER, TAKEN, DECLINED, UNKNOWN, FREED})
"""Messages of this lane, between endpoints."""
_Tell = Callable[[str, str, Mapping[str, Any]], Delivery]

log = logger(__name__)


class _About(Form, frozen=True):
    number: Whole


class _Freed(Form, frozen=True):
    number: Whole
    blocks: bytes


@dataclass(frozen=True, slots=True)
class _Freeing:
    """Blocks that their sender was told to be free: until that has gone out, it waits for them."""

    delivery: Delivery
    sender: str
    number: int
    blocks: bytes


class SharedLane:
    """Both directions of an endpoint. `put` may be called by any thread, all else by the endpoint's own.

    `offers`: whether it sends through shared memory, to as many as `peers` says at most. `tell` sends a message. `wake`
    is called on any thread when there is something for `flush`; it must take no lock, since views may be dropped
    anywhere.
    """

    def __init__(
        self,
        offers: bool,
        tell: _Tell,
        wake: Callable[[], None],
        most_bytes: int = MOST_BYTES,
        peers: Callable[[], int] = lambda: 1,
    ) -> None:
        self._offers = offers
        self._tell = tell
        self._pid = os.getpid()
        self._room = Room(WORKER_BYTES, peers)
        self._lock = threading.Lock()
        self._outgoing: dict[str, OutgoingSegment] = {}
        self._without: set[str] = set()
        """Peers that cannot map a segment of this process."""
        self._incoming = IncomingSegments(wake, most_bytes)
        self._freeing: list[_Freeing] = []
        self._free_again_at = 0.0

    def uses(self) -> dict[str, SegmentUse]:
        """What was sent to each peer."""
        with self._lock:
            return {name: outgoing.use for name, outgoing in self._outgoing.items()}

    def put(self, to: str, frames: Sequence[Buffer]) -> SharedPayload | None:
        """Copy a payload into the segment of a peer; None if it is too small, or must take the sockets."""
        parts = [memoryview(frame).cast("B") for frame in frames]
        if sum(map(len, parts)) < LEAST_BYTES or os.getpid() != self._pid:
            return None
        outgoing = self._outgoing.get(to)
        if outgoing is None or not outgoing.use.mapped:
            self._offer(to)
            return None
        return outgoing.put(parts)

    def receive(self, message: Message) -> Message | None:
        """What an endpoint receives: a message with its payload, or None if it was one of this lane.

        Raises ProtocolError for one that is malformed, or refers to what is not there.
        """
        if message.kind in KINDS:
            self._handle(message)
            return None
        if not message.references:
            return message
        try:
            payload = self._incoming.read(message.sender, message.references)
        except ProtocolError:
            # The sender begins another segment.
            number = int.from_bytes(message.references[:8], "little") % MOST
            self._tell(message.sender, UNKNOWN, {"number": number})
            raise
        return structs.replace(message, payload=payload, references=b"")

    def flush(self) -> None:
        """Tell each sender what was released since the last time, and again what did not go out."""
        if self._freeing and time.monotonic() >= self._free_again_at:
            told, self._freeing = self._freeing, []
            for one in told:
                if one.delivery.dropped:
                    self._incoming.release_again(one.sender, one.number, one.blocks)
                elif not one.delivery.settled:
                    self._freeing.append(one)
            self._free_again_at = time.monotonic() + FREE_AGAIN_S
        for sender, number, blocks in self._incoming.released():
            delivery = self._tell(sender, FREED, {"number": number, "blocks": blocks})
            self._freeing.append(_Freeing(delivery, sender, number, blocks))

    def forget(self, name: str) -> None:
        """A peer is gone: free what it held, and unmap what it offered once its views here are gone."""
        self._give_up(name)
        self._without.discard(name)
        self._incoming.forget(name)

    def close(self) -> None:
        """Remove all segments; views that are left stay readable."""
        with self._lock:
            self._offers = False
        for name in list(self._outgoing):
            self._give_up(name)
        self._incoming.clear()

    def _offer(self, to: str) -> None:
        now = time.monotonic()
        with self._lock:
            outgoing = self._outgoing.get(to)
            if to in self._without or not self._offers:
                return
            if outgoing is None:
                try:
                    outgoing = self._outgoing[to] = OutgoingSegment(self._room)
                except OSError as error:
                    self._without.add(to)
                    log.warning("no shared memory for what goes to %s, which takes the sockets: %s", to, error)
                    return
            elif now < outgoing.offered_at + OFFER_EVERY_S:
                return
            outgoing.offered_at = now
        self._tell(to, OFFER, outgoing.offer)

    def _give_up(self, name: str) -> None:
        with self._lock:
            outgoing = self._outgoing.pop(name, None)
        if outgoing is not None:
            outgoing.close()

    def _handle(self, message: Message) -> None:
        sender, kind = message.sender, message.kind
        if kind == OFFER:
            self._on_offer(sender, read(message.body, SegmentOffer, kind))
            return
        freed = read(message.body, _Freed, kind) if kind == FREED else None
        about = freed or read(message.body, _About, kind)
        outgoing = self._outgoing.get(sender)
        if outgoing is None or outgoing.number != about.number:
            return
        if freed is not None:
            outgoing.free(numbers_in(freed.blocks))
        elif kind == TAKEN:
            outgoing.taken()
        else:
            self._give_up(sender)
            if kind == DECLINED:
                self._without.add(sender)

    def _on_offer(self, sender: str, offer: SegmentOffer) -> None:
        try:
            self._incoming.map(sender, offer)
        except ProtocolError as error:
            log.warning("what %s sends takes the sockets: %s", sender, error)
            self._tell(sender, DECLINED, {"number": offer.number})
        else:
            self._tell(sender, TAKEN, {"number": offer.number})
