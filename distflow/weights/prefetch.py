"""Fetches announced weights in the background, so that generation continues until a whole version is ready."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from distflow.errors import Overtaken
from distflow.log import logger
from distflow.types import Version
from distflow.weights.manifest import Manifest
from distflow.weights.transport import NamedTensors, Updatable

CLOSE_S = 5.0

log = logger(__name__)


class StagedReader(Protocol):
    """A reader whose tensors are in memory of its own."""

    chunks: int
    """Chunks received so far."""

    def fetch(self, manifest: Manifest, superseded: Callable[[], bool] = lambda: False) -> NamedTensors:
        """The announced tensors, checked; they may be overwritten unless `hold` says otherwise.

        Raises Overtaken if the version is gone, also if `superseded()` is true and no chunk arrives.
        """
        ...

    def hold(self, manifest: Manifest) -> bool:
        """Whether what was fetched last is still there; it stays until `release` then."""
        ...

    def release(self) -> None:
        """What was held may be overwritten."""
        ...

    def close(self) -> None:
        """Release everything; ends a `fetch` under way."""
        ...


class Stage:
    """A WeightReader that holds one version at a time: the newest known when its fetch began. Thread-safe.

    A version that is ready is used even if a newer one was announced meanwhile; the newer one is fetched afterwards,
    into the same memory. So there is progress even if versions are published faster than they can be fetched.
    `on_ready` is called on the fetching thread when a version or an error is ready.
    """

    def __init__(self, reader: StagedReader, on_ready: Callable[[], None]) -> None:
        self._reader = reader
        self._on_ready = on_ready
        self._condition = threading.Condition()
        self._wanted: Manifest | None = None
        self._begun: Manifest | None = None
        """The version whose fetch began last."""
        self._ready: tuple[Manifest, NamedTensors | Exception] | None = None
        """What was fetched last, or the error."""
        self._in_use = False
        self._begins: Mapping[int, int] = {}
        self._closed = False
        self.overtaken: Version | None = None
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    @property
    def chunks(self) -> int:
        """Chunks received so far."""
        return self._reader.chunks

    @property
    def waiting(self) -> bool:
        """Whether a version or an error is ready."""
        return self._ready is not None

    def reads(self, manifest: Manifest) -> bool:
        """Whether it is to be fetched over the network."""
        return bool(manifest.digests)

    def refresh(self, engine: Updatable) -> Manifest | None:
        """Put what is ready into the engine; None if it was forgotten. Raises what the fetch raised."""
        taken = self.take()
        if taken is None:
            return None
        manifest, tensors = taken
        engine.begin_update(manifest.version)
        engine.update(tensors)
        engine.end_update()
        self.release()
        return manifest

    def offer(self, manifest: Manifest) -> None:
        """Fetch this version next, instead of any other whose fetch has not begun."""
        with self._condition:
            self._wanted = manifest
            self._condition.notify_all()

    def again(self, manifest: Manifest) -> None:
        """Fetch this version again, unless a newer one is wanted or being fetched."""
        with self._condition:
            if self._wanted is None and self._begun is manifest and self._counts(manifest):
                self._wanted = manifest
            self._condition.notify_all()

    def begin_term(self, term: int, begins: Mapping[int, int]) -> None:
        """Forget versions that do not survive, whether ready, being fetched or wanted."""
        with self._condition:
            self._begins = dict(begins)
            if self._wanted is not None and not self._counts(self._wanted):
                self._wanted = None
            if self._ready is not None and not self._counts(self._ready[0]):
                self._ready = None
            self._condition.notify_all()

    def take(self) -> tuple[Manifest, NamedTensors] | None:
        """What is ready, unchanged until `release`; None if it is gone. Raises what the fetch raised."""
        with self._condition:
            if self._ready is None:
                return None
            manifest, found = self._ready
            if isinstance(found, Exception):
                raise found
            self._ready = None
            self._in_use = self._reader.hold(manifest)
            if not self._in_use:
                # It was not taken for long, and neighbours needed the memory for a newer one, which is here now.
                self._wanted = self._wanted or manifest
                self._condition.notify_all()
                return None
            return manifest, found

    def release(self) -> None:
        """The tensors have been copied; their memory may be reused."""
        self._reader.release()
        with self._condition:
            self._in_use = False
            self._condition.notify_all()

    def close(self) -> None:
        """End the thread and the reader."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._reader.close()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("the thread that fetches weights did not stop within %g s", CLOSE_S)

    def _run(self) -> None:
        while (manifest := self._next()) is not None:
            try:
                self._fetched(manifest, self._reader.fetch(manifest, partial(self._superseded, manifest)))
            except Overtaken as error:
                log.info("%s", error)
                self.overtaken = manifest.version
            except Exception as error:
                # Raised on the worker's main thread, by `take`.
                self._fetched(manifest, error)

    def _fetched(self, manifest: Manifest, found: NamedTensors | Exception) -> None:
        with self._condition:
            if not self._counts(manifest):
                return
            self._ready = (manifest, found)
        self._on_ready()

    def _counts(self, manifest: Manifest) -> bool:
        return manifest.version.survives(self._begins)

    def _superseded(self, manifest: Manifest) -> bool:
        return self._wanted is not None or not self._counts(manifest)

    @property
    def _memory_free(self) -> bool:
        return self._ready is None and not self._in_use

    def _next(self) -> Manifest | None:
        """The next version to fetch, None after `close`. Waits for an announcement and for free memory."""
        with self._condition:
            self._condition.wait_for(lambda: self._closed or (self._wanted is not None and self._memory_free))
            self._begun, self._wanted = self._wanted, None
            return None if self._closed else self._begun
