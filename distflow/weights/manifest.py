"""What a publisher announces of one version: where each tensor lies, and a checksum for every chunk of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from distflow.errors import ChecksumError, ProtocolError
from distflow.types import Version

CHUNK_BYTES = 1 << 20


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
    """One version of one model: `place` says where the link finds the bytes, `checksums` are xxh3 of 1 MiB chunks."""

    model: str
    version: Version
    place: str
    size: int
    entries: tuple[TensorEntry, ...]
    checksums: tuple[int, ...]

    def to_wire(self) -> dict[str, Any]:
        """Plain values for a message body."""
        return {
            "model": self.model,
            "version": list(self.version),
            "place": self.place,
            "size": self.size,
            "entries": [[e.name, e.dtype, list(e.shape), e.start, e.size] for e in self.entries],
            "checksums": list(self.checksums),
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
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"a weights announcement that is none: {error!r}") from error
        if any(e.start < 0 or e.size < 0 or e.start + e.size > found.size for e in entries):
            raise ProtocolError(
                f"weights of {found.model!r} {tuple(found.version)}: a tensor lies outside {found.size} bytes"
            )
        return found


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
