"""Versions that cross hosts as what has changed: real sockets on loopback, real shared segments."""

import os
from collections.abc import Iterator
from mmap import mmap
from typing import Any

import pytest
import torch
from msgspec import structs

from distflow.errors import Overtaken, ProtocolError
from distflow.flow.sizes import PUBLISHED
from distflow.types import Version
from distflow.weights.encodings.rounding import Rounding
from distflow.weights.manifest import CHUNK_BYTES, Delta, Manifest, digests
from distflow.weights.segments.shm import HEADER_BYTES, ShmReader
from distflow.weights.swarm.delta_memory import DeltaFile, DeltaMemory
from distflow.weights.swarm.held_version import HeldVersion
from distflow.weights.swarm.reader import SwarmReader
from tests.polling import eventually
from tests.weights.swarm_kit import Host, left_of, new_reader, new_tag, newest_memory
from tests.weights.test_swarm_readers import fetch_together

VALUES = 3_000_000
"""Of the larger tensor: six chunks."""


def stepped(number: int) -> list[tuple[str, torch.Tensor]]:
    """Weights of version `number`: at each one, one value in a hundred changes, and no value twice in 100 versions."""
    made = torch.arange(VALUES, dtype=torch.int32).mul_(2654435761 % (1 << 31)).to(torch.int16)
    for step in range(1, number + 1):
        made[step % 100 :: 100] ^= step % 127 + 1
    return [("embed", made.view(torch.bfloat16)), ("norm", torch.full((7,), float(number), dtype=torch.bfloat16))]


def is_version(found: Any, number: int) -> bool:
    """Bit for bit: some of the values are NaN."""
    expected = dict(stepped(number))
    same = [torch.equal(tensor.view(torch.int16), expected[name].view(torch.int16)) for name, tensor in found]
    return len(same) == len(expected) and all(same)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(deltas=True)
    yield made
    made.close()


@pytest.fixture
def reader() -> Iterator[SwarmReader]:
    made = new_reader()
    yield made
    made.close()


def publish(host: Host, number: int) -> Manifest:
    return host.publish(number, stepped(number))


def sent_for(host: Host, reader: SwarmReader, manifest: Manifest) -> int:
    """Bytes that the publisher sends for this fetch, which must give the version."""
    before = host.server.traffic.sent_bytes
    assert is_version(reader.fetch(manifest), manifest.version.number)
    return host.server.traffic.sent_bytes - before


def deltas_of(host: Host) -> list[HeldVersion]:
    """What the publisher serves of deltas, the oldest first."""
    found = host.server._server.core._held
    return [held for (_, content), held in sorted(found.items(), key=lambda item: item[0]) if content.base >= 0]


def corrupt(held: HeldVersion, at: int) -> None:
    handle = os.open(f"/proc/self/fd/{held.file.fileno()}", os.O_RDWR)
    with mmap(handle, 0) as memory:
        memory[HEADER_BYTES + at] ^= 0xFF
    os.close(handle)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_host_that_has_the_version_before_takes_what_has_changed(encrypted: bool) -> None:
    host, tag = Host(encrypted=encrypted, deltas=True), new_tag()
    reader = new_reader(tag)
    first = publish(host, 1)
    assert first.deltas == ()
    assert sent_for(host, reader, first) == first.size
    for number in (2, 3, 4):
        manifest = publish(host, number)
        assert [(delta.base, delta.number) for delta in manifest.deltas] == [(n, n + 1) for n in range(1, number)]
        assert sent_for(host, reader, manifest) == manifest.deltas[-1].size < 0.02 * manifest.size
        assert reader.hold(manifest)
    reader.close()
    host.close()
    assert left_of(tag) == []


def test_a_reader_that_skipped_three_versions_takes_their_changes_one_after_the_other(
    host: Host, reader: SwarmReader
) -> None:
    reader.fetch(publish(host, 1))
    newest = [publish(host, number) for number in (2, 3, 4, 5)][-1]
    before = reader.status()[0]["fetched_bytes"]
    assert sent_for(host, reader, newest) == sum(delta.size for delta in newest.deltas) < 0.08 * newest.size
    assert reader.status()[0]["fetched_bytes"] - before == sum(delta.size for delta in newest.deltas)


