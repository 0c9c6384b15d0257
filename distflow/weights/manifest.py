"""What a publisher announces of one version: where each tensor lies, and a checksum for every chunk of bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from distflow.errors import ChecksumError, ProtocolError
from distflow.types import Version
from distflow.weights.canary import Canary

CHUNK_BYTES = 1 << 20
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One parameter: `start` is its first byte in the version's bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of one model: `place` says where the link finds the bytes, `checksums` are xxh3 of 1 MiB chunks.

    Where the bytes cross a network that others may write to, `digests` of the chunks take the place of the checksums.
    """

    model: str
    version: Version
    place: str
    size: int
    entries: tuple[TensorEntry, ...]
    checksums: tuple[int, ...]
    digests: tuple[bytes, ...] = ()
    canary: Canary | None = None

    @property
    def title(self) -> str:
        """For messages."""
        return f"weights of {self.model!r}, term {self.version.term}, version {self.version.number}"

    @property
    def chunks(self) -> int:
        """How many chunks the version's bytes are cut into."""
        return -(-self.size // CHUNK_BYTES)

    def to_wire(self) -> dict[str, Any]:
        """Plain values for a message body."""
        return {
            "model": self.model,
            "version": list(self.version),
            "place": self.place,
            "size": self.size,
            "entries": [[e.name, e.dtype, list(e.shape), e.start, e.size] for e in self.entries],
            "checksums": list(self.checksums),
            "digests": b"".join(self.digests),
            "canary": None if self.canary is None else self.canary.to_wire(),
        }

    @classmethod
    def from_wire(cls, body: Mapping[str, Any]) -> Manifest:
        """The inverse; raises ProtocolError on anything malformed, including tensors outside the announced bytes."""
        try:
            entries = tuple(
                TensorEntry(str(name), str(dtype), tuple(int(n) for n in shape), int(start), int(size))
                for name, dtype, shape, start, size in body["entries"]
            )
            term, number = body["version"]
            found = cls(
                str(body["model"]),
                Version(int(term), int(number)),
                str(body["place"]),
                int(body["size"]),
                entries,
                tuple(int(value) for value in body["checksums"]),
                _cut(bytes(body["digests"])),
                None if body["canary"] is None else Canary.from_wire(body["canary"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"a weights announcement that is none: {error!r}") from error
        if any(e.start < 0 or e.size < 0 or e.start + e.size > found.size for e in entries):
            raise ProtocolError(
                f"weights of {found.model!r} {tuple(found.version)}: a tensor lies outside {found.size} bytes"
            )
        return found


def _cut(digests: bytes) -> tuple[bytes, ...]:
    return tuple(digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))


def digest(chunk: bytes | memoryview) -> bytes:
    """Hash of one chunk that nobody can meet with other bytes: SHA-256, cut to 128 bits.

    Processors compute it themselves, so it is two to three times as fast as BLAKE2b.
    """
    return hashlib.sha256(chunk).digest()[:DIGEST_BYTES]


def checksums(data: memoryview) -> tuple[int, ...]:
    """xxh3 (64 bit) of each chunk of CHUNK_BYTES."""
    return tuple(xxhash.xxh3_64_intdigest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES))


def verify(data: memoryview, expected: Sequence[int], what: str) -> None:
    """Raise ChecksumError naming the first chunk of `data` that does not have its expected checksum."""
    for index, (found, wanted) in enumerate(zip(checksums(data), expected, strict=True)):
        if found != wanted:
            raise ChecksumError(
                f"{what}: chunk {index} of {len(expected)} has checksum {found:016x}, not {wanted:016x}"
            )
