"""The processes of benchmark `weights`: a publisher, readers on its host, and one for each further host."""

from __future__ import annotations

import importlib.util
import mmap
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from distflow.comm.traffic import Traffic
from distflow.config.plugins import LIBRARIES, NIXL
from distflow.types import Version
from distflow.weights.manifest import CHUNK_BYTES, Manifest
from distflow.weights.one_sided.reads import ExposedMemory, NixlSetting, one_sided_reads
from distflow.weights.segments.segment_file import SEGMENTS
from distflow.weights.segments.shm import ShmPublisher, ShmReader
from distflow.weights.swarm.reader import SwarmReader
from distflow.weights.swarm.server import SwarmServer
from distflow.weights.transport import NamedTensors

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 60.0
MODEL = "policy"
KINDS = ("plain", "encrypted", "crowd")
"""Swarms: the first two have one host; in the last one all that were ever asked to fetch are connected."""
ONE_SIDED = "nixl"
"""A swarm whose versions are read by NIXL first, where that is installed."""
TENSORS = 16


@dataclass(frozen=True, slots=True)
class WeightsSetting:
    """`tag` names the segments of this measurement; `nbytes`: of the model."""

    tag: str
    nbytes: int


def kinds() -> tuple[str, ...]:
    """The swarms that there can be here."""
    installed = importlib.util.find_spec(LIBRARIES[NIXL].module) is not None
    return (*KINDS, ONE_SIDED) if installed else KINDS


def _nixl(kind: str) -> NixlSetting | None:
    return NixlSetting(LOOPBACK, "benchmark weights", Path(os.devnull)) if kind == ONE_SIDED else None


def _server(kind: str) -> SwarmServer:
    nixl = _nixl(kind)
    return SwarmServer(LOOPBACK, encrypted=kind == "encrypted", exposed=None if nixl is None else ExposedMemory(nixl))


def obey(pipe: Connection, orders: Mapping[str, Callable[[Any], Any]]) -> None:
    """Do what the pipe says, until it says nothing more; first of all say that this process is there."""
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        name, setting = order
        pipe.send(orders[name](setting))


def publish(name: str, pipe: Connection, setting: WeightsSetting) -> None:
    """The publisher, and the far end of a bare socket."""
    servers = {kind: _server(kind) for kind in kinds()}
    publisher = ShmPublisher(f"{setting.tag}-{name}", MODEL, 0, servers["crowd"].pinned)
    weights = [(f"layer.{n}", torch.randn(setting.nbytes // TENSORS // 4)) for n in range(TENSORS)]
    data = memoryview(bytearray(setting.nbytes))
    listener = socket.create_server((LOOPBACK, 0))

    def announce(number: int) -> Mapping[str, Any]:
        began = time.perf_counter()
        local = publisher.publish(Version(0, number), weights)
        publish_s = time.perf_counter() - began
        local = publisher.summed(local)
        described = {kind: server.describe(local).to_wire() for kind, server in servers.items()}
        return {"local": local.to_wire(), "port": listener.getsockname()[1], "publish_s": publish_s, **described}

    def first(_: object) -> float:
        """From the begin of a publisher's first version until it can be announced on this host."""
        began = time.perf_counter()
        other = ShmPublisher(f"{setting.tag}-first", MODEL, 0, lambda: None)
        other.summed(other.publish(Version(0, 0), weights))
        seconds = time.perf_counter() - began
        other.close()
        return seconds

    def raw(_: object) -> None:
        link, _address = listener.accept()
        with link:
            link.sendall(data)

    def sent(kind: str) -> Mapping[str, float]:
        return {"bytes": servers[kind].traffic.sent_bytes, "cpu_s": time.process_time()}

    with ExitStack() as stack:
        for close in (publisher.close, listener.close, *(server.close for server in servers.values())):
            stack.callback(close)
        obey(pipe, {"publish": announce, "first": first, "raw": raw, "sent": sent})


def read_here(name: str, pipe: Connection, setting: WeightsSetting) -> None:
    """A reader on the publisher's host: checks a version and copies it into parameters of its own."""
    reader = ShmReader()
    own = [torch.zeros(setting.nbytes // TENSORS // 4) for _ in range(TENSORS)]
    others = [torch.randn_like(tensor) for tensor in own]

    def take(tensors: NamedTensors) -> None:
        for mine, (_, theirs) in zip(own, tensors, strict=True):
            mine.copy_(theirs)

    def shm(wire: Any) -> Mapping[str, float]:
        began, cpu = time.perf_counter(), time.process_time()
        manifest = Manifest.from_wire(wire)
        take(reader.fetch(manifest))
        assert reader.intact(manifest)
        return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}

    def memcpy(_: object) -> Mapping[str, float]:
        began, cpu = time.perf_counter(), time.process_time()
        take([("", tensor) for tensor in others])
        return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}

    obey(pipe, {"shm": shm, "memcpy": memcpy})
    reader.close()


def read_afar(name: str, pipe: Connection, setting: WeightsSetting) -> None:
    """A reader on a host of its own."""
    traffic = Traffic()
    readers = {
        kind: SwarmReader(
            f"{setting.tag}-{name}-{kind}", LOOPBACK, TIMEOUT_S, one_sided=one_sided_reads(_nixl(kind), traffic)
        )
        for kind in kinds()
    }
    with open(SEGMENTS / f"distflow-{setting.tag}-{name}-raw", "w+b") as file:
        Path(file.name).unlink()
        file.truncate(setting.nbytes)
        buffer = memoryview(mmap.mmap(file.fileno(), setting.nbytes))

    def fetch(order: tuple[str, Any]) -> Mapping[str, float]:
        kind, wire = order
        manifest = Manifest.from_wire(wire)
        began, cpu = time.perf_counter(), time.process_time()
        readers[kind].fetch(manifest)
        return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}

    def raw(port: int) -> float:
        began = time.perf_counter()
        with socket.create_connection((LOOPBACK, port), timeout=TIMEOUT_S) as link:
            at = 0
            while at < len(buffer):
                at += link.recv_into(buffer[at : at + CHUNK_BYTES])
        return time.perf_counter() - began

    with ExitStack() as stack:
        for reader in readers.values():
            stack.callback(reader.close)
        obey(pipe, {"fetch": fetch, "raw": raw})
