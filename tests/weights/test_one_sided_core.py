"""Which pieces of a version are read next, when a read stands still, and when another one is tried."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.errors import ProtocolError
from distflow.types import Version
from distflow.weights.manifest import CHUNK_BYTES, Manifest
from distflow.weights.one_sided.core import IN_FLIGHT, MOST_PAUSE, PIECE_CHUNKS, Pauses, PieceReads
from distflow.weights.one_sided.reads import net_devices
from distflow.weights.one_sided_messages import MOST_METADATA, RemoteMemory
from distflow.weights.segments.host_segments import HostSegments
from distflow.weights.swarm_messages import SwarmPlace
from tests.weights.swarm_kit import new_tag

PIECE = PIECE_CHUNKS * CHUNK_BYTES


@given(st.integers(1, 20 * PIECE), st.randoms())
def test_every_byte_is_asked_for_once_whatever_comes_first(size: int, order: object) -> None:
    reads, asked, going, chunks = PieceReads(size, 0.0), [], [], []
    while not reads.over:
        new = reads.ask()
        asked += new
        going += [one.start for one in new]
        assert len(going) <= IN_FLIGHT
        start = going.pop(order.randrange(len(going)))  # type: ignore[attr-defined]
        chunks += reads.came(start, 0.0)
    assert [one.start for one in asked] == list(range(0, size, PIECE))
    assert sum(one.size for one in asked) == size
    assert sorted(chunks) == list(range(-(-size // CHUNK_BYTES)))


def test_a_version_that_is_wrong_is_read_no_further() -> None:
    reads = PieceReads(20 * PIECE, 0.0)
    starts = [one.start for one in reads.ask()]
    reads.stop()
    assert reads.ask() == []
    for start in starts:
        assert not reads.over
        reads.came(start, 1.0)
    assert reads.over


def test_it_stands_still_from_the_last_piece_on() -> None:
    reads = PieceReads(20 * PIECE, 5.0)
    reads.ask()
    assert reads.still_s(7.0) == 2.0
    reads.came(0, 8.0)
    assert reads.still_s(9.0) == 1.0


@pytest.mark.parametrize("start", [IN_FLIGHT * PIECE, 1, -PIECE])
def test_a_piece_that_nobody_asked_for_is_an_error(start: int) -> None:
    reads = PieceReads(20 * PIECE, 0.0)
    reads.ask()
    with pytest.raises(ProtocolError, match=f"begins at byte {start} has come, awaited are"):
        reads.came(start, 0.0)


def test_after_failures_versions_are_passed_over_more_and_more_of_them() -> None:
    pauses, passed = Pauses(), []
    for _ in range(9):
        passed.append(0)
        while not pauses.over():
            passed[-1] += 1
        pauses.note(well=False)
    assert passed == [0, 0, 1, 2, 4, 8, 16, 32, MOST_PAUSE]
    while not pauses.over():
        pass
    pauses.note(well=True)
    assert pauses.over()
    pauses.note(well=False)
    assert pauses.over()


def test_ucx_uses_the_interface_of_the_run_and_the_cards_behind_it(tmp_path: Path) -> None:
    (tmp_path / "lo").mkdir()
    assert net_devices("127.0.0.1", tmp_path) == "lo"
    for card in ("mlx5_1", "mlx5_0"):
        (tmp_path / "lo" / "device" / "infiniband" / card).mkdir(parents=True)
    (tmp_path / "lo" / "dev_port").write_text("1\n")
    assert net_devices("127.0.0.1", tmp_path) == "lo,mlx5_0:2,mlx5_1:2"


def announced(**changes: object) -> dict[str, object]:
    place = str(SwarmPlace("tcp://127.0.0.1:1", bytes(16), False))
    memory = RemoteMemory(b"metadata", 1 << 46)
    body = Manifest("policy", Version(0, 1), place, 8, (), (), bytes(16), memory=memory).to_wire()
    return body | changes


def test_where_a_version_lies_is_announced_with_it() -> None:
    assert Manifest.from_wire(announced()).memory == RemoteMemory(b"metadata", 1 << 46, 0)
    assert Manifest.from_wire(announced(memory=None)).memory is None


@pytest.mark.parametrize(
    "memory",
    [[b"", 1, 0], [bytes(MOST_METADATA + 1), 1, 0], [b"m", -1, 0], [b"m", 1, -1], [b"m", 1, 0, 0], ["m", 1, 0], 5],
)
def test_what_says_it_wrongly_is_refused(memory: object) -> None:
    with pytest.raises(ProtocolError, match="memory"):
        Manifest.from_wire(announced(memory=memory))


def test_a_segment_that_a_killed_readers_process_may_still_write_is_left_alone() -> None:
    """Until that process has ended, which the kernel tells by its lock."""
    manifest = Manifest("policy", Version(0, 1), "", 100, (), ())
    tag = new_tag()
    with closing(HostSegments(tag, "policy")) as dying, closing(HostSegments(tag, "policy")) as other:
        assert dying.begin()
        segment = dying.writable(manifest)
        assert segment is not None
        with locked(segment.path) as process:
            dying.abandon(segment)
            dying.end()
            assert other.begin()
            beside = other.writable(manifest)
            assert beside is not None
            assert beside.path != segment.path
            other.abandon(beside)
            process.kill()
            process.wait()
            found = other.writable(manifest)
            assert found is not None
            assert found.path == segment.path


def locked(path: Path) -> subprocess.Popen[bytes]:
    """A process that has the lock of one that reads into a segment."""
    program = (
        f"import fcntl, os; f = os.open({str(path)!r}, os.O_RDWR); fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB); "
        "print('locked', flush=True); import time; time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"locked\n"
    return process
