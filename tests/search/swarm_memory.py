"""The memory of simulated hosts: a chunk is 16 bytes here that stand for the megabyte which it is on the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distflow.flow.sizes import CHAINED
from distflow.types import Version
from distflow.weights.manifest import CHUNK_BYTES, DIGEST_BYTES, Delta, Manifest, digest
from distflow.weights.swarm.chunk_plan import ChunkDealer
from distflow.weights.swarm.serve_core import HeldChunks

PIECES = 8
"""In which a chunk goes over the network."""
TORN = Version(-1, 0)
MODEL = "policy"


def part(number: int) -> slice:
    """What of the 16 bytes goes with a piece."""
    return slice(number * DIGEST_BYTES // PIECES, (number + 1) * DIGEST_BYTES // PIECES)


def content_of(version: Version, chunk: int, base: int = -1) -> bytes:
    """What the trainer has put there; with a `base`, what is in the delta from that version."""
    return digest(f"{version}/{base}/{chunk}".encode())


class SimulatedSegment:
    """Shared memory for one version; with a `base`, for the delta from that version."""

    def __init__(self, name: str, chunks: int, base: int = -1) -> None:
        self.name = name
        self.base = base
        self.stored = TORN
        """The version that is whole in it, as its header says."""
        self.data = [bytearray(DIGEST_BYTES) for _ in range(chunks)]

    @property
    def true(self) -> bool:
        """Whether it holds what it says."""
        return all(data == content_of(self.stored, chunk, self.base) for chunk, data in enumerate(self.data))


class HeldSegment(HeldChunks):
    """A version in a segment, as the server of its chunks sees it."""

    def __init__(self, manifest: Manifest, segment: SimulatedSegment, dealer: ChunkDealer | None = None) -> None:
        super().__init__(manifest, dealer)
        self.segment = segment

    @property
    def stored(self) -> Version:
        """The version that the segment holds."""
        return self.segment.stored


@dataclass(slots=True)
class Making:
    """A version that is made of the one in `base`, by the deltas that are `left` to be fetched."""

    version: Fetch
    base: SimulatedSegment
    left: list[Delta]


@dataclass(slots=True)
class Fetch:
    """The fetch under way, of a version or of a delta."""

    manifest: Manifest
    segment: SimulatedSegment
    held: HeldSegment
    there: Sequence[int] = ()
    arrived: int = 0
    making: Making | None = None
    """What a delta is for."""
    begun: bool = False
    woken: bool = False


def digests_of(segment: SimulatedSegment) -> bytes:
    """Of its chunks, one after the other."""
    return b"".join(digest(bytes(data)) for data in segment.data)


def manifest_of(
    version: Version, place: str, segment: SimulatedSegment, last_bytes: int, deltas: Sequence[Delta] = ()
) -> Manifest:
    """What is announced of the version in a segment."""
    size = (len(segment.data) - 1) * CHUNK_BYTES + last_bytes
    return Manifest(MODEL, version, place, size, (), (), digests_of(segment), deltas=tuple(deltas))


def delta_between(former: HeldSegment, new: HeldSegment, size: int) -> tuple[Delta, HeldSegment] | None:
    """What makes a publisher's version of the one before, in `size` bytes, and where it is served."""
    version, base = new.manifest.version, former.manifest.version.number
    if not former.intact or not 0 < size <= CHAINED * new.manifest.size:
        return None
    # Reading it counts as reading the version that it makes.
    segment = SimulatedSegment(new.segment.name, -(-size // CHUNK_BYTES), base)
    segment.stored = version
    for chunk, data in enumerate(segment.data):
        data[:] = content_of(version, chunk, base)
    delta = Delta(version.number, base, size, digests_of(segment))
    manifest = new.manifest.of_delta(delta)
    return delta, HeldSegment(manifest, segment, ChunkDealer(manifest.chunks))


def make(manifest: Manifest, base: SimulatedSegment, into: SimulatedSegment) -> list[int]:
    """Make a version of an older one, by deltas that are right; returns the chunks that are right."""
    for chunk, data in enumerate(into.data):
        data[:] = content_of(manifest.version, chunk)
        data[0] ^= base.data[chunk] != content_of(base.stored, chunk)
    return [chunk for chunk, data in enumerate(into.data) if digest(bytes(data)) == manifest.digest_of(chunk)]
