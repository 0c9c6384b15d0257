"""A WeightReader that takes versions which come in parts (`link.py`), and all others as announced.

Every version is announced as if there were no group, and what announces it works always. A reader of a group waits a
moment before it follows an announcement, for the same version to come in parts; if it does not, or not well, the
announcement is followed. Versions that come in parts are begun only while nothing else is on its way, so they are never
older than what the engine has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from distflow.log import logger
from distflow.types import Version
from distflow.weights.manifest import Manifest
from distflow.weights.transport import NamedTensors, Updatable, WeightReader

HOLD_S = 2.0
"""How long an announced version waits for the trainers to begin to send it."""

log = logger(__name__)


class ShardedReader:
    """`other`: what follows announcements. `lock`: the worker's; `joined`: whether there is a group.

    `arrived` is called under the lock with a version that has come in parts, `freed` when another may come.
    """

    def __init__(
        self,
        other: WeightReader,
        lock: threading.Condition,
        joined: Callable[[], bool],
        arrived: Callable[[Manifest], None],
        freed: Callable[[], None],
    ) -> None:
        self._other = other
        self._lock = lock
        self._joined = joined
        self._arrived = arrived
        self._freed = freed
        self._coming: Manifest | None = None
        """In parts, now."""
        self._landed: tuple[Manifest, NamedTensors] | None = None
        self._in_use = False
        self._waiting_for_parts: tuple[Manifest, float] | None = None
        """An announced version, and until when to wait."""
        self._followed: Manifest | None = None
        """What `other` was told to bring and the engine does not have yet."""
        self._announced: Manifest | None = None
        self._has: Version | None = None
        """What the engine was given last."""
        self._patient = True
        """Whether versions came in parts so far, as soon as expected: if not, none waits until one comes again."""
        self._begins: Mapping[int, int] = {}
        self._closed = False
        self._versions = 0

    @property
    def free(self) -> bool:
        """Whether a version could come in parts now."""
        idle = self._coming is None and self._landed is None and not self._in_use and not self._closed
        return idle and not self._following

    @property
    def _following(self) -> bool:
        return self._followed is not None and self._followed.version != self._other.overtaken

    @property
    def chunks(self) -> int:
        """Progress: chunks over the network, and versions that came in parts."""
        return self._other.chunks + self._versions

    @property
    def waiting(self) -> bool:
        """Whether a version, or the error of its transfer, is ready."""
        return self._landed is not None or self._other.waiting

    @property
    def overtaken(self) -> Version | None:
        """The last version that was gone when it was wanted."""
        return self._other.overtaken

    def reads(self, manifest: Manifest) -> bool:
        """Whether it has come in parts, or can be had as announced."""
        landed = self._landed
        return (landed is not None and landed[0] is manifest) or self._other.reads(manifest)

    def offer(self, manifest: Manifest) -> None:
        """Bring this version next: in parts if it comes so soon, or else as announced."""
        with self._lock:
            if self._landed is not None and self._landed[0].version >= manifest.version:
                return
            self._announced = manifest
            if self._patient and self._joined() and not self._following and not self._closed:
                until = time.monotonic() + HOLD_S
                if self._waiting_for_parts is not None:
                    # Versions that come faster than this must not put each other off for ever.
                    until = min(until, self._waiting_for_parts[1])
                self._waiting_for_parts = (manifest, until)
            else:
                self._follow(manifest)

    def look(self, now: float) -> None:
        """Follow an announcement that has waited long enough. Called under the lock, a few times a second."""
        if self._waiting_for_parts is None:
            return
        manifest, until = self._waiting_for_parts
        comes = self._coming is not None and self._coming.version >= manifest.version
        if not comes and (now > until or not self._joined()):
            self._patient = not self._joined()
            self._follow(manifest)
            self._lock.notify_all()

    def begin(self, manifest: Manifest) -> None:
        """The trainers begin to send this version."""
        self._coming, self._patient = manifest, True

    def end(self, manifest: Manifest, tensors: NamedTensors | None) -> None:
        """It has come, or not: then it is followed as announced."""
        self._coming = None
        held, version = self._waiting_for_parts, manifest.version
        if self._closed:
            return
        late = self._has is not None and version <= self._has
        if tensors is None or late or self._following or not version.survives(self._begins):
            if held is not None:
                self._follow(held[0])
        else:
            self._landed = (manifest, tensors)
            self._versions += 1
            if held is not None:
                newer = held[0].version > version
                self._waiting_for_parts = (held[0], time.monotonic() + HOLD_S) if newer else None
            self._arrived(manifest)
        self._lock.notify_all()

    def refresh(self, engine: Updatable) -> Manifest | None:
        """Put what is ready into the engine; as the other reader says if that is none in parts."""
        with self._lock:
            landed, self._landed = self._landed, None
            self._in_use = landed is not None
        if landed is None:
            manifest = self._other.refresh(engine)
            with self._lock:
                followed = self._followed
                self._has = self._has if manifest is None else manifest.version
                if manifest is not None and followed is not None and manifest.version >= followed.version:
                    self._followed = None
                self._freed()
            return manifest
        manifest, tensors = landed
        engine.begin_update(manifest.version)
        engine.update(tensors)
        engine.end_update()
        with self._lock:
            self._in_use, self._has = False, manifest.version
            self._freed()
        log.info("%s came in parts", manifest.title)
        return manifest

    def again(self, manifest: Manifest) -> None:
        """Bring this version once more, as announced, unless a newer one is on its way."""
        with self._lock:
            if self._landed is not None or self._coming is not None:
                return
            announced = self._announced
            if announced is not None and announced.version == manifest.version and announced is not manifest:
                self._follow(announced)
                return
        self._other.again(manifest)

    def begin_term(self, term: int, begins: Mapping[int, int]) -> None:
        """Forget versions that do not survive."""
        with self._lock:
            self._begins = dict(begins)
            if self._landed is not None and not self._landed[0].version.survives(begins):
                self._landed = None
            held = self._waiting_for_parts
            if held is not None and not held[0].version.survives(begins):
                self._waiting_for_parts = None
            if self._followed is not None and not self._followed.version.survives(begins):
                self._followed = None
        self._other.begin_term(term, begins)

    def close(self) -> None:
        """Take nothing more."""
        with self._lock:
            self._closed, self._landed, self._waiting_for_parts = True, None, None
        self._other.close()

    def _follow(self, manifest: Manifest) -> None:
        self._waiting_for_parts, self._followed = None, manifest
        self._other.offer(manifest)
