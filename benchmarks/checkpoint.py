"""Training held up by a checkpoint, as a share of the time that writing it takes.

    python -m benchmarks checkpoint --rounds 5 --folder /tmp

The state is that of a model of 135M parameters (SmolLM2's shapes) with AdamW's moments, float32, random: 1.6 GB.
Between a checkpoint's begin and the next change of the state lie the seconds of `--between`, in which nothing is
computed: a training step that waits for its samples. 0 is the worst case: the whole copy is waited for.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from distflow.runtime.checkpoint.format import Shard, whole
from distflow.runtime.checkpoint.parts import CheckpointWriter
from distflow.runtime.checkpoint.writer_thread import CheckpointThread
from distflow.runtime.metrics import MetricStore
from distflow.types import Version

LAYERS, WIDTH, INNER, KEYS, VOCABULARY = 30, 576, 1536, 192, 49152
WAIT_S = 600.0


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters of SmolLM2-135M by name."""
    yield "embed_tokens", (VOCABULARY, WIDTH)
    yield "norm", (WIDTH,)
    for layer in range(LAYERS):
        for name, shape in {
            "q": (WIDTH, WIDTH),
            "k": (KEYS, WIDTH),
            "v": (KEYS, WIDTH),
            "o": (WIDTH, WIDTH),
            "gate": (INNER, WIDTH),
            "up": (INNER, WIDTH),
            "down": (WIDTH, INNER),
            "norm_1": (WIDTH,),
            "norm_2": (WIDTH,),
        }.items():
            yield f"layers.{layer}.{name}", shape


def main() -> None:
    """Print one line for each way to wait."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--between", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    state = {f"{kind}.{name}": torch.randn(shape) for kind in kinds for name, shape in shapes()}
    size = sum(tensor.nbytes for tensor in state.values())
    print(f"{size / 1e9:.2f} GB of state")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        writer = CheckpointWriter(Path(folder), "trainer-0", "digest")
        thread = CheckpointThread(writer, lambda: None, MetricStore(), lambda: None, alone=True)
        number = 0

        def shards() -> dict[str, list[Shard]]:
            return {"policy": [whole(name, tensor) for name, tensor in state.items()]}

        def save(between_s: float) -> tuple[float, float]:
            """Seconds of standing still, and of writing."""
            nonlocal number
            number += 1
            begun = time.perf_counter()
            flight = thread.begin(Version(0, number), (0.0, 0.0), shards(), {"ledger": {}, "steps": {}})
            stall = time.perf_counter() - begun
            time.sleep(between_s)
            begun = time.perf_counter()
            flight.copied.result(WAIT_S)
            stall += time.perf_counter() - begun
            flight.written.result(WAIT_S)
            return stall, flight.seconds

        begun = time.perf_counter()
        thread.prepare(shards()).result(WAIT_S)
        print(f"buffers made ready, while the first training step goes on: {time.perf_counter() - begun:.2f} s")
        stall, write = save(0.0)
        print(f"first: stall {stall:.3f} s, write {write:.2f} s, {stall / write:.1%}")
        found: dict[float, list[tuple[float, float]]] = {between: [] for between in options.between}
        for _ in range(options.rounds):
            for between in options.between:
                found[between].append(save(between))
        thread.close(WAIT_S)
    for between, pairs in found.items():
        stall, write = (statistics.median(column) for column in zip(*pairs, strict=True))
        share = statistics.median(stall / write for stall, write in pairs)
        spread = f"{min(s / w for s, w in pairs):.1%}–{max(s / w for s, w in pairs):.1%}"
        print(f"{between:g} s between: stall {stall:.3f} s, write {write:.2f} s, {share:.1%} ({spread})")
