"""Deltas: what has changed between two versions of a model, to be written over a copy of the older one. Lossless.

The bytes of a version are taken as words of 16 bits, the values of a bfloat16 model, each chunk by itself: so several
threads encode and decode them, and one that does not come out right can be fetched alone. A delta is, for each
chunk, 4 bytes: the size of its part; then the parts, one after the other. A part is empty if nothing has changed, else
its first byte says how the rest is to be read:

- WHOLE: all bytes of the chunk.
- BITS: a bit for each word (bit 0 first), 1 where it has changed; then the new words.
- STEPS_8, STEPS_16: how many words have changed (4 bytes); steps of 8 or 16 bits; then the new words. A step is the
  number of unchanged words before the next changed one; the largest number there is only skips so many words.

A chunk of an odd number of bytes has its last byte after all that. Numbers are little-endian. Example: of a chunk of
1,000 words, words 2 and 300 have changed to x and y: STEPS_8, count 2, steps 2, 255, 42, then x and y.
"""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from distflow.errors import ProtocolError
from distflow.weights.manifest import CHUNK_BYTES, coding_threads

_COUNT = struct.Struct("<I")
_WORD = np.dtype("<u2")
_PROBED = 16
"""So many chunks at least tell whether a delta is worth while."""
_LANES_LOG2 = 2
_LANES = 1 << _LANES_LOG2
"""Words that are compared at once."""

Words = NDArray[np.uint16]
Positions = NDArray[np.int64]


class Kind(IntEnum):
    """How a part says what has changed."""

    WHOLE = 1
    BITS = 2
    STEPS_8 = 3
    STEPS_16 = 4


_STEPS: dict[Kind, np.dtype[np.uint8] | np.dtype[np.uint16]] = {
    Kind.STEPS_8: np.dtype("<u1"),
    Kind.STEPS_16: np.dtype("<u2"),
}


