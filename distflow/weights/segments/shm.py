"""The link on one host: a version is copied once into a shared segment, which every reader maps and reads in place.

PUBLISHED segments are used in turn, so a version stays readable until PUBLISHED − 1 newer ones were published. The
first bytes of a segment name its version; a reader that was too slow finds another version and takes the newest one
instead. The publisher never waits. With readers on other hosts one more version is kept, the one that they are reading:
it is not overwritten, so that they make progress even if versions are published faster than they can be read.

What a reader has copied is whole if the segment named the same version before and after. The checksums are for what
this cannot tell: damage between the publisher's sums and the readers, which is the same for all of them. So one reader
of the host compares them and notes it behind the segment's version; the others copy meanwhile and look for its note
before they use what they have. The kernel takes the lock from one that dies, and the next compares.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from msgspec import structs
from torch import Tensor

from distflow.errors import ChecksumError, Overtaken, ProtocolError
from distflow.flow.sizes import PINNED, PUBLISHED
from distflow.types import Version
from distflow.weights.manifest import FP8, Manifest, TensorEntry, checksums, verify
from distflow.weights.segments.page_lock import PageLock
from distflow.weights.segments.segment_file import SEGMENTS, map_shared, no_room, open_own, reserve, write
from distflow.weights.segments.turns import SegmentTurns
from distflow.weights.transport import NamedTensors

ALIGN = 64
HEADER = struct.Struct("<qq")
"""Term and number of the version in a segment; term −1 while it is being written."""
CHECKED = struct.Struct("<qqQ")
"""Behind the header, written by readers: the version whose bytes had the announced checksums, and a sum of those sums.

Two may write it at once, of two versions; whatever comes of that names no version with the sums of another.
"""
HEADER_BYTES = 64
CHECK_S = 1.0
CHECK_BYTES_S = 1 << 30
"""How long a reader waits for another one's comparison: so many seconds, and at this pace. One that was stopped in the
middle of it holds nobody up."""
LOOK_S = 0.0005
RESERVE_BYTES = 1 << 30
"""Reserved at a time: a publisher that ends does not wait for more."""

# Torch has no tensors that are read-only, and says so about the first view of such memory.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

_HOST = torch.device("cpu")
_DTYPES = {str(one): one for one in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8)}


@dataclass(frozen=True, slots=True)
class _Slot:
    """A publisher's segment, and its tensors."""

    path: Path
    memory: mmap.mmap
    views: list[Tensor]
    locked: PageLock | None
    """For the GPU that the tensors come from."""


def segment_prefix(run: str) -> str:
    """The prefix of the names of a run's shared segments."""
    return f"distflow-{run}-"


