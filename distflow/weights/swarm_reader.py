"""Fetches weights from another host, chunk by chunk, into memory of its own."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable

import zmq

from distflow.comm.curve import KEY_HINT, Watch, present_key, tune
from distflow.comm.keys import Keys
from distflow.errors import ChecksumError, NoProgressError, Overtaken, ProtocolError
from distflow.log import logger
from distflow.types import Version
from distflow.weights.manifest import CHUNK_BYTES, DIGEST_BYTES, Manifest, digest
from distflow.weights.shm import tensor_views
from distflow.weights.swarm import WINDOW, Chunks, Reply, Request, SwarmPlace
from distflow.weights.transport import NamedTensors

RETRY_S = 2.0
"""After this long without a chunk, all open chunks are requested again over a new connection."""
SLOW_FACTOR = 4.0
"""On a slow link: the same after this many times as long as the last chunk took."""
ATTEMPTS = 3
"""How often one chunk may arrive with wrong bytes."""
POLL_MS = 100

log = logger(__name__)


class SwarmReader:
    """Reads from the server named in a manifest. `keys` are the run's, for servers that encrypt.

    One thread fetches at a time; the next `fetch` overwrites the tensors of the last. After `no_progress_s` seconds
    without a chunk it raises NoProgressError; shorter interruptions of the link are recovered from.
    """

    def __init__(self, keys: Keys | None, no_progress_s: float) -> None:
        self.chunks = 0
        """Chunks received so far: the progress that a wait for weights looks at."""
        self._keys = keys
        self._no_progress_s = no_progress_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._buffer: mmap.mmap | None = None
        self._held: tuple[str, Version] | None = None
        self._closed = False
        self._fetching = threading.Lock()

    def fetch(self, manifest: Manifest, superseded: Callable[[], bool] = lambda: False) -> NamedTensors:
        """Views of the announced version, in memory that the next `fetch` reuses.

        Raises Overtaken if the version was overwritten, or if no chunk arrives and `superseded()` says that there is a
        newer one; ChecksumError for a chunk that was wrong ATTEMPTS times; ProtocolError for a manifest of another
        link; NoProgressError.
        """
        place = SwarmPlace.parse(manifest.place)
        digests = len(manifest.digests) / DIGEST_BYTES
        if digests != manifest.chunks:
            raise ProtocolError(f"{manifest.title}: {digests:g} digests for {manifest.chunks} chunks")
        self._held = None
        if self._buffer is None or len(self._buffer) != manifest.size:
            self._buffer = mmap.mmap(-1, max(manifest.size, 1))
        with self._fetching:
            _Fetch(self, manifest, place, superseded).run()
        self._held = (manifest.model, manifest.version)
        return tensor_views(self._buffer, manifest.entries, 0)

    def intact(self, manifest: Manifest) -> bool:
        """The memory is this reader's own and changes only with the next `fetch`."""
        return self._held == (manifest.model, manifest.version)

    def close(self) -> None:
        """Release everything; a `fetch` under way raises Overtaken shortly after."""
        self._closed = True
        with self._fetching:
            self._context.term()

    # -- for the fetch under way

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def limit_s(self) -> float:
        """Seconds without a chunk after which a fetch fails."""
        return self._no_progress_s

    def keep(self, chunk: int, data: memoryview) -> None:
        """Store a chunk whose digest is right."""
        assert self._buffer is not None, "a fetch has begun and allocated memory"
        self._buffer[chunk * CHUNK_BYTES : chunk * CHUNK_BYTES + len(data)] = data
        self.chunks += 1

    def connect(self, place: SwarmPlace) -> tuple[zmq.Socket[bytes], Watch]:
        """A new connection without open requests."""
        socket = self._context.socket(zmq.DEALER)
        tune(socket, place.address)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 2 * WINDOW)
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * CHUNK_BYTES)
        if place.encrypted:
            if self._keys is None:
                socket.close()
                raise ProtocolError(f"{place.address} encrypts weights — the reader needs the run's key")
            present_key(socket, self._keys)
        watch = Watch(socket)
        socket.connect(place.address)
        return socket, watch


