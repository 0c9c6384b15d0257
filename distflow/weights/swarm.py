"""The link across hosts: chunks of a version are requested one by one and checked against the manifest's digests.

The manifest arrives in an encrypted message, so its digests can be trusted; the chunks themselves are not encrypted
unless the place says so. Request: one frame, [proof, model, term, number, chunk]. Reply: a frame
[term, number, chunk, there] and the chunk's bytes. The proof is an HMAC over the rest of the request; its key, the
place's token, is sent only in the encrypted manifest. So an eavesdropper cannot make requests of its own.
"""

from __future__ import annotations

import hmac
from collections import deque
from dataclasses import dataclass

import msgspec

from distflow.comm.addresses import check_address
from distflow.comm.message import unpack
from distflow.data.decoding import Row, Whole, read, shown
from distflow.errors import ProtocolError
from distflow.types import Version

WINDOW = 8
"""Most chunks that a reader has requested and not received."""
MAX_REQUEST_BYTES = 4096
_OPEN, _ENCRYPTED = "swarm", "swarm+curve"


@dataclass(frozen=True, slots=True)
class SwarmPlace:
    """The address of a chunk server, as written in a manifest's `place`."""

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


class Request(Row, frozen=True):
    """A request for one chunk. `proof` shows that the requester knows the place's token."""

    proof: bytes
    model: str
    term: Whole
    number: Whole
    chunk: Whole

    @classmethod
    def make(cls, token: bytes, model: str, version: Version, chunk: int) -> Request:
        """Create a request with its proof."""
        return cls(_proof(token, model, version, chunk), model, *version, chunk)

    @property
    def version(self) -> Version:
        """The version that the chunk is of."""
        return Version(self.term, self.number)

    def proven(self, token: bytes) -> bool:
        """Whether the requester knows the token."""
        return hmac.compare_digest(self.proof, _proof(token, self.model, self.version, self.chunk))

    def pack(self) -> bytes:
        """For the wire."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> Request:
        """The inverse; raises ProtocolError."""
        return read(unpack(data, "a request for weights"), cls, "request for weights")


class Reply(Row, frozen=True):
    """Describes the bytes that follow it. Not `there`: the version was overwritten and no bytes follow."""

    term: Whole
    number: Whole
    chunk: Whole
    there: bool

    @property
    def version(self) -> Version:
        """The version that the chunk is of."""
        return Version(self.term, self.number)

    def pack(self) -> bytes:
        """For the wire."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> Reply:
        """The inverse; raises ProtocolError."""
        return read(unpack(data, "a reply with weights"), cls, "reply with weights")


def _proof(token: bytes, model: str, version: Version, chunk: int) -> bytes:
    return hmac.digest(token, msgspec.msgpack.encode([model, *version, chunk]), "sha256")


class Chunks:
    """Which chunks of a version are open, requested or received. No socket, no clock."""

    def __init__(self, count: int, window: int = WINDOW) -> None:
        self._window = window
        self._open = deque(range(count))
        self._asked: set[int] = set()
        self._wrong: dict[int, int] = {}
        self.count = count
        self.arrived = 0

    @property
    def done(self) -> bool:
        """Whether all have arrived."""
        return self.arrived == self.count

    def ask(self) -> list[int]:
        """The chunks to request now, so that at most a window is under way."""
        now = [self._open.popleft() for _ in range(min(self._window - len(self._asked), len(self._open)))]
        self._asked.update(now)
        return now

    def expects(self, chunk: int) -> bool:
        """Whether the chunk was requested and has not arrived."""
        return chunk in self._asked

    def right(self, chunk: int) -> None:
        """A chunk arrived with the right bytes."""
        self._asked.remove(chunk)
        self.arrived += 1

    def wrong(self, chunk: int) -> int:
        """A chunk arrived with wrong bytes and will be requested again; returns how often that has happened to it."""
        self._asked.remove(chunk)
        self._open.appendleft(chunk)
        self._wrong[chunk] = self._wrong.setdefault(chunk, 0) + 1
        return self._wrong[chunk]

    def lost(self) -> None:
        """Chunks under way will not arrive: the connection was replaced."""
        self._open.extendleft(sorted(self._asked, reverse=True))
        self._asked.clear()
