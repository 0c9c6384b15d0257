"""Serves chunks of weights from shared segments of this host: a publisher's own, or what a reader here has fetched.

One thread accepts connections; each connection has a thread that receives requests and one that sends, by `sendfile`
straight from the segment where chunks are not encrypted. A slow reader delays nobody else.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from distflow.errors import ProtocolError
from distflow.log import logger
from distflow.weights.swarm.held_version import HeldVersion
from distflow.weights.swarm.sockets import HANDSHAKE_S, Refused, address_of, hang_up, listen, receive_for, take, welcome
from distflow.weights.swarm_messages import (
    FRAME,
    LENGTH,
    MAX_ASK_BYTES,
    MOST_TOLD,
    SEAL_BYTES,
    ChunkAsk,
    Content,
    Opening,
    Says,
    Secret,
    SwarmPlace,
    packed,
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
MOST_WAITING = 256
"""Requests of one connection that have not been answered; a reader asks for a window of chunks at a time."""
MOST_HELD = 8
"""Versions that are served at a time; who holds deltas between them forgets these itself."""

log = logger(__name__)


@dataclass(slots=True)
class ServerTraffic:
    """What a server has sent so far, and whom it has refused."""

    chunks: int = 0
    sent_bytes: int = 0
    gone: int = 0
    refused: int = 0


class ChunkServer:
    """Listens on `host` from the start; raises ProtocolError if it cannot.

    Holders of a token that `admit` was told are let in. A publisher's server tells its readers of each other
    (`introduces`). `on_read` is called when a chunk is about to be sent.
    """

    def __init__(
        self, host: str, *, introduces: bool, on_read: Callable[[HeldVersion], None] = lambda held: None
    ) -> None:
        self.traffic = ServerTraffic()
        self.introduces = introduces
        self.on_read = on_read
        self.lock = threading.Lock()
        self._held: dict[tuple[str, Content], HeldVersion] = {}
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
            self._held[held.manifest.model, held.manifest.content] = held
            whole = sorted((key for key in self._held if key[1].base < 0), key=lambda key: key[1])
            for key in whole[:-MOST_HELD]:
                del self._held[key]
        self.tell()

    def forget(self, held: HeldVersion) -> None:
        """Serve a version no more, nor what was asked for of it before."""
        held.over = True
        with self.lock:
            if self._held.get((held.manifest.model, held.manifest.content)) is held:
                del self._held[held.manifest.model, held.manifest.content]

    def forget_terms_before(self, term: int) -> None:
        """Serve no version of earlier terms any more: their segments have no names, only who maps them keeps them."""
        with self.lock:
            self._held = {key: held for key, held in self._held.items() if held.manifest.version.term >= term}

    def find(self, ask: ChunkAsk) -> HeldVersion | None:
        """What is asked for, if it is held."""
        with self.lock:
            return self._held.get((ask.model, ask.content))

    def tell(self) -> None:
        """There is something new: connections tell their readers."""
        for connection in list(self._connections):
            connection.wake()

    def expect(self, held: HeldVersion, counts: Mapping[str, int]) -> None:
        """More of a version is on its way to here: `counts` are the bytes that readers have received, by address."""
        held.coming = counts
        self.tell()

    def seals(self, secret: Secret) -> bool:
        """Whether what is sent to holders of this secret is encrypted."""
        return secret.name in self._sealed

    def secrets(self) -> dict[bytes, Secret]:
        """Those that are let in, by name."""
        with self.lock:
            return dict(self._known)

    def present(self, site: str | None = None) -> set[str]:
        """The readers of a site (None: of all) that are connected, by the addresses at which they serve."""
        connections = [one for one in list(self._connections) if one.reader]
        return {one.reader for one in connections if site is None or one.site == site}

    def told(self) -> dict[str, Any]:
        """What was sent so far, and how many readers there are, for the status."""
        return {**asdict(self.traffic), "readers": len(self.present())}

    def left(self, connection: _Connection) -> None:
        """A connection is over."""
        with self.lock:
            if connection in self._connections:
                self._connections.remove(connection)
        if self.introduces:
            self.tell()

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
        self._held.clear()

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
        self.reader = ""
        self.site = ""
        self.known = False
        """Whether it knows a token."""
        self._server = server
        self._link = link
        self._jobs: queue.SimpleQueue[ChunkAsk | None] = queue.SimpleQueue()
        self._over = False
        self._seal: AESGCM | None = None
        self._sealed = 0
        self._follows: ChunkAsk | None = None
        self._told = 0
        self._told_coming: Mapping[str, int] = {}
        self._peers: set[str] = set()
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
        # In this order: whoever sees the reader sees its site.
        self.site = opening.site
        self.reader = opening.serves
        self.threads[1].start()
        if self._server.introduces:
            self._server.tell()

    def _body(self) -> memoryview:
        (size,) = LENGTH.unpack(take(self._link, LENGTH.size))
        if size > MAX_ASK_BYTES:
            raise ProtocolError(f"a request of {size} bytes, expected at most {MAX_ASK_BYTES}")
        return take(self._link, size)

    def _send(self) -> None:
        try:
            while not self._over:
                job = self._jobs.get()
                if job is not None:
                    self._answer(job)
                self._tell_news()
        except ConnectionError:
            # The reader is gone, or this server is closing.
            pass
        except OSError as error:
            if not self._over:
                log.warning("hung up on a reader of weights at %s: %s", self.reader or "no address", error)
        finally:
            self.close()

    def _answer(self, ask: ChunkAsk) -> None:
        held = self._server.find(ask)
        if ask.what == "follow":
            self._follows, self._told, self._told_coming = ask, 0, {}
        elif ask.what == "deal":
            self._deal(ask, held)
        elif ask.what == "made":
            if held is not None and held.dealer is not None:
                with self._server.lock:
                    held.dealer.made(self.reader, self.site)
        else:
            for chunk in ask.chunks:
                self._give(ask, held, chunk)

    def _deal(self, ask: ChunkAsk, held: HeldVersion | None) -> None:
        if held is None or held.dealer is None:
            self._frame(Says.GONE, ask)
            return
        with self._server.lock:
            chunks = held.dealer.deal(self.reader, self.site, ask.count)
        if chunks:
            self._frame(Says.GIVEN, ask, 0, packed(chunks))
        for chunk in chunks:
            self._chunk(ask, held, chunk)
        if len(chunks) < ask.count:
            self._frame(Says.DEALT, ask)

    def _give(self, ask: ChunkAsk, held: HeldVersion | None, chunk: int) -> None:
        if held is not None and held.dealer is not None and held.has(chunk):
            site, again = self.site, ask.what == "again"
            present = self._server.present(site)
            with self._server.lock:
                gives = held.dealer.gives(self.reader, site, chunk, present, again=again)
            if not gives:
                self._frame(Says.ELSEWHERE, ask, chunk)
                return
        self._chunk(ask, held, chunk)

    def _chunk(self, ask: ChunkAsk, held: HeldVersion | None, chunk: int) -> None:
        if held is None or not held.has(chunk):
            self._server.traffic.gone += 1
            self._frame(Says.GONE, ask, chunk)
            return
        self._server.on_read(held)
        start, size = held.span(chunk)
        if self._seal is not None:
            header = FRAME.pack(Says.CHUNK, size + SEAL_BYTES, *ask.content, chunk)
            sealed = self._seal.encrypt(seal_nonce(self._sealed), held.bytes_of(chunk), header)
            self._sealed += 1
            self._link.sendall(header, socket.MSG_MORE)
            self._link.sendall(sealed)
        else:
            self._link.sendall(FRAME.pack(Says.CHUNK, size, *ask.content, chunk), socket.MSG_MORE)
            end = start + size
            while start < end:
                sent = os.sendfile(self._link.fileno(), held.file.fileno(), start, end - start)
                if not sent:
                    raise OSError(f"{held.manifest.place} was cut short")
                start += sent
        with self._server.lock:
            self._server.traffic.chunks += 1
            self._server.traffic.sent_bytes += size

    def _tell_news(self) -> None:
        if self._server.introduces and (peers := self._server.present(self.site)) != self._peers:
            self._peers = peers
            self._frame(Says.PEERS, None, 0, msgspec.msgpack.encode(sorted(peers)))
        ask = self._follows
        held = None if ask is None else self._server.find(ask)
        if ask is None or held is None:
            return
        while new := held.order[self._told : self._told + MOST_TOLD]:
            self._told += len(new)
            self._frame(Says.HAVE, ask, 0, packed(new))
        if held.coming != self._told_coming:
            self._told_coming = held.coming
            self._frame(Says.COMING, ask, 0, msgspec.msgpack.encode(self._told_coming))

    def _frame(self, says: Says, ask: ChunkAsk | None, chunk: int = 0, payload: bytes = b"") -> None:
        content = Content(0, 0) if ask is None else ask.content
        self._link.sendall(FRAME.pack(says, len(payload), *content, chunk) + payload)
