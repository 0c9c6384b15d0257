"""How lease messages travel: over the endpoint to others, and inside the process to a worker that is its own owner.

These are handled at once, one after another, by the thread that sent the first; it holds the worker's lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from distflow.comm.endpoint import Endpoint
from distflow.comm.message import Body, Buffer, Message
from distflow.comm.outbox import Delivery, delivered
from distflow.comm.traffic import INPROC

LeaseHandler = Callable[[Message, float], None]
On = Callable[[str, Callable[[Message], None]], None]
"""Sets the handler of what peers send of a kind."""


class Lanes:
    """Sends lease messages: over the endpoint, or directly to the handlers of this worker if it is its own owner."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._handlers: dict[str, LeaseHandler] = {}
        self._queue: deque[Message] = deque()
        self._draining = False

    def on(self, kind: str, handler: LeaseHandler) -> None:
        """Handle messages of this kind that this worker sends to itself."""
        self._handlers[kind] = handler

    def register(self, on: On, kinds: Iterable[str], handler: LeaseHandler) -> None:
        """Handle messages of these kinds, from the worker itself and, by `on`, from peers."""
        for kind in kinds:
            self.on(kind, handler)
            on(kind, lambda message: handler(message, time.monotonic()))

    def post(self, to: str, kind: str, body: Body, payload: Sequence[Buffer]) -> Delivery:
        """Send; never blocks."""
        me = self._endpoint.name
        if to != me:
            return self._endpoint.send(to, kind, body, payload)
        self._queue.append(Message(kind, me, self._endpoint.incarnation, body, [memoryview(part) for part in payload]))
        self._endpoint.traffic.count(INPROC, 1, sum([part.nbytes for part in self._queue[-1].payload]))
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
