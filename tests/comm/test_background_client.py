"""Requests in the background: what waits for a worker that does not listen is bounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from distflow.comm.client import BackgroundClient
from distflow.comm.endpoint import Endpoint
from distflow.comm.message import Message
from distflow.comm.outbox import QUEUE_BYTES
from tests.polling import eventually

NAME = "trainer/0"
PAYLOAD = bytes(8 << 20)


@pytest.fixture
def client() -> Iterator[BackgroundClient]:
    faults: list[Exception] = []
    made = BackgroundClient(None, lambda name, message: None, lambda: None, faults.append)
    made.start()
    yield made
    made.close()
    assert faults == []


def test_what_waits_for_a_worker_that_does_not_listen_is_bounded(tmp_path: Path, client: BackgroundClient) -> None:
    address = f"ipc://{tmp_path}/worker"
    client.know(NAME, address)
    sent = []
    for _ in range(20):
        sent.append(client.send(NAME, "large", {}, (PAYLOAD,)))
        eventually(lambda: sent[-1].settled, "the socket to have it")
    kept = [delivery for delivery in sent if not delivery.dropped]
    assert len(kept) * len(PAYLOAD) <= QUEUE_BYTES < (len(kept) + 1) * len(PAYLOAD) + (1 << 20)
    assert not any(delivery.left for delivery in kept)
    heard: list[Message] = []
    worker = Endpoint(NAME, 0, {NAME: address})
    worker.start(heard.append)
    try:
        eventually(lambda: len(heard) == len(kept), "what was kept")
        eventually(lambda: all(delivery.left for delivery in kept), "the sender to know")
        assert not client.send(NAME, "large", {}, (PAYLOAD,)).dropped, "there is room again"
        eventually(lambda: len(heard) == len(kept) + 1, "one more")
    finally:
        worker.close()
