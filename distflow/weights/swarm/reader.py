"""Reads weights from other hosts: one reader of a host fetches a version into shared memory, its neighbours map it.

A version for which the host has an older one may be made of that, by what has changed (`delta_fetch.py`). What a reader
has fetched or made it serves to readers on other hosts. A reader outside the run does the same in memory of its own,
and serves nobody. With `weights.link: nixl` it first reads it from the publisher's memory (`one_sided/reads.py`).
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from distflow.errors import ChecksumError, NoProgressError, Overtaken, ProtocolError
from distflow.log import logger
from distflow.weights.encodings.rounding import restored
from distflow.weights.manifest import DIGEST_BYTES, Manifest, intact_chunks
from distflow.weights.one_sided.reads import OneSidedReads, StillWritten
from distflow.weights.segments.host_segments import HostSegments, SharedSegment
from distflow.weights.segments.shm import HEADER_BYTES, tensor_views
from distflow.weights.swarm.chunk_server import ChunkServer
from distflow.weights.swarm.client import FetchRules, SwarmClient
from distflow.weights.swarm.delta_fetch import DeltaFetch, make
from distflow.weights.swarm.held_version import HeldVersion
from distflow.weights.swarm.private_segments import NotServing, PrivateSegments
from distflow.weights.swarm.serve_core import ServerTraffic
from distflow.weights.swarm_messages import Opening, SwarmPlace
from distflow.weights.transport import NamedTensors

LOOK_S = 0.01
"""How often a reader looks whether its neighbour has fetched the version; a blocking lock could not be interrupted."""

IN_USE_S = 30.0
"""How long to wait for a neighbour that copies an older version, before one more segment is made beside it."""

LOOPBACK = "127.0.0.1"
"""Where to serve in a run on one host."""

Segments = HostSegments | PrivateSegments
Server = ChunkServer | NotServing
log = logger(__name__)


class SwarmReader:
    """Reads one model from the publisher named in a manifest, and from other readers of its `site`; serves at `host`.

    `tag` names this host's part of the run: readers with the same one share what they fetch. Without tag and host it
    reads from outside the run: nobody shares with it, or waits for it. One thread fetches at a time. After
    `no_progress_s` seconds without a chunk it raises NoProgressError; shorter interruptions of the link are recovered
    from.
    """

    def __init__(
        self,
        tag: str | None,
        host: str | None,
        no_progress_s: float,
        site: str = "",
        one_sided: OneSidedReads | None = None,
    ) -> None:
        self.chunks = 0
        """Chunks received so far, here or by a neighbour: the progress that a wait for weights looks at."""
        self.fetched = 0
        """Chunks that this reader has fetched itself."""
        self.fetched_bytes = 0
        """What these contained."""
        self._tag = tag
        self._host = host
        self._site = site
        self._one_sided = one_sided
        self._no_progress_s = no_progress_s
        self._segments: Segments | None = None
        self._server: Server | None = None
        self._client: SwarmClient | None = None
        self._deltas: DeltaFetch | None = None
        self._closed = threading.Event()
        self._fetching = threading.Lock()

    @property
    def traffic(self) -> ServerTraffic:
        """What was sent to readers on other hosts."""
        return ServerTraffic() if self._server is None else self._server.traffic

    def status(self) -> list[dict[str, Any]]:
        """What was fetched here, and sent to how many other readers, for the status."""
        server = self._server
        read = {} if self._one_sided is None else self._one_sided.status()
        return [] if server is None else [{**server.status(), "fetched_bytes": self.fetched_bytes, **read}]

    def fetch(self, manifest: Manifest, superseded: Callable[[], bool] = lambda: False) -> NamedTensors:
        """Views of the announced version, in memory that others may need for newer ones: `hold` it before use.

        Raises Overtaken if the version was overwritten, or if no chunk arrives and `superseded()` says that there is a
        newer one; ChecksumError for a chunk that was wrong several times; ProtocolError for a manifest of another
        link; NoProgressError; UserError if shared memory is too small.
        """
        place = SwarmPlace.parse(manifest.place)
        digests = len(manifest.digests) / DIGEST_BYTES
        if digests != manifest.chunks:
            raise ProtocolError(f"{manifest.title}: {digests:g} digests for {manifest.chunks} chunks")
        rules = FetchRules(self._no_progress_s, self._closed.is_set, superseded)
        with self._fetching:
            if self._closed.is_set():
                raise Overtaken(f"{manifest.title}: the reader was closed")
            if self._segments is None:
                self._segments = PrivateSegments() if self._tag is None else HostSegments(self._tag, manifest.model)
            if self._server is not None:
                self._server.forget_terms_before(manifest.version.term)
            self._segments.release()
            memory = self._bring(self._segments, manifest, place, rules)
            self._segments.release()
        return restored(tensor_views(memory, manifest.entries, HEADER_BYTES), manifest.entries)

    def hold(self, manifest: Manifest) -> bool:
        """Whether what was fetched last is still there. If so, it stays until `release` or the next `fetch`."""
        with self._fetching:
            return self._segments is not None and self._segments.find(manifest) is not None

    def release(self) -> None:
        """What was held may be overwritten."""
        with self._fetching:
            if self._segments is not None:
                self._segments.release()

    def close(self) -> None:
        """Release everything; a `fetch` under way raises Overtaken shortly after."""
        self._closed.set()
        with self._fetching:
            if self._one_sided is not None:
                self._one_sided.close()
            if self._client is not None:
                self._client.close()
            if self._server is not None:
                self._server.close()
            if self._segments is not None:
                self._segments.close()
            self._client = self._server = self._segments = self._deltas = None

    def _bring(self, segments: Segments, manifest: Manifest, place: SwarmPlace, rules: FetchRules) -> mmap.mmap:
        """Fetch the version, or wait for the neighbour that does."""
        progress, last = segments.progress(), time.monotonic()
        while True:
            memory = segments.find(manifest)
            if memory is not None:
                return memory
            newest = segments.newest()
            if newest is not None and newest > manifest.version:
                raise Overtaken(f"{manifest.title}: this host has a newer version")
            if segments.begin():
                memory = self._in_turn(segments, manifest, place, rules, time.monotonic() - last > IN_USE_S)
                if memory is not None:
                    return memory
            before, progress, now = progress, segments.progress(), time.monotonic()
            if progress != before:
                last = now
                self.chunks += max(0, progress[2] - before[2]) if progress[:2] == before[:2] else progress[2]
            if rules.closed():
                raise Overtaken(f"{manifest.title}: the reader was closed")
            if progress[:2] != tuple(manifest.version) and rules.superseded():
                raise Overtaken(f"{manifest.title}: a neighbour fetches another, and there is a newer version")
            if now - last > rules.no_progress_s:
                raise NoProgressError(
                    f"{manifest.title}: the reader on this host that fetches weights has received nothing for "
                    f"{now - last:.0f} s — is its process stopped? `distflow status` shows what each worker waits for"
                )
            self._closed.wait(LOOK_S)

    def _in_turn(
        self, segments: Segments, manifest: Manifest, place: SwarmPlace, rules: FetchRules, further: bool
    ) -> mmap.mmap | None:
        try:
            return segments.find(manifest) or self._fetch(segments, manifest, place, rules, further)
        except StillWritten as error:
            log.warning("%s; another segment is taken", error)
            return None
        finally:
            segments.end()

    def _fetch(
        self, segments: Segments, manifest: Manifest, place: SwarmPlace, rules: FetchRules, further: bool
    ) -> mmap.mmap | None:
        """Fetch the version into a segment that is not in use, or a further one; None: there is none now."""
        server, client, deltas = self._ends(place)
        deltas.keep_for(manifest)
        base = segments.base_of(manifest)
        *interrupted, arrived_then = segments.progress()
        try:
            segment = segments.writable(manifest, further=further)
            if segment is None:
                return None
            held = HeldVersion(manifest, segment.path)
            server.hold(held)
            before = self.chunks

            def came(nbytes: int) -> None:
                self.chunks += 1
                self.fetched += 1
                self.fetched_bytes += nbytes
                segments.note_progress(manifest.version, self.chunks - before)

            def arrived(chunk: int) -> None:
                held.add(chunk)
                came(manifest.size_of(chunk))
                server.notify()

            try:
                there = self._read(manifest, segment, arrived, rules)
                if base is not None and not there:
                    there = self._make(held, segment, base, came, rules)
                if not there and tuple(interrupted) == tuple(manifest.version) and arrived_then:
                    there = self._arrived(held, segment)
                    self.chunks += len(there)
                if len(there) < manifest.chunks:
                    client.fetch(
                        manifest, _data(segment, manifest), arrived, partial(server.expect, held), rules, there
                    )
            except BaseException:
                server.forget(held)
                segments.abandon(segment)
                raise
        finally:
            if base is not None:
                segments.let_go(base)
        memory = self._whole(segments, segment, held)
        if there:
            client.tell_made(manifest)
        return memory

    def _read(
        self, manifest: Manifest, segment: SharedSegment, arrived: Callable[[int], None], rules: FetchRules
    ) -> list[int]:
        """Read what can be read at the publisher; returns the chunks that have come right."""
        return [] if self._one_sided is None else self._one_sided.read(manifest, segment, arrived, rules.closed)

    def _arrived(self, held: HeldVersion, segment: SharedSegment) -> list[int]:
        """The chunks that are right of a fetch that was interrupted, here or at a neighbour that has died."""
        there = intact_chunks(held.manifest, _data(segment, held.manifest))
        log.info("%s: %d of %d chunks are here already", held.manifest.title, len(there), held.manifest.chunks)
        for chunk in there:
            held.add(chunk)
        return there

    def _make(
        self,
        held: HeldVersion,
        segment: SharedSegment,
        base: SharedSegment,
        came: Callable[[int], None],
        rules: FetchRules,
    ) -> list[int]:
        """Make a version of an older one, by what has changed; returns the chunks that have come right."""
        manifest = held.manifest
        server, client, deltas = self._ends(SwarmPlace.parse(manifest.place))
        try:
            changes = deltas.fetch(manifest, base.version, client, came, rules)
            there = make(manifest, _data(base, manifest), changes, _data(segment, manifest))
        except (ChecksumError, ProtocolError) as error:
            log.info("%s — fetching all of version %d", error, manifest.version.number)
            return []
        if len(there) < manifest.chunks:
            log.warning("%s: %d chunks are not what was announced", manifest.title, manifest.chunks - len(there))
        for chunk in there:
            held.add(chunk)
        server.notify()
        return there

    def _whole(self, segments: Segments, segment: SharedSegment, held: HeldVersion) -> mmap.mmap:
        memory = segments.finish(segment, held.manifest.version)
        held.whole = True
        return memory

    def _ends(self, place: SwarmPlace) -> tuple[Server, SwarmClient, DeltaFetch]:
        """What serves, the connections to the swarm of this publisher, and the deltas from there."""
        if self._server is None or self._deltas is None:
            self._server = NotServing() if self._host is None else ChunkServer(self._host, introduces=False)
            self._deltas = DeltaFetch(self._server)
        self._server.admit(place)
        if self._client is None or self._client.place != place:
            if self._client is not None:
                self._client.close()
            self._client = SwarmClient(place, Opening(self._server.address, self._site))
        return self._server, self._client, self._deltas


def _data(segment: SharedSegment, manifest: Manifest) -> memoryview:
    return memoryview(segment.memory)[HEADER_BYTES : HEADER_BYTES + manifest.size]
