"""The wire format: a msgpack header, then frames of raw bytes. Nothing is ever unpickled or evaluated.

One multipart message carries everything that waits for a peer at the moment of sending: its header is
[format, sender, incarnation, entries], each entry [kind, body, number of payload frames] is a message of its own, and
the payload frames of all entries follow in order. In place of the number of frames, an entry has the references of a
payload that lies in shared memory (`shared_lane.py`), or the lengths of one that is compressed (`compressed_lane.py`).

Example: [3, "rollout/0", 0, [["results", {…}, 1], ["ask", {…}, 0]]], then one frame: the rows of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack
import msgspec

from distflow.data.decoding import MAX_NAME_CHARACTERS, MOST, decoder, shown
from distflow.errors import ProtocolError

WIRE_FORMAT = 3
MAX_HEADER_BYTES = 64 << 20
"""Messages with samples or leases stay far below; larger headers are refused by the sender and by the receiver."""
MAX_PREFIX_BYTES = 4 << 10
"""Room in a header for what is not an entry: the sender's name takes at most four bytes a character."""
MAX_BUNDLED = 256
"""Most messages that travel as one."""
MAX_CONTAINERS = 1 << 20
"""Most lists and maps in a message: an empty one takes one byte on the wire, but about a hundred in memory."""
UNCOUNTED_BYTES = MAX_CONTAINERS
"""Shorter messages cannot contain more of them, so they are not counted."""
Buffer = bytes | bytearray | memoryview
Body = Mapping[str, Any] | msgspec.Struct
"""What is said in a message: plain values by name, or a form (`decoding.py`) of them."""


class Message(msgspec.Struct, frozen=True):
    """A received message. `sender` and `incarnation` identify the peer; `route` is where a reply goes."""

    kind: str
    sender: str
    incarnation: int
    body: Any
    """Plain values by name; of a message to oneself the very object that was sent."""
    payload: Sequence[memoryview] = ()
    route: bytes | None = None
    references: bytes = b""
    """Where the payload lies in shared memory, until it has been found."""
    sizes: Sequence[int] = ()
    """The lengths of the frames that are compressed in the only one of the payload, until it has been unpacked."""


def size_of(frame: Buffer) -> int:
    """Bytes of a frame."""
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)


def pack(kind: str, body: Body, payload: int | bytes | Sequence[int] = 0) -> bytes:
    """One message as an entry of a header; `payload`: how many frames, the references to what is in shared memory, or
    the lengths of what is compressed.

    Raises ProtocolError if no receiver would accept it.
    """
    packed = _ENCODER.encode((kind, body, payload))
    if len(packed) > MAX_HEADER_BYTES - MAX_PREFIX_BYTES:
        raise ProtocolError(
            f"a {kind!r} message with a header of {len(packed)} bytes cannot be sent: receivers accept at most "
            f"{MAX_HEADER_BYTES} — large values belong in the payload"
        )
    return packed


def prefix_of(sender: str, incarnation: int) -> bytes:
    """What every header of this sender begins with."""
    return b"\x94" + b"".join(map(_ENCODER.encode, (WIRE_FORMAT, sender, incarnation)))


def header_of(prefix: bytes, entries: Sequence[Buffer]) -> bytes:
    """The header frame of at most `MAX_BUNDLED` packed messages."""
    assert 0 < len(entries) <= MAX_BUNDLED, f"{len(entries)} messages in one"
    return b"".join((prefix, b"\xdc", len(entries).to_bytes(2, "big"), *entries))


def encode(kind: str, sender: str, incarnation: int, body: Body, payload_frames: int = 0) -> bytes:
    """The header frame of a single message. Raises ProtocolError if no receiver would accept it."""
    return header_of(prefix_of(sender, incarnation), [pack(kind, body, payload_frames)])


def decode(header: Buffer, payload: Sequence[memoryview] = (), route: bytes | None = None) -> Message:
    """Parse a header of exactly one message; raises ProtocolError if it is malformed or has more."""
    messages = decode_all(header, payload, route)
    if len(messages) != 1:
        raise ProtocolError(f"{len(messages)} messages from {messages[0].sender} in one; expected a single one here")
    return messages[0]


