"""The thread of a `PromptFeed`: disks are slow, and the worker's other messages do not wait for them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from distflow.comm.message import Message
from distflow.errors import ProtocolError
from distflow.exchange.messages import LeasePrompt, PromptAt
from distflow.exchange.prompt_feed import MOST_CALLS, SAY_EVERY_S, WAITING_BYTES, PromptFeed
from distflow.log import logger

CLOSE_S = 1.0
"""How long to wait at the end for a disk."""
log = logger(__name__)


class FeedThread:
    """Hands messages to a feed on a thread of its own. `fault` gets what ends the run."""

    def __init__(self, feed: PromptFeed, fault: Callable[[Exception], None]) -> None:
        self._feed, self._fault = feed, fault
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self._nbytes = 0
        """Of the messages in the queue."""
        self._closed = self._over = False
        self._thread = threading.Thread(target=self._run, name="prompt feed", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def has(self, position: int) -> bool:
        """Whether the row of a position is there."""
        return self._feed.has(position)

    @property
    def lacks(self) -> str:
        """Which row is waited for; "": none."""
        return self._feed.waits

    def noting(self, prompt_at: PromptAt) -> PromptAt:
        """The same, noting which positions are asked for: there is room for as many rows more."""

        def asked(position: int) -> LeasePrompt | None:
            if self._feed.reach(position):
                self.wake()
            return prompt_at(position)

        return asked

    def put(self, message: Message) -> None:
        """A message has come; where too much waits for the disk it is dropped, and comes again.

        Nothing is copied here: this is called under the worker's lock. What the payload lies in is kept until then.
        """
        nbytes = sum(part.nbytes for part in message.payload)
        with self._counting:
            if self._messages.qsize() >= MOST_CALLS or self._nbytes + nbytes > WAITING_BYTES:
                return
            self._nbytes += nbytes
        self._messages.put(message)

    def wake(self) -> None:
        """There may be room for more rows."""
        self._messages.put(None)

    def close(self, *, over: bool) -> None:
        """End; if the run is over, whoever waits is told."""
        self._closed, self._over = True, over
        self.wake()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._closed:
                self._next()
            self._feed.close(over=self._over)
        except Exception as error:  # rows that are lost, or our own error: nobody may wait for prompts forever
            self._fault(error)

    def _next(self) -> None:
        try:
            message = self._messages.get(timeout=SAY_EVERY_S / 2)
        except queue.Empty:
            message = None
        if message is not None:
            with self._counting:
                self._nbytes -= sum(part.nbytes for part in message.payload)
        try:
            if message is None:
                self._feed.tick(time.monotonic())
            else:
                self._feed.on_message(message, time.monotonic())
        except ProtocolError as error:
            assert message is not None, "only messages are malformed"
            log.warning("dropped a %r message from %s: %s", message.kind, message.sender, error)
            self._feed.refuse(message, error)
