"""Weights that readers on other hosts read from the publisher's memory by themselves (`weights.link: nixl`).

A version is announced as always, and with it where it lies. The reader of a host whose turn it is to fetch has a
process with NIXL read it into the segment of the host, checks each chunk by the digest from the announcement as pieces
come, and leaves to the swarm what is late, lost or changed. The publisher has no part in a read: its own process has
registered the segments. A read that was given up may still write, so its process is ended first, and until the kernel
says that it has ended nobody uses the segment (`process.py`).
"""

from __future__ import annotations

import mmap
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from msgspec import structs

from distflow.comm.collective import interface_of
from distflow.comm.kept_process import KeptProcess
from distflow.comm.traffic import NIXL, Traffic
from distflow.errors import ProtocolError
from distflow.log import logger
from distflow.weights.manifest import CHUNK_BYTES, Manifest, intact_chunks
from distflow.weights.one_sided.core import STILL_S, Pauses, PieceReads
from distflow.weights.one_sided_messages import (
    Answer,
    Attach,
    Attached,
    Detach,
    Detached,
    Expose,
    Exposed,
    Failed,
    HasRead,
    Order,
    Ready,
    RemoteMemory,
)
from distflow.weights.segments.shm import HEADER_BYTES

ENTRY = "distflow.weights.one_sided.process:run"
START_S = 15.0
ANSWER_S = 5.0
REGISTERED_BYTES_S = 1 << 30
"""How long registering memory may take: its pages are pinned, and written first where they never were."""
LOOK_S = 0.1
"""How often one who waits looks whether to go on with that."""
_ANSWERS = msgspec.json.Decoder(Answer)
T = TypeVar("T")
log = logger(__name__)


class StillWritten(Exception):
    """A read that was given up may still write into the segment, whose process does not end."""


class LandingSegment(Protocol):
    """Where a version is read into."""

    path: Path
    memory: mmap.mmap

    @property
    def read_into(self) -> bool:
        """Whether a process with NIXL may write into it."""
        ...


@dataclass(frozen=True, slots=True)
class NixlSetting:
    """What the process of a worker needs."""

    address: str
    """Of this host in the run: UCX uses, and listens on, the devices that have it."""
    title: str
    output: Path
    """Takes what NIXL and UCX print."""


def one_sided_reads(setting: NixlSetting | None, traffic: Traffic) -> OneSidedReads | None:
    """A reader's side, which counts as one lane of `traffic`; None without a setting."""
    return None if setting is None else OneSidedReads(setting, partial(traffic.count, NIXL, 1))


def net_devices(address: str, known: Path = Path("/sys/class/net")) -> str:
    """What UCX calls the devices with this address: the interface, and the RDMA cards behind it, as `eth0,mlx5_0:1`.

    Raises UserError if this host does not have the address.
    """
    interface = known / interface_of(address)
    cards = sorted(path.name for path in (interface / "device" / "infiniband").glob("*"))
    port = int((interface / "dev_port").read_text()) + 1 if cards else 0
    return ",".join([interface.name, *(f"{card}:{port}" for card in cards)])


class NixlProcess:
    """The process, as its worker has it. Methods raise OSError when it has ended or does not answer in time."""

    def __init__(self, setting: NixlSetting) -> None:
        self._process = KeptProcess(ENTRY, [net_devices(setting.address)], setting.title, setting.output)
        self._ready = False

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process.ended

    def await_ready(self, given_up: Callable[[], bool]) -> None:
        """Wait until NIXL is there."""
        if not self._ready:
            self._await(Ready, START_S, given_up)
            self._ready = True

    def ask(self, order: Order) -> None:
        """Give an order."""
        if not self._process.tell(msgspec.json.encode(order) + b"\n"):
            raise ConnectionError("the process with NIXL does not read its orders")

    def ask_for(self, order: Order, kind: type[T], limit_s: float, given_up: Callable[[], bool]) -> T:
        """Give an order, and wait for its answer."""
        self.ask(order)
        return self._await(kind, limit_s, given_up)

    def answers(self, wait_s: float) -> list[Answer]:
        """What has come, waiting for something at most so long."""
        ready = select.select([self._process.reports], [], [], wait_s)[0]
        try:
            found: list[Answer] = [_ANSWERS.decode(line) for line in self._process.read()]
        except msgspec.DecodeError as error:
            raise ConnectionError(f"the process with NIXL answers {error}") from error
        for answer in found:
            if isinstance(answer, Failed):
                raise ConnectionError(answer.why)
        if not found and self.ended:
            raise ConnectionError(f"the process with NIXL has ended with exit code {self._process.code}")
        if ready and not found:
            # Half a line, or the end of the process of which its keeper is to tell.
            time.sleep(0.001)
        return found

    def end(self) -> bool:
        """Kill it; whether it is known to have ended."""
        self._process.close()
        return self.ended

    def _await(self, kind: type[T], limit_s: float, given_up: Callable[[], bool]) -> T:
        deadline = time.monotonic() + limit_s
        while not (found := self.answers(LOOK_S)):
            if given_up() or time.monotonic() > deadline:
                raise TimeoutError(f"the process with NIXL has not answered within {limit_s:.0f} s")
        if len(found) != 1 or not isinstance(found[0], kind):
            raise ConnectionError(f"the process with NIXL answers {found}, expected {kind.__name__}")
        return found[0]


