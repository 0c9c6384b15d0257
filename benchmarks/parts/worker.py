"""A process of a benchmark that has an endpoint, as the workers of a run have."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from distflow.comm.endpoint import Endpoint
from distflow.comm.keys import NetworkListener
from distflow.comm.message import Body, Buffer, Message
from distflow.comm.outbox import Delivery

WAIT_S = 60.0
UNDER_WAY_BYTES = 32 << 20
"""Most bytes pushed to one peer that it has not taken yet: an outbox that is full drops messages."""
RETRY_S = 0.002
TOOK = "took"


class MeasuredWorker:
    """An endpoint whose thread shares one lock with the worker's own, and counts the bytes of payloads.

    With `shared_memory` it sends through that to those on its host.
    """

    def __init__(
        self,
        name: str,
        roster: Mapping[str, str],
        listener: NetworkListener | None = None,
        shared_memory: bool = True,
    ) -> None:
        self.changed = threading.Condition()
        self.bytes = 0
        """Of payloads that were sent or received."""
        self.endpoint = Endpoint(name, 0, roster, tick_s=0.25, listener=listener, shared_memory=shared_memory)
        self._fault: BaseException | None = None
        self._under_way: Counter[str] = Counter()

    def start(self, on_message: Callable[[Message, float], None], tick: Callable[[float], None]) -> None:
        """Listen; both are called under the lock, with the time."""

        def heard(message: Message) -> None:
            with self.changed:
                self.bytes += sum(part.nbytes for part in message.payload)
                if message.kind == TOOK:
                    self._under_way[message.sender] -= int(message.body["bytes"])
                else:
                    on_message(message, time.monotonic())
                self.changed.notify_all()

        def ticked() -> None:
            with self.changed:
                tick(time.monotonic())

        def failed(error: BaseException) -> None:
            with self.changed:
                self._fault = error
                self.changed.notify_all()

        self.endpoint.start(heard, ticked, failed)

    def post(self, to: str, kind: str, body: Body, payload: Sequence[Buffer] = ()) -> Delivery:
        """Send, and count."""
        self.bytes += sum(memoryview(part).nbytes for part in payload)
        return self.endpoint.send(to, kind, body, payload)

    def push(self, to: str, kind: str, body: Mapping[str, Any], data: Sequence[Buffer]) -> None:
        """Under the lock: send as soon as there is room, and expect `took` of the receiver."""
        self.drain(to, UNDER_WAY_BYTES)
        size = sum(memoryview(part).nbytes for part in data)
        self._under_way[to] += size
        deadline = time.monotonic() + WAIT_S
        while self.post(to, kind, body, data).dropped:
            # What the peer has taken may count as under way for a moment longer, until its memory is free.
            self.bytes -= size
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.endpoint.name} had no room for {size} bytes to {to} for {WAIT_S:g} s")
            self.changed.wait(RETRY_S)

    def drain(self, to: str, nbytes: int = 0) -> None:
        """Under the lock: wait until a receiver has taken all but this many bytes."""
        self.until(lambda: self._under_way[to] <= nbytes)

    def took(self, message: Message) -> None:
        """Tell the sender of what it has pushed that it is here."""
        self.post(message.sender, TOOK, {"bytes": sum(part.nbytes for part in message.payload)})

    def until(self, ready: Callable[[], bool]) -> None:
        """Under the lock: wait until something is so. Raises what has ended the endpoint."""
        if not self.changed.wait_for(lambda: ready() or self._fault is not None, WAIT_S):
            raise TimeoutError(f"{self.endpoint.name} heard nothing for {WAIT_S:g} s")
        if self._fault is not None:
            raise self._fault

    def meet(self, pipe: Connection) -> None:
        """Say where this worker listens, and learn where the others do."""
        pipe.send(self.endpoint.network_address)
        for name, address in pipe.recv().items():
            if name != self.endpoint.name:
                self.endpoint.know(name, address)

    def usage(self) -> dict[str, float]:
        """Since its start."""
        return {"bytes": self.bytes, "cpu_s": time.process_time()}
