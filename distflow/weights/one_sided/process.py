"""The process that has NIXL, and UCX below it, in it: a child of a worker, since UCX may abort the process it is in.

At a publisher it maps published segments and registers them; UCX answers the reads of others by itself. At a reader it
reads into a segment of its host, which it locks meanwhile: the kernel releases this lock when it has ended, and until
then nobody else writes there, since a read that was given up may still write. Orders come as lines of JSON on its
standard input, answers go to the pipe of `kept_process.py`; whatever fails ends it, and its worker starts another one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import select
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

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
    Read,
    Ready,
    RemoteMemory,
)
from distflow.weights.segments.segment_file import open_own

DEVICES, TRANSPORTS = "UCX_NET_DEVICES", "UCX_TLS"
"""The environment variables that say which network devices UCX uses, and listens on, and which transports. Where they
are set, that counts."""
NO_SHARED_MEMORY = "^sm"
"""Readers are on other hosts. UCX would open sockets for it that every user of the machine can send to."""
PROGRESS_US = 1000
"""The longest sleep of NIXL's own thread. The default of its public interface keeps a core busy all the time."""
LOOK_S = 0.0005
"""How often a reader asks whether a piece has come."""
_ORDERS = msgspec.json.Decoder(Order)


def run(devices: str, reports: str) -> int:
    """The process, until its standard input ends; returns the exit code."""
    # Where UCX aborts, a file of all mapped weights would be left.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.setdefault(DEVICES, devices)
    os.environ.setdefault(TRANSPORTS, NO_SHARED_MEMORY)
    child = _Child(int(reports))
    try:
        child.run()
    except Exception as error:
        child.answer(Failed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


@dataclass(frozen=True, slots=True)
class _Region:
    """A segment's file that is mapped and registered."""

    file: tuple[int, int]
    memory: mmap.mmap
    address: int
    registered: Any


class _Agent:
    """NIXL's agent in this process, with UCX alone. Raises what NIXL raises."""

    def __init__(self) -> None:
        from nixl_cu12 import _bindings as nixl  # its public interface has no choice of PROGRESS_US

        self._nixl = nixl
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.captureTelemetry = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        config.pthrDelay = PROGRESS_US
        self._agent = nixl.nixlAgent(f"distflow-{os.urandom(8).hex()}", config)
        self._ucx = [self._agent.createBackend("UCX", {})]

    def register(self, address: int, size: int) -> Any:
        region = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, size, 0, "")])
        self._agent.registerMem(region, self._ucx)
        return region

    def deregister(self, region: Any) -> None:
        self._agent.deregisterMem(region, self._ucx)

    def metadata(self) -> bytes:
        return bytes(self._agent.getLocalMD())

    def know(self, metadata: bytes) -> str:
        return str(self._agent.loadRemoteMD(metadata).decode())

    def forget(self, name: str) -> None:
        self._agent.invalidateRemoteMD(name)

    def begin_read(self, name: str, into: int, memory: RemoteMemory, start: int, size: int) -> int:
        nixl = self._nixl
        own = nixl.nixlXferDList(nixl.DRAM_SEG, [(into, size, 0)])
        theirs = nixl.nixlXferDList(nixl.DRAM_SEG, [(memory.address + start, size, memory.device)])
        handle: int = self._agent.createXferReq(nixl.NIXL_READ, own, theirs, name, b"", self._ucx)
        self._agent.postXferReq(handle, b"")
        return handle

    def has_read(self, handle: int) -> bool:
        state = self._agent.getXferStatus(handle)
        if state == self._nixl.NIXL_IN_PROG:
            return False
        if state != self._nixl.NIXL_SUCCESS:
            raise ConnectionError(f"a read ended with {state}")
        self._agent.releaseXferReq(handle)
        return True


class _Child:
    def __init__(self, reports: int) -> None:
        self._reports = reports
        self._orders = b""
        self._regions: dict[str, _Region] = {}
        self._known: tuple[bytes, str] | None = None
        """The publisher's metadata, and the name of its agent."""
        self._lock: int | None = None
        self._attached: Attach | None = None
        self._going: dict[int, int] = {}
        """Handles of reads under way, by the start of their pieces."""

    def run(self) -> None:
        self._agent = _Agent()
        self.answer(Ready())
        while self._take_orders(LOOK_S if self._going else None):
            for start in [start for start, handle in self._going.items() if self._agent.has_read(handle)]:
                del self._going[start]
                self.answer(HasRead(start))

    def answer(self, answer: Answer) -> None:
        left = msgspec.json.encode(answer) + b"\n"
        while left:
            left = left[os.write(self._reports, left) :]

    def _take_orders(self, wait_s: float | None) -> bool:
        """Do what was ordered; whether there may be more orders."""
        source = sys.stdin.fileno()
        if not select.select([source], [], [], wait_s)[0]:
            return True
        found = os.read(source, 1 << 16)
        *lines, self._orders = (self._orders + found).split(b"\n")
        for line in lines:
            self._act(_ORDERS.decode(line))
        return bool(found)

    def _act(self, order: Order) -> None:
        match order:
            case Expose():
                address = self._region(order.path, order.size, writable=False).address
                self.answer(Exposed(order.path, RemoteMemory(self._agent.metadata(), address)))
            case Attach():
                self._attach(order)
            case Read():
                self._read(order)
            case Detach():
                assert not self._going, "all that was begun has come"
                self._detach()
                self.answer(Detached())

    def _attach(self, order: Attach) -> None:
        self._lock = open_own(Path(order.path))
        fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._region(order.path, order.size, writable=True)
        metadata, known = order.memory.metadata, self._known
        if known is None or known[0] != metadata:
            self._known = (metadata, self._agent.know(metadata))
            if known is not None and known[1] != self._known[1]:
                self._agent.forget(known[1])
        self._attached = order
        self.answer(Attached())

    def _read(self, order: Read) -> None:
        to = self._attached
        assert to is not None, "attached"
        assert self._known is not None, "attached"
        into = self._regions[to.path].address + to.begin + order.start
        self._going[order.start] = self._agent.begin_read(self._known[1], into, to.memory, order.start, order.size)

    def _detach(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = self._attached = None

    def _region(self, path: str, size: int, *, writable: bool) -> _Region:
        """The mapped and registered file. Those that are gone are let go of: until then their memory is in use."""
        for known in [known for known, one in self._regions.items() if _file(known) != one.file]:
            self._agent.deregister(self._regions.pop(known).registered)
        if path not in self._regions:
            self._regions[path] = self._register(path, size, writable=writable)
        return self._regions[path]

    def _register(self, path: str, size: int, *, writable: bool) -> _Region:
        # A descriptor of this file that is closed here would release the lock on it.
        handle = open_own(Path(path)) if self._lock is None else self._lock
        try:
            file, access = os.fstat(handle), mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            memory = mmap.mmap(handle, size, access=access)
        finally:
            if handle != self._lock:
                os.close(handle)
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        try:
            registered = self._agent.register(address, size)
        except Exception:
            if writable:
                raise
            # InfiniBand's verbs register memory for reading and writing at once, which needs such a mapping.
            return self._register(path, size, writable=True)
        return _Region((file.st_dev, file.st_ino), memory, address, registered)


def _file(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return (found.st_dev, found.st_ino)
