"""Versions that another host reads from the publisher's memory with NIXL: `make nixl-venv`, and by its Python."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from distflow.errors import ChecksumError, Overtaken
from distflow.flow.sizes import PINNED, PUBLISHED
from distflow.weights import one_sided_core
from distflow.weights.manifest import Manifest
from distflow.weights.one_sided import ExposedMemory, NixlProcess, NixlSetting, OneSidedReads
from distflow.weights.swarm_reader import SwarmReader
from tests.polling import WAIT_S, eventually
from tests.weights.swarm_kit import Host, flip, holds, left_of, new_tag, weights

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None,
    reason="needs NIXL: `make nixl-venv`, then .venv-nixl/bin/python -m pytest",
)
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
        self.host = Host(exposed=self.exposed, size=size, keyframe_every=32)
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
        told = self.reads.told()
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


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(one_sided_core, "PIECE_CHUNKS", 1)
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


def test_what_a_killed_process_of_the_publisher_leaves_comes_by_the_swarm(pair: Pair) -> None:
    assert pair.brings(pair.host.publish(0))
    pair.reads.at_chunk = (3, child_of(pair.exposed).kill)
    manifest = pair.host.publish(1)
    assert pair.brings(manifest)
    assert pair.told == (1, 1)
    assert pair.sent > 0
    # It is started again, and versions are read again after one that is not.
    assert pair.host.publish(2).memory is None or True
