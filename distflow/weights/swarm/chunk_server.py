"""Serves chunks of weights from shared segments of this host: a publisher's own, or what a reader here has fetched.

One thread accepts connections; each connection has a thread that receives requests and one that sends, by `sendfile`
straight from the segment where chunks are not encrypted. A slow reader delays nobody else.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from distflow.errors import ProtocolError
from distflow.log import logger
from distflow.weights.swarm.held_version import HeldVersion
from distflow.weights.swarm.serve_core import MOST_WAITING, SendChunk, SendFrame, ServeCore, ServedReader
from distflow.weights.swarm.sockets import HANDSHAKE_S, Refused, address_of, hang_up, listen, receive_for, take, welcome
from distflow.weights.swarm_messages import (
    FRAME,
    LENGTH,
    MAX_ASK_BYTES,
    SEAL_BYTES,
    ChunkAsk,
    Opening,
    Says,
    Secret,
    SwarmPlace,
    read_ask,
    read_opening,
    seal_nonce,
)

CLOSE_S = 5.0
ACCEPT_PAUSE_S = 0.5
"""After a connection could not be accepted: without file descriptors, say, the next attempt fails at once, too."""
MOST_CONNECTIONS = 1024
MOST_STRANGERS = 64
"""Connections that have yet to prove that they know a token. One more takes the place of the oldest: a reader proves it
at once."""

log = logger(__name__)


class ChunkServer:
    """Listens on `host` from the start; raises ProtocolError if it cannot.

    Holders of a token that `admit` was told are let in. A publisher's server tells its readers of each other
    (`introduces`). `on_read` is called when a chunk is about to be sent.
    """

    def __init__(
        self, host: str, *, introduces: bool, on_read: Callable[[HeldVersion], None] = lambda held: None
    ) -> None:
        self.core = ServeCore[HeldVersion](introduces=introduces)
        self.traffic = self.core.traffic
        self.on_read = on_read
        self.lock = threading.Lock()
        self._known: dict[bytes, Secret] = {}
        self._sealed: set[bytes] = set()
        self._connections: list[_Connection] = []
        self._closing = threading.Event()
        self._listener = listen(host)
        self.address = address_of(self._listener)
        self._thread = threading.Thread(target=self._accept, name="swarm-serve", daemon=True)
        self._thread.start()

    def admit(self, place: SwarmPlace) -> None:
        """Let in who knows the token of this place; with its encryption."""
        secret = Secret(place.token)
        with self.lock:
            self._known[secret.name] = secret
            if place.encrypted:
                self._sealed.add(secret.name)

    def hold(self, held: HeldVersion) -> None:
        """Serve a version from now on; the oldest of too many is forgotten."""
        with self.lock:
            self.core.hold(held)
        self.notify()

    def forget(self, held: HeldVersion) -> None:
        """Serve a version no more, nor what was asked for of it before."""
        with self.lock:
            self.core.forget(held)

    def forget_terms_before(self, term: int) -> None:
        """Serve no version of earlier terms any more: their segments have no names, only who maps them keeps them."""
        with self.lock:
            self.core.forget_terms_before(term)

    def notify(self) -> None:
        """There is something new: connections tell their readers."""
        for connection in list(self._connections):
            connection.wake()

    def expect(self, held: HeldVersion, counts: Mapping[str, int]) -> None:
        """More of a version is on its way to here: `counts` are the bytes that readers have received, by address."""
        held.coming = counts
        self.notify()

    def seals(self, secret: Secret) -> bool:
        """Whether what is sent to holders of this secret is encrypted."""
        return secret.name in self._sealed

    def secrets(self) -> dict[bytes, Secret]:
        """Those that are let in, by name."""
        with self.lock:
            return dict(self._known)

    def status(self) -> dict[str, Any]:
        """What was sent so far, and how many readers there are, for the status."""
        with self.lock:
            return {**asdict(self.traffic), "readers": len(self.core.present())}

    def left(self, connection: _Connection) -> None:
        """A connection is over."""
        with self.lock:
            if connection in self._connections:
                self._connections.remove(connection)
            if connection.served in self.core.readers:
                self.core.readers.remove(connection.served)
        if self.core.introduces:
            self.notify()

    def close(self) -> None:
        """Stop serving, end all threads."""
        self._closing.set()
        hang_up(self._listener)
        with self.lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()
        for thread in (self._thread, *(thread for one in connections for thread in one.threads if thread.ident)):
            thread.join(CLOSE_S)
            if thread.is_alive():
                log.warning("%s did not stop within %g s", thread.name, CLOSE_S)
        with self.lock:
            self.core.clear()

    def _accept(self) -> None:
        told = full = False
        while not self._closing.is_set():
            try:
                link, _ = self._listener.accept()
            except OSError as error:
                if not (told or self._closing.is_set()):
                    log.warning("%s: cannot accept connections for weights for now: %s", self.address, error)
                told = True
                self._closing.wait(ACCEPT_PAUSE_S)
                continue
            told = False
            connection = _Connection(self, link)
            if self._add(connection):
                self._start(connection, link)
                continue
            link.close()
            if not (full or self._closing.is_set()):
                full = True
                log.warning("%s: %d connections of readers of weights, no more", self.address, MOST_CONNECTIONS)
        self._listener.close()

    def _add(self, connection: _Connection) -> bool:
        """Whether there is room for one more."""
        with self.lock:
            strangers = [one for one in self._connections if not one.known]
            known = len(self._connections) - len(strangers)
            if self._closing.is_set() or known >= MOST_CONNECTIONS:
                return False
            self._connections.append(connection)
        if len(strangers) >= MOST_STRANGERS:
            strangers[0].close()
        return True

    def _start(self, connection: _Connection, link: socket.socket) -> None:
        try:
            connection.threads[0].start()
        except RuntimeError as error:
            # No further thread can be started now. The reader tries again, or reads from others.
            log.warning("%s: cannot serve another reader of weights for now: %s", self.address, error)
            self.left(connection)
            link.close()
            self._closing.wait(ACCEPT_PAUSE_S)


class _Connection:
    """One reader's connection."""

    def __init__(self, server: ChunkServer, link: socket.socket) -> None:
        self.served: ServedReader[HeldVersion] | None = None
        """Once it has said who it is."""
        self.known = False
        """Whether it knows a token."""
        self._server = server
        self._link = link
        self._jobs: queue.SimpleQueue[ChunkAsk | None] = queue.SimpleQueue()
        self._over = False
        self._seal: AESGCM | None = None
        self._sealed = 0
        self.threads = [
            threading.Thread(target=target, name=f"swarm-{name}", daemon=True)
            for target, name in ((self._receive, "requests"), (self._send, "chunks"))
        ]

    def wake(self) -> None:
        """There may be something to tell the reader."""
        if self._jobs.empty():
            self._jobs.put(None)

    def close(self) -> None:
        """Hang up; both threads end."""
        self._over = True
        hang_up(self._link)
        self._jobs.put(None)

    def _receive(self) -> None:
        try:
            secret, nonces = welcome(self._link, self._server.secrets())
            self.known = True
            receive_for(self._link, HANDSHAKE_S)
            opening = read_opening(self._body())
            receive_for(self._link, 0)
            self._begin(secret, nonces, opening)
            while True:
                ask = read_ask(self._body())
                if self._jobs.qsize() > MOST_WAITING:
                    raise ProtocolError(f"more than {MOST_WAITING} requests at a time")
                self._jobs.put(ask)
        except Refused:
            with self._server.lock:
                self._server.traffic.refused += 1
        except ProtocolError as error:
            log.warning("hung up on a reader of weights: %s", error)
        except OSError:
            # It is gone, or this server is closing.
            pass
        finally:
            self.close()
            self._server.left(self)
            if self.threads[1].ident:
                self.threads[1].join(CLOSE_S)
            self._link.close()

    def _begin(self, secret: Secret, nonces: bytes, opening: Opening) -> None:
        if self._server.seals(secret):
            self._seal = AESGCM(secret.seal_key(nonces))
        self.served = ServedReader(self._server.core, opening.serves, opening.site)
        with self._server.lock:
            self._server.core.readers.append(self.served)
        self.threads[1].start()
        if self._server.core.introduces:
            self._server.notify()

    def _body(self) -> memoryview:
        (size,) = LENGTH.unpack(take(self._link, LENGTH.size))
        if size > MAX_ASK_BYTES:
            raise ProtocolError(f"a request of {size} bytes, expected at most {MAX_ASK_BYTES}")
        return take(self._link, size)

    def _send(self) -> None:
        served = self.served
        assert served is not None, "it has said who it is"
        try:
            while not self._over:
                ask = self._jobs.get()
                if ask is not None:
                    self._send_all(served.answer(ask))
                self._send_all(served.news())
        except ConnectionError:
            # The reader is gone, or this server is closing.
            pass
        except OSError as error:
            if not self._over:
                log.warning("hung up on a reader of weights at %s: %s", served.reader or "no address", error)
        finally:
            self.close()

    def _send_all(self, out: Iterator[SendFrame | SendChunk[HeldVersion]]) -> None:
        while True:
            with self._server.lock:
                what = next(out, None)
            if what is None:
                return
            if isinstance(what, SendChunk):
                self._chunk(what.held, what.chunk)
            else:
                header = FRAME.pack(what.says, len(what.payload), *what.content, what.chunk)
                self._link.sendall(header + what.payload)

    def _chunk(self, held: HeldVersion, chunk: int) -> None:
        self._server.on_read(held)
        start, size = held.span(chunk)
        content = held.manifest.content
        if self._seal is not None:
            header = FRAME.pack(Says.CHUNK, size + SEAL_BYTES, *content, chunk)
            sealed = self._seal.encrypt(seal_nonce(self._sealed), held.bytes_of(chunk), header)
            self._sealed += 1
            self._link.sendall(header, socket.MSG_MORE)
            self._link.sendall(sealed)
        else:
            self._link.sendall(FRAME.pack(Says.CHUNK, size, *content, chunk), socket.MSG_MORE)
            end = start + size
            while start < end:
                sent = os.sendfile(self._link.fileno(), held.file.fileno(), start, end - start)
                if not sent:
                    raise OSError(f"{held.manifest.place} was cut short")
                start += sent
        with self._server.lock:
            self._server.traffic.chunks += 1
            self._server.traffic.sent_bytes += size
