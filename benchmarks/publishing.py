"""Memory of a replica while it publishes a divided model, beside its share.

    python -m benchmarks publishing --params 135m --backends fsdp zero3

Two replicas on this machine publish as they do in a run: the first into shared memory, the other goes through the
parameters with it. Printed is how far each one's own memory (resident, less what is shared) rises while it does, at
most, beside the sizes of the model, of a replica's share and of the largest piece that is put together at a time; and
what the version's canary takes besides: one forward of 65 tokens, in which all replicas take part.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from benchmarks.generation import SHAPES, model_section
from distflow.config.plugins import BACKENDS
from distflow.flow.resolve import resolve
from distflow.runtime.protocols import Backend, BackendSpec, Reducer
from distflow.runtime.weight_publisher import Canaries
from distflow.testing.backend_contract import tiny_model
from distflow.types import Version
from distflow.weights.canary import canary_rows
from distflow.weights.segments.shm import ShmPublisher
from distflow.workers.backends.deepspeed_backend import GATHERED_BYTES
from tests.learning.processes import together

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "torch": ("torch", {}),
    "fsdp": ("fsdp", {}),
    "zero3": ("deepspeed", {"zero": 3}),
}
MB = 1e6
PAGE = os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The largest own memory of this process, in bytes above that at the begin, looked at all the time."""

    def __enter__(self) -> Peak:
        self._begin = self.bytes = _own_memory()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.bytes -= self._begin

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.bytes = max(self.bytes, _own_memory())


def _own_memory() -> int:
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * PAGE


def publishes(replicas: Reducer, name: str, params: str, rounds: int) -> dict[str, float]:
    """Peaks (the first version, which lays the segments out, and the largest of the later ones), sizes, seconds."""
    backend_name, options = OPTIONS[name]
    section = tiny_model(**model_section(params, "float32"))
    spec = BackendSpec(section, "cpu", True, 0, 10, options, replicas=replicas)
    backend: Backend = resolve(BACKENDS[backend_name])(spec)
    backend.join()
    publisher = ShmPublisher(f"bench-{os.getpid()}", "policy", 0) if replicas.rank == 0 else None
    canaries = Canaries(canary_rows(int(section["init"]["vocab_size"]), 512), "float32")
    peaks, took, checked = [], [], []
    try:
        for number in range(rounds + 1):
            begin = time.perf_counter()
            canaries.compute(backend)
            checked.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            with Peak() as peak:
                if publisher is not None:
                    publisher.publish(Version(0, number), backend.named_shards())
                else:
                    deque(backend.named_shards(), maxlen=0)
            peaks.append(peak.bytes / MB)
            took.append(time.perf_counter() - begin)
    finally:
        if publisher is not None:
            publisher.close()
    sizes = [tensor.numel() * tensor.element_size() for _, tensor in backend.named_shards()]
    piece = max(sizes) if name != "zero3" else max(*sizes, min(GATHERED_BYTES, sum(sizes)))
    return {
        "first": peaks[0],
        "later": max(peaks[1:]),
        "model": sum(sizes) / MB,
        "piece": piece / MB,
        "seconds": sorted(took[1:])[rounds // 2],
        "canary": sorted(checked[1:])[rounds // 2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", choices=sorted(SHAPES), default="135m")
    parser.add_argument("--backends", choices=sorted(OPTIONS), nargs="+", default=["fsdp", "zero3"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name in args.backends:
        with tempfile.TemporaryDirectory() as folder:
            job = (publishes, (name, args.params, args.rounds))
            (results,) = together(2, Path(folder), {name: job}).values()
        for rank, result in enumerate(results):
            print(
                f"{name:6s} rank {rank}: rises by {result['first']:7.1f} MB for the first version, "
                f"{result['later']:7.1f} MB for later ones, {result['seconds']:.2f} s and for the canary "
                f"{result['canary']:.3f} s; model {result['model']:.1f} MB, share {result['model'] / 2:.1f} MB, "
                f"largest piece {result['piece']:.1f} MB",
                flush=True,
            )
