"""What a publisher announces of one version: where each tensor lies, and a checksum for every chunk of bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any

import msgspec
import xxhash

from distflow.data.decoding import Whole, read, shown
from distflow.errors import ChecksumError, ProtocolError
from distflow.types import Version
from distflow.weights.canary import Canary
from distflow.weights.swarm import SwarmPlace

CHUNK_BYTES = 1 << 20
DIGEST_BYTES = 16
_SEGMENT = re.compile(r"/dev/shm/distflow-[^/\0]{1,200}")
DTYPE_BYTES = {"torch.float64": 8, "torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2}
"""Types of published tensors, and the bytes of one value."""


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
        form = read(body, _Announcement, "weights announcement")
        entries = tuple([TensorEntry(*entry) for entry in form.entries])
        version, digests = Version(*form.version), _cut(form.digests)
        canary = None if form.canary is None else Canary.from_wire(form.canary)
        found = cls(form.model, version, form.place, form.size, entries, form.checksums, digests, canary)
        if digests:
            SwarmPlace.parse(found.place)
        elif not _SEGMENT.fullmatch(found.place):
            raise ProtocolError(f"{found.title}: {shown(found.place)} is no shared segment of a run")
        for entry in entries:
            if entry.start + entry.size > found.size:
                raise ProtocolError(f"{found.title}: tensor {shown(entry.name)} lies outside {found.size} bytes")
            if entry.dtype not in DTYPE_BYTES:
                raise ProtocolError(
                    f"{found.title}: tensor {shown(entry.name)} has dtype {shown(entry.dtype)}; expected one of "
                    f"{', '.join(DTYPE_BYTES)}"
                )
            if prod(entry.shape) * DTYPE_BYTES[entry.dtype] != entry.size:
                raise ProtocolError(
                    f"{found.title}: tensor {shown(entry.name)} of shape {entry.shape} in {entry.size} bytes"
                )
        if len(form.digests) % DIGEST_BYTES or len(found.digests or found.checksums) != found.chunks:
            raise ProtocolError(f"{found.title}: {found.chunks} chunks without a checksum or digest for each")
        return found


class _Announcement(msgspec.Struct, frozen=True):
    model: str
    version: tuple[Whole, Whole]
    place: str
    size: Whole
    entries: list[tuple[str, str, Annotated[tuple[Whole, ...], msgspec.Meta(max_length=8)], Whole, Whole]]
    checksums: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    digests: bytes
    canary: list[Any] | None


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