class ShmPublisher:
    """Copies each version into one of PUBLISHED segments, named after `model` and `run`.

    With `pinned` there is one more segment, and the one that `pinned` returns (None: none) is not overwritten.
    The first version is in the first segment before there are others: memory for these is reserved on a thread, which
    takes as long as writing them, while the trainer trains on. `shown` is entered with the name of a wait for that.
    """

    def __init__(
        self,
        run: str,
        model: str,
        term: int,
        pinned: Callable[[], str | None] | None = None,
        shown: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._model = model
        self._pinned = pinned
        self._shown = shown
        slots = PUBLISHED if pinned is None else PUBLISHED + PINNED
        self._paths = [SEGMENTS / f"{segment_prefix(run)}{model}-t{term}-{slot}" for slot in range(slots)]
        self._slots: list[Future[_Slot]] = []
        self._reserving = ThreadPoolExecutor(1, thread_name_prefix="weights-memory")
        self._closing = threading.Event()
        self._entries: tuple[TensorEntry, ...] = ()
        self._size = 0
        self._turns = SegmentTurns([str(path) for path in self._paths])
        self._gpu: torch.device | None = None
        """Where the tensors come from, if that is one."""

    def publish(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
        """Copy the tensors; what is returned has no checksums yet. Raises UserError if shared memory is too small.

        Tensors are taken one by one, so that gathered ones need not exist all at once.
        """
        if not self._slots:
            self._lay_out(tensors)
            slot = self._free_slot()
        else:
            slot = self._free_slot()
            HEADER.pack_into(slot.memory, 0, -1, 0)
            views = iter(slot.views)
            for _, tensor in tensors:
                next(views).copy_(tensor)
                del tensor  # before the next one is gathered
            assert next(views, None) is None, "every version has the same parameters"
        HEADER.pack_into(slot.memory, 0, *version)
        return Manifest(self._model, version, str(slot.path), self._size, self._entries, ())

    def summed(self, manifest: Manifest) -> Manifest:
        """What `publish` has returned, with its checksums; on any thread.

        Raises Overtaken if the version is overwritten meanwhile.
        """
        slots = self._slots
        if not slots:
            raise Overtaken(f"{manifest.title}: its publisher has ended")
        slot = slots[self._paths.index(Path(manifest.place))].result()
        sums = checksums(memoryview(slot.memory)[HEADER_BYTES:])
        if HEADER.unpack_from(slot.memory, 0) != tuple(manifest.version):
            raise Overtaken(f"{manifest.title}: overwritten by a newer version before its checksums were known")
        return structs.replace(manifest, checksums=sums)

    def close(self) -> None:
        """Remove the segments; readers that still map them keep the bytes."""
        self._closing.set()
        self._reserving.shutdown(cancel_futures=True)
        self._slots = []
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _free_slot(self) -> _Slot:
        slot = self._slots[self._turns.next(None if self._pinned is None else self._pinned())]
        if slot.done():
            return slot.result()
        with self._shown(f"shared memory for a version of {self._model!r}"):
            return slot.result()

    def _lay_out(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write the first version into the first segment, which grows as needed: its size is known only at the end."""
        entries, at, path, on_host = [], 0, self._paths[0], _OnHost()
        with _segment(path) as handle:
            write(handle, path, 0, HEADER.pack(-1, 0).ljust(HEADER_BYTES, b"\0"))
            for name, tensor in tensors:
                data = on_host(tensor)
                entries.append(TensorEntry(name, str(tensor.dtype), tuple(tensor.shape), at, len(data)))
                write(handle, path, HEADER_BYTES + at, data)
                # No holes: where memory runs out later, touching one would kill this process.
                write(handle, path, HEADER_BYTES + at + len(data), bytes(-len(data) % ALIGN))
                at += len(data) + (-len(data) % ALIGN)
                del tensor, data  # before the next one is gathered
        self._entries, self._size, self._gpu = tuple(entries), at, on_host.gpu
        free = os.statvfs(SEGMENTS)
        if free.f_bavail * free.f_frsize < (len(self._paths) - 1) * (HEADER_BYTES + at):
            # Said now, and not when the thread finds it out, which is looked at with the next version.
            raise no_room(path, HEADER_BYTES + at, "too little for all versions")
        self._slots.append(self._reserving.submit(self._open_slot, path))
        self._slots += [self._reserving.submit(self._make_slot, other) for other in self._paths[1:]]

    def _make_slot(self, path: Path) -> _Slot:
        size = HEADER_BYTES + self._size
        with _segment(path) as handle:
            for begin in range(0, size, RESERVE_BYTES):
                if self._closing.is_set():
                    raise Overtaken(f"{path}: the publisher has ended")
                reserve(handle, path, begin, min(begin + RESERVE_BYTES, size))
        return self._open_slot(path)

    def _open_slot(self, path: Path) -> _Slot:
        memory = map_shared(path)
        locked = None if self._gpu is None else PageLock(memory, self._gpu, writable=True)
        return _Slot(path, memory, [view for _, view in tensor_views(memory, self._entries, HEADER_BYTES)], locked)


class _OnHost:
    """The bytes of tensors, one after another; those of a GPU's are good until the next one is asked for."""

    def __init__(self) -> None:
        self.gpu: torch.device | None = None
        """Where some came from."""
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __call__(self, tensor: Tensor) -> memoryview:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if flat.is_cuda:
            self.gpu = flat.device
            if len(self._buffer) < len(flat):
                # Copies into memory that is new to the system take seven times as long.
                self._buffer = torch.empty(len(flat), dtype=torch.uint8, pin_memory=True)
            flat = self._buffer[: len(flat)].copy_(flat)
        return flat.numpy().data


class AnnouncedSegment:
    """A publisher's segment as a reader has it open. Closed with the last reference.

    Opening it raises ProtocolError for another path, ChecksumError if it is too small. If it is gone, its publisher has
    ended, and the next one announces other weights: Overtaken. `device`: where an engine of this process copies it to.
    """

    def __init__(self, manifest: Manifest, device: torch.device = _HOST) -> None:
        path = Path(manifest.place)
        if path.parent != SEGMENTS or not path.name.startswith("distflow-"):
            raise ProtocolError(f"{manifest.title}: {path} is not a shared segment of a run")
        try:
            self._handle = open_own(path)
        except PermissionError as error:
            raise ProtocolError(f"{manifest.title}: {error}") from error
        except FileNotFoundError as error:
            raise Overtaken(f"{manifest.title}: {path} is gone; its publisher has ended") from error
        try:
            # A private mapping would be writable, but what an engine writes hides later versions in this segment.
            self.memory = mmap.mmap(self._handle, HEADER_BYTES + manifest.size, access=mmap.ACCESS_READ)
        except ValueError as error:
            os.close(self._handle)
            raise ChecksumError(
                f"{manifest.title}: {path} is smaller than the announced {manifest.size} bytes"
            ) from error
        # Where the engine is in a process of its own, this one uses no GPU, and is to take none of its memory.
        cuda: Any = torch.cuda
        copied = device.type == "cuda" and cuda.is_initialized()
        self.locked = PageLock(self.memory, device, writable=False) if copied else None

    def __del__(self) -> None:
        if hasattr(self, "memory"):
            os.close(self._handle)

    def holds(self, manifest: Manifest) -> bool:
        """Whether the segment holds this version now."""
        return HEADER.unpack_from(self.memory, 0) == tuple(manifest.version)

    def checked(self, note: bytes) -> bool:
        """Whether a reader has noted that it found the announced checksums; `note` is what it writes."""
        return os.pread(self._handle, CHECKED.size, HEADER.size) == note

    def doubt(self) -> None:
        """Forget that anyone has found the announced checksums."""
        os.pwrite(self._handle, bytes(CHECKED.size), HEADER.size)

    def begin_check(self) -> bool:
        """Take the turn to compare, if nobody has it."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def check(self, manifest: Manifest, note: bytes) -> None:
        """Compare the checksums, note that they are right and give the turn back; raises ChecksumError."""
        try:
            if not self.checked(note):
                verify(memoryview(self.memory)[HEADER_BYTES:], manifest.checksums, manifest.title)
                os.pwrite(self._handle, note, HEADER.size)
        finally:
            fcntl.flock(self._handle, fcntl.LOCK_UN)


def _note(manifest: Manifest) -> bytes:
    sums = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(manifest.checksums)}Q", *manifest.checksums))
    return CHECKED.pack(*manifest.version, sums)


class ShmReader:
    """Maps segments as they are announced. `begin_term` may be called on another thread, even during a `fetch`.

    `shown` is entered with the name of a wait while it lasts. `device`: where this process copies versions to.
    """

    def __init__(
        self, shown: Callable[[str], AbstractContextManager[object]] = nullcontext, device: str = "cpu"
    ) -> None:
        self._shown = shown
        self._device = torch.device(device)
        self._open: dict[str, AnnouncedSegment] = {}
        self._term: int | None = None
        self._lock = threading.Lock()

    def fetch(self, manifest: Manifest) -> NamedTensors:
        """Views of the announced version; raises Overtaken if it was overwritten or removed, ChecksumError if it is
        corrupt."""
        self.begin_term(manifest.version.term)
        with self._lock:
            segment = self._open.get(manifest.place)
            if segment is None and manifest.version.term == self._term:
                segment = self._open[manifest.place] = AnnouncedSegment(manifest, self._device)
        if segment is None or not segment.holds(manifest):
            raise Overtaken(f"{manifest.title}: overwritten by a newer version")
        note = _note(manifest)
        if not segment.checked(note) and segment.begin_check():
            self._check(segment, manifest, note)
        return tensor_views(segment.memory, manifest.entries, HEADER_BYTES)

    def intact(self, manifest: Manifest) -> bool:
        """Whether the segment still holds this version and no later term has begun. Raises ChecksumError if what was
        copied is corrupt."""
        segment, note = self._open.get(manifest.place), _note(manifest)
        if segment is not None and not segment.checked(note):
            with self._shown(f"a neighbour to compare the checksums of {manifest.title}"):
                self._await_check(segment, manifest, note)
        return segment is not None and self._open.get(manifest.place) is segment and segment.holds(manifest)

    def doubt(self, manifest: Manifest) -> None:
        """What came of it was wrong: compare its checksums anew, whoever has done so before."""
        segment = self._open.get(manifest.place)
        if segment is not None:
            segment.doubt()

    def _await_check(self, segment: AnnouncedSegment, manifest: Manifest, note: bytes) -> None:
        waits_until = time.monotonic() + CHECK_S + manifest.size / CHECK_BYTES_S
        while segment.holds(manifest) and not segment.checked(note):
            if segment.begin_check() or time.monotonic() > waits_until:
                self._check(segment, manifest, note)
            else:
                time.sleep(LOOK_S)

    def begin_term(self, term: int) -> None:
        """Unmap segments of earlier terms: although removed, they occupy memory as long as they are mapped."""
        with self._lock:
            if self._term is None or term > self._term:
                self._term = term
                self._open.clear()

    def close(self) -> None:
        """Release the segments; each is unmapped when its last view is gone."""
        self._open.clear()

    def _check(self, segment: AnnouncedSegment, manifest: Manifest, note: bytes) -> None:
        try:
            segment.check(manifest, note)
        except ChecksumError as error:
            if segment.holds(manifest):
                raise
            raise Overtaken(f"{manifest.title}: overwritten by a newer version while it was read") from error


@contextmanager
def _segment(path: Path) -> Iterator[int]:
    """A new, open file."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)


def tensor_views(memory: mmap.mmap, entries: tuple[TensorEntry, ...], offset: int) -> list[tuple[str, Tensor]]:
    """Views of a version whose bytes begin at `offset`, one per parameter; those in fp8 as flat bytes.

    Whoever writes into views of read-only memory is killed (SIGSEGV).
    Raises ProtocolError for another dtype.
    """
    out = []
    for entry in entries:
        if entry.dtype == FP8:
            data = torch.frombuffer(memory, dtype=torch.uint8, count=entry.size, offset=offset + entry.start)
            out.append((entry.name, data))
            continue
        if entry.dtype not in _DTYPES:
            raise ProtocolError(
                f"parameter {entry.name!r} has dtype {entry.dtype!r}; expected one of {sorted(_DTYPES)}"
            )
        dtype = _DTYPES[entry.dtype]
        count = entry.size // dtype.itemsize
        view = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset + entry.start).view(entry.shape)
        out.append((entry.name, view))
    return out