def test_who_keeps_up_never_takes_a_version_whole_again_and_who_is_far_behind_does(
    host: Host, reader: SwarmReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distflow.weights.swarm.delta_chain.MOST_DELTAS", 3)
    behind, far_behind = new_reader(), new_reader()
    for number in range(12):
        manifest = publish(host, number)
        sent = sent_for(host, reader, manifest)
        assert sent == (manifest.deltas[-1].size if number else manifest.size)
        if number in (7, 8):
            (far_behind if number == 7 else behind).fetch(manifest)
    assert [delta.base for delta in manifest.deltas] == [8, 9, 10]
    assert len(deltas_of(host)) == 3
    for late, chunks in ((behind, 3), (far_behind, manifest.chunks)):
        before = late.fetched
        assert is_version(late.fetch(manifest), 11)
        assert late.fetched - before == chunks, "each delta fits into one"
        late.close()


def test_a_version_that_was_never_announced_leads_nowhere_and_those_before_it_still_do(host: Host) -> None:
    readers = [new_reader() for _ in range(2)]
    first, second = publish(host, 1), publish(host, 2)
    lost = publish(host, 3)
    for reader, manifest in zip(readers, (first, second), strict=True):
        reader.fetch(manifest)
    # As if it had been overwritten while its changes were looked for.
    host.server._held.pop()
    newest = publish(host, 4)
    assert [(delta.base, delta.number) for delta in newest.deltas] == [(1, 2), (2, 4)]
    assert lost.of_delta(lost.deltas[-1]).content not in [held.manifest.content for held in deltas_of(host)]
    for reader, chunks in zip(readers, (2, 1), strict=True):
        before = reader.fetched
        assert is_version(reader.fetch(newest), 4)
        assert reader.fetched - before == chunks
        reader.close()


def test_changes_that_are_not_smaller_than_the_version_are_not_taken(host: Host, reader: SwarmReader) -> None:
    sparse, dense = stepped(1), [("embed", torch.randn(VALUES).bfloat16()), ("norm", torch.zeros(7).bfloat16())]
    reader.fetch(host.publish(1, sparse))
    manifest = host.publish(2, dense)
    assert manifest.deltas == ()
    assert all(torch.equal(found, dict(dense)[name]) for name, found in reader.fetch(manifest))
    third = host.publish(3, [(name, tensor.neg()) for name, tensor in dense])
    assert third.deltas == (), "every second byte is another one"


def test_the_deltas_that_are_kept_are_bounded(host: Host) -> None:
    """A third of the values changes at a time: the delta of one version takes 0.4 of it."""
    base = torch.arange(VALUES, dtype=torch.int32).to(torch.int16)
    for number in range(1, 6):
        base[number % 3 :: 3] += 1
        manifest = host.publish(number, [("embed", base.view(torch.bfloat16))])
    assert [(delta.base, delta.number) for delta in manifest.deltas] == [(4, 5)]
    assert len(deltas_of(host)) == 1


def test_hosts_give_each_other_what_has_changed(host: Host) -> None:
    readers = [new_reader() for _ in range(4)]
    fetch_together(readers, publish(host, 1))
    manifest = publish(host, 2)
    before = host.server.traffic.sent_bytes
    assert all(is_version(found, 2) for found in fetch_together(readers, manifest))
    assert host.server.traffic.sent_bytes - before <= 1.25 * manifest.deltas[-1].size
    for reader in readers:
        reader.close()


def test_a_late_reader_gets_the_version_from_hosts_that_made_it_themselves(host: Host) -> None:
    readers = [new_reader() for _ in range(2)]
    fetch_together(readers, publish(host, 1))
    manifest = publish(host, 2)
    fetch_together(readers, manifest)
    dealer = host.server._held[-1].dealer
    assert dealer is not None
    eventually(lambda: dealer._sites[""].next == manifest.chunks, "readers have told the publisher")
    late = new_reader()
    assert sent_for(host, late, manifest) == 0
    for reader in (*readers, late):
        reader.close()


def test_one_of_three_readers_on_a_host_fetches_what_has_changed(host: Host) -> None:
    tag = new_tag()
    readers = [new_reader(tag) for _ in range(3)]
    fetch_together(readers, publish(host, 1))
    manifest = publish(host, 2)
    before = host.server.traffic.sent_bytes
    assert all(is_version(found, 2) for found in fetch_together(readers, manifest))
    assert host.server.traffic.sent_bytes - before == manifest.deltas[-1].size
    for reader in readers:
        reader.close()
    assert left_of(tag) == []


def test_a_delta_that_is_lost_or_corrupt_is_no_loss(host: Host, reader: SwarmReader) -> None:
    reader.fetch(publish(host, 1))
    lost = publish(host, 2)
    host.server._server.forget(deltas_of(host)[-1])
    assert sent_for(host, reader, lost) == lost.size
    wrong = publish(host, 3)
    corrupt(deltas_of(host)[-1], 5000)
    assert sent_for(host, reader, wrong) > wrong.size
    assert sent_for(host, reader, publish(host, 4)) < 0.02 * wrong.size


def test_a_delta_that_is_garbage_is_refused_and_the_version_taken_in_full(host: Host, reader: SwarmReader) -> None:
    """Its digests are right: the publisher has announced it so."""
    reader.fetch(publish(host, 1))
    manifest = publish(host, 2)
    for garbage in (bytes(3), bytes(24) + b"\7\7\7", (3).to_bytes(4, "little") + bytes(20) + b"\3\1\1"):
        delta = structs.replace(manifest.deltas[-1], size=len(garbage), digests=digests([memoryview(garbage)]))
        forged = structs.replace(manifest, deltas=(delta,))
        with DeltaFile() as file:
            memory = DeltaMemory(forged.of_delta(delta), file)
        memory.data[:] = garbage
        memory.finish()
        host.server._server.hold(memory.held)
        assert is_version(reader.fetch(forged), 2)
        reader.fetch(publish(host, 1))


def test_chunks_that_do_not_come_right_are_fetched_alone(host: Host, reader: SwarmReader) -> None:
    """The older version has changed under the reader: a bit of its memory has flipped."""
    reader.fetch(publish(host, 1))
    newest_memory(reader)[HEADER_BYTES + 2 * CHUNK_BYTES + 5] ^= 1
    manifest = publish(host, 2)
    assert sent_for(host, reader, manifest) == manifest.deltas[-1].size + CHUNK_BYTES


def test_a_reader_without_the_older_version_takes_all_of_it(host: Host, reader: SwarmReader) -> None:
    publish(host, 1)
    manifest = publish(host, 2)
    assert sent_for(host, reader, manifest) == manifest.size


@pytest.mark.parametrize(
    ("deltas", "reason"),
    [
        ((Delta(4, 3, 10, b"x" * 16),), "its deltas do not lead to it one by one"),
        ((Delta(3, 2, 10, b"x" * 16), Delta(5, 4, 10, b"x" * 16)), "its deltas do not lead to it one by one"),
        ((Delta(5, 5, 10, b"x" * 16),), "1 digests for 10 bytes that make version 5 of 5"),
        ((Delta(5, 4, 0, b""),), "0 digests for 0 bytes that make version 5 of 4"),
        ((Delta(5, 4, 10, b"x" * 8),), "0.5 digests for 10 bytes that make version 5 of 4"),
        ((Delta(5, 4, 1 << 40, b"x" * 16),), "1 digests for 1099511627776 bytes that make version 5 of 4"),
    ],
)
def test_deltas_that_do_not_fit_their_version_are_refused(host: Host, deltas: tuple[Delta, ...], reason: str) -> None:
    manifest = publish(host, 5)
    with pytest.raises(ProtocolError, match=f"term 0, version 5: {reason}"):
        Manifest.from_wire(structs.replace(manifest, deltas=deltas).to_wire())
    with pytest.raises(ProtocolError, match="do not lead to it"):
        Manifest.from_wire(structs.replace(manifest, base=4).to_wire())


def test_only_deltas_that_lead_from_what_a_host_has_count(host: Host) -> None:
    manifest = [publish(host, number) for number in (1, 2, 3, 4)][-1]
    assert [delta.base for delta in manifest.chain_from(Version(0, 2))] == [2, 3]
    for had in (None, Version(0, 0), Version(0, 4), Version(1, 2)):
        assert manifest.chain_from(had) == ()


MATRIX, NORM = torch.randn(1000, 3001), torch.randn(3001)


@pytest.mark.parametrize(("to", "share", "off"), [("bf16", 0.5, 1 / 256), ("fp8", 0.2525, 1 / 16)])
def test_rounded_versions_cross_as_what_has_changed_too(to: Rounding, share: float, off: float) -> None:
    host, reader = Host(deltas=True, to=to), new_reader()
    for number in range(1, 7):
        matrix = MATRIX.clone()
        matrix[:number] = 1.0
        manifest = host.publish(number, [("matrix", matrix), ("norm", NORM)])
        assert manifest.size == pytest.approx(share * 4 * (MATRIX.numel() + NORM.numel()), rel=0.01)
        before = host.server.traffic.sent_bytes
        found = dict(reader.fetch(manifest))
        assert list(found) == ["matrix", "norm"]
        assert bool(((found["matrix"].float() - matrix).abs() <= torch.clamp(matrix.abs() * off, 2e-4)).all())
        assert torch.equal(found["norm"], NORM.bfloat16())
        assert host.server.traffic.sent_bytes - before <= (manifest.size if number == 1 else 0.01 * manifest.size)
        assert reader.hold(manifest)
    near = host.publisher.publish(Version(0, 7), [("matrix", MATRIX), ("norm", NORM)])
    assert torch.equal(ShmReader().fetch(near)[0][1], MATRIX), "within the host nothing is rounded"
    reader.close()
    host.close()
    assert left_of(host.tag) == []


def test_a_version_that_is_overwritten_while_it_is_rounded_is_not_announced() -> None:
    host = Host(to="fp8")
    first = host.publisher.publish(Version(0, 0), [("matrix", MATRIX)])
    for number in range(1, PUBLISHED + 2):
        host.publisher.publish(Version(0, number), [("matrix", MATRIX)])
    with pytest.raises(Overtaken, match="version 0: overwritten by a newer version before it was rounded"):
        host.server.describe(first)
    host.close()
