"""Reads announced weights where they are in this host's memory, straight into an engine that stands still meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

from distflow.errors import ChecksumError, Overtaken
from distflow.log import logger
from distflow.types import Version
from distflow.weights.manifest import Manifest
from distflow.weights.transport import NamedTensors, Updatable

log = logger(__name__)


class Mapped(Protocol):
    """Finds announced versions in memory that their publisher will reuse."""

    def fetch(self, manifest: Manifest) -> NamedTensors:
        """The announced tensors. Raises ChecksumError if they differ from what was announced, Overtaken (a
        ChecksumError) if they were overwritten. What was copied from them counts only if `intact` says so."""
        ...

    def intact(self, manifest: Manifest) -> bool:
        """Whether the tensors were right, and unchanged until they were copied; raises ChecksumError."""
        ...

    def doubt(self, manifest: Manifest) -> None:
        """What came of this version was wrong: trust nothing that was found out about it."""
        ...

    def begin_term(self, term: int) -> None:
        """Fetch nothing of earlier terms any more. Thread-safe."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class InPlace:
    """A WeightReader of what is in memory already: a version is ready as soon as it is announced."""

    chunks = 0
    """Nothing crosses a network."""

    def __init__(self, reader: Mapped) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._offered: Manifest | None = None
        self._begins: Mapping[int, int] = {}
        self.overtaken: Version | None = None

    @property
    def waiting(self) -> bool:
        """Whether `refresh` has something to do."""
        return self._offered is not None

    def reads(self, manifest: Manifest) -> bool:
        """Whether it is in this host's memory."""
        return not manifest.digests

    def offer(self, manifest: Manifest) -> None:
        """Copy this version next, unless it is known to be gone."""
        with self._lock:
            self._offer(manifest)

    def refresh(self, engine: Updatable) -> Manifest | None:
        """Copy the offered version, twice if its bytes were wrong; if it is gone, the engine stays paused."""
        with self._lock:
            manifest, self._offered = self._offered, None
        if manifest is None:
            return None
        engine.begin_update(manifest.version)
        try:
            self._copy_right(engine, manifest)
        except Overtaken as error:
            log.info("%s", error)
            self.overtaken = manifest.version
            return None
        engine.end_update()
        return manifest

    def again(self, manifest: Manifest) -> None:
        """Check and copy this version again, unless another was offered."""
        self._reader.doubt(manifest)
        with self._lock:
            # Looked at and put there together: a newer one may be offered at any time.
            if self._offered is None:
                self._offer(manifest)

    def begin_term(self, term: int, begins: Mapping[int, int]) -> None:
        """Forget a version that does not survive, and release the memory of earlier terms."""
        with self._lock:
            self._begins = dict(begins)
            if self._offered is not None and not self._offered.version.survives(begins):
                self._offered = None
        self._reader.begin_term(term)

    def close(self) -> None:
        """Release everything."""
        self._reader.close()

    def _offer(self, manifest: Manifest) -> None:
        if manifest.version != self.overtaken and manifest.version.survives(self._begins):
            self._offered = manifest

    def _copy_right(self, engine: Updatable, manifest: Manifest) -> None:
        try:
            self._copy(engine, manifest)
        except Overtaken:
            raise
        except ChecksumError as error:
            log.warning("fetching weights again: %s", error)
            self._copy(engine, manifest)

    def _copy(self, engine: Updatable, manifest: Manifest) -> None:
        engine.update(self._reader.fetch(manifest))
        if not self._reader.intact(manifest):
            raise Overtaken(f"version {tuple(manifest.version)} was overwritten while it was copied")