def decode_all(header: Buffer, payload: Sequence[memoryview] = (), route: bytes | None = None) -> list[Message]:
    """Parse and check a header: its messages, at least one, in order. Raises ProtocolError if any is malformed."""
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(header)} bytes; at most {MAX_HEADER_BYTES} are accepted")
    fields = unpack(header, "a header")
    if not isinstance(fields, list) or not fields:
        raise ProtocolError("a header that is not [format, sender, incarnation, entries]")
    if type(fields[0]) is not int or fields[0] != WIRE_FORMAT:
        raise ProtocolError(f"wire format {shown(fields[0])}; expected {WIRE_FORMAT}: run the same code everywhere")
    if len(fields) != 4:
        raise ProtocolError("a header that is not [format, sender, incarnation, entries]")
    _, sender, incarnation, entries = fields
    if not (_is_name(sender) and type(incarnation) is int and 0 <= incarnation < MOST and type(entries) is list):
        raise ProtocolError(f"a header with wrong types: sender {shown(sender)}, incarnation {shown(incarnation)}")
    if not 0 < len(entries) <= MAX_BUNDLED:
        raise ProtocolError(f"{len(entries)} messages from {sender} in one; expected 1 … {MAX_BUNDLED}")
    messages: list[Message] = []
    at = 0
    for entry in entries:
        kind, body, references, sizes, count = _checked(entry, sender)
        frames = payload[at : at + count] if count else ()
        messages.append(Message(kind, sender, incarnation, body, frames, route, references, sizes))
        at += count
    if at != len(payload):
        raise ProtocolError(f"messages from {sender} with {len(payload)} payload frames; their header announces {at}")
    return messages


def _checked(entry: object, sender: str) -> tuple[str, dict[str, Any], bytes, Sequence[int], int]:
    if type(entry) is not list or len(entry) != 3:
        raise ProtocolError(f"an entry from {sender} that is not [kind, body, number of payload frames]")
    kind, body, payload = entry
    references, count = b"", payload
    sizes: Sequence[int] = ()
    if type(payload) is bytes:
        references, count = payload, 0
    elif type(payload) is list:
        sizes, count = payload, 1
        if not all(type(size) is int and 0 <= size < MOST for size in sizes):
            raise ProtocolError(f"a compressed payload from {sender} of lengths {shown(sizes)}")
    well_typed = _is_name(kind) and type(count) is int and 0 <= count < MAX_HEADER_BYTES
    if not well_typed or type(body) is not dict or not all(type(key) is str for key in body):
        raise ProtocolError(
            f"an entry from {sender} with wrong types: kind {shown(kind)}, payload frames {shown(count)}"
        )
    return kind, body, references, sizes, count


def _is_name(value: object) -> bool:
    return type(value) is str and 0 < len(value) <= MAX_NAME_CHARACTERS


@decoder
def unpack(data: Buffer, what: str) -> Any:
    """Decode msgpack into plain values; the ProtocolError for malformed data calls it `what`."""
    counted: dict[str, Any] = {}
    if len(data) > UNCOUNTED_BYTES:
        count = _counter()
        counted = {"list_hook": count, "object_hook": count}
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=_no_extension, **counted)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"{what} that is not msgpack: {error}") from error


def _no_extension(kind: int, data: bytes) -> Any:
    raise ValueError(f"an extension of type {kind}")


def _counter() -> Callable[[Any], Any]:
    left = iter(range(MAX_CONTAINERS))

    def count(container: Any) -> Any:
        if next(left, None) is None:
            raise ValueError(f"more than {MAX_CONTAINERS} lists and maps")
        return container

    return count


def _plain(value: object) -> str | float | int:
    """What the encoder does not know: types derived from plain ones, such as numpy's double."""
    for plain in (str, float, int):
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot travel in a message: {shown(value)}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
