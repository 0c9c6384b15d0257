"""Entry of a worker whose messages are lost and doubled on their way out, at random by the worker's name."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distflow.comm.endpoint import Endpoint
from distflow.comm.message import Buffer
from distflow.comm.outbox import Delivery, delivered
from distflow.runtime.main import run_worker as real

LOST, DOUBLED = 0.1, 0.1


def run_worker(document: Path, incarnation: int) -> int:
    rng = random.Random(document.name)
    send = Endpoint.send
    begun: set[tuple[str, str]] = set()

    def lossy(self: Endpoint, to: str, kind: str, body: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> Delivery:
        # The first of each kind to each peer is lost for certain: what is sent but once never arrives.
        fate = 0.0 if (to, kind) not in begun else rng.random()
        begun.add((to, kind))
        copies = 0 if fate < LOST else 2 if fate < LOST + DOUBLED else 1
        sent = [send(self, to, kind, body, payload) for _ in range(copies)]
        return sent[-1] if sent else delivered()

    Endpoint.send = lossy
    return real(document, incarnation)
