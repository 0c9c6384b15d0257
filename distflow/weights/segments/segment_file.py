"""Files in shared memory: opening them, where only this user's count, and room for them."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from distflow.errors import UserError
from distflow.flow.sizes import FETCHED, PINNED, PUBLISHED

SEGMENTS = Path("/dev/shm")


def memory_name() -> str:
    """Tells whose shared memory this process can read: the same name for two processes if each can read the other's."""
    # The device number tells containers of one machine apart, each with its own file system there.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{SEGMENTS.stat().st_dev}/{os.getuid()}"


def open_own(path: Path, *, make: bool = False) -> int:
    """Open a file of a run, and with `make` make it if there is none; returns the descriptor.

    Anyone may write to /dev/shm: raises PermissionError for a file that is not this user's alone, which might hold
    anything, and OSError as `os.open` does.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    handle = os.open(path, flags | (os.O_CREAT if make else 0), 0o600)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(handle)
        raise PermissionError(
            f"{path}: expected a file of user {os.geteuid()} with mode 0600, found owner {found.st_uid}, "
            f"mode {stat.S_IMODE(found.st_mode):o} — remove it, then start again"
        )
    return handle


def reserve(handle: int, path: Path, begin: int, size: int) -> None:
    """Grow a segment from `begin` to `size` bytes. Without it, a full file system kills the writer with SIGBUS."""
    try:
        # Only the new part: allocating existing bytes again takes as long as writing them.
        os.posix_fallocate(handle, begin, size - begin)
    except OSError as error:
        raise no_room(path, size, error.strerror) from error


def no_room(path: Path, size: int, why: str | None) -> UserError:
    """The error for a segment of `size` bytes, which is removed."""
    path.unlink(missing_ok=True)
    free = os.statvfs(SEGMENTS)
    return UserError(
        f"{path}: no room for weights of {size / 1e6:.1f} MB ({why}); {SEGMENTS} has "
        f"{free.f_bavail * free.f_frsize / 1e6:.1f} MB free and {PUBLISHED} versions are kept, on several hosts "
        f"{PUBLISHED + PINNED}, {FETCHED} where they are fetched — enlarge it, for example with "
        f"`mount -o remount,size=…G {SEGMENTS}`, with --shm-size=…g for a container, and in Kubernetes with a volume "
        f"`emptyDir: {{medium: Memory}}` at {SEGMENTS}"
    )


def write(handle: int, path: Path, at: int, data: bytes | memoryview) -> None:
    """Unlike writing through a mapping, this fails where there is no memory; unlike `reserve`, it writes pages once."""
    left = memoryview(data)
    try:
        while left:
            done = os.pwrite(handle, left, at)
            left, at = left[done:], at + done
    except OSError as error:
        raise no_room(path, at + len(left), error.strerror) from error


def map_shared(path: Path) -> mmap.mmap:
    """Map a segment for writing."""
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(handle, 0)
    finally:
        os.close(handle)
