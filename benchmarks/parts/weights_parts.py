"""The processes that benchmark `weights` moves parts of a model between.

Trainers hold even ranges of the elements of each tensor, readers want even ranges of its columns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore

from benchmarks.parts.weights_workers import LOOPBACK, TENSORS, TIMEOUT_S, obey
from distflow.weights.shards.plan import Box, RankPart, TensorLayout, boxes_of, plan_pieces
from distflow.weights.shards.transfer import HeldPart, ShardTransfer

COLUMNS = 1024


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
