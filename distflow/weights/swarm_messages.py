"""The link across hosts: chunks of a version from whoever holds them, over TCP, each checked by its digest.

The manifest arrives in an encrypted message, so its digests can be trusted. It also brings the token of the version's
place: both ends of a connection prove that they know it, by a keyed hash of two random numbers, before anything else is
said; the token itself never travels here. The chunks are not encrypted unless the place says so; then each is sealed
with AES-GCM, by a key of that connection alone.

A reader sends an `Opening`, then any number of `ChunkAsk`s, each with its length before it. A holder sends frames: a
`FRAME` header, then the payload. Both may be sent at any time; the order of the answers is up to the holder.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Literal, NamedTuple

import msgspec
from blake3 import blake3

from distflow.comm.addresses import Address, check_address
from distflow.comm.message import unpack
from distflow.data.decoding import FromMinusOne, Row, Site, Whole, read, shown
from distflow.errors import ProtocolError

GREETING = b"distflow weights 3\n"
NONCE_BYTES = 16
PROOF_BYTES = 32
SEAL_BYTES = 16
LENGTH = struct.Struct("<I")
"""Bytes of the message that follows."""
FRAME = struct.Struct("<BIqqqq")
"""What it is (`Says`), bytes of payload, what it is about (`Content`), chunk (else 0)."""
MAX_ASK_BYTES = 4096
MOST_AT_ONCE = 64
"""Chunks in one `ChunkAsk`."""
MOST_TOLD = 1 << 14
"""Chunks in one `Says.HAVE`."""
_OPEN, _ENCRYPTED = "swarm", "swarm+aes"


class Content(NamedTuple):
    """Of what chunks are: a version (`base` −1), or the delta that makes it of version `base` of the same term."""

    term: int
    number: int
    base: int = -1


@dataclass(frozen=True, slots=True)
class SwarmPlace:
    """The address of a publisher's chunk server, as written in a manifest's `place`."""

    address: str
    token: bytes
    encrypted: bool

    def __str__(self) -> str:
        return f"{_ENCRYPTED if self.encrypted else _OPEN}:{self.address}#{self.token.hex()}"

    @classmethod
    def parse(cls, text: str) -> SwarmPlace:
        """The inverse; raises ProtocolError."""
        scheme, _, rest = text.partition(":")
        address, _, token = rest.partition("#")
        try:
            if scheme in (_OPEN, _ENCRYPTED) and address.startswith("tcp://"):
                return cls(check_address(address), bytes.fromhex(token), scheme == _ENCRYPTED)
        except ValueError:
            # Not hexadecimal: reported below, like every other malformed place.
            pass
        raise ProtocolError(
            f"weights at {shown(text)}: expected {_OPEN}:tcp://HOST:PORT#TOKEN — run the same code everywhere"
        )

    @property
    def target(self) -> tuple[str, int]:
        """Host and port."""
        return target_of(self.address)


def target_of(address: str) -> tuple[str, int]:
    """Host and port of `tcp://HOST:PORT`, which `check_address` has seen."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


class Says(IntEnum):
    """What a holder's frame is."""

    CHUNK = 1
    """The bytes of a chunk."""
    GONE = 2
    """This chunk will not come: the holder does not have the version (any more)."""
    ELSEWHERE = 3
    """This chunk was given to another reader, from whom it can be had."""
    DEALT = 4
    """All chunks have been given out; those that were asked for and not given will not come."""
    HAVE = 5
    """Payload: chunks that the holder has got, 4 bytes each."""
    PEERS = 6
    """Payload: msgpack list of the addresses of readers that serve what they have fetched."""
    GIVEN = 7
    """Payload: chunks that a deal has given to this reader, 4 bytes each; they come next."""
    COMING = 8
    """Payload: msgpack map of addresses of readers to how many bytes they have received."""


class Opening(Row, frozen=True):
    """The first message of a reader."""

    serves: Address
    """Where it serves what it has fetched. It also tells readers apart. "": nowhere."""
    site: Site = ""
    """Where its host stands: chunks are dealt to the readers of each site by themselves."""


class ChunkAsk(Row, frozen=True):
    """A request of a reader.

    deal: any `count` chunks that nobody else has been given. want: these, unless another present reader has been given
    them. again: these, whoever has been given them. follow: what the holder has of this version, and gets later. made:
    nothing; this reader has all chunks of the version, made of those of another one.
    """

    what: Literal["deal", "want", "again", "follow", "made"]
    model: str
    term: Whole
    number: Whole
    chunks: Annotated[tuple[Whole, ...], msgspec.Meta(max_length=MOST_AT_ONCE)] = ()
    count: Annotated[int, msgspec.Meta(ge=0, le=MOST_AT_ONCE)] = 0
    base: FromMinusOne = -1

    @property
    def content(self) -> Content:
        """What is asked for."""
        return Content(self.term, self.number, self.base)


def pack(message: Opening | ChunkAsk) -> bytes:
    """For the wire, with its length."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def read_opening(data: bytes | memoryview) -> Opening:
    """The inverse without the length; raises ProtocolError."""
    return read(unpack(data, "an opening for weights"), Opening, "opening for weights")


def read_ask(data: bytes | memoryview) -> ChunkAsk:
    """The inverse without the length; raises ProtocolError."""
    return read(unpack(data, "a request for weights"), ChunkAsk, "request for weights")


def read_peers(data: bytes | memoryview) -> tuple[str, ...]:
    """The addresses in a PEERS frame; raises ProtocolError."""
    return read(unpack(data, "a list of readers"), tuple[Address, ...], "list of readers")


def read_counts(data: bytes | memoryview) -> dict[str, int]:
    """The readers in a COMING frame, and their bytes; raises ProtocolError."""
    return read(unpack(data, "what readers have received"), dict[Address, Whole], "bytes of readers")


def packed(chunks: Sequence[int]) -> bytes:
    """The payload of a HAVE or GIVEN frame."""
    return struct.pack(f"<{len(chunks)}I", *chunks)


def read_indices(data: bytes | memoryview) -> tuple[int, ...]:
    """The chunks in a HAVE or GIVEN frame; raises ProtocolError."""
    if len(data) % LENGTH.size:
        raise ProtocolError(f"malformed list of chunks: {len(data)} bytes, expected {LENGTH.size} for each")
    return struct.unpack(f"<{len(data) // LENGTH.size}I", data)


class Secret:
    """What the holders of a token can compute: proofs for a connection, and the key that its chunks are sealed with."""

    def __init__(self, token: bytes) -> None:
        self._key = blake3(token, derive_key_context="distflow weights 1 connection").digest()
        self.name = blake3(b"name", key=self._key).digest(length=8)
        """Tells a server with several tokens which one it is, and nobody what it is."""

    def proof(self, end: Literal["reader", "holder"], nonces: bytes) -> bytes:
        """Shows that one end knows the token; `nonces`: the holder's, then the reader's."""
        return blake3(end.encode() + nonces, key=self._key).digest()

    def seal_key(self, nonces: bytes) -> bytes:
        """Key of AES-256-GCM for what the holder sends on this connection."""
        return blake3(b"seal" + nonces, key=self._key).digest()


def seal_nonce(count: int) -> bytes:
    """The nonce of the chunk that was sent as number `count` of its connection."""
    return count.to_bytes(12, "big")
