"""What a publisher announces about a version: where each tensor is, and a checksum for every chunk of bytes."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Annotated, Any

import msgspec
import xxhash
from blake3 import blake3

from distflow.data.decoding import MOST, Form, FromMinusOne, Row, Whole, read, shown
from distflow.errors import ChecksumError, ProtocolError
from distflow.types import Version
from distflow.weights.canary import Canary
from distflow.weights.one_sided_messages import RemoteMemory
from distflow.weights.swarm_messages import Content, SwarmPlace

CHUNK_BYTES = 1 << 20
DIGEST_BYTES = 16
FEWEST_THREADS, MOST_THREADS, CORES_A_THREAD = 4, 16, 8
RUN_BYTES = 16 * CHUNK_BYTES
"""What a thread sums at a time."""
_SEGMENT = re.compile(r"/dev/shm/distflow-[^/\0]{1,200}")
DTYPE_BYTES = {"torch.float64": 8, "torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2}
"""Types of published tensors, and the bytes of one value."""
FP8 = "torch.float8_e4m3fn"
"""The type of a tensor that was rounded for the network (distflow/weights/encodings/rounding.py)."""
BLOCK = 128
"""Values of such a tensor that share a scale, of one byte."""
_PRECISIONS = {FP8: "fp8", **{dtype: dtype.removeprefix("torch.") for dtype in DTYPE_BYTES}}


class TensorEntry(Row, frozen=True):
    """One parameter: `start` is the offset of its first byte in the version's bytes."""

    name: str
    dtype: str
    shape: Annotated[tuple[Whole, ...], msgspec.Meta(max_length=8)]
    start: Whole
    size: Whole


class Delta(Row, frozen=True):
    """The bytes that make version `number` of version `base` (distflow/weights/encodings/delta.py), `size` in all."""

    number: Whole
    base: Whole
    size: Whole
    digests: bytes


class Manifest(Form, frozen=True):
    """One version of one model: `place` says where the link finds the bytes, `checksums` are xxh3 of 1 MiB chunks. A
    publisher that has just copied a version has none of these yet.

    Where the bytes cross a network that others may write to, `digests` take the place of the checksums: DIGEST_BYTES
    for each chunk, one after the other. There, `deltas` lead to this version, each from the version before it, and
    `memory` is where readers with NIXL read it. With a `base` the bytes themselves are those of a delta.
    """

    model: str
    version: Version
    place: str
    size: Whole
    entries: tuple[TensorEntry, ...]
    checksums: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    digests: bytes = b""
    canary: Canary | None = None
    deltas: tuple[Delta, ...] = ()
    base: FromMinusOne = -1
    memory: RemoteMemory | None = None

    @property
    def title(self) -> str:
        """The version in words, for messages."""
        since = f", changes since version {self.base}" if self.base >= 0 else ""
        return f"weights of {self.model!r}, term {self.version.term}, version {self.version.number}{since}"

    @property
    def precisions(self) -> set[str]:
        """The types that values were rounded to on their way, as `Canary.tolerance` takes them."""
        return {_PRECISIONS[entry.dtype] for entry in self.entries}

    @property
    def content(self) -> Content:
        """Of what the chunks are."""
        return Content(*self.version, self.base)

    @property
    def chunks(self) -> int:
        """Number of chunks of the version's bytes."""
        return -(-self.size // CHUNK_BYTES)

    def size_of(self, chunk: int) -> int:
        """Bytes of a chunk: the last one may be shorter than CHUNK_BYTES."""
        return min(CHUNK_BYTES, self.size - chunk * CHUNK_BYTES)

    def digest_of(self, chunk: int) -> bytes:
        """The expected digest of a chunk."""
        return self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]

    def chain_from(self, had: Version | None) -> tuple[Delta, ...]:
        """The deltas that make this version of one that a host has; none if there are none, or they are larger."""
        bases = [delta.base for delta in self.deltas]
        if had is None or had.term != self.version.term or had.number not in bases:
            return ()
        chain = self.deltas[bases.index(had.number) :]
        return chain if sum(delta.size for delta in chain) < self.size else ()

    def of_delta(self, delta: Delta) -> Manifest:
        """What says how to fetch one of the deltas."""
        return Manifest(
            self.model,
            Version(self.version.term, delta.number),
            self.place,
            delta.size,
            (),
            (),
            delta.digests,
            base=delta.base,
        )

    def to_wire(self) -> dict[str, Any]:
        """Plain values for a message body."""
        body: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(bytes,))
        return body

    @classmethod
    def from_wire(cls, body: Mapping[str, Any]) -> Manifest:
        """The inverse; raises ProtocolError on anything malformed, including tensors outside the announced bytes."""
        found = read(body, cls, "weights announcement")
        if not 0 <= min(found.version) <= max(found.version) < MOST:
            raise ProtocolError(f"malformed weights announcement: expected a version >= 0, got {found.version}")
        if found.digests:
            SwarmPlace.parse(found.place)
        elif not _SEGMENT.fullmatch(found.place):
            raise ProtocolError(f"{found.title}: {shown(found.place)} is not a shared segment of a run")
        for entry in found.entries:
            _check_entry(entry, found)
        _check_deltas(found)
        sums = len(found.digests) / DIGEST_BYTES if found.digests else len(found.checksums)
        if sums != found.chunks:
            raise ProtocolError(f"{found.title}: {sums:g} checksums or digests for {found.chunks} chunks")
        return found


