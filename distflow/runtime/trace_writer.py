"""The trace of one worker: spans, flows and counters, written to `trace/<pool>-<i>.jsonl` by a thread of its own.

Recording appends to a bounded queue and never blocks: what does not fit there, or on the disk, is dropped and counted.
Each incarnation of a worker begins with a header object; the lines after it are arrays, with times in µs since the
header's `began_us` (wall clock), measured by the process's monotonic clock:

    {"format": 1, "worker": "rollout/0", "host": 0, "pid": 840, "incarnation": 0, "term": 0, "began_us": 17…}
    ["T", thread, name]                                  a thread, before its first event
    ["X", name, category, thread, begin, duration]       a span
    ["s", kind, thread, time, [id, …]]                   flows that begin here
    ["f", kind, thread, time, [id, …], [worker, …]]      flows that end here, and the workers that began them, if known
    ["C", name, time, value]                             a counter
    ["D", time, count]                                   events dropped since the process began

A flow of kind `group` is a group of samples that was sent and then taken for training; its id is the prompt position,
which together with the worker identifies the copy that was kept. A flow of kind `weights` is a version that was
published and then loaded; its id is `model:term:version`. Flows belong to the innermost span around them.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from distflow.runtime.disk import Disk

FORMAT = 1
QUEUE_LIMIT = 1 << 16
"""Events that may wait to be written; further ones are dropped."""
FLUSH_S = 0.5
CLOSE_S = 5.0
WHAT = "trace_events"
BLOCK = 1024
"""Lines written at once. Each system call releases the interpreter's lock, and taking it back stops the worker."""

_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


class TraceSink:
    """Where events go. This one records nothing: for `run.trace: false`, and for steps that are tested by hand.

    Times are `time.perf_counter()` seconds; any thread may call.
    """

    def span(self, name: str, category: str, begin: float, end: float) -> None:
        """Record something that took from `begin` to `end` on this thread."""

    def depart(self, kind: str, ids: Sequence[str]) -> None:
        """Record flows that begin here and now."""

    def arrive(self, kind: str, ids: Sequence[str], workers: Sequence[str] = ()) -> None:
        """Record flows that end here and now; `workers` began them, one for each id."""

    def count(self, name: str, value: float) -> None:
        """Record a value that changes with time."""

    def close(self) -> None:
        """Write what is left."""


UNTRACED = TraceSink()


