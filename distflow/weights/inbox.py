"""What a generating worker knows of published weights, and how they get into its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from distflow.errors import ChecksumError, Overtaken
from distflow.log import logger
from distflow.types import Version
from distflow.weights.link import WeightReader
from distflow.weights.manifest import Manifest
from distflow.weights.staging import Stage

log = logger(__name__)


class Updatable(Protocol):
    """The part of an engine that takes weights."""

    def begin_update(self, version: Version) -> None:
        """From here on nothing is sampled."""
        ...

    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy these in."""
        ...

    def end_update(self) -> None:
        """Sample again, as the new version."""
        ...


class WeightInbox:
    """The newest announcement of one model. `announce` and `newest` are called under the worker's lock.

    Weights come from `reader` while the engine stands still, or, for links that are not that quick, from a `stage`. If
    the publisher of this host is gone for good, those of another one come over the network: `far` makes their stage.
    """

    def __init__(self, reader: WeightReader | Stage, far: Callable[[], Stage] | None = None) -> None:
        self._reader = reader
        self._far = far
        self._newest: Manifest | None = None
        self._overtaken: Version | None = None
        self.loaded: Version | None = None

    @property
    def newest(self) -> Version | None:
        """The newest version announced."""
        return None if self._newest is None else self._newest.version

    @property
    def model(self) -> str:
        """The model whose versions are announced here; empty before the first."""
        return "" if self._newest is None else self._newest.model

    @property
    def waiting(self) -> bool:
        """Whether a version can be loaded that is newer than the loaded one, and not known to be gone."""
        if isinstance(self._reader, Stage):
            return self._reader.waiting
        if self.newest is None or self.newest == self._overtaken:
            return False
        return self.loaded is None or self.newest > self.loaded

    @property
    def chunks(self) -> int:
        """Pieces of weights that have come in over a network, ever."""
        return self._reader.chunks if isinstance(self._reader, Stage) else 0

    def announce(self, manifest: Manifest) -> None:
        """Take note; announcements may come twice or late."""
        if self._newest is None or manifest.version > self._newest.version:
            self._newest = manifest
            if manifest.digests and self._far is not None and not isinstance(self._reader, Stage):
                self._reader = self._far()
            if isinstance(self._reader, Stage):
                self._reader.offer(manifest)

    def load(self, engine: Updatable) -> None:
        """Bring the newest version, or the staged one, into the engine.

        The engine stays torn if that version was overtaken while it was read.

        Then a newer announcement is on its way, and `waiting` is false until it comes. A version whose bytes are wrong
        is fetched once more; wrong twice, it raises ChecksumError.
        """
        manifest, reader = self._newest, self._reader
        if isinstance(reader, Stage):
            self._load_staged(engine, reader)
            return
        assert manifest is not None, "weights are loaded after they were announced"
        engine.begin_update(manifest.version)
        self.loaded = None
        try:
            self._copy_right(engine, reader, manifest)
        except Overtaken as error:
            log.info("%s", error)
            self._overtaken = manifest.version
            return
        engine.end_update()
        self.loaded = manifest.version

    def _load_staged(self, engine: Updatable, stage: Stage) -> None:
        manifest, tensors = stage.ready()
        engine.begin_update(manifest.version)
        self.loaded = None
        engine.update(tensors)
        engine.end_update()
        self.loaded = stage.release()

    def _copy_right(self, engine: Updatable, reader: WeightReader, manifest: Manifest) -> None:
        try:
            self._copy(engine, reader, manifest)
        except Overtaken:
            raise
        except ChecksumError as error:
            log.warning("fetching weights once more: %s", error)
            self._copy(engine, reader, manifest)

    def _copy(self, engine: Updatable, reader: WeightReader, manifest: Manifest) -> None:
        engine.update(reader.fetch(manifest))
        if not reader.intact(manifest):
            raise Overtaken(f"version {tuple(manifest.version)} was overwritten while it was copied")

    def close(self) -> None:
        """Let go of the link."""
        self._reader.close()