def _check_deltas(manifest: Manifest) -> None:
    numbers = [*(delta.base for delta in manifest.deltas), manifest.version.number]
    if manifest.base >= 0 or [delta.number for delta in manifest.deltas] != numbers[1:]:
        raise ProtocolError(f"{manifest.title}: its deltas do not lead to it one by one: {shown(manifest.deltas)}")
    for delta in manifest.deltas:
        sums = len(delta.digests) / DIGEST_BYTES
        if not delta.base < delta.number or not 0 < delta.size < manifest.size or sums != -(-delta.size // CHUNK_BYTES):
            raise ProtocolError(
                f"{manifest.title}: {sums:g} digests for {delta.size} bytes that make version {delta.number} of "
                f"{delta.base}"
            )


def _check_entry(entry: TensorEntry, manifest: Manifest) -> None:
    what = f"{manifest.title}: tensor {shown(entry.name)}"
    if entry.start + entry.size > manifest.size:
        raise ProtocolError(f"{what} lies outside {manifest.size} bytes")
    if entry.dtype not in _PRECISIONS:
        raise ProtocolError(f"{what} has dtype {shown(entry.dtype)}; expected one of {', '.join(_PRECISIONS)}")
    count = prod(entry.shape)
    size = count + -(-count // BLOCK) if entry.dtype == FP8 else count * DTYPE_BYTES[entry.dtype]
    if size != entry.size:
        raise ProtocolError(f"{what} of shape {entry.shape} in {entry.size} bytes")


def coding_threads() -> int:
    """Threads that sum, hash, encode or decode a version, on the cores that this process may use: an eighth of many, so
    that several processes of a host can do it at once.
    """
    cores = len(os.sched_getaffinity(0))
    return min(cores, max(FEWEST_THREADS, min(cores // CORES_A_THREAD, MOST_THREADS)))


def digest(chunk: bytes | memoryview) -> bytes:
    """Hash of one chunk for which nobody can make another chunk: BLAKE3, 128 bits of it.

    With vector instructions it is four to five times as fast as SHA-256. Releases the GIL.
    """
    return blake3(chunk).digest(length=DIGEST_BYTES)


def digests(chunks: Sequence[memoryview]) -> bytes:
    """The digests of chunks, one after the other, computed on several threads."""
    with ThreadPoolExecutor(coding_threads()) as pool:
        return b"".join(pool.map(digest, chunks))


def intact_chunks(manifest: Manifest, data: memoryview, among: range | None = None) -> list[int]:
    """The chunks, all or those `among`, that have the announced digests, found on several threads."""

    def right(chunk: int) -> bool:
        return digest(data[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]) == manifest.digest_of(chunk)

    asked = range(manifest.chunks) if among is None else among
    with ThreadPoolExecutor(coding_threads()) as pool:
        return [chunk for chunk, found in zip(asked, pool.map(right, asked), strict=True) if found]


def checksums(data: memoryview) -> tuple[int, ...]:
    """xxh3 (64 bit) of each chunk of CHUNK_BYTES; of many chunks on several threads, with the GIL released."""

    def of_run(begin: int) -> list[int]:
        starts = range(begin, min(begin + RUN_BYTES, len(data)), CHUNK_BYTES)
        return [xxhash.xxh3_64_intdigest(data[at : at + CHUNK_BYTES]) for at in starts]

    if len(data) <= RUN_BYTES:
        return tuple(of_run(0))
    with ThreadPoolExecutor(coding_threads()) as pool:
        return tuple(itertools.chain.from_iterable(pool.map(of_run, range(0, len(data), RUN_BYTES))))


def verify(data: memoryview, expected: Sequence[int], what: str) -> None:
    """Raise ChecksumError naming the first chunk of `data` whose checksum is not as expected."""
    for index, (found, wanted) in enumerate(zip(checksums(data), expected, strict=True)):
        if found != wanted:
            raise ChecksumError(
                f"{what}: chunk {index} of {len(expected)} has checksum {found:016x}, not {wanted:016x}"
            )
