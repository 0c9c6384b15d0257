"""A segment of shared memory that one process writes and one other reads.

It grows in steps up to its limit, and each step is pre-faulted: writing pages for the first time takes several times as
long as writing them again. It is a file without a name, which the reader opens through the writer's descriptor: the
kernel frees the memory when both have ended, however and whenever they end, and /dev/shm is left to the weights. It is
sealed, so that nobody can cut it short under the reader.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from distflow.errors import ProtocolError

MOST_BYTES = 1 << 32
"""Largest segment that is mapped."""
SegmentName = Annotated[str, msgspec.Meta(pattern=r"\Adistflow-[0-9a-f]{16}\Z")]
"""What a segment is told apart by in a form; never a path."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""MADV_POPULATE_READ and MADV_POPULATE_WRITE of Linux 5.14, which `mmap` does not name."""


class OwnSegment:
    """Created and written here. Raises OSError if it cannot be made."""

    def __init__(self, limit: int) -> None:
        self.name = f"distflow-{secrets.token_hex(8)}"
        self.size = 0
        self.limit = limit
        self.handle = os.memfd_create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.pid = os.getpid()
        try:
            # No memory yet: pages are allocated as it grows.
            os.ftruncate(self.handle, limit)
            fcntl.fcntl(self.handle, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.handle, limit)
        except OSError:
            self.close()
            raise
        self.view = memoryview(self._map)

    def grow(self, size: int) -> bool:
        """Allocate and pre-fault its first `size` bytes; False if there is no memory for them."""
        try:
            os.posix_fallocate(self.handle, self.size, size - self.size)
        except OSError:
            return False
        _populate(self._map, _POPULATE_WRITE, self.size, size)
        self.size = size
        return True

    def close(self) -> None:
        """Nobody else can map it from here on; it is unmapped when nobody here writes to it any more."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


class PeerSegment:
    """Mapped read-only; views of it keep it mapped."""

    def __init__(self, pid: int, handle: int, name: str, limit: int) -> None:
        """Map what a process has open. Raises ProtocolError if it is no segment of this name, size and user."""
        path = Path(f"/proc/{pid}/fd/{handle}")
        try:
            # Looked at first: opening anything else may wait, or do something.
            found = os.readlink(path)
            if found != f"/memfd:{name} (deleted)":
                raise ProtocolError(f"{path} is {found}; expected the segment {name}")
            own = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self.memory = _mapped(own, name, limit)
            finally:
                os.close(own)
        except OSError as error:
            raise ProtocolError(f"the segment {name} cannot be mapped: {path}: {error.strerror}") from error
        self.limit = limit
        self._touched = 0

    def touch(self, end: int) -> None:
        """Map the pages up to `end`, all at once rather than one by one as they are read."""
        if end > self._touched:
            _populate(self.memory, _POPULATE_READ, self._touched, end)
            self._touched = end - end % mmap.PAGESIZE


def _mapped(handle: int, name: str, limit: int) -> mmap.mmap:
    about = os.fstat(handle)
    if about.st_uid != os.geteuid():
        raise ProtocolError(f"the segment {name} is not of user {os.geteuid()}")
    if about.st_size != limit or not 0 < limit <= MOST_BYTES:
        raise ProtocolError(f"the segment {name} has {about.st_size} bytes; {limit} were announced")
    if not fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ProtocolError(f"the segment {name} could be cut short while it is read")
    return mmap.mmap(handle, limit, access=mmap.ACCESS_READ)


def _populate(memory: mmap.mmap, advice: int, begin: int, end: int) -> None:
    begin -= begin % mmap.PAGESIZE
    with suppress(OSError):
        # Older kernels do not know it: there, pages are mapped one by one.
        memory.madvise(advice, begin, end - begin)
