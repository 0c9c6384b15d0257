"""One connection of a reader to a holder of weights, with a thread that receives chunks into place and checks them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from distflow.errors import ProtocolError
from distflow.log import logger
from distflow.weights.manifest import CHUNK_BYTES
from distflow.weights.swarm.fetch_actions import ChunkLink, Landing
from distflow.weights.swarm.sockets import connect, hang_up, receive_for
from distflow.weights.swarm_messages import (
    FRAME,
    MOST_AT_ONCE,
    MOST_TOLD,
    SEAL_BYTES,
    ChunkAsk,
    Content,
    Opening,
    Says,
    Secret,
    SwarmPlace,
    pack,
    read_counts,
    read_indices,
    read_peers,
    seal_nonce,
)

STEP_S = 0.1
"""How often the thread that receives a chunk notes how much of it has come."""
MOST_PAYLOAD = {
    Says.CHUNK: CHUNK_BYTES + SEAL_BYTES,
    Says.GONE: 0,
    Says.ELSEWHERE: 0,
    Says.DEALT: 0,
    Says.HAVE: 4 * MOST_TOLD,
    Says.PEERS: 1 << 20,
    Says.GIVEN: 4 * MOST_AT_ONCE,
    Says.COMING: 1 << 20,
}

log = logger(__name__)


class Receiver(Protocol):
    """Who hears what comes on a connection, on that connection's thread."""

    def landing(self, link: SwarmLink, content: Content, chunk: int, size: int) -> Landing | None:
        """Where a chunk that begins to arrive goes; None: nobody wants it."""
        ...

    def landed(self, link: SwarmLink, content: Content, chunk: int, *, right: bool) -> None:
        """A chunk with a landing has arrived."""
        ...

    def heard(self, link: SwarmLink, says: Says, content: Content, chunk: int, chunks: tuple[int, ...]) -> None:
        """Anything about chunks but their bytes."""
        ...

    def coming(self, content: Content, counts: Mapping[str, int]) -> None:
        """Bytes that readers have received while they fetched this, by their addresses."""
        ...

    def met(self, peers: tuple[str, ...]) -> None:
        """The readers that serve."""
        ...

    def lost(self, link: SwarmLink) -> None:
        """The connection is over; nothing more comes, and no landing is written to."""
        ...


class SwarmLink(ChunkLink):
    """Connects in the constructor: raises OSError, Refused for another token. `own`: what it says of this reader."""

    def __init__(self, number: int, address: str, place: SwarmPlace, own: Opening, receiver: Receiver) -> None:
        super().__init__(number, address, time.monotonic())
        secret = Secret(place.token)
        self._socket, nonces = connect(address, secret)
        self._seal = AESGCM(secret.seal_key(nonces)) if place.encrypted else None
        self._sealed = 0
        self._receiver = receiver
        self._sending = threading.Lock()
        self._spare: memoryview | None = None
        receive_for(self._socket, 0)
        self._socket.sendall(pack(own))
        self.thread = threading.Thread(target=self._run, name="swarm-fetch", daemon=True)
        self.thread.start()

    def ask(self, ask: ChunkAsk) -> None:
        """Send a request; if the connection is over, its thread finds out."""
        try:
            with self._sending:
                self._socket.sendall(pack(ask))
        except OSError:
            hang_up(self._socket)

    def close(self) -> None:
        """Hang up; the thread ends."""
        hang_up(self._socket)

    def _run(self) -> None:
        header = memoryview(bytearray(FRAME.size))
        try:
            while True:
                self._receive(header)
                self._take(header)
        except ProtocolError as error:
            log.warning("%s: hung up on it: %s", self.address, error)
        except ConnectionError:
            # The other end is gone, or this one is closing.
            pass
        except OSError as error:
            log.warning("%s: the connection for weights broke: %s", self.address, error)
        finally:
            self._socket.close()
            self._receiver.lost(self)

    def _take(self, header: memoryview) -> None:
        kind, size, term, number, base, chunk = FRAME.unpack(header)
        try:
            says = Says(kind)
        except ValueError as error:
            raise ProtocolError(f"a frame of kind {kind}") from error
        if size > MOST_PAYLOAD[says]:
            raise ProtocolError(f"{says.name} of {size} bytes, expected at most {MOST_PAYLOAD[says]}")
        content = Content(term, number, base)
        if says is Says.CHUNK:
            self._chunk(bytes(header), content, chunk, size)
            return
        body = memoryview(bytearray(size))
        self._receive(body)
        if says is Says.PEERS:
            self._receiver.met(read_peers(body))
        elif says is Says.COMING:
            self._receiver.coming(content, read_counts(body))
        else:
            self._receiver.heard(self, says, content, chunk, read_indices(body))

    def _chunk(self, header: bytes, content: Content, chunk: int, size: int) -> None:
        plain = size if self._seal is None else size - SEAL_BYTES
        landing = self._receiver.landing(self, content, chunk, plain)
        number = self._sealed
        self._sealed += 1
        if landing is None:
            self._receive(self._scratch(size))
            return
        into = landing.data if self._seal is None else self._scratch(size)
        receive_for(self._socket, STEP_S)
        self._receive(into, counts=landing.trusted)
        receive_for(self._socket, 0)
        genuine = self._seal is None or self._unseal(self._seal, seal_nonce(number), into, header, landing.data)
        self._receiver.landed(self, content, chunk, right=self.judge(landing, size, genuine=genuine))

    def _unseal(self, seal: AESGCM, nonce: bytes, sealed: memoryview, header: bytes, into: memoryview) -> bool:
        try:
            seal.decrypt_into(nonce, sealed, header, into)
        except InvalidTag:
            return False
        return True

    def _scratch(self, size: int) -> memoryview:
        if self._spare is None:
            self._spare = memoryview(bytearray(CHUNK_BYTES + SEAL_BYTES))
        return self._spare[:size]

    def _receive(self, into: memoryview, *, counts: bool = False) -> None:
        """Fill `into`, however long it takes; `heard_at` says since when nothing has come. `counts`: as `received`."""
        at = 0
        while at < len(into):
            try:
                found = self._socket.recv_into(into[at:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            if not found:
                raise ConnectionResetError("the other end hung up")
            at, self.heard_at = at + found, time.monotonic()
            self.received += found if counts else 0
