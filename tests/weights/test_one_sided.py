"""Versions that another host reads in the publisher's memory, with NIXL where it is installed, and with a stand-in."""

from __future__ import annotations

import importlib.util
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from distflow.errors import ChecksumError, Overtaken
from distflow.flow.sizes import PINNED, PUBLISHED
from distflow.weights.manifest import Manifest
from distflow.weights.one_sided import core as one_sided_core
from distflow.weights.one_sided import reads as one_sided
from distflow.weights.one_sided.reads import ExposedMemory, NixlProcess, NixlSetting, OneSidedReads
from distflow.weights.swarm.reader import SwarmReader
from tests.polling import WAIT_S
from tests.weights.swarm_kit import Host, flip, holds, left_of, new_tag

NO_NIXL = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None,
    reason="needs NIXL: `make nixl-venv`, then .venv-nixl/bin/python -m pytest",
)
STANDIN = "tests.weights.nixl_standin:run"
SIZE = 8_000_000
"""Values of 4 bytes: 31 chunks."""


class Reads(OneSidedReads):
    """`at_chunk` is called when this many chunks have come."""

    def __init__(self, setting: NixlSetting) -> None:
        self.counted = 0
        super().__init__(setting, self._add)
        self.at_chunk: tuple[int, Callable[[], None]] | None = None

    def _add(self, nbytes: int) -> None:
        self.counted += nbytes

    def read(self, manifest: Manifest, segment: Any, arrived: Any, given_up: Any) -> list[int]:
        came = 0

        def seen(chunk: int) -> None:
            nonlocal came
            came += 1
            if self.at_chunk is not None and came == self.at_chunk[0]:
                (_, act), self.at_chunk = self.at_chunk, None
                act()
            arrived(chunk)

        return super().read(manifest, segment, seen, given_up)


class Pair:
    """A publisher and a reader of another host, each with its process."""

    def __init__(self, folder: Path, size: int = SIZE) -> None:
        setting = [NixlSetting("127.0.0.1", f"test {end}", folder / f"{end}.log") for end in ("publisher", "reader")]
        self.size, self.tag = size, new_tag()
        self.exposed, self.reads = ExposedMemory(setting[0]), Reads(setting[1])
        self.host = Host(exposed=self.exposed, size=size, deltas=True)
        self.reader = SwarmReader(self.tag, "127.0.0.1", WAIT_S, one_sided=self.reads)

    def brings(self, manifest: Manifest) -> bool:
        """Whether a version comes as it was published."""
        tensors = self.reader.fetch(manifest)
        assert self.reader.hold(manifest)
        right = holds(tensors, manifest.version.number, self.size)
        self.reader.release()
        return right

    @property
    def told(self) -> tuple[int, int]:
        """Versions that came whole by NIXL, and others."""
        told = self.reads.status()
        return told["read_whole"], told["read_in_part"]

    @property
    def sent(self) -> int:
        """Bytes that the swarm has sent."""
        return self.host.server.traffic.sent_bytes

    def close(self) -> None:
        self.reader.close()
        self.host.close()
        assert left_of(self.tag) == []


def child_of(end: ExposedMemory | OneSidedReads) -> psutil.Process:
    """The process with NIXL."""
    process = end._process
    assert isinstance(process, NixlProcess)
    (child,) = psutil.Process(process._process._keeper.pid).children()
    return child


@pytest.fixture(params=["stand-in", pytest.param("nixl", marks=NO_NIXL)])
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    if request.param == "stand-in":
        monkeypatch.setattr(one_sided, "ENTRY", STANDIN)
    monkeypatch.setattr(one_sided_core, "PIECE_CHUNKS", 1)
    for limit in ("START_S", "ANSWER_S", "STILL_S"):
        # Whatever else runs here.
        monkeypatch.setattr(one_sided, limit, 60.0)
    with closing(Pair(tmp_path)) as made:
        yield made


def test_versions_come_by_reads_alone(pair: Pair) -> None:
    for number in range(PUBLISHED + PINNED + 2):
        manifest = pair.host.publish(number)
        assert manifest.memory is not None
        assert pair.brings(manifest)
    assert pair.told == (PUBLISHED + PINNED + 2, 0)
    assert pair.reads.counted >= pair.told[0] * SIZE * 4
    assert pair.sent == 0


def test_segments_are_mapped_writable_where_cards_demand_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_sided, "ENTRY", f"{STANDIN}_with_cards")
    with closing(Pair(tmp_path)) as pair:
        assert pair.brings(pair.host.publish(0))
        assert pair.told == (1, 0)


def test_what_a_killed_process_of_the_publisher_leaves_comes_by_the_swarm(pair: Pair) -> None:
    assert pair.brings(pair.host.publish(0))
    pair.reads.at_chunk = (3, child_of(pair.exposed).kill)
    assert pair.brings(pair.host.publish(1))
    assert pair.told == (1, 1)
    assert 0 < pair.sent < SIZE * 4
    sent = pair.sent
    assert pair.brings(pair.host.publish(2)), "by another process"
    assert pair.told == (2, 1)
    assert pair.sent == sent


