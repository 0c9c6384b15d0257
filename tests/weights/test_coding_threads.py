"""How many threads and connections a host takes for weights: as its cores allow."""

from __future__ import annotations

import os
from typing import Any

import pytest

from distflow.types import Version
from distflow.weights.manifest import DIGEST_BYTES, Manifest, coding_threads
from distflow.weights.swarm import client as swarm_client
from distflow.weights.swarm.client import SwarmClient
from distflow.weights.swarm.fetch_actions import WantedVersion
from distflow.weights.swarm_messages import Opening, SwarmPlace


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (8, 4), (32, 4), (96, 12), (128, 16), (384, 16)])
def test_threads_follow_the_cores(cores: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert coding_threads() == threads


@pytest.mark.parametrize(("threads", "connections"), [(2, 4), (9, 9)])
def test_a_reader_receives_on_as_many_connections(
    threads: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm_client, "coding_threads", lambda: threads)
    client: Any = SwarmClient(SwarmPlace("tcp://127.0.0.1:1", bytes(16), False), Opening("tcp://127.0.0.1:2"))
    made: list[str] = []
    monkeypatch.setattr(client, "_connect_to", made.append)
    manifest = Manifest("policy", Version(0, 1), "", 1, (), (), bytes(DIGEST_BYTES))
    client._core.begin(WantedVersion(manifest, lambda chunk: memoryview(b""), lambda chunk: None, 1.0), (), 0.0)
    client._connect()
    assert made == ["tcp://127.0.0.1:1"] * connections
