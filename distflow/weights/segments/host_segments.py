"""The shared segments of a host that fetches weights: one reader fetches a version into one, its neighbours map it.

Readers agree by locks on files, which the kernel releases when a process ends, however it ends:

- `…-swarm`: each reader holds it, shared; the last one to leave removes everything.
- `…-swarm-turn`: held by the reader that fetches. The file says how far it is, for those who wait.
- `…-swarm-t<term>-<n>`, a segment: held exclusively while it is written, shared by each reader that uses it. One that
  nobody holds is written next, unless it is the newest whole one, which is kept for readers on other hosts. There are
  FETCHED of them, unless a reader does not let go of an older one. A process that reads into it by NIXL
  (`one_sided/process.py`) holds a record lock on it besides.

A segment begins like a publisher's, with its version, or term −1 until all of its chunks have arrived and been checked.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from distflow.errors import UserError
from distflow.flow.sizes import FETCHED
from distflow.log import logger
from distflow.types import Version
from distflow.weights.manifest import Manifest
from distflow.weights.segments.segment_file import SEGMENTS, open_own, reserve
from distflow.weights.segments.shm import HEADER, HEADER_BYTES, segment_prefix

TURN = struct.Struct("<qqq")
"""Term and number of the version that is fetched, chunks of it that have arrived."""

log = logger(__name__)


@dataclass(slots=True)
class SharedSegment:
    """One segment as this process has it open. Closed with the last reference."""

    path: Path
    handle: int
    memory: mmap.mmap
    """For the fetch that writes it."""
    readable: mmap.mmap
    """For engines, whose writes would be seen by their neighbours."""

    @classmethod
    def open(cls, path: Path) -> SharedSegment:
        """Map a segment that exists; raises OSError, also for another user's."""
        handle = open_own(path)
        try:
            # One that is being made grows meanwhile: both are of the same size.
            memory = mmap.mmap(handle, 0)
            readable = mmap.mmap(handle, len(memory), access=mmap.ACCESS_READ)
            return cls(path, handle, memory, readable)
        except BaseException:
            os.close(handle)
            raise

    @property
    def version(self) -> Version:
        """The version in it; term −1: none that is whole."""
        return Version(*HEADER.unpack_from(self.memory, 0))

    @property
    def linked(self) -> bool:
        """Whether it still has its name, and the size that it had."""
        return _same(self.path, self.handle) and os.fstat(self.handle).st_size == len(self.memory)

    def mark(self, version: Version) -> None:
        """Say which version it holds."""
        HEADER.pack_into(self.memory, 0, *version)

    def lock(self, how: int) -> bool:
        """Lock it, or change the lock; returns whether that was possible at once."""
        return _locked(self.handle, how)

    @property
    def read_into(self) -> bool:
        """Whether a process reads into it by NIXL: the lock of that is of another kind, and outlives the worker."""
        try:
            fcntl.lockf(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return True
        fcntl.lockf(self.handle, fcntl.LOCK_UN)
        return False

    def __del__(self) -> None:
        os.close(self.handle)


class HostSegments:
    """One reader's part in the segments of `model` on this host; `tag` names the host's part of the run.

    Used by one thread.
    """

    def __init__(self, tag: str, model: str) -> None:
        self._stem = f"{segment_prefix(tag)}{model}-swarm"
        self._open: dict[Path, SharedSegment] = {}
        self._used: SharedSegment | None = None
        self._presence = self._enter()
        self._turn = _made(SEGMENTS / f"{self._stem}-turn")

    def find(self, manifest: Manifest) -> mmap.mmap | None:
        """The whole version, if it is here: in use, and unchanged, until `release`."""
        for segment in self._segments():
            if segment.version == manifest.version and len(segment.memory) == HEADER_BYTES + manifest.size:
                if segment.lock(fcntl.LOCK_SH) and segment.version == manifest.version:
                    self._used = segment
                    return segment.readable
                self.let_go(segment)
        return None

    def base_of(self, manifest: Manifest) -> SharedSegment | None:
        """The newest version that is whole, if deltas lead from it to this one: unchanged until `let_go`."""
        newest = self.newest()
        for segment in self._segments():
            if segment.version == newest and len(segment.memory) == HEADER_BYTES + manifest.size:
                if manifest.chain_from(newest) and segment.lock(fcntl.LOCK_SH) and segment.version == newest:
                    return segment
                self.let_go(segment)
        return None

    def newest(self) -> Version | None:
        """The newest version that is whole."""
        return max((one.version for one in self._segments() if one.version.term >= 0), default=None)

    def release(self) -> None:
        """What was in use may be overwritten."""
        if self._used is not None:
            self.let_go(self._used)
            self._used = None

    def begin(self) -> bool:
        """Take the turn to fetch, if nobody has it; until `end`."""
        return _locked(self._turn, fcntl.LOCK_EX)

    def end(self) -> None:
        """Give the turn back."""
        fcntl.flock(self._turn, fcntl.LOCK_UN)

    def note_progress(self, version: Version, arrived: int) -> None:
        """Say how far the fetch is."""
        os.pwrite(self._turn, TURN.pack(*version, arrived), 0)

    def progress(self) -> tuple[int, ...]:
        """What the reader whose turn it is, or was, has noted: term, number, chunks arrived."""
        return TURN.unpack(os.pread(self._turn, TURN.size, 0).ljust(TURN.size, b"\0"))

    def writable(self, manifest: Manifest, *, further: bool = False) -> SharedSegment | None:
        """A segment for a version that will be fetched, torn until `finish`. For the reader whose turn it is.

        If a fetch was interrupted it is the one of that: what has arrived is still there. None: all are in use, and
        FETCHED is enough unless `further` and there is room for more. Those of earlier terms are removed. Raises
        UserError if there is no room.
        """
        size, term = HEADER_BYTES + manifest.size, manifest.version.term
        newest, used = self.newest(), 0
        for segment in sorted(self._segments(), key=lambda segment: segment.version.term >= 0):
            if segment.path.name.startswith(f"{self._stem}-t{term}-") and len(segment.memory) == size:
                if (segment.version != newest or newest is None) and segment.lock(fcntl.LOCK_EX):
                    if not segment.read_into:
                        segment.mark(Version(-1, 0))
                        return segment
                    # By the process of a reader that was just killed.
                    self.let_go(segment)
                used += 1
            elif segment.version < manifest.version:
                segment.path.unlink(missing_ok=True)
                self._open.pop(segment.path, None)
        if used < FETCHED:
            return self._create(term, size)
        try:
            return self._create(term, size) if further else None
        except UserError as error:
            log.warning("%s; waiting for a neighbour that uses an older version", error)
            return None

    def finish(self, segment: SharedSegment, version: Version) -> mmap.mmap:
        """All of it has arrived: neighbours may map it, and this reader uses it."""
        segment.mark(version)
        segment.lock(fcntl.LOCK_SH)
        self._used = segment
        return segment.readable

    def abandon(self, segment: SharedSegment) -> None:
        """The version did not arrive."""
        self.let_go(segment)

    def close(self) -> None:
        """Leave; the last one to do so removes the segments."""
        self.release()
        if _locked(self._presence, fcntl.LOCK_EX):
            for path in (*_paths(self._stem), SEGMENTS / f"{self._stem}-turn", SEGMENTS / self._stem):
                path.unlink(missing_ok=True)
        self._open.clear()
        os.close(self._turn)
        os.close(self._presence)

    def _enter(self) -> int:
        path = SEGMENTS / self._stem
        while True:
            handle = _made(path)
            fcntl.flock(handle, fcntl.LOCK_SH)
            if _same(path, handle):
                return handle
            # The last reader was leaving and has removed the file meanwhile.
            os.close(handle)

    def _segments(self) -> list[SharedSegment]:
        """Those that exist, in the order of their names."""
        found = {}
        for path in _paths(self._stem):
            segment = self._open.get(path)
            if segment is None or not segment.linked:
                try:
                    segment = SharedSegment.open(path)
                except (OSError, ValueError):
                    # Just removed, just being made, or put there by another user.
                    continue
            found[path] = segment
        self._open = found
        return list(found.values())

    def _create(self, term: int, size: int) -> SharedSegment:
        number = next(n for n in range(1 << 20) if not (SEGMENTS / f"{self._stem}-t{term}-{n}").exists())
        path = SEGMENTS / f"{self._stem}-t{term}-{number}"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Torn from its first byte on: neighbours may see it as soon as it has a size.
            os.pwrite(handle, HEADER.pack(-1, 0), 0)
            reserve(handle, path, 0, size)
        finally:
            os.close(handle)
        segment = self._open[path] = SharedSegment.open(path)
        segment.lock(fcntl.LOCK_EX)
        return segment

    def let_go(self, segment: SharedSegment) -> None:
        """It may be overwritten, as far as this reader is concerned."""
        fcntl.flock(segment.handle, fcntl.LOCK_UN)


def _made(path: Path) -> int:
    try:
        return open_own(path, make=True)
    except PermissionError as error:
        raise UserError(f"weights cannot be shared on this host: {error}") from error


def _paths(stem: str) -> list[Path]:
    return sorted(SEGMENTS.glob(f"{stem}-t[0-9]*-[0-9]*"))


def _locked(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same(path: Path, handle: int) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(handle)
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)
