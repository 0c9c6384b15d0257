"""The sending half of the lane through shared memory: one segment for one peer, and what it holds of it."""

from __future__ import annotations

import secrets
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

from distflow.comm.arena import ALIGN, Arena, Block, aligned
from distflow.comm.shared_segment import OwnSegment
from distflow.errors import ProtocolError

BLOCK_BYTES = 1 << 20
"""Frames are packed into blocks of at most this size; a larger frame has a block of its own."""
LIMIT_BYTES = 128 << 20
"""Size of the segment for one peer. One message can take half of it and leave room for the next."""
STEP_BYTES = 256 << 10
"""A segment grows by multiples of this: with many peers, each gets little at a time."""
MOST_STEP_BYTES = 8 << 20
"""It doubles, by at most this much at a time unless a message needs more; where there is no room for that, it grows by
what the message needs."""
WORKER_BYTES = 4 * LIMIT_BYTES
"""Most memory that the segments of one worker take together. Samples there count at their owner, which grants no more
leases than it has room for, wherever their results lie."""
HEADER = Struct("<qq")
"""In front of a block's frames: its generation, and the size of the block."""
HEADER_BYTES = ALIGN


@dataclass(slots=True)
class SegmentUse:
    """What one peer's segment carries, for the status."""

    messages: int = 0
    nbytes: int = 0
    held: int = 0
    """Bytes that the peer has not released yet."""
    mapped: bool = False
    full: int = 0
    """Messages that found no room, and took the sockets."""


class Room:
    """What the segments of one worker take together. Thread-safe.

    Half of it is kept for `peers()` that there may be, the same for each; more than that is taken of the other half,
    by who comes first.
    """

    def __init__(self, nbytes: int, peers: Callable[[], int] = lambda: 1) -> None:
        self._nbytes = nbytes
        self._peers = peers
        self._taken: dict[int, int] = {}
        """By segment."""
        self._lock = threading.Lock()

    def take(self, segment: int, nbytes: int) -> bool:
        """Whether there was room for so much more of a segment."""
        with self._lock:
            others = [taken for number, taken in self._taken.items() if number != segment]
            own = sum(self._taken.values()) - sum(others)
            peers = max(self._peers(), len(others) + 1)
            share = self._nbytes // (2 * peers)
            kept = share * (peers - 1) - sum([min(share, taken) for taken in others])
            left = self._nbytes - sum(others) - own - nbytes
            fits = left >= (0 if own + nbytes <= share else kept)
            if fits:
                self._taken[segment] = own + nbytes
        return fits

    def give_back(self, segment: int, nbytes: int) -> None:
        """What was taken is free again."""
        with self._lock:
            self._taken[segment] -= nbytes
            if not self._taken[segment]:
                del self._taken[segment]


class SharedPayload:
    """The frames of one message in blocks of a segment. Thread-safe."""

    __slots__ = ("_blocks", "_segment", "nbytes", "references")

    def __init__(self, segment: OutgoingSegment, blocks: dict[int, Block], references: bytes, nbytes: int) -> None:
        self._segment: OutgoingSegment | None = segment
        """None once nothing of it is there: whoever remembers this message does not keep the memory."""
        self._blocks = blocks
        self.references = references
        """What the receiver finds them by."""
        self.nbytes = nbytes

    @property
    def released(self) -> bool:
        """Whether the receiver has released all of it, or is gone."""
        return not self._blocks

    def release(self, generation: int) -> None:
        """The receiver needs this block no longer."""
        self._blocks.pop(generation, None)
        if not self._blocks:
            self._segment = None

    def withdraw(self) -> None:
        """The message was not sent: nobody will release it."""
        segment, blocks = self._segment, list(self._blocks.values())
        if segment is not None:
            segment.free([number for block in blocks for number in (block.offset, block.generation)])


