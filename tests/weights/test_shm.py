import os
import threading
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from distflow.errors import ChecksumError, Overtaken, ProtocolError, UserError
from distflow.flow.sizes import PINNED, PUBLISHED
from distflow.types import Version
from distflow.weights.in_place import InPlace
from distflow.weights.manifest import CHUNK_BYTES, Manifest, checksums, verify
from distflow.weights.receiver import WeightInbox
from distflow.weights.segments import shm
from distflow.weights.segments.segment_file import SEGMENTS
from distflow.weights.segments.shm import AnnouncedSegment, ShmPublisher, ShmReader
from distflow.weights.swarm.announcing import Announcing
from tests.polling import WAIT_S
from tests.weights.swarm_kit import SummingPublisher


def weights(number: float) -> list[tuple[str, torch.Tensor]]:
    fill = float(number)
    return [
        ("embed", torch.full((7, 3), fill)),
        ("norm", torch.full((3,), fill + 1, dtype=torch.bfloat16)),
        ("head", torch.full((5,), fill + 2, dtype=torch.float64)),
    ]


@pytest.fixture
def publisher() -> Iterator[ShmPublisher]:
    made = SummingPublisher(f"test-{uuid.uuid4().hex[:8]}", "policy", 0)
    yield made
    made.close()


class FakeEngine:
    """Records what it was given."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def begin_update(self, version: Version) -> None:
        self.events.append(f"begin {version.number}")

    def update(self, tensors: object) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in tensors}  # type: ignore[attr-defined]

    def end_update(self) -> None:
        self.events.append("end")


def test_a_reader_gets_the_published_tensors_bit_for_bit(publisher: ShmPublisher) -> None:
    manifest = publisher.publish(Version(0, 5), weights(1.5))
    reader = ShmReader()
    found = dict(reader.fetch(Manifest.from_wire(manifest.to_wire())))
    for name, tensor in weights(1.5):
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert reader.intact(manifest)


def test_tensors_are_taken_one_by_one_and_let_go(publisher: ShmPublisher) -> None:
    """The first version too, whose sizes are not known before."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def made(number: float) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, tensor in weights(number):
            copy = tensor.clone()
            alive.append(weakref.ref(copy))
            most = max(most, sum(ref() is not None for ref in alive))
            yield name, copy
            del copy

    for number in (1, 2):
        found = ShmReader().fetch(publisher.publish(Version(0, number), made(number)))
        assert all(torch.equal(tensor, dict(weights(number))[name]) for name, tensor in found)
    assert len(alive) == 6
    assert most == 1


def test_recent_versions_stay_and_an_overwritten_one_is_told_apart(publisher: ShmPublisher) -> None:
    manifests = [publisher.publish(Version(0, n), weights(n)) for n in range(PUBLISHED)]
    reader = ShmReader()
    assert float(dict(reader.fetch(manifests[0]))["embed"][0, 0]) == 0.0
    publisher.publish(Version(0, PUBLISHED), weights(PUBLISHED))
    assert not reader.intact(manifests[0])
    with pytest.raises(Overtaken, match="term 0, version 0: overwritten by a newer version"):
        reader.fetch(manifests[0])
    assert float(dict(reader.fetch(manifests[1]))["embed"][0, 0]) == 1.0


def test_a_flipped_bit_is_found(publisher: ShmPublisher) -> None:
    manifest = publisher.publish(Version(0, 1), weights(1))
    with Path(manifest.place).open("r+b") as file:
        file.seek(shm.HEADER_BYTES + 3)
        file.write(b"\x77")
    with pytest.raises(ChecksumError, match="weights of 'policy', term 0, version 1: chunk 0 of 1 has checksum"):
        ShmReader().fetch(manifest)


