"""What a generating worker knows of published weights, and how they get into its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from torch import Tensor

from distflow.errors import ChecksumError, Overtaken, WorkerFailed
from distflow.log import logger
from distflow.types import Version
from distflow.weights.canary import Scoring
from distflow.weights.manifest import Manifest
from distflow.weights.prefetch import Stage
from distflow.weights.transport import WeightReader

log = logger(__name__)


class Updatable(Protocol):
    """The part of an engine that takes weights."""

    def begin_update(self, version: Version) -> None:
        """From here on nothing is sampled; if the version is the one in use, what came from it since is given up."""
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
        self._begins: Mapping[int, int] = {}
        self._overtaken: Version | None = None
        self._suspected: Version | None = None
        """It was loaded, and the engine computes something else with it than the trainer."""
        self._told = False
        self.loaded: Version | None = None
        self.difference: float | None = None
        """Of the loaded version: mean difference (nats) of the engine's log-probs from the trainer's, if compared."""

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
        """Take note; announcements may come twice or late, also from before a term that began behind them."""
        known = self.newest or self.loaded
        if manifest.version.survives(self._begins) and (known is None or manifest.version > known):
            self._newest = manifest
            if manifest.digests and self._far is not None and not isinstance(self._reader, Stage):
                self._reader = self._far()
            if isinstance(self._reader, Stage):
                self._reader.offer(manifest)

    def begin_term(self, term: int, begins: Mapping[int, int]) -> None:
        """Training has begun again (`begins`: training steps by term): versions that do not survive are not loaded.

        What was published before is let go of, so that its memory can be used.
        """
        self._begins = dict(begins)
        if self._newest is not None and not self._newest.version.survives(begins):
            self._newest = None
        if isinstance(self._reader, Stage):
            self._reader.begin_term(begins)
        else:
            self._reader.begin_term(term)

    def load(self, engine: Updatable) -> None:
        """Bring the newest version, or the staged one, into the engine, and compare their log-probs of its canary.

        The engine stays torn if that version was overtaken while it was read.

        Then a newer announcement is on its way, and `waiting` is false until it comes. A version whose bytes are wrong,
        or with which the engine computes something else than the trainer, is fetched once more; wrong twice, it raises
        ChecksumError or WorkerFailed.
        """
        # `begin_term` may run meanwhile: it forgets a version first and looks at `loaded` then; here it is the reverse.
        self.loaded = self.difference = None
        manifest = self._bring(engine)
        if manifest is not None and self._agrees(engine, manifest):
            self.loaded, self._suspected = manifest.version, None
        elif manifest is not None and not isinstance(self._reader, Stage):
            self.load(engine)

    def _bring(self, engine: Updatable) -> Manifest | None:
        """Which version the engine has now; None if it was overtaken, or forgotten as a new term began."""
        manifest, reader = self._newest, self._reader
        if isinstance(reader, Stage):
            taken = reader.take()
            if taken is None:
                return None
            manifest, tensors = taken
            engine.begin_update(manifest.version)
            engine.update(tensors)
            engine.end_update()
            reader.release()
            return manifest
        if manifest is None:
            return None
        engine.begin_update(manifest.version)
        try:
            self._copy_right(engine, reader, manifest)
        except Overtaken as error:
            log.info("%s", error)
            self._overtaken = manifest.version
            return None
        engine.end_update()
        return manifest

    def _agrees(self, engine: Updatable, manifest: Manifest) -> bool:
        """Whether trainer and engine compute the same; if not, the version comes once more, and raises then."""
        canary = manifest.canary
        if canary is None or not isinstance(engine, Scoring):
            if canary is not None and not self._told:
                log.warning("%s has no method logprobs: versions are not compared with the trainer's", type(engine))
                self._told = True
            return True
        found = engine.logprobs(canary.rows)
        if found is None:
            log.info("%s: not compared with the trainer's log-probs: the engine had no room for them", manifest.title)
            return True
        self.difference = canary.difference(found)
        tolerance = canary.tolerance(engine.precision)
        if self.difference <= tolerance:
            return True
        what = (
            f"{manifest.title}: the engine's log-probs of {sum(map(len, found))} fixed tokens differ from the "
            f"trainer's by {self.difference:.3g} nats in the mean, expected at most {tolerance:g} between "
            f"{canary.precision} and {engine.precision}"
        )
        if self._suspected is not None:
            raise WorkerFailed(
                f"{what}, also after they were fetched once more — the engine does not compute what is trained: its "
                "model class may load other tensors than the trainer publishes; try engine torch"
            )
        log.warning("%s; fetching them once more", what)
        self._suspected = manifest.version
        # An engine that decodes by itself has gone on with these while it was asked; from here on none does.
        engine.begin_update(manifest.version)
        if isinstance(self._reader, Stage):
            self._reader.again(manifest)
        return False

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