class OutgoingSegment:
    """The segment for one peer, which grows as long as there is `room`."""

    def __init__(self, room: Room) -> None:
        self.number = secrets.randbits(60)
        """Differs from that of any other segment, those of an earlier process of this worker among them."""
        self.segment = OwnSegment(LIMIT_BYTES)
        self.offered_at = 0.0
        self.use = SegmentUse()
        self._arena = Arena(LIMIT_BYTES)
        self._room = room
        self._payloads: dict[int, SharedPayload] = {}
        self._lock = threading.Lock()
        self._closed = False

    @property
    def offer(self) -> dict[str, Any]:
        """What the peer maps it by."""
        segment = self.segment
        where = {"pid": segment.pid, "handle": segment.handle}
        return {"number": self.number, "name": segment.name, "size": segment.limit, **where}

    def taken(self) -> None:
        """The peer has mapped it."""
        self.use.mapped = True

    def put(self, frames: Sequence[memoryview]) -> SharedPayload | None:
        """Copy the frames; None if there is no room."""
        parts = _parts(frames)
        with self._lock:
            blocks = None if self._closed else self._take([size for size, _ in parts])
            if blocks is None:
                self.use.full += 1
                return None
            references = array("q", [self.number])
            for block, (_, inside) in zip(blocks, parts, strict=True):
                references.extend((block.offset, block.generation, len(inside), *map(len, inside)))
            held = {block.generation: block for block in blocks}
            payload = SharedPayload(self, held, references.tobytes(), sum(map(len, frames)))
            self._payloads.update(dict.fromkeys(held, payload))
            self.use.messages += 1
            self.use.nbytes += payload.nbytes
            self.use.held = self._arena.held
        # Not under the lock: nobody else knows these blocks yet.
        view = self.segment.view
        for block, (_, inside) in zip(blocks, parts, strict=True):
            at = block.offset + HEADER_BYTES
            for frame in inside:
                view[at : at + len(frame)] = frame
                at += aligned(len(frame))
            HEADER.pack_into(view, block.offset, block.generation, block.size)
        return payload

    def free(self, references: Sequence[int]) -> None:
        """Give blocks back: offset and generation of each. Raises ProtocolError if one of them is not held."""
        stale: ProtocolError | None = None
        with self._lock:
            for offset, generation in zip(references[::2], references[1::2], strict=False) if not self._closed else ():
                try:
                    block = self._arena.release(offset, generation)
                except ProtocolError as error:
                    stale = error
                    continue
                HEADER.pack_into(self.segment.view, block.offset, -1, 0)
                self._payloads.pop(generation).release(generation)
            self.use.held = self._arena.held
        if stale is not None:
            raise stale

    def close(self) -> None:
        """Give up the segment and everything in it."""
        with self._lock:
            if self._arena.size and not self._closed:
                self._room.give_back(self.number, self._arena.size)
            self._closed = True
            for generation, payload in self._payloads.items():
                payload.release(generation)
            self._payloads.clear()
            self.use.held, self.use.mapped = 0, False
            self.segment.close()

    def _take(self, sizes: Sequence[int]) -> list[Block] | None:
        blocks: list[Block] = []
        for size in sizes:
            block = self._arena.take(size)
            if block is None and self._grow(sum(map(aligned, sizes[len(blocks) :]))):
                block = self._arena.take(size)
            if block is None:
                for one in blocks:
                    self._arena.release(one.offset, one.generation)
                return None
            blocks.append(block)
        return blocks

    def _grow(self, missing: int) -> bool:
        before = self._arena.size
        needed = missing + (-missing % STEP_BYTES)
        for more in (max(needed, min(before, MOST_STEP_BYTES)), needed):
            size = min(LIMIT_BYTES, before + more)
            if size > before and self._room.take(self.number, size - before):
                if self.segment.grow(size):
                    self._arena.grow(size)
                    return True
                self._room.give_back(self.number, size - before)
        return False


def _parts(frames: Sequence[memoryview]) -> list[tuple[int, list[memoryview]]]:
    """The frames in order, divided into blocks: the size of each with its header, and what it holds."""
    parts: list[tuple[int, list[memoryview]]] = []
    size, inside = HEADER_BYTES, list[memoryview]()
    for frame in frames:
        if inside and size + aligned(len(frame)) > BLOCK_BYTES:
            parts.append((size, inside))
            size, inside = HEADER_BYTES, []
        size += aligned(len(frame))
        inside.append(frame)
    return [*parts, (size, inside)]