class ExposedMemory:
    """A publisher's segments as others read them."""

    def __init__(self, setting: NixlSetting) -> None:
        self._setting = setting
        self._pauses = Pauses()
        # Started now, it is there when the first version is.
        self._process: NixlProcess | None = NixlProcess(setting)
        self._closed = False
        self._lock = threading.Lock()

    def of(self, manifest: Manifest) -> RemoteMemory | None:
        """Where others read a version in a segment, unless that is not possible now. Waits a while for the process."""
        with self._lock:
            return None if self._closed else self._of(manifest)

    def close(self) -> None:
        """End the process; what is read now is lost."""
        self._closed = True
        with self._lock:
            self._end()

    def _of(self, manifest: Manifest) -> RemoteMemory | None:
        if self._process is not None and self._process.ended:
            self._bury()
        if self._process is None and not self._pauses.over():
            return None
        had = self._process
        try:
            try:
                found = self._expose(manifest)
            except OSError:
                if had is None or not had.ended:
                    raise
                # It was ending already: that is known a moment after it is killed.
                self._bury()
                found = self._expose(manifest)
        except OSError as error:
            log.warning("%s cannot be read by NIXL: %s", manifest.title, error)
            self._pauses.note(well=False)
            self._end()
            return None
        self._pauses.note(well=True)
        return found

    def _expose(self, manifest: Manifest) -> RemoteMemory:
        """Have the process expose a version, which is started if there is none; raises OSError."""
        process = self._process = self._process or NixlProcess(self._setting)
        process.await_ready(lambda: self._closed)
        size = HEADER_BYTES + manifest.size
        limit_s = ANSWER_S + size / REGISTERED_BYTES_S
        memory = process.ask_for(Expose(manifest.place, size), Exposed, limit_s, lambda: self._closed).memory
        return structs.replace(memory, address=memory.address + HEADER_BYTES)

    def _bury(self) -> None:
        """Leave a process that has ended: a reader that hangs up in the middle may have made UCX abort it."""
        log.warning("the process from which others read weights by NIXL has ended; another one is started")
        self._pauses.note(well=False)
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()


class OneSidedReads:
    """A reader's side. Used by one thread. `count` takes bytes that were read."""

    def __init__(self, setting: NixlSetting, count: Callable[[int], None]) -> None:
        self._setting = setting
        self._count = count
        self._pauses = Pauses()
        self._process: NixlProcess | None = None
        self._bytes = 0
        self._whole = 0
        self._parts = 0

    def status(self) -> dict[str, int]:
        """For the status: bytes that were read and right; versions that came whole, and those that did not."""
        return {"read_bytes": self._bytes, "read_whole": self._whole, "read_in_part": self._parts}

    def read(
        self,
        manifest: Manifest,
        segment: LandingSegment,
        arrived: Callable[[int], None],
        given_up: Callable[[], bool],
    ) -> list[int]:
        """Read a version into a segment; returns the chunks that are there and right, each told to `arrived` before.

        Raises StillWritten if nothing else may be written there now.
        """
        if manifest.memory is None or not self._pauses.over():
            return []
        right: list[int] = []
        try:
            process = self._running()
            process.await_ready(given_up)
            order = Attach(str(segment.path), HEADER_BYTES + manifest.size, HEADER_BYTES, manifest.memory)
            process.ask_for(order, Attached, ANSWER_S + manifest.size / REGISTERED_BYTES_S, given_up)
            for chunk in self._pieces(process, manifest, segment, given_up):
                right.append(chunk)
                arrived(chunk)
            process.ask_for(Detach(), Detached, ANSWER_S, given_up)
        except (OSError, ProtocolError) as error:
            log.log(INFO if given_up() else WARNING, "%s by NIXL: %s", manifest.title, error)
            self._give_up(manifest, segment)
        except BaseException:
            self._give_up(manifest, segment)
            raise
        self._note(manifest, right)
        return right

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _running(self) -> NixlProcess:
        if self._process is not None and self._process.ended:
            self.close()
        self._process = self._process or NixlProcess(self._setting)
        return self._process

    def _pieces(
        self, process: NixlProcess, manifest: Manifest, segment: LandingSegment, given_up: Callable[[], bool]
    ) -> Iterator[int]:
        """The chunks that have come and are right."""
        reads = PieceReads(manifest.size, time.monotonic())
        data = memoryview(segment.memory)[HEADER_BYTES : HEADER_BYTES + manifest.size]
        _ask(process, reads)
        while not reads.over:
            for answer in process.answers(LOOK_S):
                if not isinstance(answer, HasRead):
                    raise ProtocolError(f"the process with NIXL answers {answer}, expected a piece")
                chunks = reads.came(answer.start, time.monotonic())
                _ask(process, reads)  # read while these are hashed
                right = intact_chunks(manifest, data, chunks)
                if len(right) < len(chunks):
                    reads.stop()
                yield from right
                _check(reads, given_up)
            _check(reads, given_up)

    def _give_up(self, manifest: Manifest, segment: LandingSegment) -> None:
        process, self._process = self._process, None
        ended = process is None or process.end()
        if not ended or segment.read_into:
            self._pauses.note(well=False)
            raise StillWritten(f"{manifest.title}: a process that reads it by NIXL does not end")

    def _note(self, manifest: Manifest, right: Sequence[int]) -> None:
        whole = len(right) == manifest.chunks
        self._pauses.note(well=whole)
        nbytes = min(len(right) * CHUNK_BYTES, manifest.size)
        self._bytes += nbytes
        self._count(nbytes)
        if whole:
            self._whole += 1
            log.info("%s came by NIXL", manifest.title)
        else:
            self._parts += 1
            log.info("%s: %d of %d chunks came by NIXL", manifest.title, len(right), manifest.chunks)


def _check(reads: PieceReads, given_up: Callable[[], bool]) -> None:
    if given_up():
        raise TimeoutError("given up")
    if reads.still_s(time.monotonic()) > STILL_S:
        raise TimeoutError(f"nothing has come for {STILL_S:g} s")


def _ask(process: NixlProcess, reads: PieceReads) -> None:
    for order in reads.ask():
        process.ask(order)
