"""What a reader outside the run fetches into and from: memory of its own, which goes with it however it ends.

It takes part in nothing that others wait for. Its memory has no name that a neighbour could map, and it serves nobody.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distflow.errors import UserError
from distflow.flow.sizes import FETCHED
from distflow.types import Version
from distflow.weights.manifest import Manifest
from distflow.weights.segments.host_segments import SharedSegment
from distflow.weights.segments.shm import HEADER_BYTES
from distflow.weights.swarm.held_version import HeldVersion
from distflow.weights.swarm.serve_core import ServerTraffic
from distflow.weights.swarm_messages import SwarmPlace


class PrivateSegments:
    """As `HostSegments` for one process alone: FETCHED segments, written in turn. Used by one thread."""

    def __init__(self) -> None:
        self._segments: list[SharedSegment] = []
        self._progress: tuple[int, ...] = (0, 0, 0)

    def find(self, manifest: Manifest) -> mmap.mmap | None:
        """The whole version, if it is here; unchanged until the next fetch but one."""
        return next((one.readable for one in self._alike(manifest) if one.version == manifest.version), None)

    def base_of(self, manifest: Manifest) -> SharedSegment | None:
        """The newest version that is whole, if deltas lead from it to this one."""
        newest = self.newest()
        chain = manifest.chain_from(newest)
        return next((one for one in self._alike(manifest) if chain and one.version == newest), None)

    def newest(self) -> Version | None:
        """The newest version that is whole."""
        return max((one.version for one in self._segments if one.version.term >= 0), default=None)

    def release(self) -> None:
        """Nothing is kept for others."""

    def begin(self) -> bool:
        """It is always this reader's turn."""
        return True

    def end(self) -> None:
        """The turn is over."""

    def note_progress(self, version: Version, arrived: int) -> None:
        """Note how far the fetch is."""
        self._progress = (*version, arrived)

    def progress(self) -> tuple[int, ...]:
        """What was noted last: term, number, chunks arrived."""
        return self._progress

    def writable(self, manifest: Manifest, *, further: bool = False) -> SharedSegment | None:
        """A segment for a version that will be fetched, torn until `finish`: that of an interrupted fetch, else the
        older one. Those of another size are freed. Raises UserError if there is no room.
        """
        self._segments = self._alike(manifest)
        free = [one for one in self._segments if one.version.term < 0]
        if not free and len(self._segments) == FETCHED:
            free = sorted(self._segments, key=lambda one: one.version)
        segment = free[0] if free else self._make(HEADER_BYTES + manifest.size)
        segment.mark(Version(-1, 0))
        return segment

    def finish(self, segment: SharedSegment, version: Version) -> mmap.mmap:
        """All of it has arrived."""
        segment.mark(version)
        return segment.readable

    def abandon(self, segment: SharedSegment) -> None:
        """The version did not arrive; what has arrived of it stays."""

    def let_go(self, segment: SharedSegment) -> None:
        """It may be overwritten."""

    def close(self) -> None:
        """Free the memory, once its last view is gone."""
        self._segments = []

    def _alike(self, manifest: Manifest) -> list[SharedSegment]:
        return [one for one in self._segments if len(one.memory) == HEADER_BYTES + manifest.size]

    def _make(self, size: int) -> SharedSegment:
        handle = os.memfd_create("distflow-weights")
        try:
            # All of it now: where memory runs out later, touching a page would kill this process.
            os.posix_fallocate(handle, 0, size)
            memory, readable = mmap.mmap(handle, size), mmap.mmap(handle, size, access=mmap.ACCESS_READ)
        except OSError as error:
            os.close(handle)
            raise UserError(
                f"no memory for weights of {size / 1e6:.1f} MB ({error.strerror}): {FETCHED} versions are kept where "
                "they are fetched, besides the tensors that you keep — free some, or read where there is more"
            ) from error
        segment = SharedSegment(Path(f"/proc/self/fd/{handle}"), handle, memory, readable)
        self._segments.append(segment)
        return segment


class NotServing:
    """As `ChunkServer` where nobody reads from it: versions come, and are passed on to nobody."""

    address = ""

    def __init__(self) -> None:
        self.traffic = ServerTraffic()

    def admit(self, place: SwarmPlace) -> None:
        """Nobody connects."""

    def hold(self, held: HeldVersion) -> None:
        """Nobody asks for it."""

    def forget(self, held: HeldVersion) -> None:
        """It was not served."""

    def forget_terms_before(self, term: int) -> None:
        """None were served."""

    def notify(self) -> None:
        """There is nobody to notify."""

    def expect(self, held: HeldVersion, counts: Mapping[str, int]) -> None:
        """Nobody waits for it."""

    def status(self) -> dict[str, Any]:
        """For the status."""
        return {}

    def close(self) -> None:
        """There is nothing to end."""
