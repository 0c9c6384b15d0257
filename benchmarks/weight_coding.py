"""What a host does to weights on their way: rounding to fp8 and back, keeping a delta, copying a trainer's part.

    python -m benchmarks weight_coding

Each beside what it could be at best, or used to be, in turns; printed are medians and the lowest and highest ratio of
a turn:

- fp8: values a second of `to_fp8` and `from_fp8` on a bfloat16 tensor, as a share of a copy of it by one thread, and
  the most memory besides tensor and result, as a multiple of the tensor.
- delta: the longest that another thread of the process stood still while a delta was put where it is served from, as
  a share of the time that took; beside an assignment to a slice of a mapping, which holds the GIL.
- parts: seconds to copy a part into memory that is kept, beside memory that is new each time.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

import torch

from distflow.types import Version
from distflow.weights.encodings.rounding import from_fp8, to_fp8
from distflow.weights.shards.copies import PartCopies
from distflow.weights.swarm.delta_memory import DeltaFile

MIB = 1 << 20
LOOK_S = 0.001


@dataclass(frozen=True, slots=True)
class Part:
    """What a trainer holds."""

    name: str
    shape: tuple[int, ...]
    start: int
    data: torch.Tensor


class Still:
    """The longest that a thread, which wakes each millisecond, stood still."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._over = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this lasts."""
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        last = time.perf_counter()
        while not self._over.wait(LOOK_S):
            now = time.perf_counter()
            self.longest_s, last = max(self.longest_s, now - last), now


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def most_memory(work: Callable[[], object]) -> int:
    """Bytes that this process has had at most during the work, above those before."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _peak()
    work()
    return _peak() - before


def _peak() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None, "proc(5)"
    return int(found[1]) << 10


def fp8(size: int) -> dict[str, float]:
    """One turn."""
    values = torch.randn(size // 2, dtype=torch.bfloat16) * 0.02
    into, stored = torch.empty_like(values).copy_(values), to_fp8(values)
    copy = seconds(lambda: into.copy_(values))
    beside = most_memory(lambda: to_fp8(values)) - stored.nbytes
    return {
        "to fp8 ÷ copy": copy / seconds(lambda: to_fp8(values)),
        "from fp8 ÷ copy": copy / seconds(lambda: from_fp8(stored, values.shape)),
        "memory besides ÷ tensor": max(0, beside) / values.nbytes,
    }


def delta(size: int) -> dict[str, float]:
    """One turn."""
    data, found = os.urandom(MIB) * (size // MIB), {}
    with DeltaFile() as file:
        still = Still()
        with still.watched():
            took = seconds(lambda: [file.write(at, data[at : at + MIB]) for at in range(0, size, MIB)])
        found["still ÷ writing a delta"] = still.longest_s / took
    handle = os.memfd_create("bench")
    os.ftruncate(handle, size)
    with mmap(handle, size) as memory:
        still = Still()
        with still.watched():
            took = seconds(lambda: memory.__setitem__(slice(0, size), data))
        found["still ÷ assigning to a slice"] = still.longest_s / took
    os.close(handle)
    return found


def parts(size: int) -> dict[str, float]:
    """One turn."""
    part = Part("embed", (size // 2,), 0, torch.ones(size // 2, dtype=torch.bfloat16))
    kept = PartCopies()
    for number in range(2):
        copy = kept.next()
        copy.fill([part])
        copy.version = Version(0, number)
    new = seconds(lambda: PartCopies().next().fill([part]))
    return {"kept ÷ new memory": seconds(lambda: kept.next().fill([part])) / new}


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[float]] = {}
    for _ in range(args.turns):
        for measure in (fp8, delta, parts):
            for name, found in measure(args.megabytes * MIB).items():
                rows.setdefault(name, []).append(found)
    for name, found in rows.items():
        print(f"{name}: {statistics.median(found):.3f} ({min(found):.3f}–{max(found):.3f})")
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.0f}")