class Tracer(TraceSink):
    """Records the events of one incarnation of one worker. `about`: what the header says about it.

    At `file_bytes` the file is renamed to `<pool>-<i>.before.jsonl`, replacing an earlier one, and a new file begins.
    """

    def __init__(
        self,
        path: Path,
        about: Mapping[str, Any],
        disk: Disk,
        *,
        file_bytes: int,
        queue_limit: int = QUEUE_LIMIT,
    ) -> None:
        self._queue: deque[tuple[Any, ...]] = deque()
        self._queue_limit = queue_limit
        self._threads: dict[int, int] = {}
        self._counting = threading.Lock()
        self.dropped = 0
        """Events that found the queue or the disk full."""
        # Read one right after the other: the time between them shifts all events of this process alike.
        self._base = time.perf_counter()
        self._header = {"format": FORMAT, **about, "began_us": time.time_ns() // 1000}
        self._disk = disk
        self._lines = _TraceFile(path, file_bytes, self._header)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="trace", daemon=True)
        self._thread.start()

    def span(self, name: str, category: str, begin: float, end: float) -> None:
        """See `TraceSink`."""
        self._put(("X", name, category, self._thread_number(), begin, end))

    def depart(self, kind: str, ids: Sequence[str]) -> None:
        """See `TraceSink`."""
        self._put(("s", kind, self._thread_number(), time.perf_counter(), ids))

    def arrive(self, kind: str, ids: Sequence[str], workers: Sequence[str] = ()) -> None:
        """See `TraceSink`."""
        self._put(("f", kind, self._thread_number(), time.perf_counter(), ids, workers))

    def count(self, name: str, value: float) -> None:
        """See `TraceSink`."""
        self._put(("C", name, time.perf_counter(), value))

    def close(self) -> None:
        """Write what is left and close the file."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _put(self, event: tuple[Any, ...]) -> None:
        if len(self._queue) < self._queue_limit:
            self._queue.append(event)
        else:
            with self._counting:
                self.dropped += 1

    def _thread_number(self) -> int:
        """Number threads by their first event; a thread that reuses a dead one's identity takes over its row."""
        identity = threading.get_ident()
        if identity not in self._threads:
            with self._counting:
                self._threads[identity] = len(self._threads) + 1
            self._put(("T", self._threads[identity], threading.current_thread().name))
        return self._threads[identity]

    # -- the writing thread

    def _write_on(self) -> None:
        told, over = 0, False
        while not over:
            over = self._closing.wait(FLUSH_S)
            told = self._write_queued(told)
        self._lines.close()

    def _write_queued(self, told: int) -> int:
        lines = [self._line(self._queue.popleft()) for _ in range(len(self._queue))]
        if self.dropped > told:
            told = self.dropped
            lines.append(["D", self._since(time.perf_counter()), told])
        for begin in range(0, len(lines), BLOCK):
            self._write_block(lines[begin : begin + BLOCK])
        return told

    def _write_block(self, lines: list[list[Any]]) -> None:
        try:
            self._lines.write(lines)
            self._disk.taken(WHAT)
        except OSError as error:
            # A full disk costs part of the trace, never the training.
            self._disk.refused(WHAT, error)
            self._disk.dropped(WHAT, len(lines))
            with self._counting:
                self.dropped += len(lines)

    def _line(self, event: tuple[Any, ...]) -> list[Any]:
        kind = event[0]
        if kind == "X":
            _, name, category, thread, begin, end = event
            since = self._since(begin)
            return ["X", name.removeprefix("timing_s/"), category, thread, since, round(self._since(end) - since, 3)]
        if kind == "C":
            return ["C", event[1], self._since(event[2]), event[3]]
        if kind in "sf":
            return [*event[:3], self._since(event[3]), *map(list, event[4:])]
        return list(event)

    def _since(self, moment: float) -> float:
        return round((moment - self._base) * 1e6, 3)


class _TraceFile:
    """Appends lines, the header first; begins a new file when one is full, and keeps the previous one.

    Each call writes all of its lines or none: half a line would make the file unreadable.
    """

    def __init__(self, path: Path, limit: int, header: Mapping[str, Any]) -> None:
        self._path = path
        self._limit = limit
        self._header = header
        self._threads: list[Sequence[Any]] = []
        self._named = 0
        """How many threads the present file names."""
        self._size = 0
        self._file: IO[bytes] | None = None

    def write(self, lines: Sequence[Sequence[Any]]) -> None:
        known = len(self._threads)
        self._threads += [line for line in lines if line[0] == "T"]
        if self._file is not None and self._size >= self._limit:
            self._file.close()
            self._file = None
            self._path.replace(self._path.with_suffix(".before.jsonl"))
        if self._file is None:
            self._file = self._open()
        self._append(self._file, (*self._threads[self._named : known], *lines))
        self._named = len(self._threads)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> IO[bytes]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("ab", buffering=0)
        self._size, self._named = file.tell(), 0
        try:
            self._append(file, [self._header])
        except OSError:
            file.close()
            raise
        return file

    def _append(self, file: IO[bytes], lines: Iterable[object]) -> None:
        data = b"".join(_ENCODER.encode(line).encode() + b"\n" for line in lines)
        whole = self._size + len(data)
        try:
            # Unbuffered files may write less than they are given.
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(self._size)
            raise
        self._size = whole


@contextmanager
def spanned(sink: TraceSink, name: str, category: str) -> Iterator[None]:
    """Record a span around what is inside, even if that raises."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        sink.span(name, category, begin, time.perf_counter())
