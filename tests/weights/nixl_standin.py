"""Stands in for NIXL where it is not installed: an agent's metadata names files, which its readers open.

The process around it is the real one, as are its orders, its locks and its end. As with NIXL, a process that has ended
or is stopped answers no reads.
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

from distflow.weights.one_sided import process as one_sided_process
from distflow.weights.one_sided_messages import RemoteMemory


class StandIn:
    def __init__(self) -> None:
        self._regions: dict[int, str] = {}
        self._known: dict[str, Any] = {}
        self._going: list[tuple[str, int, RemoteMemory, int, int]] = []

    def register(self, address: int, size: int) -> int:
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, _, _, _, *path = line.split(maxsplit=5)
            if int(span.partition("-")[0], 16) == address:
                self._regions[address] = path[0]
        assert address in self._regions, "a mapped file"
        return address

    def deregister(self, region: int) -> None:
        del self._regions[region]

    def metadata(self) -> bytes:
        return json.dumps({"pid": os.getpid(), "regions": list(self._regions.items())}).encode()

    def know(self, metadata: bytes) -> str:
        told = json.loads(metadata)
        self._known[str(told["pid"])] = dict(told["regions"])
        return str(told["pid"])

    def forget(self, name: str) -> None:
        del self._known[name]

    def begin_read(self, name: str, into: int, memory: RemoteMemory, start: int, size: int) -> int:
        self._going.append((name, into, memory, start, size))
        return len(self._going) - 1

    def has_read(self, handle: int) -> bool:
        name, into, memory, start, size = self._going[handle]
        try:
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            state = "X"
        if state in "XZ":
            raise ConnectionError(f"process {name} is gone")
        if state == "T":
            return False
        base = max(address for address in self._known[name] if address <= memory.address)
        with open(self._known[name][base], "rb") as file:
            data = os.pread(file.fileno(), size, memory.address - base + start)
        ctypes.memmove(into, data, size)
        return True


class WithCards(StandIn):
    """RDMA cards take no memory that is mapped for reading alone."""

    def register(self, address: int, size: int) -> int:
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.startswith(f"{address:x}-") and "w" not in line.split()[1]:
                raise ConnectionError("Bad address")
        return super().register(address, size)


def run(devices: str, reports: str) -> int:
    """As `one_sided_process.run`."""
    return _run(StandIn, devices, reports)


def run_with_cards(devices: str, reports: str) -> int:
    """The same where there are RDMA cards."""
    return _run(WithCards, devices, reports)


def _run(agent: type[StandIn], devices: str, reports: str) -> int:
    one_sided_process._Agent = agent  # type: ignore[assignment,misc]
    return one_sided_process.run(devices, reports)
