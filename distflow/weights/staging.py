"""Fetches announced weights in the background, so that generation goes on until a whole version lies ready."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from distflow.errors import Overtaken
from distflow.log import logger
from distflow.types import Version
from distflow.weights.link import NamedTensors
from distflow.weights.manifest import Manifest

CLOSE_S = 5.0

log = logger(__name__)


class StagedReader(Protocol):
    """A reader whose tensors lie in memory of its own."""

    chunks: int
    """Chunks that have come in, ever."""

    def fetch(self, manifest: Manifest, superseded: Callable[[], bool] = lambda: False) -> NamedTensors:
        """As WeightReader has it; may end with Overtaken once `superseded()` and nothing comes."""
        ...

    def close(self) -> None:
        """Let go; ends a `fetch` under way."""
        ...


class Stage:
    """Holds one version at a time: the newest known when its fetch began. Thread-safe.

    What lies ready is used although a newer one was announced meanwhile; only then is the newer one fetched, into the
    same memory. So there is progress even if versions come faster than they travel. `on_ready` is called on the
    fetching thread when a version, or a fault, lies ready.
    """

    def __init__(self, reader: StagedReader, on_ready: Callable[[], None]) -> None:
        self._reader = reader
        self._on_ready = on_ready
        self._condition = threading.Condition()
        self._wanted: Manifest | None = None
        self._ready: tuple[Manifest, NamedTensors] | None = None
        self._fault: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    @property
    def chunks(self) -> int:
        """Chunks that have come in, ever."""
        return self._reader.chunks

    @property
    def waiting(self) -> bool:
        """Whether a version (or the fault that stopped us) lies ready."""
        return self._ready is not None or self._fault is not None

    def offer(self, manifest: Manifest) -> None:
        """To be fetched next, in place of any other that is not being fetched yet."""
        with self._condition:
            self._wanted = manifest
            self._condition.notify_all()

    def again(self, manifest: Manifest) -> None:
        """Fetch it once more, unless there is a newer one to be fetched."""
        with self._condition:
            if self._wanted is None:
                self._wanted = manifest
            self._condition.notify_all()

    def ready(self) -> tuple[Manifest, NamedTensors]:
        """What lies ready, untouched until `release`; raises what the fetch raised."""
        if self._fault is not None:
            raise self._fault
        assert self._ready is not None, "asked for only while `waiting`"
        return self._ready

    def release(self) -> Version:
        """It was copied; its memory may be used again. Returns which version it was."""
        with self._condition:
            assert self._ready is not None, "released once"
            version = self._ready[0].version
            self._ready = None
            self._condition.notify_all()
        return version

    def close(self) -> None:
        """End the thread and the reader."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._reader.close()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("the thread that fetches weights did not end within %g s", CLOSE_S)

    def _run(self) -> None:
        while (manifest := self._next()) is not None:
            try:
                found = self._reader.fetch(manifest, lambda: self._wanted is not None)
            except Overtaken as error:
                log.info("%s", error)
                continue
            except Exception as error:
                # Raised on the worker's main thread, by `ready`.
                self._fault = error
            else:
                self._ready = (manifest, found)
            self._on_ready()

    def _next(self) -> Manifest | None:
        """The next to fetch, None at the end. Waits for an announcement, and until the memory is free."""
        with self._condition:
            self._condition.wait_for(lambda: self._closed or (self._wanted is not None and not self.waiting))
            manifest, self._wanted = self._wanted, None
            return None if self._closed else manifest
