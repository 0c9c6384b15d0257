"""Serves chunks of published weights to readers on other hosts, from the shared segments themselves."""

from __future__ import annotations

import mmap
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from msgspec import structs

from distflow.comm.curve import Gate, bind_network
from distflow.comm.keys import Keys, listening_on
from distflow.errors import Overtaken, ProtocolError
from distflow.flow.sizes import PINNED, PUBLISHED
from distflow.log import logger
from distflow.types import Version
from distflow.weights.manifest import CHUNK_BYTES, Manifest, digest
from distflow.weights.shm import HEADER, HEADER_BYTES, open_segment
from distflow.weights.swarm import MAX_REQUEST_BYTES, WINDOW, Reply, Request, SwarmPlace

POLL_MS = 100
"""Interval at which the thread checks whether to end."""
CLOSE_S = 5.0
PIN_S = 3.0
"""After this long without a request, a version is no longer considered being read."""
REPLIES_PER_READER = 2 * WINDOW
"""Chunks queued for one reader; further ones are dropped and requested again."""
REQUESTS_AT_ONCE = 64

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class _Served:
    manifest: Manifest
    segment: mmap.mmap

    def holds(self, version: Version) -> bool:
        return bool(HEADER.unpack_from(self.segment, 0) == tuple(version))

    def chunk(self, index: int) -> memoryview:
        start = index * CHUNK_BYTES
        return memoryview(self.segment)[HEADER_BYTES:][start : min(start + CHUNK_BYTES, self.manifest.size)]


@dataclass(slots=True)
class ServerTraffic:
    """Counters for the status."""

    chunks: int = 0
    gone: int = 0
    dropped: int = 0
    refused: int = 0


class SwarmServer:
    """Listens on `host` from the start, on threads of its own. With `keys` it encrypts, for holders of the key only.

    Raises ProtocolError if it cannot listen. Memory: at most REPLIES_PER_READER chunks for each reader.
    """

    def __init__(self, host: str, keys: Keys | None = None) -> None:
        self.traffic = ServerTraffic()
        self._served: dict[str, _Served] = {}
        self._lock = threading.Lock()
        self._pin: tuple[str, float] | None = None
        self._closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.SNDHWM, REPLIES_PER_READER)
        self._router.setsockopt(zmq.RCVHWM, REQUESTS_AT_ONCE)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._gate = None if keys is None else Gate(self._context, self._router, keys)
        try:
            address = bind_network(self._router, [listening_on(host)])
        except ProtocolError:
            self._close_sockets()
            raise
        self.place = SwarmPlace(address, secrets.token_bytes(16), keys is not None)
        self._offers: queue.SimpleQueue[tuple[Manifest, Callable[[Manifest], None]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"swarm-{target.__name__.strip('_')}", daemon=True)
            for target in (self._serve, self._describe_offers)
        ]
        for thread in self._threads:
            thread.start()

    def describe(self, manifest: Manifest) -> Manifest:
        """The manifest of the same version for readers on other hosts; from now on its chunks are served.

        `manifest` is what ShmPublisher returned. Hashes all bytes (about a second per gigabyte) with the GIL released.
        Raises Overtaken if the version is overwritten meanwhile.
        """
        served = _Served(manifest, open_segment(manifest))
        digests = b"".join([digest(served.chunk(index)) for index in range(manifest.chunks)])
        if not served.holds(manifest.version):
            raise Overtaken(f"{manifest.title}: overwritten by a newer version before it was hashed")
        with self._lock:
            self._served.pop(manifest.place, None)
            self._served[manifest.place] = served
            while len(self._served) > PUBLISHED + PINNED:
                # From a former publisher, whose segments had other names.
                del self._served[next(iter(self._served))]
        return structs.replace(manifest, place=str(self.place), checksums=(), digests=digests)

    def offer(self, manifest: Manifest, announce: Callable[[Manifest], None]) -> None:
        """`describe` on a thread of its own, then call `announce` there; overwritten versions are skipped."""
        self._offers.put((manifest, announce))

    def pinned(self) -> str | None:
        """The segment that a reader is fetching: ShmPublisher does not overwrite it."""
        with self._lock:
            return None if self._pin is None or time.monotonic() > self._pin[1] else self._pin[0]

    def close(self) -> None:
        """End both threads and stop serving."""
        self._closing = True
        self._offers.put(None)
        for thread in self._threads:
            thread.join(CLOSE_S)
            if thread.is_alive():
                log.warning("%s did not stop within %g s", thread.name, CLOSE_S)

    def _describe_offers(self) -> None:
        while (offer := self._offers.get()) is not None:
            if not self._offers.empty():
                # There is a newer one: hashing this one would only delay it.
                continue
            manifest, announce = offer
            try:
                announce(self.describe(manifest))
            except Overtaken as error:
                log.info("%s", error)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        if self._gate is not None:
            poller.register(self._gate.questions, zmq.POLLIN)
        try:
            while not self._closing:
                ready = dict(poller.poll(POLL_MS))
                if self._gate is not None and self._gate.questions in ready:
                    self._gate.answer()
                if self._router in ready:
                    self._answer_some()
                elif self._gate is not None:
                    self.traffic.refused += self._gate.refused()
        finally:
            self._close_sockets()

    def _answer_some(self) -> None:
        for _ in range(REQUESTS_AT_ONCE):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                request = Request.unpack(frames[-1])
            except ProtocolError as error:
                log.warning("dropped a request for weights: %s", error)
                continue
            if request.proven(self.place.token):
                self._answer(frames[0], request)
            else:
                self.traffic.refused += 1

    def _answer(self, reader: bytes, request: Request) -> None:
        data = self._copy(request)
        reply = Reply(*request.version, request.chunk, data is not None)
        try:
            self._router.send_multipart([reader, reply.pack(), data or b""], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            # Its queue is full, or it is gone. A reader that still wants the chunk requests it again.
            self.traffic.dropped += 1
            return
        self.traffic.chunks += data is not None
        self.traffic.gone += data is None

    def _copy(self, request: Request) -> bytes | None:
        """A copy of the chunk, which a newer version cannot change; None if the version was overwritten."""
        with self._lock:
            served = next((s for s in self._served.values() if _fits(s.manifest, request)), None)
            if served is None or not served.holds(request.version):
                return None
            now = time.monotonic()
            if self._pin is None or now > self._pin[1] or self._pin[0] == served.manifest.place:
                self._pin = (served.manifest.place, now + PIN_S)
        data = bytes(served.chunk(request.chunk))
        return data if served.holds(request.version) else None

    def _close_sockets(self) -> None:
        if self._gate is not None:
            self._gate.close()
        self._router.close(linger=0)
        self._context.term()


def _fits(manifest: Manifest, request: Request) -> bool:
    same = manifest.model == request.model and manifest.version == request.version
    return same and 0 <= request.chunk < manifest.chunks
