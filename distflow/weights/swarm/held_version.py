"""A version of a model, or a delta, in a segment of this host, as the server of its chunks sees it."""

from __future__ import annotations

from collections.abc import Mapping
from mmap import ACCESS_READ, mmap
from pathlib import Path

from distflow.weights.manifest import CHUNK_BYTES, Manifest
from distflow.weights.segments.shm import HEADER, HEADER_BYTES
from distflow.weights.swarm.chunk_plan import ChunkDealer


class HeldVersion:
    """One version, or a delta, in a segment at `path`: all of it, or what a reader here has fetched so far.

    `dealer` is the publisher's. Once it is whole, the header of the segment says whether it is still there.
    """

    def __init__(self, manifest: Manifest, path: Path, dealer: ChunkDealer | None = None) -> None:
        self.manifest = manifest
        self.dealer = dealer
        self.order: list[int] = []
        """The chunks that have been fetched, in the order in which they came."""
        self.coming: Mapping[str, int] = {}
        """Bytes that the reader here has received while it fetched this, and what it was told of others, by address."""
        self.whole = dealer is not None
        self.over = False
        """Whether it is served no more: what a fetch that was given up has got is written over."""
        self._got: set[int] = set()
        # Closed with the last reference: a thread may be sending from it.
        self.file = path.open("rb", buffering=0)
        self.memory = mmap(self.file.fileno(), HEADER_BYTES + manifest.size, access=ACCESS_READ)

    def add(self, chunk: int) -> None:
        """A chunk has arrived and is right."""
        self._got.add(chunk)
        self.order.append(chunk)

    def has(self, chunk: int) -> bool:
        """Whether this chunk is there."""
        if self.whole:
            return chunk < self.manifest.chunks and self.intact
        return chunk in self._got and not self.over

    @property
    def intact(self) -> bool:
        """Whether the segment holds the whole version."""
        return bool(HEADER.unpack_from(self.memory, 0) == tuple(self.manifest.version))

    def span(self, chunk: int) -> tuple[int, int]:
        """Offset in the segment, and bytes."""
        start = chunk * CHUNK_BYTES
        return HEADER_BYTES + start, min(CHUNK_BYTES, self.manifest.size - start)

    def bytes_of(self, chunk: int) -> memoryview:
        """A chunk, in place."""
        start, size = self.span(chunk)
        return memoryview(self.memory)[start : start + size]