class _Fetch:
    """The fetch of one version."""

    def __init__(
        self, reader: SwarmReader, manifest: Manifest, place: SwarmPlace, superseded: Callable[[], bool]
    ) -> None:
        self._reader = reader
        self._manifest = manifest
        self._place = place
        self._superseded = superseded
        self._chunks = Chunks(manifest.chunks)
        self._patience_s = RETRY_S
        self._retry_at = 0.0
        self._refused = False

    def run(self) -> None:
        socket, watch = self._reader.connect(self._place)
        last = time.monotonic()
        self._retry_at = last + self._patience_s
        try:
            while not self._chunks.done:
                if self._reader.closed:
                    raise Overtaken(f"{self._manifest.title}: the reader was closed")
                self._ask(socket)
                if socket.poll(POLL_MS):
                    if self._take(socket):
                        now = time.monotonic()
                        self._patience_s = max(RETRY_S, SLOW_FACTOR * (now - last))
                        last, self._retry_at = now, now + self._patience_s
                    continue
                self._give_up(watch, last)
                if time.monotonic() >= self._retry_at:
                    watch.close()
                    socket.close()
                    socket, watch = self._again()
        finally:
            watch.close()
            socket.close()

    def _ask(self, socket: zmq.Socket[bytes]) -> None:
        for chunk in self._chunks.ask():
            request = Request.make(self._place.token, self._manifest.model, self._manifest.version, chunk)
            socket.send(request.pack(), zmq.NOBLOCK)

    def _take(self, socket: zmq.Socket[bytes]) -> bool:
        """Receive one reply; returns whether it contained a missing chunk."""
        frames = socket.recv_multipart(copy=False)
        try:
            reply = Reply.unpack(frames[0].bytes)
        except ProtocolError as error:
            log.warning("%s: dropped a reply: %s", self._place.address, error)
            return False
        if reply.version != self._manifest.version or not self._chunks.expects(reply.chunk):
            return False
        if not reply.there:
            raise Overtaken(f"{self._manifest.title}: overwritten by a newer version while it was fetched")
        data = memoryview(frames[-1].buffer)
        if digest(data) != self._manifest.digest_of(reply.chunk):
            self._note_wrong(reply.chunk)
            return False
        self._reader.keep(reply.chunk, data)
        self._chunks.right(reply.chunk)
        return True

    def _note_wrong(self, chunk: int) -> None:
        what = (
            f"{self._manifest.title}: chunk {chunk} of {self._chunks.count} from {self._place.address} does not have "
            f"the announced digest"
        )
        if self._chunks.wrong(chunk) >= ATTEMPTS:
            raise ChecksumError(f"{what}, {ATTEMPTS} times — the link or the publisher's memory is corrupt")
        log.warning("%s; requesting it again", what)

    def _give_up(self, watch: Watch, last: float) -> None:
        """Raise if waiting longer is pointless."""
        silence = time.monotonic() - last
        if silence > RETRY_S and self._superseded():
            raise Overtaken(
                f"{self._manifest.title}: no chunk from {self._place.address}, and there is a newer version"
            )
        if watch.refused() and not self._refused:
            # Not final: a proxy between the hosts may accept connections for a server that is not back yet.
            self._refused = True
            log.warning("%s refused the connection for weight transfer — %s", self._place.address, KEY_HINT)
        if silence > self._reader.limit_s:
            why = KEY_HINT if self._refused else "is that host up and its port reachable?"
            raise NoProgressError(
                f"{self._manifest.title} from {self._place.address}: no chunk for {silence:.0f} s, "
                f"{self._chunks.arrived} of {self._chunks.count} arrived — {why}"
            )

    def _again(self) -> tuple[zmq.Socket[bytes], Watch]:
        """Open a new connection: the old one may be dead, and its chunks must not arrive twice."""
        log.info("%s: no chunk from %s, reconnecting", self._manifest.title, self._place.address)
        self._chunks.lost()
        self._patience_s *= 2
        self._retry_at = time.monotonic() + self._patience_s
        return self._reader.connect(self._place)
