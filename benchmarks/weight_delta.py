"""Bytes and seconds of a version to another host after an optimizer step: only what has changed, or all.

    make smollm2
    python -m benchmarks weight_delta --links 1gbit

The real SmolLM2-135M in bfloat16, with float32 masters, is trained on the answers to a reasoning-gym task by AdamW.
Each version is published and fetched twice, in turns of changing order: in full, and as what has changed since the
version before. Both must give the same bytes; exit code 1 if they do not. Times are of the publisher (digests, and
finding out what has changed), of the reader until it has all tensors, and of both together: what a version takes on its
way. Encoding and decoding (with the digests of the result) are measured beside a copy of the model by as many
threads. With `--links` publisher and reader are on hosts (network namespaces) whose links carry that; without, both are
on loopback.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.lora_publishing import chats, learn
from benchmarks.parts.team import Team
from distflow.config.plugins import BACKENDS
from distflow.config.schema import ModelConfig
from distflow.flow.resolve import resolve
from distflow.runtime.protocols import BackendSpec
from distflow.types import Version
from distflow.weights.encodings.delta import encode
from distflow.weights.manifest import CHUNK_BYTES, Manifest, coding_threads
from distflow.weights.segments.segment_file import SEGMENTS
from distflow.weights.segments.shm import HEADER_BYTES, AnnouncedSegment, ShmPublisher, segment_prefix
from distflow.weights.swarm.delta_fetch import make
from distflow.weights.swarm.delta_memory import DeltaFile
from distflow.weights.swarm.reader import SwarmReader
from distflow.weights.swarm.server import SwarmServer
from tests.hosts.bridged import BridgedHosts

KINDS = {"full": False, "delta": True}
"""How versions are sent, each with whether what has changed is served, too."""
TRAINED = 8
"""Chats in a step."""
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Setting:
    """`tag` names the segments of this measurement, `address` the end of this process."""

    tag: str
    address: str
    model: Mapping[str, Any]
    steps: int


def train(name: str, pipe: Connection, setting: Setting) -> None:
    """Trains and publishes: each order is a version, answered by its manifests and times."""
    disable_progress_bar()
    model = ModelConfig.model_validate(setting.model)
    backend = resolve(BACKENDS["torch"])(BackendSpec(model.model_dump(), "cpu", True, 0, setting.steps, {}))
    lessons = chats(model, setting.steps * TRAINED, seed=0)
    servers = {kind: SwarmServer(setting.address, deltas=deltas) for kind, deltas in KINDS.items()}
    publisher = ShmPublisher(setting.tag, "policy", 0, servers["full"].pinned)
    former: Manifest | None = None
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        if number:
            own, lessons = lessons[:TRAINED], lessons[TRAINED:]
            learn(backend, own, sum(len(chat.answer) for chat in own))
        local = publisher.publish(Version(0, number), backend.named_shards())
        found: dict[str, Any] = {"codec": {} if former is None else codec(former, local)}
        for kind in _turned(number):
            began = time.perf_counter()
            manifest = servers[kind].describe(local)
            found[kind] = (manifest.to_wire(), time.perf_counter() - began)
        former = local
        pipe.send(found)
    for server in servers.values():
        server.close()
    publisher.close()


def codec(former: Manifest, local: Manifest) -> Mapping[str, float]:
    """GB/s of a version's bytes: copied, encoded, and made of the older one; and the share of values that changed."""
    segments = [AnnouncedSegment(one) for one in (former, local)]
    base, new = (memoryview(segment.memory)[HEADER_BYTES:] for segment in segments)
    into = memoryview(np.empty(len(new), np.uint8))
    spans = [slice(at, at + CHUNK_BYTES) for at in range(0, len(new), CHUNK_BYTES)]

    def copy(span: slice) -> None:
        np.copyto(np.frombuffer(into[span], np.uint8), np.frombuffer(new[span], np.uint8))

    def copied() -> None:
        with ThreadPoolExecutor(coding_threads()) as pool:
            list(pool.map(copy, spans))

    copied()
    with DeltaFile() as file:
        sizes: list[int | None] = []
        times = {
            "copy": seconds(copied),
            "encode": seconds(lambda: sizes.append(encode(new, base, len(new), file.write))),
        }
        delta = os.pread(file.handle, sizes[0] or 0, HEADER_BYTES)
    times["decode"] = seconds(lambda: make(local, base, [memoryview(delta)], into))
    changed = np.frombuffer(new, np.uint16) != np.frombuffer(base, np.uint16)
    return {name: len(new) / took / 1e9 for name, took in times.items()} | {"changed": float(changed.mean())}


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def read(name: str, pipe: Connection, setting: Setting) -> None:
    """Fetches each version in both ways, and answers with the times and whether the bytes are the same."""
    readers = {kind: SwarmReader(f"{setting.tag}-{kind}", setting.address, TIMEOUT_S) for kind in KINDS}
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        took, tensors = {}, {}
        for kind in _turned(order["number"]):
            manifest = Manifest.from_wire(order[kind])
            began = time.perf_counter()
            tensors[kind] = readers[kind].fetch(manifest)
            took[kind] = time.perf_counter() - began
        pairs = zip(*(tensors[kind] for kind in KINDS), strict=True)
        same = all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for (_, one), (_, other) in pairs)
        pipe.send({"same": same, **took})
    for reader in readers.values():
        reader.close()


