"""The wire format: a msgpack header, then frames of raw bytes. Nothing is ever unpickled or evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from distflow.data.decoding import MAX_NAME_CHARACTERS, MOST, decoder, shown
from distflow.errors import ProtocolError

WIRE_FORMAT = 1
MAX_HEADER_BYTES = 64 << 20
"""Messages with samples or leases stay far below; larger headers are refused by the sender and by the receiver."""
MAX_CONTAINERS = 1 << 20
"""Most lists and maps in a message: an empty one takes one byte on the wire, but about a hundred in memory."""
UNCOUNTED_BYTES = MAX_CONTAINERS
"""Shorter messages cannot contain more of them, so they are not counted."""
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Message:
    """A received message. `sender` and `incarnation` identify the peer; `route` is where a reply goes."""

    kind: str
    sender: str
    incarnation: int
    body: Mapping[str, Any]
    payload: Sequence[memoryview] = ()
    route: bytes | None = field(default=None, compare=False)


def encode(kind: str, sender: str, incarnation: int, body: Mapping[str, Any]) -> bytes:
    """The header frame. Raises ProtocolError if no receiver would accept it."""
    packed: bytes = msgpack.packb([WIRE_FORMAT, kind, sender, incarnation, body], use_bin_type=True)
    if len(packed) > MAX_HEADER_BYTES:
        raise ProtocolError(
            f"{sender} cannot send a {kind!r} message with a header of {len(packed)} bytes: receivers accept at most "
            f"{MAX_HEADER_BYTES} — large values belong in the payload"
        )
    return packed


def decode(header: Buffer, payload: Sequence[memoryview] = (), route: bytes | None = None) -> Message:
    """Parse and check a header; raises ProtocolError if it is malformed."""
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(header)} bytes; at most {MAX_HEADER_BYTES} are accepted")
    fields = unpack(header, "a header")
    if not isinstance(fields, list) or len(fields) != 5:
        raise ProtocolError("a header that is not [format, kind, sender, incarnation, body]")
    version, kind, sender, incarnation, body = fields
    if type(version) is not int or version != WIRE_FORMAT:
        raise ProtocolError(
            f"wire format {shown(version)} from {shown(sender)}; expected {WIRE_FORMAT}: run the same code everywhere"
        )
    well_typed = _is_name(kind) and _is_name(sender) and type(incarnation) is int and 0 <= incarnation < MOST
    if not well_typed or not isinstance(body, dict) or not all(type(key) is str for key in body):
        raise ProtocolError(
            f"a header with wrong types: kind {shown(kind)}, sender {shown(sender)}, incarnation {shown(incarnation)}"
        )
    return Message(kind, sender, incarnation, body, payload, route)


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
