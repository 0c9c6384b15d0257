"""The lane to peers of other sites: the payload is one frame compressed by Zstandard, over the same sockets.

The message names the lengths of the payload's frames in place of their number. A receiver unpacks no more than they add
up to, and refuses what would be longer, or is not what they say. Sockets encrypt what is compressed already.

Example: an entry ["results", {…}, [1_048_576]], then one frame of 310 kB.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import zstandard
from msgspec import structs

from distflow.comm.message import Body, Buffer, Message, pack, size_of
from distflow.comm.outbox import Delivery, Outbox
from distflow.errors import ProtocolError

LEAST_BYTES = 1 << 10
"""Smaller payloads are sent as they are."""
LEAST_GAIN = 0.95
"""So is what compression leaves more than this share of."""
LEVEL = 3


class CompressedLane:
    """Compresses on the sending thread; what has more than `most_bytes`, which no receiver unpacks, is left alone."""

    def __init__(self, outbox: Outbox, most_bytes: int) -> None:
        self._outbox = outbox
        self._most_bytes = most_bytes
        self._of_thread = threading.local()

    def send(self, to: str, kind: str, body: Body, payload: Sequence[Buffer]) -> Delivery | None:
        """Queue a message; None if its payload had better travel as it is."""
        sizes = [size_of(frame) for frame in payload]
        total = sum(sizes)
        if not LEAST_BYTES <= total <= self._most_bytes:
            return None
        stream = self._compressor().compressobj(size=total)
        frame = b"".join([*(stream.compress(part) for part in payload), stream.flush()])
        if len(frame) > LEAST_GAIN * total:
            return None
        return self._outbox.put(to, [pack(kind, body, sizes), frame], compressed=True)

    def _compressor(self) -> zstandard.ZstdCompressor:
        found: zstandard.ZstdCompressor | None = self._of_thread.__dict__.get("compressor")
        if found is None:
            found = self._of_thread.compressor = zstandard.ZstdCompressor(level=LEVEL)
        return found


def unpacked(message: Message, most_bytes: int) -> Message:
    """The message with the payload that was sent. Raises ProtocolError if it is not what its lengths say."""
    sizes, (frame,) = message.sizes, message.payload
    total = sum(sizes)
    if total > most_bytes:
        raise ProtocolError(f"{message.sender} compressed {total} bytes; at most {most_bytes} are accepted at once")
    try:
        if zstandard.frame_content_size(frame) != total:
            raise ProtocolError(f"{message.sender} compressed other than the {total} bytes that it announced")
        content = memoryview(zstandard.ZstdDecompressor().decompress(frame))
    except zstandard.ZstdError as error:
        raise ProtocolError(f"a payload from {message.sender} that cannot be unpacked: {error}") from error
    frames, at = [], 0
    for size in sizes:
        frames.append(content[at : at + size])
        at += size
    return structs.replace(message, payload=frames, sizes=())
