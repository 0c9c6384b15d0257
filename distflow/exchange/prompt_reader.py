"""Prompts read ahead for an owner's ledgers, by a thread of its own.

`PromptReader` reads prompts on a thread of its own, because data sources and tokenizers may be slow. The core asks for
the prompt of a position with `prompt_at`, under the worker's lock, and gets None while it has not been read. Positions
that were asked for are read first; then those that each ledger will need next, lowest first, until enough prompts are
in memory. Which positions exist and which worker gets them is decided elsewhere.

Only this thread calls the source and the tokenizer. An exception they raise is kept in place of the prompt and becomes
the worker's fault when that prompt is asked for: a prompt that is never needed does not end the run.

Example, 2 ledgers: prompt_at(0) → None; 0 is read, then 2, 4, … (the rest of its ledger) → `arrived` → prompt_at(0).
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from distflow.exchange.messages import LeasePrompt

AHEAD_BYTES = 64 << 20
"""Most memory for prompts that have not been asked for yet."""
GATHER_S = 0.02
"""While several prompts are waited for, `arrived` is called this often, and once more for the last of them."""
LOOK_EVERY_S = 1.0
"""How often an idle reader checks whether it was closed; it is woken when there is something to read."""
CLOSE_S = 1.0
"""How long to wait at the end for the prompt being read: a slow source must not delay it."""
_TOKEN_BYTES, _PROMPT_BYTES = 40, 1024
"""Rough memory of a prompt: per token, and besides its tokens and text."""

Read = LeasePrompt | Exception


@dataclass(slots=True)
class _Ledger:
    """Prompts of one ledger that have been read, by rising position, and the position to read next."""

    next: int
    read: deque[tuple[int, Read]] = field(default_factory=deque)


class PromptReader:
    """The reader's thread calls `read(position)`, and `arrived()` when prompts that were asked for have been read.

    `stride`, the number of ledgers, is the distance between positions of one ledger. At most `ahead` prompts are read
    before they are asked for. `fault` gets the exception of a prompt that could not be read. A handler of `arrived`
    calls `take_news`.
    """

    def __init__(
        self,
        read: Callable[[int], LeasePrompt | None],
        stride: int,
        ahead: int,
        arrived: Callable[[], None],
        fault: Callable[[Exception], None],
    ) -> None:
        self._read = read
        self._stride = stride
        self._most = ahead
        self._arrived = arrived
        self._fault = fault
        self._changed = threading.Condition()
        self._ledgers: dict[int, _Ledger] = {}
        self._order: list[int] = []
        """Heap of positions to read ahead, the lowest first; some may be out of date."""
        self._wanted: dict[int, None] = {}
        """Positions that were asked for and have not been read yet."""
        self._news = False
        """Whether something that was asked for has been read since the last `take_news`."""
        self._told_at = 0.0
        self._count = self._bytes = 0
        self._end: int | None = None
        """The lowest position whose prompt is known not to be there yet."""
        self._mores = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="prompts", daemon=True)

    def start(self) -> None:
        """Start to read what is asked for."""
        self._thread.start()

    def close(self) -> None:
        """Stop reading."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def prompt_at(self, position: int) -> LeasePrompt | None:
        """The prompt of a position, each once; None if it has not been read, and `arrived` will follow.

        The positions of a ledger are asked for in rising order; prompts in between are dropped.
        """
        with self._changed:
            ledger = self._ledgers.setdefault(position % self._stride, _Ledger(position))
            while ledger.read and ledger.read[0][0] < position:
                self._forget(ledger)
            if not ledger.read or ledger.read[0][0] != position:
                self._want(ledger, position)
                return None
            found = ledger.read[0][1]
            if not isinstance(found, Exception):
                self._forget(ledger)
                self._changed.notify_all()
                return found
        self._fault(found)
        return None

    def more(self) -> None:
        """Prompts that were not there have come; any thread may call this."""
        with self._changed:
            self._end = None
            self._mores += 1
            self._changed.notify_all()

    def take_news(self) -> bool:
        """Whether something that was asked for has been read since the last call."""
        with self._changed:
            news, self._news = self._news, False
            self._told_at = time.monotonic()
            return news

    def _want(self, ledger: _Ledger, position: int) -> None:
        if not self._wanted:
            self._told_at = time.monotonic()
        if position not in self._wanted:
            self._wanted[position] = None
            ledger.next = max(ledger.next, position)
            self._changed.notify_all()

    def _forget(self, ledger: _Ledger) -> None:
        self._count -= 1
        self._bytes -= _size(ledger.read.popleft()[1])

    # -- the reader's thread

    def _run(self) -> None:
        try:
            self._read_on()
        except Exception as error:  # our own error: those who wait for prompts must not wait forever
            self._fault(error)

    def _read_on(self) -> None:
        while (position := self._await()) is not None:
            mores = self._mores
            try:
                found: Read | None = self._read(position)
            except Exception as error:  # of the user's code: raised where the prompt would be used
                found = error
            if self._lacks(position, mores) if found is None else self._keep(position, found):
                self._arrived()

    def _lacks(self, position: int, mores: int) -> bool:
        """Note that a prompt is not there, unless it has come meanwhile; return whether to call `arrived`."""
        with self._changed:
            if self._mores == mores:
                self._end = position if self._end is None else min(self._end, position)
            return self._tells

    def _await(self) -> int | None:
        """Wait for the next position to read; None when closed."""
        with self._changed:
            while not self._closed:
                position = self._next()
                if position is not None:
                    return position
                self._changed.wait(LOOK_EVERY_S)
        return None

    def _next(self) -> int | None:
        wanted = next(filter(self._may_be_there, self._wanted), None)
        if wanted is not None:
            return wanted
        if self._count >= self._most or self._bytes >= AHEAD_BYTES:
            return None
        while self._order:
            position = self._order[0]
            if self._ledgers[position % self._stride].next == position:
                return position if self._may_be_there(position) else None
            heapq.heappop(self._order)
        return None

    def _may_be_there(self, position: int) -> bool:
        return self._end is None or position < self._end

    def _keep(self, position: int, found: Read) -> bool:
        """Keep what was read; return whether to call `arrived`."""
        with self._changed:
            ledger = self._ledgers[position % self._stride]
            (ledger.read.appendleft if position < ledger.next else ledger.read.append)((position, found))
            self._count += 1
            self._bytes += _size(found)
            if position >= ledger.next and not isinstance(found, Exception):
                ledger.next = position + self._stride
                heapq.heappush(self._order, ledger.next)
            if position in self._wanted:
                del self._wanted[position]
                self._news = True
            return self._tells

    @property
    def _tells(self) -> bool:
        """Whether to call `arrived` now: nothing else that was asked for can be read, or it is time."""
        more = any(map(self._may_be_there, self._wanted))
        return self._news and (not more or time.monotonic() - self._told_at >= GATHER_S)


def _size(found: Read) -> int:
    if isinstance(found, Exception):
        return 0
    return _PROMPT_BYTES + _TOKEN_BYTES * len(found.prompt_ids) + len(found.prompt_text) + len(found.task)
