"""Publishers, readers and links for tests of weights across hosts: real sockets on loopback, real shared segments."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from distflow.types import Version
from distflow.weights.encodings.rounded_publisher import RoundedPublisher
from distflow.weights.encodings.rounding import Rounding
from distflow.weights.manifest import CHUNK_BYTES, Manifest
from distflow.weights.one_sided.reads import ExposedMemory
from distflow.weights.segments.segment_file import SEGMENTS
from distflow.weights.segments.shm import HEADER_BYTES, ShmPublisher, segment_prefix
from distflow.weights.swarm.reader import SwarmReader
from distflow.weights.swarm.server import SwarmServer
from distflow.weights.swarm_messages import SwarmPlace
from tests.polling import WAIT_S


def weights(number: float, size: int = 1_000_000) -> list[tuple[str, torch.Tensor]]:
    return [
        ("embed", torch.full((size,), float(number))),
        ("norm", torch.full((3, 7), number + 1.0, dtype=torch.bfloat16)),
        ("head", torch.full((5,), number + 2.0, dtype=torch.float64)),
    ]


def holds(tensors: Any, number: float, size: int = 1_000_000) -> bool:
    expected = dict(weights(number, size))
    return all(torch.equal(tensor, expected[name]) for name, tensor in tensors)


class SummingPublisher(ShmPublisher):
    """Its versions can be announced at once."""

    def publish(self, version: Version, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        return self.summed(super().publish(version, tensors))


def new_tag() -> str:
    """A host of its own."""
    return f"test-{uuid.uuid4().hex[:8]}"


def new_reader(tag: str = "", no_progress_s: float = WAIT_S, site: str = "") -> SwarmReader:
    """On a host of its own unless it has a `tag`."""
    return SwarmReader(tag or new_tag(), "127.0.0.1", no_progress_s, site)


def left_of(tag: str) -> list[str]:
    """What a host still has in shared memory."""
    return [path.name for path in SEGMENTS.glob(f"{segment_prefix(tag)}*")]


def newest_memory(reader: SwarmReader) -> Any:
    """The memory of the newest version on a reader's host, to damage it."""
    assert reader._segments is not None
    return max(reader._segments._segments(), key=lambda segment: segment.version).memory


class Host:
    """One training host: a publisher, and a server beside it."""

    def __init__(
        self,
        *,
        encrypted: bool = False,
        term: int = 0,
        size: int = 1_000_000,
        deltas: bool = False,
        to: Rounding | None = None,
        exposed: ExposedMemory | None = None,
        on_fault: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.term, self.size, self.tag = term, size, new_tag()
        rounding = None if to is None else RoundedPublisher(self.tag, to)
        self.server = SwarmServer(
            "127.0.0.1",
            encrypted=encrypted,
            deltas=deltas,
            rounding=rounding,
            exposed=exposed,
            on_fault=on_fault,
        )
        self.publisher = SummingPublisher(self.tag, "policy", term, self.server.pinned)

    def publish(self, number: int, tensors: Iterable[tuple[str, torch.Tensor]] | None = None) -> Manifest:
        """Publish these tensors, by default `weights(number)`."""
        found = weights(number, self.size) if tensors is None else tensors
        local = self.publisher.publish(Version(self.term, number), found)
        return Manifest.from_wire(self.server.describe(local).to_wire())

    def close(self) -> None:
        self.server.close()
        self.publisher.close()


def flip(manifest: Manifest, chunk: int) -> None:
    """Flip the bits of one byte of a segment."""
    at = HEADER_BYTES + chunk * CHUNK_BYTES + 17
    with open(manifest.place, "r+b") as file:
        file.seek(at)
        before = file.read(1)[0]
        file.seek(at)
        file.write(bytes([before ^ 0xFF]))


class Proxy:
    """A link that can be cut: then nothing goes through; with `reset`, connections end too.

    `rate`: bytes a second that all its connections share.
    """

    def __init__(self, place: str, rate: float = float("inf")) -> None:
        self._rate = rate
        self._turn = threading.Lock()
        self._place = SwarmPlace.parse(place)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = threading.Event()
        self._open.set()
        self._ends: list[socket.socket] = []
        self.passed = 0
        self.seen = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def place(self) -> str:
        return str(replace(self._place, address=f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"))

    def cut(self, *, reset: bool) -> None:
        self._open.clear()
        if reset:
            self._hang_up(self._ends)

    def heal(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._hang_up([self._listener, *self._ends])
        self._open.set()

    def _hang_up(self, ends: list[socket.socket]) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._place.target)
                self._ends += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                assert self._open.wait(WAIT_S), "the test healed the link"
                # Before the other end can have finished with it.
                self.passed += len(data)
                self.seen += data
                target.sendall(data)
                # Slow enough that a test can cut the link in the middle.
                time.sleep(0.002)
                with self._turn:
                    time.sleep(len(data) / self._rate)
        self._hang_up([source, target])
