"""A version of a model, or a delta, in a segment of this host, as the server of its chunks sees it."""

from __future__ import annotations

from mmap import ACCESS_READ, mmap
from pathlib import Path

from distflow.types import Version
from distflow.weights.manifest import CHUNK_BYTES, Manifest
from distflow.weights.segments.shm import HEADER, HEADER_BYTES
from distflow.weights.swarm.chunk_plan import ChunkDealer
from distflow.weights.swarm.serve_core import HeldChunks


class HeldVersion(HeldChunks):
    """In a segment at `path`. Once it is whole, the header of the segment says whether it is still there."""

    def __init__(self, manifest: Manifest, path: Path, dealer: ChunkDealer | None = None) -> None:
        super().__init__(manifest, dealer)
        # Closed with the last reference: a thread may be sending from it.
        self.file = path.open("rb", buffering=0)
        self.memory = mmap(self.file.fileno(), HEADER_BYTES + manifest.size, access=ACCESS_READ)

    @property
    def stored(self) -> Version:
        """The version that the segment holds."""
        return Version(*HEADER.unpack_from(self.memory, 0))

    def span(self, chunk: int) -> tuple[int, int]:
        """Offset in the segment, and bytes."""
        return HEADER_BYTES + chunk * CHUNK_BYTES, self.manifest.size_of(chunk)

    def bytes_of(self, chunk: int) -> memoryview:
        """A chunk, in place."""
        start, size = self.span(chunk)
        return memoryview(self.memory)[start : start + size]
