"""A process of a benchmark that has an endpoint, as the workers of a run have."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from distflow.comm.endpoint import Endpoint
from distflow.comm.keys import NetworkListener
from distflow.comm.message import Buffer, Message
from distflow.comm.outbox import Delivery

WAIT_S = 60.0


class MeasuredWorker:
    """An endpoint whose thread shares one lock with the worker's own, and counts the bytes of payloads."""

    def __init__(self, name: str, roster: Mapping[str, str], listener: NetworkListener | None = None) -> None:
        self.changed = threading.Condition()
        self.bytes = 0
        """Of payloads that were sent or received."""
        self.endpoint = Endpoint(name, 0, roster, tick_s=0.25, listener=listener)
        self._fault: BaseException | None = None

    def start(self, on_message: Callable[[Message, float], None], tick: Callable[[float], None]) -> None:
        """Listen; both are called under the lock, with the time."""

        def heard(message: Message) -> None:
            with self.changed:
                self.bytes += sum(part.nbytes for part in message.payload)
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

    def post(self, to: str, kind: str, body: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> Delivery:
        """Send, and count."""
        self.bytes += sum(memoryview(part).nbytes for part in payload)
        return self.endpoint.send(to, kind, body, payload)

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
