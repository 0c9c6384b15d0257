"""The file in which an owner lists the lossless consumers that it has, for the one that follows it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from distflow.exchange.listing import Listed
from distflow.log import logger
from distflow.runtime.disk import replace_file

CLOSE_S = 1.0
"""How long to wait at the end for a disk."""
log = logger(__name__)


class ConsumerList:
    """Written on a thread of its own, since disks are slow: the newest list, if there are several by then.

    `written` is called on that thread with the names in the file. If the disk refuses, too: the run goes on. `fault`
    gets an error of our own.
    """

    def __init__(
        self, file: Path, written: Callable[[Iterable[str]], None], fault: Callable[[Exception], None]
    ) -> None:
        self._file, self._written, self._fault = file, written, fault
        self._changed = threading.Condition()
        self._newest: Listed | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="consumers", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def write(self, listed: Listed) -> None:
        """Write this list soon; never blocks."""
        with self._changed:
            self._newest = dict(listed)
            self._changed.notify()

    def close(self) -> None:
        """Write what is left, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while (listed := self._next()) is not None:
                self._write(listed)
                self._written(listed)
        except Exception as error:  # clients of lossless consumers may not wait forever
            self._fault(error)

    def _next(self) -> Listed | None:
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None or self._closing)
            listed, self._newest = self._newest, None
        return listed

    def _write(self, listed: Listed) -> None:
        try:
            self._file.parent.mkdir(exist_ok=True)
            replace_file(self._file, json.dumps(listed))
        except OSError as error:
            log.error("could not write %s, so consumers may miss samples after a restart: %s", self._file, error)
