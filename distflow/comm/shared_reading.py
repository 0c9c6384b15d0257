"""The receiving half of the lane through shared memory: checked references become read-only views."""

from __future__ import annotations

import os
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from distflow.comm.arena import ALIGN, aligned
from distflow.comm.message import Buffer
from distflow.comm.shared_segment import MOST_BYTES, PeerSegment, SegmentName
from distflow.comm.shared_sending import HEADER, HEADER_BYTES
from distflow.data.decoding import Form, Whole
from distflow.errors import ProtocolError

_NUMBER_BYTES = 8


class SegmentOffer(Form, frozen=True):
    """What a segment is found by: the process that writes it, and its descriptor there."""

    number: Whole
    name: SegmentName
    size: Annotated[int, msgspec.Meta(gt=0, le=MOST_BYTES)]
    pid: Whole
    handle: Whole


class _View(weakref.ref[Any]):
    """Knows which block is released when its array is gone."""

    __slots__ = ("key",)
    key: tuple[str, int, int, int]


class IncomingSegments:
    """What peers have offered, and what is read of it. Used on one thread; only views may be dropped on any.

    `wake` is called when there is something for `released`; it must take no lock, since views may be dropped anywhere.
    """

    def __init__(self, wake: Callable[[], None], most_bytes: int) -> None:
        self._wake = wake
        self._most_bytes = most_bytes
        """Longest frame that is accepted."""
        self._pid = os.getpid()
        self._segments: dict[str, tuple[int, PeerSegment]] = {}
        self._views: dict[tuple[str, int, int, int], _View] = {}
        self._released: deque[tuple[str, int, int, int]] = deque()

    @property
    def views(self) -> int:
        """How many blocks are being read."""
        return len(self._views)

    def map(self, sender: str, offer: SegmentOffer) -> None:
        """Map an offered segment in place of the last one. Raises ProtocolError if it cannot be mapped."""
        if self._number(sender) != offer.number:
            self._segments[sender] = (offer.number, PeerSegment(offer.pid, offer.handle, offer.name, offer.size))

    def forget(self, sender: str) -> None:
        """Unmap what a peer offered, once its views are gone."""
        self._segments.pop(sender, None)

    def clear(self) -> None:
        """Forget all peers."""
        self._segments.clear()

    def read(self, sender: str, references: Buffer) -> list[memoryview]:
        """Read-only views of the frames that a message refers to.

        Raises ProtocolError if a reference is not to a block of this sender, whose segment is forgotten then.
        """
        number, *numbers = numbers_in(references) or [-1]
        if number < 0 or self._number(sender) != number:
            raise ProtocolError(f"a payload in segment {number} of {sender}, which is not mapped here")
        try:
            return self._frames((sender, number), numbers)
        except ProtocolError:
            self.forget(sender)
            raise

    def released(self) -> Iterator[tuple[str, int, bytes]]:
        """Sender, segment, and the blocks of it that nobody reads any longer since the last time."""
        freed: dict[tuple[str, int], array[int]] = {}
        for _ in range(len(self._released)):
            name, number, offset, generation = self._released.popleft()
            freed.setdefault((name, number), array("q")).extend((offset, generation))
        for (name, number), blocks in freed.items():
            if self._number(name) == number:
                yield name, number, blocks.tobytes()

    def release_again(self, sender: str, number: int, blocks: bytes) -> None:
        """Its sender was not told."""
        numbers = numbers_in(blocks)
        self._released.extend((sender, number, *block) for block in zip(numbers[::2], numbers[1::2], strict=True))

    def _number(self, sender: str) -> int:
        return self._segments[sender][0] if sender in self._segments else -1

    def _frames(self, source: tuple[str, int], numbers: Sequence[int]) -> list[memoryview]:
        frames: list[memoryview] = []
        at, end = 0, len(numbers)
        while at < end:
            if at + 3 > end or not 0 < numbers[at + 2] <= end - at - 3:
                raise ProtocolError("references to a payload that end too early")
            offset, generation, count = numbers[at : at + 3]
            block = self._block(source, offset, generation)
            begin = 0
            for length in numbers[at + 3 : at + 3 + count]:
                if not 0 <= length <= min(len(block) - begin, self._most_bytes):
                    raise ProtocolError(f"a frame of {length} bytes in {len(block) - begin} bytes of a block")
                frames.append(block[begin : begin + length])
                begin += aligned(length)
            at += 3 + count
        return frames

    def _block(self, source: tuple[str, int], offset: int, generation: int) -> memoryview:
        segment = self._segments[source[0]][1]
        if offset < 0 or offset % ALIGN or offset + HEADER_BYTES > segment.limit:
            raise ProtocolError(f"a block at offset {offset} of a segment of {segment.limit} bytes")
        found, size = HEADER.unpack_from(segment.memory, offset)
        key = (*source, offset, generation)
        if found != generation or key in self._views:
            there = "which is read already" if found == generation else f"where generation {found} lies"
            raise ProtocolError(f"a stale reference to generation {generation} at offset {offset}, {there}")
        if not HEADER_BYTES <= size <= segment.limit - offset:
            raise ProtocolError(f"a block of {size} bytes at offset {offset} of a segment of {segment.limit} bytes")
        segment.touch(offset + size)
        # A view cannot be watched: what is sliced from it outlives it. All of them keep the array they are made from.
        whole = np.frombuffer(segment.memory, np.uint8, size - HEADER_BYTES, offset + HEADER_BYTES)
        view = _View(whole, self._dropped)
        view.key = key
        self._views[key] = view
        return whole.data

    def _dropped(self, view: _View) -> None:
        """On any thread, and anywhere in its code: only what is atomic."""
        if self._views.pop(view.key, None) is not None and os.getpid() == self._pid:
            self._released.append(view.key)
            self._wake()


def numbers_in(data: Buffer) -> list[int]:
    """The numbers in references, or in blocks that were released."""
    if len(data) % _NUMBER_BYTES:
        raise ProtocolError(f"references of {len(data)} bytes; expected a multiple of {_NUMBER_BYTES}")
    numbers = array("q")
    numbers.frombytes(data)
    return numbers.tolist()
