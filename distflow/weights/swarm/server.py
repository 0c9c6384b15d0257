"""The publisher's side of the link across hosts: digests of a version, and its chunks, each given out about once."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import structs

from distflow.errors import Overtaken
from distflow.flow.sizes import PINNED, PUBLISHED
from distflow.log import logger
from distflow.weights.encodings.rounded_publisher import RoundedPublisher
from distflow.weights.manifest import Delta, Manifest, digests
from distflow.weights.one_sided.reads import ExposedMemory
from distflow.weights.segments.shm import AnnouncedSegment
from distflow.weights.segments.turns import Pin
from distflow.weights.swarm.announcing import Announcing
from distflow.weights.swarm.chunk_plan import ChunkDealer
from distflow.weights.swarm.chunk_server import ChunkServer
from distflow.weights.swarm.delta_chain import DeltaChain
from distflow.weights.swarm.delta_memory import delta_between
from distflow.weights.swarm.held_version import HeldVersion
from distflow.weights.swarm.serve_core import ServerTraffic
from distflow.weights.swarm_messages import SwarmPlace

log = logger(__name__)


def _tell(error: BaseException) -> None:
    log.error("no versions for other hosts any more: %s", error)


class SwarmServer:
    """Listens on `host` from the start, on threads of its own; `encrypted`: chunks are sealed.

    With `deltas` versions are also served as what has changed since the one before, with `rounding` they are rounded
    before, and with `exposed` readers may read them where they lie. `on_fault` is called on a thread here with what it
    cannot go on after.
    Raises ProtocolError if it cannot listen.
    """

    def __init__(
        self,
        host: str,
        *,
        encrypted: bool = False,
        deltas: bool = False,
        rounding: RoundedPublisher | None = None,
        exposed: ExposedMemory | None = None,
        on_fault: Callable[[BaseException], None] = _tell,
    ) -> None:
        self._pin = Pin()
        self._lock = threading.Lock()
        self._held: list[HeldVersion] = []
        self._server = ChunkServer(host, introduces=True, on_read=self._pin_for)
        self.place = SwarmPlace(self._server.address, secrets.token_bytes(16), encrypted)
        self._server.admit(self.place)
        self._rounding = rounding
        self._exposed = exposed
        self._chain = DeltaChain[HeldVersion](self._server) if deltas else None
        # Where there is a newer one, hashing an older one would only delay it.
        self._announcing = Announcing("swarm-describe", self.describe, on_fault, only_newest=True)

    @property
    def traffic(self) -> ServerTraffic:
        """What was sent so far."""
        return self._server.traffic

    def status(self) -> list[dict[str, Any]]:
        """What was sent to how many readers, for the status."""
        return [self._server.status()]

    def describe(self, manifest: Manifest) -> Manifest:
        """The manifest of the same version for readers on other hosts; from now on its chunks are served.

        `manifest` is what ShmPublisher returned. Hashes and compares all bytes, on several threads with the GIL
        released.
        Raises Overtaken if the version is overwritten meanwhile.
        """
        if self._rounding is not None:
            manifest = self._rounding.publish(manifest, self.pinned)
        else:
            AnnouncedSegment(manifest)
        memory = None if self._exposed is None else self._exposed.of(manifest)
        held = HeldVersion(manifest, Path(manifest.place), ChunkDealer(manifest.chunks))
        found = digests([held.bytes_of(chunk) for chunk in range(manifest.chunks)])
        if not held.intact:
            raise Overtaken(f"{manifest.title}: overwritten by a newer version before it was hashed")
        deltas = () if self._chain is None else self._chain.lead_to(manifest.size, self._delta_to(held))
        if not held.intact:
            raise Overtaken(f"{manifest.title}: overwritten by a newer version before its changes were known")
        # The same segment held an older version.
        former = [one for one in self._held if one.manifest.place == manifest.place]
        self._held = [*(one for one in self._held if one not in former), held][-(PUBLISHED + PINNED) :]
        for one in former:
            self._server.forget(one)
        self._server.hold(held)
        return structs.replace(
            manifest, place=str(self.place), checksums=(), digests=found, deltas=deltas, memory=memory
        )

    def offer(self, manifest: Manifest, announce: Callable[[Manifest], None]) -> None:
        """`describe` on a thread of its own, then call `announce` there; overwritten versions are skipped."""
        self._announcing.offer(manifest, announce)

    def pinned(self) -> str | None:
        """The segment that a reader is fetching: ShmPublisher does not overwrite it."""
        with self._lock:
            return self._pin.pinned(time.monotonic())

    def close(self) -> None:
        """End all threads and stop serving."""
        self._server.close()
        if self._exposed is not None:
            self._exposed.close()
        if self._announcing.close() and self._rounding is not None:
            self._rounding.close()

    def _delta_to(self, held: HeldVersion) -> tuple[Delta, HeldVersion] | None:
        return delta_between(self._held[-1], held) if self._held else None

    def _pin_for(self, held: HeldVersion) -> None:
        with self._lock:
            self._pin.read(held.manifest.place, time.monotonic())
