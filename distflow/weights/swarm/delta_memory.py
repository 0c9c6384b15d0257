"""Deltas in the memory of a host, to be served from there, and how a publisher makes one."""

from __future__ import annotations

import os
from mmap import ACCESS_READ, mmap
from pathlib import Path

from distflow.flow.sizes import CHAINED
from distflow.weights.encodings.delta import encode
from distflow.weights.manifest import CHUNK_BYTES, Delta, Manifest, digests
from distflow.weights.segments.shm import HEADER, HEADER_BYTES
from distflow.weights.swarm.chunk_plan import ChunkDealer
from distflow.weights.swarm.held_version import HeldVersion


class DeltaFile:
    """Memory that a delta is written to before its size is known: a file without a name, gone with its last user."""

    def __init__(self) -> None:
        self.handle = os.memfd_create("distflow-delta", os.MFD_CLOEXEC)

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Write bytes of the delta, on any thread. Unlike assigning to a slice of a mapping it releases the GIL."""
        left, at = memoryview(data), HEADER_BYTES + at
        while left:
            done = os.pwrite(self.handle, left, at)
            left, at = left[done:], at + done

    def digests(self, size: int) -> bytes:
        """Of the chunks of a delta of `size` bytes."""
        data = memoryview(mmap(self.handle, HEADER_BYTES + size, access=ACCESS_READ))[HEADER_BYTES:]
        return digests([data[at : at + CHUNK_BYTES] for at in range(0, size, CHUNK_BYTES)])

    def __enter__(self) -> DeltaFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.handle)


class DeltaMemory:
    """A delta in memory, which chunks can be served from; in `file` if it has been written already."""

    def __init__(self, manifest: Manifest, file: DeltaFile, dealer: ChunkDealer | None = None) -> None:
        os.ftruncate(file.handle, HEADER_BYTES + manifest.size)
        self._memory = mmap(file.handle, HEADER_BYTES + manifest.size)
        HEADER.pack_into(self._memory, 0, -1, 0)
        self.held = HeldVersion(manifest, Path(f"/proc/self/fd/{file.handle}"), dealer)

    @property
    def data(self) -> memoryview:
        """The bytes of the delta."""
        return memoryview(self._memory)[HEADER_BYTES:]

    def finish(self) -> None:
        """All bytes are there and right."""
        HEADER.pack_into(self._memory, 0, *self.held.manifest.version)
        self.held.whole = True


def delta_between(former: HeldVersion, new: HeldVersion) -> tuple[Delta, HeldVersion] | None:
    """What makes a publisher's version of the one before, and where it is served.

    None where there is none: another layout, an older version that is gone, or nearly everything changed.
    """
    if not former.intact or not _follows(new.manifest, former.manifest):
        return None
    with DeltaFile() as file:
        size = encode(_bytes_of(new), _bytes_of(former), int(CHAINED * new.manifest.size), file.write)
        if not size or not former.intact or not new.intact:
            return None
        delta = Delta(new.manifest.version.number, former.manifest.version.number, size, file.digests(size))
        manifest = new.manifest.of_delta(delta)
        memory = DeltaMemory(manifest, file, ChunkDealer(manifest.chunks))
    memory.finish()
    return delta, memory.held


def _follows(new: Manifest, former: Manifest) -> bool:
    """Whether one can be made of the other."""
    same = new.entries == former.entries and new.size == former.size
    return same and new.version.term == former.version.term and new.version.number > former.version.number


def _bytes_of(held: HeldVersion) -> memoryview:
    return memoryview(held.memory)[HEADER_BYTES : HEADER_BYTES + held.manifest.size]
