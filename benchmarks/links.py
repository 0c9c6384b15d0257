"""Bytes per second of weights fetched from another host, beside a raw TCP connection: all over loopback.

    python -m benchmarks.links --megabytes 256 --rounds 7

A server process publishes a version each round; this process fetches it over the plain swarm, over the encrypted one,
and the same number of bytes over one bare socket that nobody checks, all into shared memory that has been used before.
Rounds take turns; medians and their ratios are printed.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from distflow.types import Version
from distflow.weights.manifest import CHUNK_BYTES, Manifest
from distflow.weights.shm import SEGMENTS, ShmPublisher
from distflow.weights.swarm_reader import SwarmReader
from distflow.weights.swarm_server import SwarmServer

TIMEOUT_S = 60.0
FIRST = 2
"""Rounds that only touch the memory: a reader has two segments."""


def serve(pipe: Connection, size: int) -> None:
    """Publish on both kinds of server, listen on a bare socket; do what the pipe says until it says to end."""
    publisher = ShmPublisher("bench-links", "policy", 0)
    weights = torch.randn(size // 4)
    servers = [SwarmServer("127.0.0.1"), SwarmServer("127.0.0.1", encrypted=True)]
    data = memoryview(bytearray(size))
    number = 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        while what := pipe.recv():
            if what == "raw":
                link, _ = listener.accept()
                with link:
                    link.sendall(data)
                continue
            local = publisher.publish(Version(0, number), [("weights", weights)])
            begun = time.perf_counter()
            manifests = [server.describe(local) for server in servers]
            hashing = 2 * size / (time.perf_counter() - begun)
            pipe.send(([manifest.to_wire() for manifest in manifests], hashing))
            number += 1
    for server in servers:
        server.close()
    publisher.close()


def raw(pipe: Connection, port: int, buffer: memoryview) -> None:
    """Receive as many bytes as the buffer has over one connection."""
    pipe.send("raw")
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as link:
        at = 0
        while at < len(buffer):
            at += link.recv_into(buffer[at : at + CHUNK_BYTES])


def main() -> None:
    """Print one line a link."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    size = options.megabytes << 20
    pipe, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(other, size), daemon=True)
    process.start()
    port = pipe.recv()
    readers = [SwarmReader(f"bench-links-{n}", "127.0.0.1", TIMEOUT_S) for n in range(2)]
    with open(SEGMENTS / "distflow-bench-links-raw", "w+b") as file:
        Path(file.name).unlink()
        file.truncate(size)
        buffer = memoryview(mmap.mmap(file.fileno(), size))
    links: dict[str, Callable[[list[Manifest]], object]] = {
        "raw TCP": lambda manifests: raw(pipe, port, buffer),
        "swarm": lambda manifests: readers[0].fetch(manifests[0]),
        "swarm, encrypted": lambda manifests: readers[1].fetch(manifests[1]),
    }
    rates: dict[str, list[float]] = {name: [] for name in links}
    hashed: list[float] = []
    for number in range(FIRST + options.rounds):
        pipe.send("publish")
        wires, hashing = pipe.recv()
        manifests = list(map(Manifest.from_wire, wires))
        hashed.append(hashing)
        for name, fetch in links.items():
            begun = time.perf_counter()
            fetch(manifests)
            if number >= FIRST:
                rates[name].append(size / (time.perf_counter() - begun))
    for reader in readers:
        reader.close()
    pipe.send("")
    process.join(TIMEOUT_S)
    base = statistics.median(rates["raw TCP"])
    for name, found in rates.items():
        middle = statistics.median(found)
        spread = f"[{min(found) / 1e9:.2f}–{max(found) / 1e9:.2f}]"
        print(f"{name:18s} {middle / 1e9:6.2f} GB/s  {spread}  {middle / base:.2f} of raw TCP")
    print(f"describing a version: {statistics.median(hashed) / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
