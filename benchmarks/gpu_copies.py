"""Weights between a GPU and shared memory: publishing them and loading them, beside what the bus carries.

    python -m benchmarks.gpu_copies            # 3 GiB in 300 tensors; needs a GPU

`pinned` is the limit, one copy of all bytes from or to pinned memory; `pageable` the same with memory that is not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

from distflow.types import Version
from distflow.weights.manifest import Manifest
from distflow.weights.segments.shm import ShmPublisher, ShmReader

GIB = 1 << 30


def _seconds(do: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    do()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _gb_s(size: int, what: list[float]) -> str:
    return f"{size / statistics.median(what) / 1e9:6.1f} GB/s ({min(what) * 1e3:.0f}–{max(what) * 1e3:.0f} ms)"


def main() -> None:
    """A line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--repetitions", type=int, default=5)
    chosen = parser.parse_args()
    count = int(chosen.gib * GIB) // chosen.tensors // 2
    named = [(f"w{number}", torch.randn(count, device="cuda").bfloat16()) for number in range(chosen.tensors)]
    size = 2 * count * len(named)
    whole = torch.empty(size, dtype=torch.uint8, device="cuda")
    hosts = {
        "pinned": torch.empty(size, dtype=torch.uint8, pin_memory=True),
        "pageable": torch.zeros(size, dtype=torch.uint8),
    }
    publisher = ShmPublisher(f"bench-{os.getpid()}", "policy", 0)
    reader = ShmReader(device="cuda:0")
    numbers = iter(range(1 << 20))
    target = [torch.empty_like(tensor) for _, tensor in named]
    manifests: list[Manifest] = []

    def publish() -> None:
        manifests.append(publisher.publish(Version(0, next(numbers)), named))

    def load() -> None:
        views = reader.fetch(publisher.summed(manifests[-1]))
        times["load"].append(_seconds(lambda: [to.copy_(view) for to, (_, view) in zip(target, views, strict=True)]))

    times: dict[str, list[float]] = {"publish": [], "load": []}
    try:
        first_s = _seconds(publish)
        # Each segment is mapped, and locked, when it is first used.
        for _ in range(4):
            publish()
            load()
        times = {"publish": [], "load": []}
        for _ in range(chosen.repetitions):
            times["publish"].append(_seconds(publish))
            load()
            for name, host in hosts.items():
                times.setdefault(f"{name} down", []).append(_seconds(lambda host=host: host.copy_(whole)))
                times.setdefault(f"{name} up", []).append(_seconds(lambda host=host: whole.copy_(host)))
        same = all(to.equal(tensor) for to, (_, tensor) in zip(target, named, strict=True))
    finally:
        publisher.close()
    print(
        f"{torch.cuda.get_device_name()}, {size / GIB:.2f} GiB in {len(named)} tensors; first version {first_s:.2f} s"
    )
    for name, found in times.items():
        print(f"{name:14s} {_gb_s(size, found)}")
    print("what was loaded is", "equal" if same else "DIFFERENT")


if __name__ == "__main__":
    main()
