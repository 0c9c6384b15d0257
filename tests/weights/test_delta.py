"""Deltas of weights: what they make of the older version is the newer one, bit for bit; garbage is refused."""

import contextlib
import os
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distflow.errors import ProtocolError
from distflow.weights.encodings import delta
from distflow.weights.encodings.delta import Kind, apply_part, encode, encode_part, parts_of
from distflow.weights.manifest import CHUNK_BYTES, digests
from distflow.weights.swarm.delta_memory import DeltaFile


def applied(part: bytes, base: bytes) -> bytes:
    chunk = bytearray(base)
    apply_part(memoryview(part), memoryview(chunk))
    return bytes(chunk)


def part_of(new: bytes, base: bytes) -> bytes:
    return encode_part(memoryview(new), memoryview(base))


def encoded(new: bytes | bytearray, base: bytes, most: int) -> bytes | None:
    found = bytearray(most)

    def write(at: int, data: bytes) -> None:
        found[at : at + len(data)] = data

    size = encode(memoryview(new), memoryview(base), most, write)
    return None if size is None else bytes(found[:size])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Two versions of a chunk: some of its bytes differ, few or many, near or far from each other."""
    size = draw(st.one_of(st.integers(0, 40), st.integers(0, 200_000)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = random.integers(0, 256, size, np.uint8)
    new = base.copy()
    changed = random.random(size) < draw(st.sampled_from([0.0, 1e-5, 1e-3, 0.02, 0.2, 0.5, 1.0]))
    new[changed] = random.integers(0, 256, int(changed.sum()), np.uint8)
    return new.tobytes(), base.tobytes()


@given(pairs())
def test_a_part_makes_the_newer_chunk_of_the_older_and_is_hardly_larger(pair: tuple[bytes, bytes]) -> None:
    new, base = pair
    part = part_of(new, base)
    assert applied(part, base) == new
    assert len(part) <= len(new) + 1
    assert bool(part) == (new != base)


@pytest.mark.parametrize(
    ("share", "kind"),
    [(0.0002, Kind.STEPS_16), (0.01, Kind.STEPS_8), (0.3, Kind.BITS), (0.999, Kind.WHOLE)],
)
def test_the_smallest_form_is_taken(share: float, kind: Kind) -> None:
    random = np.random.default_rng(0)
    base = random.integers(0, 1 << 16, CHUNK_BYTES // 2, np.uint16)
    new = np.where(random.random(len(base)) < share, base ^ 1, base)
    part = part_of(new.tobytes(), base.tobytes())
    assert part[0] == kind
    assert applied(part, base.tobytes()) == new.tobytes()
    expected = {Kind.STEPS_16: 4, Kind.STEPS_8: 3.1, Kind.BITS: 2 + 1 / 8 / share, Kind.WHOLE: 2 / share}[kind]
    assert len(part) == pytest.approx(expected * share * len(base), rel=0.1)


def test_nan_payloads_signed_zeros_and_denormals_come_through() -> None:
    base = np.array([0, 0x7FC0, 0x8000, 0x7F80, 1, 0x3F80] * 11, np.uint16)
    new = base.copy()
    new[:5] = [0x8000, 0x7FC1, 0, 0xFFFF, 0x8001]
    made = applied(part_of(new.tobytes(), base.tobytes()), base.tobytes())
    assert made == new.tobytes()
    assert torch.isnan(torch.frombuffer(bytearray(made), dtype=torch.bfloat16)[[1, 3]]).all()


@pytest.mark.parametrize("size", [0, 1, 2, CHUNK_BYTES, CHUNK_BYTES + 7, 3 * CHUNK_BYTES - 2])
def test_a_delta_of_many_chunks(size: int) -> None:
    random = np.random.default_rng(1)
    base = random.integers(0, 256, size, np.uint8)
    new = base.copy()
    new[::1000] += 1
    found = encoded(new.tobytes(), base.tobytes(), size + 100)
    assert found is not None
    parts = parts_of(memoryview(found), size)
    made = bytearray(base.tobytes())
    for number, part in enumerate(parts):
        apply_part(part, memoryview(made)[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])
    assert bytes(made) == new.tobytes()
    assert len(parts) == -(-size // CHUNK_BYTES)


def test_no_delta_where_it_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    base = bytes(40 * CHUNK_BYTES)
    uneven = bytearray(base)
    uneven[: 4 * CHUNK_BYTES] = b"\1" * (4 * CHUNK_BYTES)
    assert encoded(uneven, base, len(base) // 8) is not None
    assert encoded(uneven, base, len(base) // 11) is None
    monkeypatch.setattr(delta, "encode_part", lambda *_: pytest.fail("a few chunks tell that it is not worth while"))
    assert encoded(b"\1" * len(base), base, len(base) // 2) is None


def test_a_delta_is_in_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few chunks' parts besides: of a large model each further copy would be gigabytes."""
    monkeypatch.setattr(delta, "coding_threads", lambda: 1)
    random = np.random.default_rng(0)
    base = np.zeros(64 * CHUNK_BYTES // 2, np.uint16)
    new = (random.random(len(base), np.float32) < 0.3).view(np.uint8).astype(np.uint16)
    memory = np.empty(len(base), np.uint8)

    def write(at: int, data: bytes) -> None:
        memory[at : at + len(data)] = np.frombuffer(data, np.uint8)

    tracemalloc.start()
    try:
        size = encode(memoryview(new).cast("B"), memoryview(base).cast("B"), len(memory), write)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size is not None
    assert peak < size / 2


def test_what_the_system_takes_in_part_is_written_further(monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, at: pwrite(handle, data[:1000], at))
    with DeltaFile() as file:
        file.write(3, bytes(range(256)) * 20)
        assert file.digests(5123) == digests([memoryview(bytes(3) + bytes(range(256)) * 20)])


@given(pairs(), st.integers(0, 2**32), st.binary(max_size=60))
def test_a_part_that_is_cut_short_or_overwritten_is_refused_or_stays_within_its_chunk(
    pair: tuple[bytes, bytes], seed: int, garbage: bytes
) -> None:
    new, base = pair
    part = part_of(new, base)
    random = np.random.default_rng(seed)
    at = int(random.integers(0, len(part) + 1))
    for broken in (part[:at], part + garbage, part[:at] + garbage + part[at + len(garbage) :], garbage):
        room = bytearray(b"x" * 8 + base + b"x" * 8)
        with contextlib.suppress(ProtocolError):
            apply_part(memoryview(broken), memoryview(room)[8 : 8 + len(base)])
        assert room[:8] == room[8 + len(base) :] == b"x" * 8
    if part and part[0] != Kind.BITS:
        with pytest.raises(ProtocolError):
            applied(part[:-1], base)


def steps(kind: Kind, count: int, *found: int, values: int | None = None) -> bytes:
    form = "B" if kind is Kind.STEPS_8 else "H"
    words = struct.pack(f"<{count if values is None else values}H", *range(count if values is None else values))
    return bytes((kind,)) + struct.pack("<I", count) + struct.pack(f"<{len(found)}{form}", *found) + words


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (b"\0", "a part of a delta of kind 0"),
        (b"\7abc", "a part of a delta of kind 7"),
        (b"\1" + bytes(99), "99 bytes in a delta for a chunk of 100"),
        (b"\2" + bytes(6), "6 bytes in a delta for a bit for each of 50 words"),
        (b"\2" + b"\1" + bytes(6), "a part of a delta of 7 bytes for 1 changed of 50 words"),
        (b"\2" + bytes(6) + b"\x80" + bytes(2), "a part of a delta of 9 bytes for 1 changed of 50 words"),
        (b"\3\1", "1 bytes of steps in a delta"),
        (steps(Kind.STEPS_8, 1, 50), "word 50 in a delta for a chunk of 50 words"),
        (steps(Kind.STEPS_8, 2, 48, 1), "word 50 in a delta for a chunk of 50 words"),
        (steps(Kind.STEPS_16, 1, 60_000), "word 60000 in a delta for a chunk of 50 words"),
        (steps(Kind.STEPS_8, 2, 1, 255), "1 steps in a delta for 2 changed words"),
        (steps(Kind.STEPS_8, 1, 1, 255), "1 steps in a delta for 1 changed words"),
        (steps(Kind.STEPS_8, 1, 1, 1), "2 steps in a delta for 1 changed words"),
        (steps(Kind.STEPS_8, 0, 255), "0 steps in a delta for 0 changed words"),
        (steps(Kind.STEPS_8, 1 << 31, 1, values=1), "a part of a delta of 7 bytes for 2147483648 changed words"),
        (steps(Kind.STEPS_16, 1, 1)[:-1], "a part of a delta of 7 bytes for 1 changed words"),
    ],
)
def test_what_is_malformed_is_refused(part: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        applied(part, bytes(100))


def test_a_delta_whose_parts_do_not_add_up_is_refused() -> None:
    with pytest.raises(ProtocolError, match="a delta of 7 bytes for 2 chunks"):
        parts_of(memoryview(bytes(7)), CHUNK_BYTES + 1)
    with pytest.raises(ProtocolError, match="a delta of 9 bytes whose parts have 8"):
        parts_of(memoryview(bytes(9)), CHUNK_BYTES + 1)
    with pytest.raises(ProtocolError, match="whose parts have 4294967303"):
        parts_of(memoryview(b"\xff\xff\xff\xff" + bytes(8)), CHUNK_BYTES + 1)
