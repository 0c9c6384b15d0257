"""The two processes of benchmark `rows`: one puts rows, the other waits for them and reads them.

Orders come over the pipe, as a name and a number; each is answered with figures.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import zmq

from benchmarks.parts.worker import MeasuredWorker
from distflow.comm.message import Message
from distflow.data.batch import Batch
from distflow.data.batch_wire import decode_batch, encode_batch
from distflow.exchange.lease_settings import MESSAGE_BYTES

WRITER, READER = "writer", "reader"
ROWS, ROW, RAW = "rows", "row", "raw"
SEEN = "seen"
PLAIN_MS = 60_000


@dataclass(frozen=True, slots=True)
class RowsSetting:
    """What both know."""

    folder: str
    rows: int
    row_bytes: int

    @property
    def roster(self) -> Mapping[str, str]:
        """Addresses of both."""
        return {name: f"ipc://{self.folder}/{name}" for name in (WRITER, READER)}

    @property
    def sockets(self) -> Mapping[str, str]:
        """Addresses of both where all payloads take the sockets."""
        return {name: f"{address}-sockets" for name, address in self.roster.items()}

    @property
    def plain(self) -> str:
        """Address of sockets that are plain pyzmq."""
        return f"ipc://{self.folder}/plain"

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return self.rows * self.row_bytes

    def parts(self) -> list[range]:
        """Rows that travel in one message each."""
        each = max(1, MESSAGE_BYTES // self.row_bytes)
        return [range(first, min(first + each, self.rows)) for first in range(0, self.rows, each)]


def serve(pipe: Connection, orders: Mapping[str, Callable[[int], object]]) -> None:
    """Answer orders until there are no more."""
    while (order := pipe.recv()) is not None:
        name, number = order
        pipe.send(orders[name](number))


def write(name: str, pipe: Connection, setting: RowsSetting) -> None:
    """The process that puts rows."""
    worker = MeasuredWorker(name, setting.roster)
    heard: deque[Message] = deque()
    worker.start(lambda message, now: heard.append(message), lambda now: None)
    worker.meet(pipe)
    sockets = MeasuredWorker(name, setting.sockets, shared_memory=False)
    sockets.start(lambda message, now: None, lambda now: None)
    writer = Writer(worker, sockets, heard, setting)
    serve(
        pipe,
        {
            "put": writer.put,
            "raw": writer.raw,
            "row": writer.row,
            "copy": writer.copy,
            "plain": writer.plain,
            "echo": writer.echo,
        },
    )
    worker.endpoint.close()
    sockets.endpoint.close()


class Writer:
    """Puts rows, and measures how fast memory is beside it."""

    def __init__(
        self, worker: MeasuredWorker, sockets: MeasuredWorker, heard: deque[Message], setting: RowsSetting
    ) -> None:
        self._worker = worker
        self._sockets = sockets
        self._heard = heard
        self._setting = setting
        self._table = torch.ones((setting.rows, setting.row_bytes), dtype=torch.uint8)
        self._segment = mmap.mmap(-1, setting.nbytes)
        self._shared = torch.frombuffer(self._segment, dtype=torch.uint8).view_as(self._table)
        self._private = torch.empty_like(self._table)

    def put(self, _: int) -> dict[str, float]:
        """All rows, each a payload of its own, until the reader has them."""
        rows = [row.numpy().data for row in self._table.unbind()]
        began, cpu = time.perf_counter(), time.process_time()
        with self._worker.changed:
            for part in self._setting.parts():
                self._worker.push(READER, ROWS, {}, rows[part.start : part.stop])
            self._worker.drain(READER)
        return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}

    def raw(self, _: int) -> dict[str, float]:
        """The same bytes over the sockets, as results have them: in messages of one buffer each."""
        data = self._table.view(-1).numpy().data
        began = time.perf_counter()
        with self._sockets.changed:
            for at in range(0, len(data), MESSAGE_BYTES):
                self._sockets.push(READER, RAW, {}, [data[at : at + MESSAGE_BYTES]])
            self._sockets.drain(READER)
        return {"seconds": time.perf_counter() - began}

    def row(self, count: int) -> dict[str, list[float]]:
        """One row after another: seconds until the waiting reader had it, and until this was known here."""
        visible, cycles = [], []
        for _ in range(count):
            began = time.perf_counter()
            description, buffer = encode_batch(Batch({"x": self._table[:1]}))
            with self._worker.changed:
                self._worker.post(READER, ROW, {"batch": description}, [buffer])
                seen = self._answer()
            visible.append(seen.body["at"] - began)
            cycles.append(time.perf_counter() - began)
        return {"visible_s": visible, "cycle_s": cycles}

    def copy(self, _: int) -> dict[str, float]:
        """The limits: a copy into shared memory that was touched before, and into memory."""
        return {
            "shm_s": _timed(lambda: self._shared.copy_(self._table)),
            "memcpy_s": _timed(lambda: self._private.copy_(self._table)),
        }

    def plain(self, size: int) -> dict[str, float]:
        """The same bytes over plain pyzmq, in messages of this size."""
        data = self._table.view(-1).numpy().data
        with zmq.Context() as context, closing(context.socket(zmq.PAIR)) as socket:
            socket.linger, socket.rcvtimeo, socket.sndtimeo = 0, PLAIN_MS, PLAIN_MS
            socket.connect(self._setting.plain)
            socket.send(b"ready")
            socket.recv()
            began = time.perf_counter()
            for at in range(0, len(data), size):
                socket.send(data[at : at + size], copy=False)
            socket.recv()
            return {"seconds": time.perf_counter() - began}

    def echo(self, count: int) -> dict[str, list[float]]:
        """Round trips of one row over plain pyzmq."""
        row = self._table[0].numpy().tobytes()
        found = []
        with zmq.Context() as context, closing(context.socket(zmq.PAIR)) as socket:
            socket.linger, socket.rcvtimeo, socket.sndtimeo = 0, PLAIN_MS, PLAIN_MS
            socket.connect(self._setting.plain)
            for _ in range(count):
                began = time.perf_counter()
                socket.send(row)
                socket.recv()
                found.append(time.perf_counter() - began)
        return {"seconds": found}

    def _answer(self) -> Message:
        self._worker.until(lambda: bool(self._heard))
        return self._heard.popleft()


def read(name: str, pipe: Connection, setting: RowsSetting) -> None:
    """The process that waits for rows and reads them."""
    worker = MeasuredWorker(name, setting.roster)
    reader = Reader(worker, setting)
    worker.start(reader.hear, lambda now: None)
    sockets = MeasuredWorker(name, setting.sockets, shared_memory=False)
    sockets.start(lambda message, now: sockets.took(message), lambda now: None)
    worker.meet(pipe)
    orders = {"begin": reader.begin, "get": reader.get, "row": reader.row}
    serve(pipe, {**orders, "plain": reader.plain, "echo": reader.echo})
    worker.endpoint.close()
    sockets.endpoint.close()


class Reader:
    """Takes what arrives."""

    def __init__(self, worker: MeasuredWorker, setting: RowsSetting) -> None:
        self._worker = worker
        self._setting = setting
        self._arrived: list[Message] = []
        self._cpu_s = 0.0
        self._waiting: deque[Message] = deque()

    def hear(self, message: Message, now: float) -> None:
        """Keep it, and tell the writer; a row that is waited for, only once it has been read."""
        if message.kind == ROW:
            self._waiting.append(message)
            return
        if message.kind == ROWS:
            self._arrived.append(message)
        self._worker.took(message)

    def begin(self, _: int) -> None:
        """Count the CPU time from here on."""
        self._cpu_s = time.process_time()

    def get(self, _: int) -> dict[str, float]:
        """Views of all rows, and every byte of them once."""
        began = time.perf_counter()
        with self._worker.changed:
            arrived, self._arrived = self._arrived, []
        rows = [row for message in arrived for row in message.payload]
        got = time.perf_counter()
        cpu_s = time.process_time() - self._cpu_s
        touch(rows)
        seconds = time.perf_counter() - began
        assert len(rows) == self._setting.rows, f"{len(rows)} of {self._setting.rows} rows arrived"
        return {"get_s": got - began, "touch_s": seconds, "cpu_s": cpu_s}

    def row(self, count: int) -> None:
        """A consumer that waits for one row after another, and tells when it had it."""
        for _ in range(count):
            with self._worker.changed:
                self._worker.until(lambda: bool(self._waiting))
                message = self._waiting.popleft()
            decode_batch(message.body["batch"], message.payload[0]).dense("x")
            at = time.perf_counter()
            with self._worker.changed:
                self._worker.post(WRITER, SEEN, {"at": at})

    def plain(self, size: int) -> None:
        """The receiving side of plain pyzmq."""
        with zmq.Context() as context, closing(context.socket(zmq.PAIR)) as socket:
            socket.linger, socket.rcvtimeo, socket.sndtimeo = 1000, PLAIN_MS, PLAIN_MS
            _bind(socket, self._setting.plain)
            socket.send(socket.recv())
            left = self._setting.nbytes
            while left:
                left -= len(socket.recv(copy=False))
            socket.send(b"all")

    def echo(self, count: int) -> None:
        """The other side of round trips."""
        with zmq.Context() as context, closing(context.socket(zmq.PAIR)) as socket:
            socket.linger, socket.rcvtimeo, socket.sndtimeo = 1000, PLAIN_MS, PLAIN_MS
            _bind(socket, self._setting.plain)
            for _ in range(count):
                socket.send(socket.recv())


def _bind(socket: zmq.Socket[bytes], address: str) -> None:
    Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
    socket.bind(address)


def touch(rows: Sequence[memoryview]) -> None:
    """Read every byte once, eight at a time where a row has them."""
    for row in rows:
        np.frombuffer(row, np.uint8 if len(row) % 8 else np.int64).sum()


def _timed(work: Callable[[], object]) -> float:
    work()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
