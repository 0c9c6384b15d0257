"""A thread that does one job after another, for what training must not wait for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Background:
    """Jobs run in the order in which they were given; what they return or raise is in their futures."""

    def __init__(self, name: str) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do this when all that was given before is done."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                result = work()
            except Exception as error:
                # Whoever waits for the future gets it.
                future.set_exception(error)
            else:
                future.set_result(result)

        self._queue.put(job)
        return future

    def close(self, limit_s: float) -> bool:
        """Finish what was given, for at most so many seconds; whether all is done."""
        self._queue.put(None)
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            # Jobs hold views of the model's state: not a moment longer than they need them.
            del job
