"""The link on one host: a version is copied once into a shared segment, which every reader maps and reads in place.

KEEP segments are used in turn, so a version stays readable until KEEP − 1 newer ones were published. The first bytes of
a segment name the version it holds; a reader that was overtaken finds another version (or a checksum that does not fit)
and takes the newest one instead. The publisher never waits.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from distflow.errors import ChecksumError, Overtaken, ProtocolError, UserError
from distflow.types import Version
from distflow.weights.link import NamedTensors
from distflow.weights.manifest import Manifest, TensorEntry, checksums, verify

KEEP = 3
ALIGN = 64
HEADER = struct.Struct("<qq")
"""Term and number of the version in a segment; term −1 while it is being written."""
HEADER_BYTES = 64
SEGMENTS = Path("/dev/shm")

_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


def segment_prefix(run: str) -> str:
    """All shared segments of a run are named so."""
    return f"distflow-{run}-"


class ShmPublisher:
    """Copies each version into one of KEEP segments. `model` and `run` name them."""

    def __init__(self, run: str, model: str, term: int) -> None:
        self._model = model
        self._paths = [SEGMENTS / f"{segment_prefix(run)}{model}-t{term}-{slot}" for slot in range(KEEP)]
        self._maps: list[mmap.mmap] = []
        self._views: list[list[Tensor]] = []
        self._entries: tuple[TensorEntry, ...] = ()
        self._size = 0
        self._turn = 0

    def publish(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
        """Copy in, sum, and describe. Raises UserError when shared memory is too small."""
        named = list(tensors)
        if not self._maps:
            self._lay_out(named)
        slot = self._turn % KEEP
        self._turn += 1
        HEADER.pack_into(self._maps[slot], 0, -1, 0)
        for view, (_, tensor) in zip(self._views[slot], named, strict=True):
            view.copy_(tensor)
        sums = checksums(memoryview(self._maps[slot])[HEADER_BYTES:])
        HEADER.pack_into(self._maps[slot], 0, *version)
        return Manifest(self._model, version, str(self._paths[slot]), self._size, self._entries, sums)

    def close(self) -> None:
        """Remove the segments; readers that still map them keep their bytes."""
        self._views.clear()
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _lay_out(self, named: list[tuple[str, Tensor]]) -> None:
        entries, at = [], 0
        for name, tensor in named:
            size = tensor.numel() * tensor.element_size()
            entries.append(TensorEntry(name, str(tensor.dtype), tuple(tensor.shape), at, size))
            at += size + (-size % ALIGN)
        self._entries, self._size = tuple(entries), at
        for path in self._paths:
            segment = _create(path, HEADER_BYTES + self._size)
            self._maps.append(segment)
            self._views.append([view for _, view in _tensors(segment, self._entries)])


class ShmReader:
    """Maps segments as they are announced."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def fetch(self, manifest: Manifest) -> NamedTensors:
        """Views of the announced version; raises Overtaken if it was overwritten, ChecksumError if never whole."""
        if manifest.place not in self._maps:
            self._maps[manifest.place] = _open(manifest)
        segment = self._maps[manifest.place]
        if not self.intact(manifest):
            raise Overtaken(f"{_what(manifest)}: overwritten by a newer version")
        try:
            verify(memoryview(segment)[HEADER_BYTES:], manifest.checksums, _what(manifest))
        except ChecksumError as error:
            if self.intact(manifest):
                raise
            raise Overtaken(f"{_what(manifest)}: overwritten by a newer version while it was read") from error
        return _tensors(segment, manifest.entries)

    def intact(self, manifest: Manifest) -> bool:
        """Whether the segment still holds this version."""
        return bool(HEADER.unpack_from(self._maps[manifest.place], 0) == tuple(manifest.version))

    def close(self) -> None:
        """Let go; a segment is unmapped when the last view of it is gone."""
        self._maps.clear()


def _what(manifest: Manifest) -> str:
    return f"weights of {manifest.model!r}, term {manifest.version.term}, version {manifest.version.number}"


def _create(path: Path, size: int) -> mmap.mmap:
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Without the reservation, a full shared-memory file system kills the writer with SIGBUS in mid-copy.
        os.posix_fallocate(handle, 0, size)
        return mmap.mmap(handle, size)
    except OSError as error:
        path.unlink()
        free = os.statvfs(SEGMENTS)
        raise UserError(
            f"{path}: no room for weights of {size / 1e6:.1f} MB ({error.strerror}); {SEGMENTS} has "
            f"{free.f_bavail * free.f_frsize / 1e6:.1f} MB free and {KEEP} versions are kept — enlarge it, "
            f"for example with `mount -o remount,size=…G {SEGMENTS}`"
        ) from error
    finally:
        os.close(handle)


def _open(manifest: Manifest) -> mmap.mmap:
    path = Path(manifest.place)
    if path.parent != SEGMENTS or not path.name.startswith("distflow-"):
        raise ProtocolError(f"{_what(manifest)}: {path} is no shared segment of a run")
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise ChecksumError(f"{_what(manifest)}: {path} is gone; its publisher has left") from error
    try:
        # A private mapping sees what the publisher writes, and cannot write into it.
        return mmap.mmap(handle, HEADER_BYTES + manifest.size, access=mmap.ACCESS_COPY)
    except ValueError as error:
        raise ChecksumError(f"{_what(manifest)}: {path} is smaller than the announced {manifest.size} bytes") from error
    finally:
        os.close(handle)


def _tensors(segment: mmap.mmap, entries: tuple[TensorEntry, ...]) -> list[tuple[str, Tensor]]:
    """Views of a segment, one a parameter."""
    out = []
    for entry in entries:
        if entry.dtype not in _DTYPES:
            raise ProtocolError(
                f"parameter {entry.name!r} has dtype {entry.dtype!r}; expected one of {sorted(_DTYPES)}"
            )
        dtype = _DTYPES[entry.dtype]
        count = entry.size // dtype.itemsize
        view = torch.frombuffer(segment, dtype=dtype, count=count, offset=HEADER_BYTES + entry.start).view(entry.shape)
        out.append((entry.name, view))
    return out
