"""Publishers and readers of weights in processes of their own, which can be killed in the middle of something.

Each is told what to do over a pipe. A reader on a host of its own has a tag of its own, as in `swarm_kit`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import torch

from distflow.types import Version
from distflow.weights.in_place import InPlace
from distflow.weights.manifest import Manifest
from distflow.weights.receiver import WeightInbox
from distflow.weights.segments import shm
from distflow.weights.segments.host_segments import TURN, HostSegments
from distflow.weights.segments.segment_file import SEGMENTS
from distflow.weights.segments.shm import ShmReader, segment_prefix
from distflow.weights.swarm.private_segments import PrivateSegments
from distflow.weights.swarm.reader import SwarmReader
from distflow.weights.swarm.server import SwarmServer
from tests.polling import WAIT_S
from tests.weights.swarm_kit import SummingPublisher, holds, newest_memory, weights

LOOPBACK = "127.0.0.1"
END_S = 5.0


class Actor:
    """A process, and the pipe to it."""

    def __init__(self, role: type[Role], *setting: object) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_run, args=(role, other, setting), daemon=True)
        self._process.start()
        other.close()

    def tell(self, order: str, *values: object) -> None:
        self._pipe.send((order, values))

    def answer(self) -> Any:
        assert self._pipe.poll(WAIT_S), "an answer"
        return self._pipe.recv()

    def ask(self, order: str, *values: object) -> Any:
        self.tell(order, *values)
        return self.answer()

    def kill(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(WAIT_S)

    def end(self) -> None:
        self._pipe.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(WAIT_S)


class Role:
    """What a process does for the one at the other end of its pipe."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def close(self) -> None:
        """The test is over."""

    def stand_still(self, where: str) -> None:
        """Say where this process is; the test kills it there."""
        self.pipe.send(where)
        threading.Event().wait(2 * WAIT_S)


class Publisher(Role):
    """The training worker of a host: what it publishes is announced by the test."""

    def __init__(self, pipe: Connection, run: str, term: int, size: int) -> None:
        super().__init__(pipe)
        self.term, self.size = term, size
        self.server = SwarmServer(LOOPBACK)
        self.publisher = SummingPublisher(run, "policy", term, self.server.pinned)

    def publish(self, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The announcements to readers here and on other hosts."""
        local = self.publisher.publish(Version(self.term, number), weights(number, self.size))
        return local.to_wire(), self.server.describe(local).to_wire()

    def stop_halfway(self, number: int) -> None:
        """Publish, and stand still when the first of the tensors has been written."""

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            first, *_ = weights(number, self.size)
            yield first
            self.stand_still("halfway")

        self.publisher.publish(Version(self.term, number), tensors())

    def sent(self) -> int:
        return self.server.traffic.sent_bytes

    def close(self) -> None:
        self.server.close()
        self.publisher.close()


class FarReader(Role):
    """A reader on another host than the publisher's; without a `tag` one outside the run."""

    def __init__(self, pipe: Connection, tag: str | None, size: int) -> None:
        super().__init__(pipe)
        self.size = size
        self.reader = SwarmReader(tag, tag and LOOPBACK, WAIT_S)

    def fetch(self, wire: Any) -> bool:
        """Whether what came is what was published."""
        manifest = Manifest.from_wire(wire)
        return holds(self.reader.fetch(manifest), manifest.version.number, self.size)

    def stop_after(self, wire: Any, chunks: int) -> None:
        """Fetch, and stand still after so many chunks: what has come is served meanwhile."""
        kind: Any = PrivateSegments if self.reader._tag is None else HostSegments
        note = kind.note_progress

        def until(segments: Any, version: Version, arrived: int) -> None:
            note(segments, version, arrived)
            if arrived == chunks:
                self.stand_still("fetching")

        kind.note_progress = until
        self.fetch(wire)

    def flip(self, at: int) -> None:
        """Damage what this reader has and serves."""
        newest_memory(self.reader)[at] ^= 0xFF

    def counts(self) -> tuple[int, int]:
        """Chunks that it fetched itself, and that it sent to others."""
        return self.reader.fetched, self.reader.traffic.chunks

    def close(self) -> None:
        self.reader.close()


class Generating(Role):
    """A worker of the publisher's host, whose engine takes what is announced."""

    def __init__(self, pipe: Connection, size: int) -> None:
        super().__init__(pipe)
        self.size = size
        self.inbox = WeightInbox(InPlace(ShmReader()))
        self.tensors: dict[str, torch.Tensor] = {}
        self.torn = True

    def announce(self, wire: Any) -> None:
        self.inbox.announce(Manifest.from_wire(wire))

    def load(self) -> tuple[int, int] | None:
        """The version in the engine, whose tensors are those of that version."""
        self.inbox.load(self)
        return self.serves()

    def stop_in_check(self) -> None:
        """Load, and stand still while its checksums are compared."""
        shm.verify = lambda data, sums, what: self.stand_still("comparing")
        self.load()

    def serves(self) -> tuple[int, int] | None:
        version = self.inbox.loaded
        assert self.torn == (version is None)
        assert version is None or holds(self.tensors.items(), version.number, self.size)
        return None if version is None else (version.term, version.number)

    def begin_term(self, term: int, begins: dict[int, int]) -> None:
        self.inbox.begin_term(term, begins)

    def begin_update(self, version: Version) -> None:
        self.torn = True

    def update(self, tensors: Any) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in tensors}

    def end_update(self) -> None:
        self.torn = False


def _run(role: type[Role], pipe: Connection, setting: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    actor = role(pipe, *setting)
    try:
        while True:
            order, values = pipe.recv()
            pipe.send(getattr(actor, order)(*values))
    except EOFError:
        actor.close()


def start(stack: ExitStack, role: type[Role], *setting: object) -> Actor:
    actor = Actor(role, *setting)
    stack.callback(actor.end)
    return actor


def arrived(tag: str) -> int:
    """Chunks that have come to a host of the version that is fetched there."""
    turn = SEGMENTS / f"{segment_prefix(tag)}policy-swarm-turn"
    found: int = TURN.unpack(turn.read_bytes().ljust(TURN.size, b"\0"))[2] if turn.exists() else 0
    return found


def tidy(tag: str) -> None:
    """Remove what killed processes have left of a host in shared memory, as the agent of a host does."""
    for path in SEGMENTS.glob(f"{segment_prefix(tag)}*"):
        path.unlink(missing_ok=True)