def test_what_is_fetched_once_more_is_compared_once_more(publisher: ShmPublisher) -> None:
    """Damage that came after a neighbour had compared is the reason why an engine computes something else."""
    manifest = publisher.publish(Version(0, 1), weights(1))
    neighbour, reader = ShmReader(), ShmReader()
    neighbour.fetch(manifest)
    with Path(manifest.place).open("r+b") as file:
        file.seek(shm.HEADER_BYTES + 3)
        file.write(b"\x77")
    reader.fetch(manifest)
    assert reader.intact(manifest)
    InPlace(reader).again(manifest)
    with pytest.raises(ChecksumError, match="chunk 0 of 1 has checksum"):
        reader.fetch(manifest)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compared with its checksums since then."""
    compared: list[str] = []

    def note(data: memoryview, expected: Sequence[int], what: str) -> None:
        compared.append(what)
        verify(data, expected, what)

    monkeypatch.setattr(shm, "verify", note)
    return compared


def test_one_reader_of_a_host_compares_the_checksums_for_all(
    publisher: ShmPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, readers = counted(monkeypatch), [ShmReader() for _ in range(3)]
    for number in range(PUBLISHED + 1):
        manifest = publisher.publish(Version(0, number), weights(number))
        for reader in readers:
            assert float(dict(reader.fetch(manifest))["embed"][0, 0]) == number
            assert reader.intact(manifest)
        assert len(compared) == number + 1, "what was noted of the version before in this segment says nothing"


def test_readers_copy_while_one_compares_and_trust_nothing_before_it_is_done(
    publisher: ShmPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = publisher.publish(Version(0, 1), weights(1))
    compares, go_on = threading.Event(), threading.Event()

    def compare(*arguments: Any) -> None:
        compares.set()
        assert go_on.wait(WAIT_S)
        verify(*arguments)

    monkeypatch.setattr(shm, "verify", compare)
    waits: list[str] = []

    @contextmanager
    def shown(name: str) -> Iterator[None]:
        waits.append(name)
        yield

    slow, fast, found = ShmReader(), ShmReader(shown), list[bool]()
    first = threading.Thread(target=slow.fetch, args=(manifest,))
    first.start()
    assert compares.wait(WAIT_S)
    fast.fetch(manifest)
    second = threading.Thread(target=lambda: found.append(fast.intact(manifest)))
    second.start()
    second.join(0.05)
    assert second.is_alive()
    assert waits == ["a neighbour to compare the checksums of weights of 'policy', term 0, version 1"]
    go_on.set()
    for thread in (first, second):
        thread.join(WAIT_S)
    assert found == [True]


def test_damage_is_found_by_readers_that_have_copied_it_already(
    publisher: ShmPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has compared, since the one whose turn it was stands still: the others do it themselves after a while."""
    monkeypatch.setattr(shm, "CHECK_S", 0.05)
    manifest = publisher.publish(Version(0, 1), weights(1))
    stuck, reader = AnnouncedSegment(manifest), ShmReader()
    assert stuck.begin_check()
    reader.fetch(manifest)
    assert reader.intact(manifest)
    damaged = publisher.publish(Version(0, 2), weights(2))
    with Path(damaged.place).open("r+b") as file:
        file.seek(shm.HEADER_BYTES + 3)
        file.write(b"\x77")
    stuck = AnnouncedSegment(damaged)
    assert stuck.begin_check()
    reader.fetch(damaged)
    with pytest.raises(ChecksumError, match="version 2: chunk 0 of 1 has checksum"):
        reader.intact(damaged)


def test_segments_are_named_after_the_run_and_leave_with_the_publisher() -> None:
    run = f"test-{uuid.uuid4().hex[:8]}"
    publisher = SummingPublisher(run, "policy", 0)
    manifest = publisher.publish(Version(0, 0), weights(0))
    for number in range(1, PUBLISHED):
        publisher.publish(Version(0, number), weights(0))
    assert len(list(SEGMENTS.glob(f"distflow-{run}-*"))) == PUBLISHED
    publisher.close()
    with_network = SummingPublisher(run, "policy", 1, lambda: None)
    for number in range(PUBLISHED + PINNED):
        with_network.publish(Version(1, number), weights(0))
    assert len(list(SEGMENTS.glob(f"distflow-{run}-*"))) == PUBLISHED + PINNED, "what hosts are checked to have"
    with_network.close()
    assert not list(SEGMENTS.glob(f"distflow-{run}-*"))
    with pytest.raises(Overtaken, match="is gone; its publisher has ended"):
        ShmReader().fetch(manifest)


def mapped(name: str) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]


def test_what_engines_get_cannot_be_written(publisher: ShmPublisher) -> None:
    """What one writes would hide later versions in this segment from its process."""
    manifest = publisher.publish(Version(0, 0), weights(0))
    before = mapped(manifest.place)
    reader = ShmReader()
    assert float(dict(reader.fetch(manifest))["norm"][0]) == 1.0
    (mapping,) = [line for line in mapped(manifest.place) if line not in before]
    assert " r--s " in mapping