def test_a_process_that_ends_while_it_is_asked_is_replaced_at_once(pair: Pair) -> None:
    """Its end is known when its keeper has told it, which takes long where much else runs."""
    for number in (0, 1):
        assert pair.brings(pair.host.publish(2 * number))
        child = child_of(pair.exposed)
        keeper = child.parent()
        assert keeper is not None
        keeper.suspend()
        child.kill()
        later = threading.Timer(0.2, keeper.resume)
        later.start()
        assert pair.brings(pair.host.publish(2 * number + 1))
        later.join()
    assert pair.told == (4, 0)


def test_a_publisher_whose_process_is_another_one_is_read_again(pair: Pair) -> None:
    """Whether it has died between two versions, or its worker was started again."""
    assert pair.brings(pair.host.publish(0))
    for number in (1, 2):
        process = child_of(pair.exposed)
        process.kill()
        process.wait()
        assert pair.brings(pair.host.publish(2 * number - 1))
        assert pair.brings(pair.host.publish(2 * number))
    assert pair.told[0] >= 3


def test_what_a_killed_process_of_the_reader_leaves_comes_by_the_swarm(pair: Pair) -> None:
    assert pair.brings(pair.host.publish(0))
    pair.reads.at_chunk = (3, lambda: child_of(pair.reads).kill())
    assert pair.brings(pair.host.publish(1))
    assert pair.told == (1, 1)
    assert 0 < pair.sent < SIZE * 4
    assert pair.brings(pair.host.publish(2)), "by another process"
    assert pair.told == (2, 1)


def dying_reader(entry: str, tag: str, folder: Path, wire: Any, begun: Connection) -> None:
    """A worker that says when it has read something, and would never be done."""
    one_sided.ENTRY, one_sided_core.PIECE_CHUNKS, one_sided.STILL_S = entry, 1, 60.0
    reads = Reads(NixlSetting("127.0.0.1", "test neighbour", folder / "neighbour.log"))

    def say() -> None:
        begun.send("reading")
        signal.pause()

    reads.at_chunk = (3, say)
    SwarmReader(tag, "127.0.0.1", WAIT_S, one_sided=reads).fetch(Manifest.from_wire(wire))


def test_a_neighbour_takes_over_from_a_reader_that_is_killed(pair: Pair, tmp_path: Path) -> None:
    manifest = pair.host.publish(0)
    context = multiprocessing.get_context("spawn")
    begun, end = context.Pipe()
    setting = (one_sided.ENTRY, pair.tag, tmp_path, manifest.to_wire(), end)
    neighbour = context.Process(target=dying_reader, args=setting, daemon=True)
    neighbour.start()
    assert begun.poll(60.0)
    neighbour.kill()
    neighbour.join()
    assert pair.brings(manifest)
    assert pair.told == (1, 0)


def test_a_read_that_stands_still_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pair.brings(pair.host.publish(0))
    stopped = child_of(pair.exposed)
    pair.reads.at_chunk = (3, stopped.suspend)
    with monkeypatch.context() as impatient:
        impatient.setattr(one_sided, "STILL_S", 1.0)
        assert pair.brings(pair.host.publish(1))
    assert pair.told == (1, 1)
    stopped.resume()
    # UCX may abort that process, as late as when the next version is announced.
    assert pair.brings(pair.host.publish(2))
    assert pair.brings(pair.host.publish(3))
    assert pair.told in ((2, 1), (3, 1))


def test_a_version_that_is_overwritten_meanwhile_is_not_used(pair: Pair) -> None:
    versions = [pair.host.publish(0)]
    assert pair.brings(versions[0])

    def overwrite() -> None:
        versions.extend(pair.host.publish(number) for number in range(2, 2 + PUBLISHED + PINNED))

    pair.reads.at_chunk = (3, overwrite)
    with pytest.raises(Overtaken):
        pair.brings(pair.host.publish(1))
    assert pair.told == (1, 1)
    assert pair.brings(versions[-1])


def test_a_flipped_bit_is_refused(pair: Pair) -> None:
    assert pair.brings(pair.host.publish(0))
    places = []
    publish = pair.host.publisher.publish

    def noting(*arguments: Any) -> Manifest:
        places.append(publish(*arguments))
        return places[-1]

    pair.host.publisher.publish = noting  # type: ignore[method-assign]
    manifest = pair.host.publish(1)
    flip(places[-1], 7)
    with pytest.raises(ChecksumError, match="chunk 7"):
        pair.brings(manifest)
    assert pair.told == (1, 1)
    flip(places[-1], 7)
    assert pair.brings(manifest)


def test_a_reader_that_is_closed_in_the_middle_leaves_nothing(pair: Pair) -> None:
    assert pair.brings(pair.host.publish(0))
    process = child_of(pair.reads)
    pair.reads.at_chunk = (3, pair.reader._closed.set)
    manifest = pair.host.publish(1)
    with suppress(Overtaken):
        pair.reader.fetch(manifest)
    assert pair.told == (1, 1)
    assert not process.is_running()


def test_where_nixl_does_not_start_versions_come_by_the_swarm(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(one_sided, "ENTRY", "no.such.module:run")
        assert [pair.brings(pair.host.publish(number)) for number in range(3)] == [True] * 3
    assert pair.told == (0, 2), "after two failures a version is not tried"
    assert pair.brings(pair.host.publish(3))
    assert pair.told == (1, 2)
