"""Copies files out of another host's run folder, which its agent serves: piece by piece, on from what is here already.

Whoever fetches says how long to wait for the next piece, not how long all of them may take: files are of any size.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from distflow.comm.client import Client
from distflow.comm.keys import Keys
from distflow.data.decoding import Whole, read
from distflow.errors import ProtocolError
from distflow.launch.observe.file_server import READ_BYTES, FileData

ANSWER_S = 5.0
"""For one answer; then the same is asked again over a new connection."""


@dataclass(frozen=True, slots=True)
class ServedFile:
    """A file that an agent offers; `path` is relative to its run folder."""

    path: str
    size: int
    head_bytes: int
    head_digest: str


class _Listing(msgspec.Struct, frozen=True):
    files: list[tuple[str, Whole, Whole, str]]
    more: bool


class FileClient:
    """Fetches from one agent. Use as a context.

    `patience_s`: after so long without an answer it is given up; `deadline`: when all must be over (monotonic clock).
    `limit`: the key of the recipe that sets the patience, for messages.
    """

    def __init__(
        self, agent: str, keys: Keys | None, patience_s: float, deadline: float = math.inf, limit: str = ""
    ) -> None:
        self._limit = f" ({limit})" if limit else ""
        self._client = Client(agent, keys)
        self._patience_s = patience_s
        self._deadline = deadline

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._client.close()

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
            while size is None or have < size:
                most = READ_BYTES if size is None else min(READ_BYTES, size - have)
                answer = self._ask("files.read", {"path": path, "offset": have, "size": most})
                data = read(answer, FileData, "answer to files.read").data
                if not data:
                    return
                # Written where it belongs, not at the end: two commands may be fetching the same at once.
                have += os.pwrite(handle, data, have)
                note(have)
        finally:
            os.close(handle)

    def _ask(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        asked = time.monotonic()
        while True:
            now = time.monotonic()
            left = min(asked + self._patience_s, self._deadline) - now
            if now >= self._deadline:
                raise ProtocolError(f"{kind}: not everything could be fetched in the time for it")
            if left <= 0:
                raise ProtocolError(f"{kind}: no answer for {self._patience_s:g} s{self._limit}")
            answer = self._client.ask(kind, body, min(ANSWER_S, left))
            if answer is not None and "error" in answer:
                raise ProtocolError(f"{kind}: {answer['error']}")
            if answer is not None:
                return answer
