"""Reads files of a run folder on another host from the agent there."""

from __future__ import annotations

import math
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from distflow.comm.client import Client
from distflow.comm.keys import Keys
from distflow.data.decoding import Form, Whole, read
from distflow.errors import ProtocolError
from distflow.launch.observe.file_server import READ_BYTES, FileData

ANSWER_S = 5.0
"""How long to wait for one answer; then the same is asked again over a new connection."""
READS = 4
"""Pieces of one file that are asked for at once, each over a connection of its own."""


@dataclass(frozen=True, slots=True)
class ServedFile:
    """A file that an agent offers; `path` is relative to its run folder."""

    path: str
    size: int
    head_bytes: int
    head_digest: str


class _Listing(Form, frozen=True):
    files: list[tuple[str, Whole, Whole, str]]
    more: bool


class OutOfTime(ProtocolError):
    """The agent answers, but not everything could be fetched in the time for it."""


class NoAnswer(ProtocolError):
    """The agent was asked for as long as anybody waits, without an answer."""


class FileClient:
    """Fetches from one agent. Use as a context.

    `patience_s`: after so long without an answer it is given up; `deadline`: when all must be over (monotonic clock).
    `limit`: the key of the recipe that sets the patience, for messages.
    """

    def __init__(
        self, agent: str, keys: Keys | None, patience_s: float, deadline: float = math.inf, limit: str = ""
    ) -> None:
        self._limit = f" ({limit})" if limit else ""
        self._clients = [Client(agent, keys) for _ in range(READS)]
        self._idle: queue.SimpleQueue[Client] = queue.SimpleQueue()
        for client in self._clients:
            self._idle.put(client)
        self._patience_s = patience_s
        self._deadline = deadline
        self._answered = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for client in self._clients:
            client.close()

    def list(self, folder: str) -> Iterator[ServedFile]:
        """All files of a folder that it serves. Raises ProtocolError."""
        after, more = "", True
        while more:
            answer = self._ask("files.list", {"folder": folder, "after": after})
            listing = read(answer, _Listing, "answer to files.list")
            files = [ServedFile(*entry) for entry in listing.files]
            more, after = listing.more and bool(files), files[-1].path if files else ""
            yield from files

    def copy(
        self,
        path: str,
        to: Path,
        have: int = 0,
        size: int | None = None,
        note: Callable[[int], None] = lambda have: None,
    ) -> None:
        """Bring a file here from byte `have` on: to its end, or until there are `size` bytes. Raises ProtocolError.

        `note` is told after each piece how many there are. What has come stays if the rest does not: go on behind it.
        """
        handle = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if have == 0:
                os.ftruncate(handle, 0)
            for piece in self._to_end(path, have) if size is None else self._ahead(path, have, size):
                left = memoryview(piece)
                while left:
                    # Written where it belongs, not at the end: two commands may be fetching the same at once.
                    written = os.pwrite(handle, left, have)
                    left, have = left[written:], have + written
                note(have)
        finally:
            os.close(handle)

    def _to_end(self, path: str, have: int) -> Iterator[bytes]:
        while data := self._read(path, have, READ_BYTES):
            yield data
            have += len(data)

    def _ahead(self, path: str, have: int, size: int) -> Iterator[bytes]:
        """The pieces in order, while those behind them are on their way. Ends early with a file that is shorter."""
        rest = iter(range(have, size, READ_BYTES))
        with ThreadPoolExecutor(READS, thread_name_prefix="read") as pool:
            coming: deque[tuple[int, Future[bytes]]] = deque()

            def ask_on() -> None:
                for offset in rest:
                    count = min(READ_BYTES, size - offset)
                    coming.append((count, pool.submit(self._read, path, offset, count)))
                    if len(coming) >= READS:
                        return

            try:
                ask_on()
                while coming:
                    count, piece = coming.popleft()
                    data = piece.result()
                    yield data
                    if len(data) < count:
                        return
                    ask_on()
            finally:
                for _, piece in coming:
                    piece.cancel()

    def _read(self, path: str, offset: int, size: int) -> bytes:
        answer = self._ask("files.read", {"path": path, "offset": offset, "size": size})
        return read(answer, FileData, "answer to files.read").data

    def _ask(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        client = self._idle.get()
        try:
            return self._ask_by(client, kind, body)
        finally:
            self._idle.put(client)

    def _ask_by(self, client: Client, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        asked = time.monotonic()
        while True:
            now = time.monotonic()
            left = min(asked + self._patience_s, self._deadline) - now
            if now >= self._deadline and (self._answered or asked >= self._deadline):
                raise OutOfTime(f"{kind}: not everything could be fetched in the time for it")
            if left <= 0:
                raise NoAnswer(f"{kind}: no answer for {min(self._patience_s, now - asked):.3g} s{self._limit}")
            answer = client.ask(kind, body, min(ANSWER_S, left))
            self._answered |= answer is not None
            if answer is not None and "error" in answer:
                raise ProtocolError(f"{kind}: {answer['error']}")
            if answer is not None:
                return answer
