"""A segment of shared memory that one process writes and one other reads.

It grows in steps up to its limit, and each step is pre-faulted: writing pages for the first time takes several times as
long as writing them again. Its name is removed as soon as the reader has mapped it, so that the kernel frees the memory
when both have ended, however they end.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from distflow.errors import ProtocolError

SEGMENTS = Path("/dev/shm")
MOST_BYTES = 1 << 32
"""Largest segment that is mapped."""
LEFT_FREE = 0.5
"""Share of the file system that stays free of arenas: weights need it, and their publisher fails without it."""
SegmentName = Annotated[str, msgspec.Meta(pattern=r"\Adistflow-[^/\0]{1,240}\Z")]
"""The name of a segment in a form; never a path."""
_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""MADV_POPULATE_READ and MADV_POPULATE_WRITE of Linux 5.14, which `mmap` does not name."""


class OwnSegment:
    """Created and written here. Raises OSError if it cannot be made."""

    def __init__(self, prefix: str, limit: int) -> None:
        self.name = f"{prefix}lane.{os.getpid()}.{secrets.token_hex(4)}"
        self.size = 0
        self.limit = limit
        self._handle = os.open(SEGMENTS / self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._pid = os.getpid()
        try:
            # No memory yet: pages are allocated as it grows.
            os.ftruncate(self._handle, limit)
            self._map = mmap.mmap(self._handle, limit)
        except OSError:
            self.close()
            raise
        self.view = memoryview(self._map)

    def grow(self, size: int) -> bool:
        """Allocate and pre-fault its first `size` bytes; False if too little shared memory would be left."""
        found = os.statvfs(SEGMENTS)
        if found.f_bavail * found.f_frsize - (size - self.size) < LEFT_FREE * found.f_blocks * found.f_frsize:
            return False
        try:
            # Without it, a full file system kills the writer with SIGBUS.
            os.posix_fallocate(self._handle, self.size, size - self.size)
        except OSError:
            return False
        _populate(self._map, _POPULATE_WRITE, self.size, size)
        self.size = size
        return True

    def remove_name(self) -> None:
        """Nobody else can map it from here on."""
        if os.getpid() == self._pid:
            (SEGMENTS / self.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove it; it is unmapped when nobody here writes to it any more."""
        self.remove_name()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class PeerSegment:
    """Mapped read-only; views of it keep it mapped."""

    def __init__(self, name: str, limit: int) -> None:
        """Map a segment. Raises ProtocolError if there is none of this name and size that belongs to this user."""
        try:
            handle = os.open(SEGMENTS / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ProtocolError(f"{SEGMENTS / name} cannot be mapped: {error.strerror}") from error
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise ProtocolError(f"{SEGMENTS / name} is not a file of user {os.geteuid()}")
            if found.st_size != limit or not 0 < limit <= MOST_BYTES:
                raise ProtocolError(f"{SEGMENTS / name} has {found.st_size} bytes; {limit} were announced")
            self.memory = mmap.mmap(handle, limit, access=mmap.ACCESS_READ)
        finally:
            os.close(handle)
        self.limit = limit
        self._touched = 0

    def touch(self, end: int) -> None:
        """Map the pages up to `end`, all at once rather than one by one as they are read."""
        if end > self._touched:
            _populate(self.memory, _POPULATE_READ, self._touched, end)
            self._touched = end - end % mmap.PAGESIZE


def _populate(memory: mmap.mmap, advice: int, begin: int, end: int) -> None:
    begin -= begin % mmap.PAGESIZE
    with suppress(OSError):
        # Older kernels do not know it: there, pages are mapped one by one.
        memory.madvise(advice, begin, end - begin)
