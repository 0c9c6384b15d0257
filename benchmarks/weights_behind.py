"""Bytes of versions to hosts that have the one before, an older one, or none.

    python -m benchmarks weights_behind [--megabytes 64] [--versions 72] [--changed 0.01 0.03]

A publisher goes through versions of a bfloat16 model, at each of which another share of the values has changed. Readers
that pass nothing on fetch them over loopback, so that all of their bytes come from the publisher: one at each version,
one at every 4th, one that begins late, one at every 48th. In the end a reader comes that stands beside another one, and
gets the version there. Each version that a reader gets is compared bit by bit. Prints bytes as shares of the model, and
the publisher's seconds for a version.
"""

from __future__ import annotations

import argparse
import statistics
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import torch

from benchmarks.parts.weights_workers import LOOPBACK
from distflow.types import Version
from distflow.weights.manifest import Manifest
from distflow.weights.segments.shm import ShmPublisher
from distflow.weights.swarm.reader import SwarmReader
from distflow.weights.swarm.server import SwarmServer

TIMEOUT_S = 60.0
READERS = {"each version": (0, 1), "every 4th": (0, 4), "begins at the 40th": (40, 1), "every 48th": (0, 48)}
"""At which version each begins, and how many it goes on by."""


def versions(count: int, nbytes: int, changed: float) -> Iterator[torch.Tensor]:
    """The model's values, version by version; the same memory each time."""
    values = torch.randint(-(1 << 15), 1 << 15, (nbytes // 2,), dtype=torch.int16)
    for number in range(count):
        if number:
            at = torch.rand(len(values)) < changed
            values[at] += 1
        yield values.view(torch.bfloat16)


def measure(nbytes: int, count: int, changed: float) -> None:
    """One share of changed values: prints its rows."""
    made: list[tuple[float, float]] = []
    sent: dict[str, list[int]] = {who: [] for who in READERS}
    tag = f"bench-{uuid.uuid4().hex[:8]}"
    with ExitStack() as stack:
        server = SwarmServer(LOOPBACK, deltas=True)
        publisher = ShmPublisher(tag, "policy", 0, server.pinned)
        readers = {who: SwarmReader(None, None, TIMEOUT_S) for who in READERS}
        beside = [SwarmReader(f"{tag}-{n}", LOOPBACK, TIMEOUT_S) for n in range(2)]
        for close in (publisher.close, server.close, *(one.close for one in (*readers.values(), *beside))):
            stack.callback(close)

        def fetch(reader: SwarmReader, manifest: Manifest, values: torch.Tensor) -> int:
            before = server.traffic.sent_bytes
            ((_, found),) = reader.fetch(manifest)
            assert torch.equal(found.view(torch.int16), values.view(torch.int16)), manifest.title
            return server.traffic.sent_bytes - before

        for number, values in enumerate(versions(count, nbytes, changed)):
            local = publisher.publish(Version(0, number), [("layer", values)])
            began, cpu = time.perf_counter(), time.process_time()
            manifest = server.describe(local)
            made.append((time.perf_counter() - began, time.process_time() - cpu))
            for who, (begin, step) in READERS.items():
                if number >= begin and (number - begin) % step == 0:
                    sent[who].append(fetch(readers[who], manifest, values))
        fetch(beside[0], manifest, values)
        late = fetch(beside[1], manifest, values)
    show(nbytes, changed, manifest, sent, made)
    print(f"  comes last, beside a host that has it: {late / nbytes:.3f} from the publisher")


def show(
    nbytes: int, changed: float, last: Manifest, sent: dict[str, list[int]], made: list[tuple[float, float]]
) -> None:
    """The rows of one share."""
    print(f"{changed:.1%} of the values change, {len(made)} versions of {nbytes / 1e6:.0f} MB; shares of the model:")
    for who, sizes in sent.items():
        shares = [size / nbytes for size in sizes]
        others = [share for share in shares if share < 1] or [0.0]
        print(
            f"  {who}: {len(shares)} fetches, {sum(share >= 1 for share in shares)} whole, the others "
            f"{statistics.median(others):.3f} (most {max(others):.3f}); "
            f"{sum(shares):.2f} in all, {sum(shares) / len(shares):.3f} a fetch"
        )
    wall, cpu = (statistics.median(times[n] for times in made[1:]) for n in range(2))
    print(f"  publisher: {wall:.3f} s a version, {cpu:.3f} s of CPU")
    print(
        f"  kept: {len(last.deltas)} deltas, {sum(delta.size for delta in last.deltas) / nbytes:.3f} of the model; "
        f"their digests {sum(len(delta.digests) for delta in last.deltas)} bytes of a manifest, "
        f"the version's {len(last.digests)}"
    )


def main() -> int:
    """Measure each share in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--versions", type=int, default=72)
    parser.add_argument("--changed", type=float, nargs="+", default=[0.01, 0.03])
    args = parser.parse_args()
    for changed in args.changed:
        measure(args.megabytes << 20, args.versions, changed)
    return 0
