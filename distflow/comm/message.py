"""The wire format: a msgpack header, then frames of raw bytes. Nothing is ever unpickled or evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from distflow.errors import ProtocolError

WIRE_FORMAT = 1
MAX_HEADER_BYTES = 64 << 20
"""What carries samples or leases stays far below; anything larger is refused, by its sender as by its receiver."""
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Message:
    """What a peer sent. `sender` and `incarnation` name the peer's life; `route` leads a reply back to it."""

    kind: str
    sender: str
    incarnation: int
    body: Mapping[str, Any]
    payload: Sequence[memoryview] = ()
    route: bytes | None = field(default=None, compare=False)


def encode(kind: str, sender: str, incarnation: int, body: Mapping[str, Any]) -> bytes:
    """The header frame. Raises ProtocolError for one that no receiver would accept."""
    packed: bytes = msgpack.packb([WIRE_FORMAT, kind, sender, incarnation, body], use_bin_type=True)
    if len(packed) > MAX_HEADER_BYTES:
        raise ProtocolError(
            f"{sender} cannot send a {kind!r} message with a header of {len(packed)} bytes: receivers accept at most "
            f"{MAX_HEADER_BYTES} — what is large belongs into its payload"
        )
    return packed


def decode(header: Buffer, payload: Sequence[memoryview] = (), route: bytes | None = None) -> Message:
    """Parse and check a header; raises ProtocolError on anything that is not one."""
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(header)} bytes; at most {MAX_HEADER_BYTES} are accepted")
    try:
        fields = msgpack.unpackb(header, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"a header that is not msgpack: {error}") from error
    if not isinstance(fields, list) or len(fields) != 5:
        raise ProtocolError("a header that is not [format, kind, sender, incarnation, body]")
    version, kind, sender, incarnation, body = fields
    if version != WIRE_FORMAT:
        raise ProtocolError(f"wire format {version!r} from {sender!r}; expected {WIRE_FORMAT}: run the same code")
    well_typed = isinstance(kind, str) and isinstance(sender, str) and isinstance(incarnation, int)
    if not well_typed or not isinstance(body, dict):
        raise ProtocolError(f"a header with wrong types: kind {kind!r}, sender {sender!r}, incarnation {incarnation!r}")
    return Message(kind, sender, incarnation, body, payload, route)


def whole(body: Mapping[str, Any], name: str, what: str) -> int:
    """A whole number of a message's body; raises ProtocolError that calls the message `what` if there is none."""
    if name not in body or not isinstance(body[name], int):
        raise ProtocolError(f"{what} whose {name!r} is missing or no whole number")
    return int(body[name])
