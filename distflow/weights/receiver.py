"""The published weights that a generating worker knows of, and loading them into its engine."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from distflow.errors import WorkerFailed
from distflow.log import logger
from distflow.types import Version
from distflow.weights.canary import TOLERANCE, Canary, Scoring, ScoringLater
from distflow.weights.manifest import Manifest
from distflow.weights.transport import Updatable, WeightReader

log = logger(__name__)


class WeightInbox:
    """The newest announcement of one model. `announce` and `newest` are called under the worker's lock.

    Training may move to this host or away from it: `other` then creates the reader of what is announced.
    With `only`, versions (rising) that alone are wanted, others are passed over, except where one of these was missed.
    """

    def __init__(
        self, reader: WeightReader, other: Callable[[Manifest], WeightReader] | None = None, only: Sequence[int] = ()
    ) -> None:
        self._reader = reader
        self._other = other
        self._only = only
        self._former: list[WeightReader] = []
        """Replaced ones that may still be in use, and keep removed segments mapped until they are closed."""
        self._newest: Manifest | None = None
        self._wanted: Manifest | None = None
        """The announced version to load: the newest, unless only some are wanted."""
        self._begins: Mapping[int, int] = {}
        self._suspected: Version | None = None
        """A loaded version with which the engine's log-probs differed from the trainer's."""
        self._unjudged: tuple[Manifest, Canary] | None = None
        """The loaded version, while its engine has had no room for the canary."""
        self.skipped = 0
        """Versions that were never compared, since the engine had no room for the canary while it had them."""
        self._told = False
        self.loaded: Version | None = None
        self.difference: float | None = None
        """Mean difference (nats) of the engine's log-probs from the trainer's for the loaded version, if compared."""

    @property
    def newest(self) -> Version | None:
        """The newest version announced."""
        return None if self._newest is None else self._newest.version

    @property
    def model(self) -> str:
        """The announced model; empty before the first announcement."""
        return "" if self._newest is None else self._newest.model

    @property
    def waiting(self) -> bool:
        """Whether there is a version to load."""
        return self._reader.waiting

    @property
    def chunks(self) -> int:
        """Chunks received over the network so far."""
        return self._reader.chunks

    def announce(self, manifest: Manifest) -> None:
        """Record an announcement; it may be repeated, late, or of a version that did not survive a new term."""
        known = self.newest or self.loaded
        if manifest.version.survives(self._begins) and (known is None or manifest.version > known):
            self._newest = manifest
            if self._other is not None and not self._reader.reads(manifest):
                self._former.append(self._reader)
                self._reader = self._other(manifest)
            self._choose()

    def begin_term(self, term: int, begins: Mapping[int, int]) -> None:
        """Training has restarted (`begins`: training steps by term): versions that do not survive are not loaded.

        Earlier segments are released, so that their memory can be reused.
        """
        self._begins = dict(begins)
        if self._newest is not None and not self._newest.version.survives(begins):
            self._newest = None
        if self._wanted is not None and not self._wanted.version.survives(begins):
            self._wanted = None
        self._reader.begin_term(term, begins)

    def load(self, engine: Updatable) -> None:
        """Load what is waiting, and compare the engine's log-probs of its canary.

        If that version was overwritten while it was read, the engine stays paused: a newer announcement is on its way,
        and `waiting` is false until it arrives. A version with wrong bytes or different log-probs is fetched once more;
        the second time raises ChecksumError or WorkerFailed.
        """
        self._close_former()
        if self._unjudged is not None:
            self._skip(self._unjudged[0])
        # `begin_term` may run meanwhile: it forgets a version first, then reads `loaded`; here the order is reversed.
        self.loaded = self.difference = None
        manifest = self._reader.refresh(engine)
        if manifest is None:
            if self._wanted is not None and self._wanted.version == self._reader.overtaken:
                self._choose()
        elif self._agrees(engine, manifest):
            self.loaded = manifest.version
        elif self._reader.waiting:
            self.load(engine)

    def judge(self, engine: Updatable) -> bool:
        """Compare the canary of the loaded version if there was no room for it before; whether that was possible now.

        If it differs, the version is fetched once more: it is `waiting` then, or will be.
        """
        if self._unjudged is None or not isinstance(engine, ScoringLater) or engine.scoring:
            return False
        (manifest, canary), found = self._unjudged, engine.late_logprobs()
        if found is None:
            self._skip(manifest)
            return False
        self._unjudged = None
        if not self._close_enough(engine, engine.precision, manifest, canary, found):
            self.loaded = None
        return True

    def _skip(self, manifest: Manifest) -> None:
        log.info("%s: log-probs not compared with the trainer's: no room in the engine", manifest.title)
        self._unjudged = self._suspected = None
        self.skipped += 1

    def _choose(self) -> None:
        """Choose what to load next, after an announcement, and when a version was overtaken."""
        newest = self._newest
        if newest is None or newest.version == self._reader.overtaken or not self._wants(newest.version):
            return
        self._wanted = newest
        if not newest.version.survives(self._begins):
            # A term has begun meanwhile.
            self._wanted = None
        else:
            self._reader.offer(newest)
        if self._newest is not newest:
            # Announced meanwhile, on another thread: it is not to be lost behind this one.
            self._choose()

    def _wants(self, version: Version) -> bool:
        """Whether this version is one of those that are wanted, or the nearest that is left of one."""
        if not self._only or version.number in self._only:
            return True
        kept = self._wanted
        if kept is not None and kept.version != self._reader.overtaken:
            had = kept.version.number
        else:
            had = -1 if self.loaded is None else self.loaded.number
        return bisect_right(self._only, had) < bisect_right(self._only, version.number)

    def _agrees(self, engine: Updatable, manifest: Manifest) -> bool:
        """Whether trainer and engine compute the same. If not, the version is fetched again; a second time raises."""
        canary = manifest.canary
        if canary is None or not isinstance(engine, Scoring):
            if canary is not None and not self._told:
                log.warning(
                    "%s has no method logprobs: its log-probs are not compared with the trainer's", type(engine)
                )
                self._told = True
            self._suspected = None
            return True
        found = engine.logprobs(canary.rows)
        if found is None:
            self._unjudged = (manifest, canary)
            if not isinstance(engine, ScoringLater):
                self._skip(manifest)
            return True
        return self._close_enough(engine, engine.precision, manifest, canary, found)

    def _close_enough(
        self, engine: Updatable, precision: str, manifest: Manifest, canary: Canary, found: Sequence[Sequence[float]]
    ) -> bool:
        self.difference = canary.difference(found)
        tolerance = canary.tolerance(precision, manifest.precisions)
        if self.difference <= tolerance:
            self._suspected = None
            return True
        known = max(TOLERANCE[canary.precision], TOLERANCE[precision])
        coarser = {one for one in manifest.precisions if TOLERANCE[one] > known}
        what = (
            f"{manifest.title}: the engine's log-probs of {sum(map(len, found))} fixed tokens differ from the "
            f"trainer's by {self.difference:.3g} nats on average, expected at most {tolerance:g} between "
            f"{canary.precision} and {precision}"
            + (f", with weights in {', '.join(sorted(coarser))}" if coarser else "")
        )
        if self._suspected is not None:
            raise WorkerFailed(
                f"{what}, even after the weights were fetched again — either the last updates have made the weights so "
                "large that rounding tells (look at actor/grad_norm, lower models.<name>.optimizer.lr), or the engine "
                "does not compute the trained model: another engine's model class may load other tensors than the "
                "trainer publishes, which engine torch does not"
            )
        log.warning("%s; fetching the weights again", what)
        self._suspected = manifest.version
        # A free-running engine has continued with these weights meanwhile; from here on none does.
        engine.begin_update(manifest.version)
        self._reader.again(manifest)
        return False

    def close(self) -> None:
        """Close the link."""
        self._close_former()
        self._reader.close()

    def _close_former(self) -> None:
        while self._former:
            self._former.pop().close()