def _turned(number: int) -> list[str]:
    return list(KINDS)[:: -1 if number % 2 else 1]


def measure(args: argparse.Namespace, lr: float, ends: Mapping[str, tuple[str, str | None]]) -> bool:
    """One learning rate; prints its row, and returns whether all versions were exact."""
    tag = f"bench-{uuid.uuid4().hex[:8]}"
    model = {"path": args.model, "dtype": "bfloat16", "optimizer": {"lr": lr}}
    rows: list[dict[str, float]] = []
    exact = True
    try:
        with Team("benchmarks.lora_publishing") as team:
            for name, member in (("train", train), ("read", read)):
                address, network = ends[name]
                team.start(name, member, Setting(tag, address, model, args.skip + args.steps), network)
            team.answers(("train", "read"))
            for number in range(args.skip + args.steps + 1):
                team.tell(("train",), number)
                made = team.answers(("train",))["train"]
                team.tell(("read",), {"number": number, **{kind: made[kind][0] for kind in KINDS}})
                got = team.answers(("read",))["read"]
                exact = exact and got["same"]
                deltas = Manifest.from_wire(made["delta"][0]).deltas
                if number > args.skip and deltas:
                    row = {f"{kind} s": made[kind][1] + got[kind] for kind in KINDS}
                    row |= {f"{kind} made s": made[kind][1] for kind in KINDS}
                    rows.append(row | made["codec"] | {"bytes": deltas[-1].size / made["delta"][0]["size"]})
    finally:
        for segment in SEGMENTS.glob(f"{segment_prefix(tag)}*"):
            segment.unlink()
    print(f"lr {lr:g}: {summary(rows)}, {'exact' if exact else 'WRONG'}", flush=True)
    return exact and bool(rows)


def summary(rows: list[dict[str, float]]) -> str:
    """Medians, and lowest–highest of the ratios of the same round."""

    def median(key: str) -> float:
        return statistics.median(row[key] for row in rows)

    if not rows:
        return "no version that crossed as what has changed"
    ratios = sorted(row["delta s"] / row["full s"] for row in rows)
    return (
        f"{len(rows)} steps, changed {median('changed'):.2%} of the values, {median('bytes'):.2%} of the bytes; "
        f"full {median('full s'):.2f} s (of these {median('full made s'):.2f} at the publisher), "
        f"delta {median('delta s'):.2f} s ({median('delta made s'):.2f}), "
        f"delta ÷ full {statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f}); GB/s: "
        f"encode {median('encode'):.2f}, decode {median('decode'):.2f}, copy {median('copy'):.2f}"
    )


def main() -> int:
    """1 if a version was not exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    parser.add_argument("--skip", type=int, default=3, help="first steps that are not counted")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--links", help="rate of the links between hosts, such as 1gbit")
    args = parser.parse_args()
    with ExitStack() as stack:
        ends: dict[str, tuple[str, str | None]] = dict.fromkeys(("train", "read"), ("127.0.0.1", None))
        if args.links is not None:
            hosts = stack.enter_context(BridgedHosts(2, args.links)).hosts
            ends = {name: (host.address, host.network) for name, host in zip(ends, hosts, strict=True)}
        return int(not all([measure(args, lr, ends) for lr in args.lr]))