def test_a_reader_lets_go_of_former_terms() -> None:
    """Else each of them would stay in shared memory for as long as the reader lives."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    inbox, engine = WeightInbox(InPlace(ShmReader())), FakeEngine()
    for term in range(3):
        publisher = SummingPublisher(name, "policy", term)
        for number in range(PUBLISHED):
            inbox.announce(publisher.publish(Version(term, number), weights(number)))
            inbox.load(engine)
        publisher.close()
    del publisher
    assert len(mapped(name)) == PUBLISHED
    assert all(f"-t{2}-" in line for line in mapped(name))
    inbox.begin_term(2, {2: 0})
    assert len(mapped(name)) == PUBLISHED, "it is the one that we are in"
    inbox.begin_term(3, {3: 0})
    assert not mapped(name), "the new publisher may need the room"
    assert float(engine.tensors["embed"][0, 0]) == PUBLISHED - 1


def test_a_term_that_begins_while_weights_are_copied_takes_them_away(publisher: ShmPublisher) -> None:
    class Interrupted(FakeEngine):
        def update(self, tensors: object) -> None:
            super().update(tensors)
            inbox.begin_term(1, {1: 0})

    inbox, engine = WeightInbox(InPlace(ShmReader())), Interrupted()
    inbox.announce(publisher.publish(Version(0, 1), weights(1)))
    for _ in range(2):
        inbox.load(engine)
        assert inbox.loaded is None
        assert not inbox.waiting, "those of the new term are waited for"


@pytest.mark.parametrize("moment", ["first segment", "room for all", "further segments"])
def test_too_little_shared_memory_is_said_with_the_cure(
    moment: str, monkeypatch: pytest.MonkeyPatch, publisher: ShmPublisher
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    if moment == "first segment":
        monkeypatch.setattr(os, "pwrite", full)
    elif moment == "room for all":
        free = os.statvfs(SEGMENTS)
        small = os.statvfs_result((*free[:4], 0, *free[5:]))
        monkeypatch.setattr(os, "statvfs", lambda path: small)
    else:
        monkeypatch.setattr(os, "posix_fallocate", full)
        publisher.publish(Version(0, 0), weights(0))
    with pytest.raises(UserError, match="no room for weights of .* MB .* enlarge it, for example with `mount"):
        publisher.publish(Version(0, 1), weights(1))


def test_the_first_version_is_there_before_there_is_memory_for_others(
    publisher: ShmPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, go_on = shm.reserve, threading.Event()

    def slow(*arguments: Any) -> None:
        assert go_on.wait(WAIT_S)
        reserve(*arguments)

    monkeypatch.setattr(shm, "reserve", slow)
    manifest = publisher.publish(Version(0, 0), weights(0))
    assert not go_on.is_set()
    assert float(dict(ShmReader().fetch(manifest))["norm"][0]) == 1.0
    go_on.set()
    for number in range(1, PUBLISHED):
        publisher.publish(Version(0, number), weights(number))
    assert float(dict(ShmReader().fetch(manifest))["norm"][0]) == 1.0, "each version has a segment of its own"


def test_a_publisher_that_ends_while_it_reserves_memory_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    run, begins, go_on = f"test-{uuid.uuid4().hex[:8]}", threading.Event(), threading.Event()
    reserve = shm.reserve

    def slow(*arguments: Any) -> None:
        begins.set()
        assert go_on.wait(WAIT_S)
        reserve(*arguments)

    monkeypatch.setattr(shm, "reserve", slow)
    publisher = SummingPublisher(run, "policy", 0)
    publisher.publish(Version(0, 0), weights(0))
    assert begins.wait(WAIT_S)
    closing = threading.Thread(target=publisher.close)
    closing.start()
    go_on.set()
    closing.join(WAIT_S)
    assert not list(SEGMENTS.glob(f"distflow-{run}-*"))


def test_a_version_that_is_overwritten_before_it_is_summed_is_never_announced() -> None:
    publisher = ShmPublisher(f"test-{uuid.uuid4().hex[:8]}", "policy", 0)
    manifests = [publisher.publish(Version(0, number), weights(number)) for number in range(PUBLISHED + 1)]
    told: list[Manifest] = []
    faults: list[BaseException] = []
    announcing = Announcing("sums", publisher.summed, faults.append)
    for manifest in (*manifests, manifests[-1]):
        announcing.offer(manifest, told.append)
    assert announcing.close()
    assert [manifest.version.number for manifest in told] == list(range(1, PUBLISHED + 1)), "and each one once"
    assert all(manifest.checksums for manifest in told)
    publisher.close()
    announcing = Announcing("sums", publisher.summed, faults.append)
    announcing.offer(manifests[-1], told.append)
    assert announcing.close()
    assert len(told) == PUBLISHED
    assert not faults


def test_many_chunks_have_the_same_sums_on_several_threads() -> None:
    data = memoryview(bytearray(os.urandom(1 << 16)) * (16 * 35 + 3) + b"end")
    alone = [xxhash.xxh3_64_intdigest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
    assert checksums(data) == tuple(alone)


def test_an_announcement_cannot_name_other_files() -> None:
    manifest = Manifest("policy", Version(0, 0), "/etc/hostname", 1, (), (0,))
    with pytest.raises(ProtocolError, match="is not a shared segment of a run"):
        ShmReader().fetch(manifest)


@pytest.mark.parametrize(
    "change", [{"size": -1}, {"version": [1]}, {"entries": [["a", "torch.float32", [2], 0, 9000]]}]
)
def test_malformed_announcements_are_refused(publisher: ShmPublisher, change: dict[str, object]) -> None:
    wire = publisher.publish(Version(0, 0), weights(0)).to_wire()
    with pytest.raises(ProtocolError, match="malformed weights announcement|lies outside"):
        Manifest.from_wire({**wire, **change})


def test_the_inbox_loads_the_newest_and_ignores_late_announcements(publisher: ShmPublisher) -> None:
    inbox, engine = WeightInbox(InPlace(ShmReader())), FakeEngine()
    first, second = (publisher.publish(Version(0, n), weights(n)) for n in (0, 1))
    inbox.announce(second)
    inbox.announce(first)
    assert inbox.waiting
    inbox.load(engine)
    assert inbox.loaded == Version(0, 1)
    assert not inbox.waiting
    assert float(engine.tensors["embed"][0, 0]) == 1.0
    assert engine.events == ["begin 1", "end"]


def test_an_inbox_for_some_versions_passes_over_the_others(publisher: ShmPublisher) -> None:
    inbox, engine = WeightInbox(InPlace(ShmReader()), only=(2, 4)), FakeEngine()
    for number in range(3):
        inbox.announce(publisher.publish(Version(0, number), weights(number)))
        assert inbox.waiting == (number == 2)
        assert inbox.newest == Version(0, number), "what the publisher is told, who else would announce it again"
    inbox.announce(publisher.publish(Version(0, 3), weights(3)))
    inbox.load(engine)
    assert inbox.loaded == Version(0, 2)
    assert not inbox.waiting
    inbox.announce(publisher.publish(Version(0, 4), weights(4)))
    assert inbox.waiting


def test_an_inbox_that_has_missed_a_version_takes_the_newest_there_is(publisher: ShmPublisher) -> None:
    inbox, engine = WeightInbox(InPlace(ShmReader()), only=(2,)), FakeEngine()
    for number in range(2, 3 + PUBLISHED):
        inbox.announce(publisher.publish(Version(0, number), weights(number)))
    inbox.load(engine)
    assert inbox.loaded is None, "it was overwritten"
    assert inbox.waiting
    inbox.load(engine)
    assert inbox.loaded == Version(0, 2 + PUBLISHED)
    late = WeightInbox(InPlace(ShmReader()), only=(2,))
    late.announce(publisher.publish(Version(0, 9), weights(9)))
    assert late.waiting, "version 2 was announced before it came"


def test_an_overtaken_version_leaves_the_engine_torn_until_the_next(publisher: ShmPublisher) -> None:
    inbox, engine = WeightInbox(InPlace(ShmReader())), FakeEngine()
    manifests = [publisher.publish(Version(0, n), weights(n)) for n in range(PUBLISHED + 1)]
    inbox.announce(manifests[0])
    inbox.load(engine)
    assert inbox.loaded is None
    assert not inbox.waiting, "what is gone is not tried again"
    inbox.announce(manifests[-1])
    assert inbox.waiting
    inbox.load(engine)
    assert inbox.loaded == Version(0, PUBLISHED)
    assert engine.events == ["begin 0", f"begin {PUBLISHED}", "end"]


@pytest.mark.parametrize("moment", ["before the sums", "before the copy"])
def test_a_reader_that_is_overtaken_in_the_middle_takes_the_next_version(
    moment: str, publisher: ShmPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher never waits for a reader: it overwrites what is just being summed or copied."""
    inbox, engine, numbers = WeightInbox(InPlace(ShmReader())), FakeEngine(), iter(range(2 * PUBLISHED))

    def overtake() -> None:
        monkeypatch.undo()
        for number in [next(numbers) for _ in range(PUBLISHED)]:
            inbox.announce(publisher.publish(Version(0, number), weights(number)))

    overtake()
    owner, name, original = (
        (shm, "verify", verify) if moment == "before the sums" else (engine, "update", engine.update)
    )
    monkeypatch.setattr(owner, name, lambda *arguments: [overtake(), original(*arguments)])
    inbox.load(engine)
    assert inbox.loaded is None
    assert inbox.waiting
    inbox.load(engine)
    assert inbox.loaded == Version(0, 2 * PUBLISHED - 1)
    assert float(engine.tensors["embed"][0, 0]) == 2 * PUBLISHED - 1
