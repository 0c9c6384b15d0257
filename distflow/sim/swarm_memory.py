"""The memory of simulated hosts: a chunk is 16 bytes here that stand for the megabyte which it is on the network."""

from __future__ import annotations

from distflow.types import Version
from distflow.weights.manifest import CHUNK_BYTES, DIGEST_BYTES, Manifest, digest
from distflow.weights.swarm.chunk_plan import ChunkDealer
from distflow.weights.swarm.serve_core import HeldChunks

PIECES = 8
"""In which a chunk goes over the network."""
TORN = Version(-1, 0)
MODEL = "policy"


def part(number: int) -> slice:
    """What of the 16 bytes goes with a piece."""
    return slice(number * DIGEST_BYTES // PIECES, (number + 1) * DIGEST_BYTES // PIECES)


def content_of(version: Version, chunk: int) -> bytes:
    """What the trainer has put there."""
    return digest(f"{version}/{chunk}".encode())


class SimulatedSegment:
    """Shared memory for one version."""

    def __init__(self, name: str, chunks: int) -> None:
        self.name = name
        self.stored = TORN
        """The version that is whole in it, as its header says."""
        self.data = [bytearray(DIGEST_BYTES) for _ in range(chunks)]

    @property
    def true(self) -> bool:
        """Whether it holds what it says."""
        return all(data == content_of(self.stored, chunk) for chunk, data in enumerate(self.data))


class HeldSegment(HeldChunks):
    """A version in a segment, as the server of its chunks sees it."""

    def __init__(self, manifest: Manifest, segment: SimulatedSegment, dealer: ChunkDealer | None = None) -> None:
        super().__init__(manifest, dealer)
        self.segment = segment

    @property
    def stored(self) -> Version:
        """The version that the segment holds."""
        return self.segment.stored


def manifest_of(version: Version, place: str, segment: SimulatedSegment, last_bytes: int) -> Manifest:
    """What is announced of the version in a segment."""
    size = (len(segment.data) - 1) * CHUNK_BYTES + last_bytes
    return Manifest(MODEL, version, place, size, (), (), b"".join(digest(bytes(data)) for data in segment.data))
