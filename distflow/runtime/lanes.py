"""How lease messages travel: over the endpoint to other workers, and inside the process to the worker itself.

A colocated worker is its own owner. Its messages skip the sockets and are handled at once, one after another, by
whichever thread sent the first of them; that thread holds the worker's lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distflow.comm.endpoint import Endpoint
from distflow.comm.message import Buffer, Message
from distflow.comm.outbox import Delivery, delivered

Handler = Callable[[Message, float], None]


class Lanes:
    """`post` for the channels; `handle` is where messages to this worker itself go."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._handlers: dict[str, Handler] = {}
        self._queue: deque[Message] = deque()
        self._draining = False

    def on(self, kind: str, handler: Handler) -> None:
        """Handle messages of this kind that the worker sends to itself."""
        self._handlers[kind] = handler

    def post(self, to: str, kind: str, body: Mapping[str, Any], payload: Sequence[Buffer]) -> Delivery:
        """Send; never blocks."""
        me = self._endpoint.name
        if to != me:
            return self._endpoint.send(to, kind, body, payload)
        self._queue.append(Message(kind, me, self._endpoint.incarnation, body, [memoryview(part) for part in payload]))
        if self._draining:
            return delivered()
        self._draining = True
        try:
            while self._queue:
                message = self._queue.popleft()
                self._handlers[message.kind](message, time.monotonic())
        finally:
            self._draining = False
        return delivered()
