"""The processes that benchmark `weights` moves parts of a model between, and those of an optimizer step.

In parts: trainers hold even ranges of the elements of each tensor, readers want even ranges of its columns. A step: the
first of AdamW on masters in float32, at LR, published in bfloat16 and fetched on another host in both ways.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

from benchmarks.parts.weights_workers import LOOPBACK, MODEL, TENSORS, TIMEOUT_S, WeightsSetting, obey
from distflow.types import Version
from distflow.weights.manifest import Manifest
from distflow.weights.segments.shm import ShmPublisher
from distflow.weights.shards.plan import Box, RankPart, TensorLayout, boxes_of, plan_pieces
from distflow.weights.shards.transfer import HeldPart, ShardTransfer
from distflow.weights.swarm.reader import SwarmReader
from distflow.weights.swarm.server import SwarmServer

COLUMNS = 1024
LR = 1e-6
WIDTH = 0.02
"""Standard deviation of the masters, as of weights of language models."""
WAYS = {"full": False, "delta": True}
"""How a version crosses, each with whether what has changed is served, too."""


@dataclass(frozen=True, slots=True)
class PartSetting:
    """One rank of so many `senders` and then `takers`, who meet at file `store`."""

    store: Path
    rank: int
    senders: int
    takers: int
    nbytes: int


def _layouts(setting: PartSetting) -> list[TensorLayout]:
    shape = (setting.nbytes // TENSORS // 4 // COLUMNS, COLUMNS)
    each, wide = math.prod(shape) // setting.senders, -(-COLUMNS // setting.takers)
    sources = [RankPart(n, box) for n in range(setting.senders) for box in boxes_of(shape, n * each, each)]
    starts = range(0, COLUMNS, wide)
    targets = [
        RankPart(setting.senders + n, Box((0, start), (shape[0], min(start + wide, COLUMNS))))
        for n, start in enumerate(starts)
    ]
    return [TensorLayout(f"layer.{n}", shape, 4, tuple(sources), tuple(targets)) for n in range(TENSORS)]


def move_parts(name: str, pipe: Connection, setting: PartSetting) -> None:
    """One rank of the group: it sends its parts of a version, or gets those that it wants."""
    layouts, size = _layouts(setting), setting.senders + setting.takers
    plan = plan_pieces(layouts)
    sends = setting.rank < setting.senders
    parts = {
        layout.name: [
            HeldPart(part.box, torch.randn(part.box.sizes))
            for part in (layout.sources if sends else layout.targets)
            if part.rank == setting.rank
        ]
        for layout in layouts
    }
    group = ShardTransfer(FileStore(str(setting.store), size), setting.rank, size, LOOPBACK, TIMEOUT_S)

    def move(_: object) -> Mapping[str, float]:
        began, cpu = time.perf_counter(), time.process_time()
        done = group.send(plan, parts, TIMEOUT_S) if sends else group.receive(plan, parts, TIMEOUT_S)
        assert not done.lost, done.lost
        return {
            "seconds": time.perf_counter() - began,
            "cpu_s": time.process_time() - cpu,
            "bytes": 0 if sends else done.nbytes,
        }

    obey(pipe, {"move": move})
    group.end()


def step_and_publish(name: str, pipe: Connection, setting: WeightsSetting) -> None:
    """Each order is an optimizer step, answered by what is announced of it in both ways and how long that took."""
    masters = [torch.nn.Parameter(torch.randn(setting.nbytes // TENSORS // 2) * WIDTH) for _ in range(TENSORS)]
    servers = {way: SwarmServer(LOOPBACK, deltas=deltas) for way, deltas in WAYS.items()}
    publisher = ShmPublisher(f"{setting.tag}-{name}", MODEL, 0, servers["full"].pinned)

    def step(number: int) -> Mapping[str, tuple[Any, float]]:
        for master in masters:
            master.grad = torch.randn_like(master)
            torch.optim.AdamW([master], lr=LR).step()
            master.grad = None
        weights = ((f"layer.{n}", master.detach().bfloat16()) for n, master in enumerate(masters))
        local = publisher.publish(Version(0, number), weights)
        found = {}
        for way in _turned(number):
            began = time.perf_counter()
            wire = servers[way].describe(local).to_wire()
            found[way] = (wire, time.perf_counter() - began)
        return found

    with ExitStack() as stack:
        for close in (publisher.close, *(server.close for server in servers.values())):
            stack.callback(close)
        obey(pipe, {"step": step})


def follow_steps(name: str, pipe: Connection, setting: WeightsSetting) -> None:
    """A reader on a host of its own, which fetches each version in both ways; both must give the same."""
    readers = {way: SwarmReader(f"{setting.tag}-{name}-{way}", LOOPBACK, TIMEOUT_S) for way in WAYS}

    def fetch(order: tuple[int, Mapping[str, Any]]) -> Mapping[str, float]:
        number, wires = order
        took, tensors = {}, {}
        for way in _turned(number):
            manifest = Manifest.from_wire(wires[way])
            began = time.perf_counter()
            tensors[way] = readers[way].fetch(manifest)
            took[way] = time.perf_counter() - began
        pairs = zip(tensors["full"], tensors["delta"], strict=True)
        assert all(torch.equal(one.view(torch.int16), other.view(torch.int16)) for (_, one), (_, other) in pairs)
        manifest = Manifest.from_wire(wires["delta"])
        sent = manifest.deltas[-1].size if manifest.deltas else manifest.size
        return {**took, "bytes": sent / manifest.size}

    with ExitStack() as stack:
        for reader in readers.values():
            stack.callback(reader.close)
        obey(pipe, {"fetch": fetch})


def _turned(number: int) -> list[str]:
    """Both ways, each of them first in every other turn."""
    return list(WAYS)[:: -1 if number % 2 else 1]
