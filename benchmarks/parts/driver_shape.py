"""The same samples with a driver between the workers, as where one process dispatches everything: for comparison.

Each generating worker pushes its samples to the driver, which passes every message on as it comes (it does not even
wait for all of them, as such systems do), and each training worker reads its share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from benchmarks.parts.worker import MeasuredWorker
from distflow.comm.message import Message
from distflow.data.batch import Batch
from distflow.data.batch_wire import decode_batch, encode_batch
from distflow.exchange.lease_settings import MESSAGE_BYTES

if TYPE_CHECKING:
    from benchmarks.parts.step_workers import StepSetting

DRIVER = "driver"
DISPATCH = "dispatch"


def push_to_driver(worker: MeasuredWorker, batch: Batch, receivers: tuple[str, ...]) -> None:
    """Send the rows of a batch, an equal share to each receiver."""
    each = max(1, MESSAGE_BYTES * batch.rows // batch.nbytes)
    share = batch.rows // len(receivers)
    for number, receiver in enumerate(receivers):
        for first in range(number * share, (number + 1) * share, each):
            part = batch.slice(first, min(first + each, (number + 1) * share))
            description, buffer = encode_batch(part)
            with worker.changed:
                worker.push(DRIVER, DISPATCH, {"batch": description, "rows": part.rows, "to": receiver}, [buffer])


def relay(name: str, pipe: Connection, setting: StepSetting) -> None:
    """The driver. Orders: a number of rows to pass on, answered when it has; "usage"; and None to end."""
    worker = MeasuredWorker(name, setting.roster, setting.listener)
    waiting: deque[Message] = deque()
    worker.start(lambda message, now: waiting.append(message), lambda now: None)
    worker.meet(pipe)
    while (order := pipe.recv()) is not None:
        left = 0 if order == "usage" else order
        while left:
            with worker.changed:
                worker.until(lambda: bool(waiting))
                message = waiting.popleft()
                worker.took(message)
                worker.push(message.body["to"], DISPATCH, message.body, message.payload)
            left -= message.body["rows"]
        pipe.send(worker.usage())
    worker.endpoint.close()


class Dispatched:
    """What a training worker has been sent by the driver."""

    def __init__(self, worker: MeasuredWorker) -> None:
        self._worker = worker
        self._here: deque[Message] = deque()

    def hear(self, message: Message) -> None:
        """Keep it until it is read."""
        self._worker.took(message)
        self._here.append(message)

    def batches(self, rows: int) -> Iterator[Batch]:
        """So many rows, as they come."""
        while rows:
            with self._worker.changed:
                self._worker.until(lambda: bool(self._here))
                message = self._here.popleft()
            batch = decode_batch(message.body["batch"], message.payload[0])
            rows -= batch.rows
            yield batch
