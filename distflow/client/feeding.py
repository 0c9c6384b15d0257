"""Prompts that a program puts into a run while it goes on (docs/feeding.md)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

import msgspec

from distflow.client.arguments import check_seconds
from distflow.comm.message import Buffer
from distflow.errors import UserError
from distflow.exchange.prompt_feed import END, FEED, MOST_BYTES, MOST_ROWS, Ended, Fed

REPEAT_S = 1.0
"""After so long without an answer a call is repeated; it may be waiting for room."""


class FeedCall:
    """A call until it is answered. `body(number, waits)`; after `timeout` seconds it waits no longer.

    What it brings is sent once, and again if the owner has not got it: it may have restarted.
    """

    def __init__(
        self,
        kind: str,
        body: Callable[[int, bool], msgspec.Struct],
        payload: Sequence[Buffer] = (),
        timeout: float | None = None,
    ) -> None:
        self.kind = kind
        self._body, self._payload = body, payload
        self._late = inf if timeout is None else time.monotonic() + timeout
        self._sent_at = -inf
        self._whole = True

    def answer(self, reply: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """The answer, if this reply is one."""
        if reply is not None and "unknown" in reply:
            self._whole, self._sent_at = True, -inf
            return None
        return reply

    def sends(self, number: int, now: float) -> tuple[Mapping[str, Any], Sequence[Buffer]] | None:
        """What to send now, or again."""
        if now - self._sent_at < REPEAT_S and not self._sent_at < self._late <= now:
            return None
        payload = self._payload if self._whole else ()
        self._whole, self._sent_at = False, now
        return msgspec.to_builtins(self._body(number, now < self._late)), payload


class Feeding:
    """Of the client `name`. Used by any thread; calls go one after another."""

    def __init__(self, name: str, ask: Callable[[FeedCall], Mapping[str, Any] | None]) -> None:
        self.feeds = False
        """Whether this client puts prompts, and has not said that these are all."""
        self._name, self._ask = name, ask
        self._one = threading.Lock()

    def put(self, rows: Iterable[Mapping[str, Any]], timeout: float | None) -> int:
        """See `Client.put_prompts`."""
        check_seconds("timeout", timeout)
        if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
            raise UserError(f"put_prompts: expected a list of rows, got a {type(rows).__name__}")
        lines = [_line(index, row) for index, row in enumerate(rows)]
        size = sum(map(len, lines)) + len(lines)
        if len(lines) > MOST_ROWS or size > MOST_BYTES:
            raise UserError(
                f"put_prompts: {len(lines)} rows of {size} bytes; at most {MOST_ROWS} rows and {MOST_BYTES} bytes are "
                "taken at once: put them in several calls"
            )
        ends = None if timeout is None else time.monotonic() + timeout
        taken = 0
        with self._one:
            while taken < len(lines):
                self.feeds = True
                left = None if ends is None else max(0.0, ends - time.monotonic())
                some = self._answer(FeedCall(FEED, self._fed, (b"\n".join(lines[taken:]),), left))
                taken += some
                if not some:
                    break
        return taken

    def end(self) -> None:
        """See `Client.end_prompts`."""
        with self._one:
            self._answer(FeedCall(END, lambda number, waits: Ended(self._name, number)))
            self.feeds = False

    def _answer(self, asking: FeedCall) -> int:
        """How many rows were taken; raises UserError if they are refused."""
        reply = self._ask(asking)
        if reply is not None and "error" in reply:
            raise UserError(str(reply["error"]))
        # Without an answer the run is over.
        return 0 if reply is None else int(reply.get("taken", 0))

    def _fed(self, number: int, waits: bool) -> Fed:
        return Fed(self._name, number, waits)


def _line(index: int, row: Mapping[str, Any]) -> bytes:
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        told = "has names that are no text" if isinstance(row, Mapping) else f"is a {type(row).__name__}"
        raise UserError(f"put_prompts: row {index} {told}; expected a mapping such as {{'prompt': 'two and two'}}")
    try:
        return json.dumps(dict(row), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"put_prompts: row {index} is no JSON: {error} — use text, finite numbers, lists and mappings"
        ) from None
