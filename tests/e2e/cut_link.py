"""Entry of a worker that hears nothing of the other home for a while, nor is heard there: the link is cut."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distflow.comm.endpoint import Endpoint
from distflow.comm.message import Buffer
from distflow.comm.outbox import Delivery, delivered
from distflow.runtime.main import run_worker as real

CUT_S = 10.0
AFTER = 20
"""Messages of rows that a training worker has sent before."""
HOMES = ("trainer", "critic")


def run_worker(document: Path, incarnation: int) -> int:
    """The cut begins on the owner's side, in the middle of a training step, and holds in both directions."""
    send, mark = Endpoint.send, document.parent / "cut"
    rows = 0

    def cut(self: Endpoint, to: str, kind: str, body: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> Delivery:
        nonlocal rows
        across = {self.name.partition("/")[0], to.partition("/")[0]} == set(HOMES)
        if kind == "rows":
            rows += 1
            if rows == AFTER and not mark.exists():
                mark.write_text("")
        if across and mark.exists() and time.time() - mark.stat().st_mtime < CUT_S:
            return delivered()
        return send(self, to, kind, body, payload)

    Endpoint.send = cut
    return real(document, incarnation)
