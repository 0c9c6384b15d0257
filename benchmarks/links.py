"""Bytes per second of weights fetched from another host, beside a raw TCP connection: all over loopback.

    python -m benchmarks.links --megabytes 256 --rounds 7

A server process publishes one version; this process fetches it over the plain swarm, over the encrypted one, and the
same number of bytes over one bare socket that nobody checks. Rounds take turns; medians and their ratios are printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from distflow.types import Version
from distflow.weights.manifest import CHUNK_BYTES, Manifest
from distflow.weights.shm import ShmPublisher
from distflow.weights.swarm_reader import SwarmReader
from distflow.weights.swarm_server import SwarmServer

TIMEOUT_S = 60.0


def serve(pipe: Connection, size: int) -> None:
    """Publish one version on both kinds of server, listen on a bare socket; serve until the pipe says to end."""
    publisher = ShmPublisher("bench-links", "policy", 0)
    local = publisher.publish(Version(0, 0), [("weights", torch.randn(size // 4))])
    servers = [SwarmServer("127.0.0.1"), SwarmServer("127.0.0.1", encrypted=True)]
    begun = time.perf_counter()
    manifests = [server.describe(local) for server in servers]
    hashing = 2 * size / (time.perf_counter() - begun)
    data = memoryview(bytearray(size))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(([manifest.to_wire() for manifest in manifests], listener.getsockname()[1], hashing))
        while pipe.recv():
            link, _ = listener.accept()
            with link:
                link.sendall(data)
    for server in servers:
        server.close()
    publisher.close()


def raw(pipe: Connection, port: int, buffer: memoryview) -> None:
    """Receive as many bytes as the buffer has over one connection."""
    pipe.send(True)
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
    wires, port, hashing = pipe.recv()
    plain, encrypted = map(Manifest.from_wire, wires)
    readers = [SwarmReader(f"bench-links-{n}", "127.0.0.1", TIMEOUT_S) for n in range(2)]
    buffer = memoryview(bytearray(size))
    links: dict[str, Callable[[], object]] = {
        "raw TCP": lambda: raw(pipe, port, buffer),
        "swarm": lambda: readers[0].fetch(plain),
        "swarm, encrypted": lambda: readers[1].fetch(encrypted),
    }
    rates: dict[str, list[float]] = {name: [] for name in links}
    for number in range(options.rounds + 1):
        for name, fetch in links.items():
            begun = time.perf_counter()
            fetch()
            if number:  # the first round only touches the memory
                rates[name].append(size / (time.perf_counter() - begun))
    for reader in readers:
        reader.close()
    pipe.send(False)
    process.join(TIMEOUT_S)
    base = statistics.median(rates["raw TCP"])
    for name, found in rates.items():
        middle = statistics.median(found)
        spread = f"[{min(found) / 1e9:.2f}–{max(found) / 1e9:.2f}]"
        print(f"{name:18s} {middle / 1e9:6.2f} GB/s  {spread}  {middle / base:.2f} of raw TCP")
    print(f"describing a version: {hashing / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