def encode(new: memoryview, base: memoryview, most: int, write: Callable[[int, bytes], None]) -> int | None:
    """Make the delta that makes `new` of `base`, as many bytes; returns its size, None if it were more than `most`.

    `write` is called with offsets and what is to be there, on several threads. All but a few chunks' parts are written
    at any time. The GIL is released for the most part.
    """
    assert len(new) == len(base), "versions of one layout"
    chunks = [(new[at : at + CHUNK_BYTES], base[at : at + CHUNK_BYTES]) for at in range(0, len(new), CHUNK_BYTES)]
    probed = chunks[:: max(1, len(chunks) // _PROBED)]
    if sum(_fewest_bytes(*pair) for pair in probed) * len(new) > most * sum(len(pair[0]) for pair in probed):
        # So it is with every version of a float32 model, which is not to wait for this each time.
        return None
    sizes: list[int] = []
    end = _COUNT.size * len(chunks)
    threads = coding_threads()
    with ThreadPoolExecutor(threads) as pool:
        # In turns, so that it ends as soon as there is too much.
        for turn in range(0, len(chunks), 4 * threads):
            parts = list(pool.map(lambda pair: encode_part(*pair), chunks[turn : turn + 4 * threads]))
            *starts, end = itertools.accumulate(map(len, parts), initial=end)
            if end > most:
                return None
            sizes += map(len, parts)
            deque(pool.map(write, starts, parts), maxlen=0)
    write(0, struct.pack(f"<{len(sizes)}I", *sizes))
    return end


def parts_of(delta: memoryview, size: int) -> list[memoryview]:
    """The parts of a delta for a version of `size` bytes, one for each chunk; raises ProtocolError."""
    chunks = -(-size // CHUNK_BYTES)
    begin = _COUNT.size * chunks
    if len(delta) < begin:
        raise ProtocolError(f"a delta of {len(delta)} bytes for {chunks} chunks")
    sizes = struct.unpack_from(f"<{chunks}I", delta)
    if begin + sum(sizes) != len(delta):
        raise ProtocolError(f"a delta of {len(delta)} bytes whose parts have {begin + sum(sizes)}")
    ends = np.cumsum((begin, *sizes)).tolist()
    return [delta[start:end] for start, end in pairwise(ends)]


def _fewest_bytes(new: memoryview, base: memoryview) -> int:
    """Of what has changed in a chunk, without where."""
    words = len(new) // 2
    ours, theirs = (np.frombuffer(data, _WORD, words) for data in (new, base))
    return _WORD.itemsize * int(np.count_nonzero(ours != theirs))


def encode_part(new: memoryview, base: memoryview) -> bytes:
    """What has changed in one chunk, in the smallest form."""
    at = _changed(new, base)
    tail = bytes(new[len(new) // 2 * 2 :])
    if not len(at) and tail == base[len(new) // 2 * 2 :]:
        return b""
    words = len(new) // 2
    values = np.frombuffer(new, _WORD, words)[at].tobytes()
    gaps = np.diff(at, prepend=-1) - 1
    beside = len(values) + len(tail)
    sizes = {
        kind: _COUNT.size + dtype.itemsize * (len(at) + int((gaps // np.iinfo(dtype).max).sum())) + beside
        for kind, dtype in _STEPS.items()
    }
    sizes |= {Kind.BITS: -(-words // 8) + beside, Kind.WHOLE: len(new)}
    kind = min(sizes, key=lambda one: sizes[one])
    if kind is Kind.WHOLE:
        return b"".join((bytes((kind,)), new))
    if kind is Kind.BITS:
        flags = np.zeros(words, np.bool_)
        flags[at] = True
        return b"".join((bytes((kind,)), np.packbits(flags, bitorder="little").tobytes(), values, tail))
    return b"".join((bytes((kind,)), _COUNT.pack(len(at)), _steps(gaps, _STEPS[kind]), values, tail))


def apply_part(part: memoryview, chunk: memoryview) -> None:
    """Make a chunk of the newer version of the same one of the older; raises ProtocolError for anything malformed.

    Then the chunk may have been changed in part.
    """
    if not part:
        return
    try:
        kind = Kind(part[0])
    except ValueError as error:
        raise ProtocolError(f"a part of a delta of kind {part[0]}") from error
    body = part[1:]
    if kind is Kind.WHOLE:
        if len(body) != len(chunk):
            raise ProtocolError(f"{len(body)} bytes in a delta for a chunk of {len(chunk)}")
        chunk[:] = body
        return
    words, odd = divmod(len(chunk), 2)
    if len(body) < odd:
        raise ProtocolError("a part of a delta without the last byte of its chunk")
    at, values = (_by_bits if kind is Kind.BITS else _by_steps)(kind, body[: len(body) - odd], words)
    np.frombuffer(chunk, _WORD, words)[at] = values
    if odd:
        chunk[-1] = body[-1]


def _changed(new: memoryview, base: memoryview) -> Positions:
    """Where words differ."""
    words = len(new) // 2
    ours, theirs = (np.frombuffer(data, _WORD, words) for data in (new, base))
    wide = words // _LANES * _LANES
    # Most of a step's chunk is as it was: 64 bits at a time find the few places to look at.
    ours_wide, theirs_wide = ours[:wide].view(np.uint64), theirs[:wide].view(np.uint64)
    near = np.flatnonzero(ours_wide != theirs_wide)
    inside = np.flatnonzero((ours_wide[near] ^ theirs_wide[near]).view(_WORD) != 0)
    at = (near[inside >> _LANES_LOG2] << _LANES_LOG2) + (inside & (_LANES - 1))
    rest = wide + np.flatnonzero(ours[wide:] != theirs[wide:])
    return np.concatenate((at, rest)) if len(rest) else at


def _steps(gaps: Positions, dtype: np.dtype[np.uint8] | np.dtype[np.uint16]) -> bytes:
    skip = int(np.iinfo(dtype).max)
    skips = gaps // skip
    steps = np.full(len(gaps) + int(skips.sum()), skip, dtype)
    steps[np.cumsum(skips + 1) - 1] = gaps - skips * skip
    return steps.tobytes()


def _by_steps(kind: Kind, body: memoryview, words: int) -> tuple[Positions, Words]:
    dtype = _STEPS[kind]
    if len(body) < _COUNT.size:
        raise ProtocolError(f"{len(body)} bytes of steps in a delta")
    (count,) = _COUNT.unpack_from(body)
    size, odd = divmod(len(body) - _COUNT.size - count * _WORD.itemsize, dtype.itemsize)
    if size < count or odd:
        raise ProtocolError(f"a part of a delta of {len(body)} bytes for {count} changed words")
    steps = np.frombuffer(body, dtype, size, _COUNT.size)
    ends = np.flatnonzero(steps != np.iinfo(dtype).max)
    if len(ends) != count or (size and ends[-1:].tolist() != [size - 1]):
        raise ProtocolError(f"{len(ends)} steps in a delta for {count} changed words")
    at = np.cumsum(steps, dtype=np.int64)[ends] + np.arange(count)
    if count and at[-1] >= words:
        raise ProtocolError(f"word {at[-1]} in a delta for a chunk of {words} words")
    return at, np.frombuffer(body, _WORD, count, _COUNT.size + size * dtype.itemsize)


def _by_bits(_kind: Kind, body: memoryview, words: int) -> tuple[Positions, Words]:
    size = -(-words // 8)
    if len(body) < size:
        raise ProtocolError(f"{len(body)} bytes in a delta for a bit for each of {words} words")
    flags = np.unpackbits(np.frombuffer(body, np.uint8, size), bitorder="little")
    at = np.flatnonzero(flags)
    if len(body) - size != len(at) * _WORD.itemsize or (len(at) and at[-1] >= words):
        raise ProtocolError(f"a part of a delta of {len(body)} bytes for {len(at)} changed of {words} words")
    return at, np.frombuffer(body, _WORD, len(at), size)
