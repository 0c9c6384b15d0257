"""TCP connections between holders and readers of weights: listening, connecting, proving that one knows the token."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import time
from collections.abc import Mapping

from distflow.comm.curve import DEAD_LINK_MS
from distflow.errors import ProtocolError
from distflow.weights.swarm_messages import GREETING, NONCE_BYTES, PROOF_BYTES, Secret, target_of

CONNECT_S = 1.0
HANDSHAKE_S = 5.0
"""For all of a handshake, however slowly it comes."""
_NAME_BYTES = 8
_USER_TIMEOUT = 18
"""TCP_USER_TIMEOUT of Linux; Python 3.11 knows it by name only where it was built so."""


class Refused(ConnectionError):
    """The other end does not know the token, or hung up because this end does not."""


def listen(host: str) -> socket.socket:
    """Listen on a port that the system chooses. Raises ProtocolError that says what to do."""
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    try:
        return socket.create_server((bare, 0), family=family, backlog=128)
    except OSError as error:
        shown = f"[{bare}]" if family == socket.AF_INET6 else bare
        raise ProtocolError(
            f"cannot listen on tcp://{shown}:*: {error.strerror} — a host's address must be one of its own, as "
            f"`ip address` shows them, and written as an IP address"
        ) from error


def address_of(listener: socket.socket) -> str:
    """`tcp://HOST:PORT` of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def tune(link: socket.socket) -> None:
    """Notice a dead link within seconds."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, DEAD_LINK_MS)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        link.setsockopt(socket.IPPROTO_TCP, option, value)


def receive_for(link: socket.socket, seconds: float) -> None:
    """Wait so long for bytes (0: for ever). Unlike a Python time-out it leaves sending, and `sendfile`, blocking."""
    whole = int(seconds)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, int((seconds - whole) * 1e6)))


def receive(link: socket.socket, into: memoryview, until: float | None = None) -> None:
    """Fill `into`; raises ConnectionError at the end of the stream, BlockingIOError after the time to wait.

    `until`: by then all of it has to be there (time.monotonic()); without, each time to wait begins with the last byte.
    """
    at = 0
    while at < len(into):
        if until is not None:
            # 0 would be for ever.
            receive_for(link, max(0.001, until - time.monotonic()))
        found = link.recv_into(into[at:], 0, socket.MSG_WAITALL)
        if not found:
            raise ConnectionResetError("the other end hung up")
        at += found


def take(link: socket.socket, size: int, until: float | None = None) -> memoryview:
    """Receive `size` bytes, as `receive`."""
    found = memoryview(bytearray(size))
    receive(link, found, until)
    return found


def connect(address: str, secret: Secret) -> tuple[socket.socket, bytes]:
    """Connect as a reader; returns the connection and its nonces. Raises OSError, Refused if it is the wrong token."""
    link = socket.create_connection(target_of(address), CONNECT_S)
    try:
        link.settimeout(None)
        tune(link)
        until = time.monotonic() + HANDSHAKE_S
        greeting = take(link, len(GREETING) + NONCE_BYTES, until)
        if greeting[: len(GREETING)] != GREETING:
            raise Refused("no server of weights listens there")
        own = secrets.token_bytes(NONCE_BYTES)
        nonces = bytes(greeting[len(GREETING) :]) + own
        link.sendall(secret.name + own + secret.proof("reader", nonces))
        try:
            proof = take(link, PROOF_BYTES, until)
        except ConnectionError as error:
            raise Refused("it hung up in the handshake") from error
        if not secrets.compare_digest(proof, secret.proof("holder", nonces)):
            raise Refused("it does not know the token")
    except BaseException:
        link.close()
        raise
    return link, nonces


def welcome(link: socket.socket, known: Mapping[bytes, Secret]) -> tuple[Secret, bytes]:
    """A reader connects; returns its secret, one of those `known` by name, and the nonces.

    Raises OSError, Refused.
    """
    tune(link)
    until = time.monotonic() + HANDSHAKE_S
    own = secrets.token_bytes(NONCE_BYTES)
    link.sendall(GREETING + own)
    answer = take(link, _NAME_BYTES + NONCE_BYTES + PROOF_BYTES, until)
    name, nonce, proof = answer[:8], answer[8 : 8 + NONCE_BYTES], answer[8 + NONCE_BYTES :]
    nonces = own + bytes(nonce)
    secret = known.get(bytes(name))
    if secret is None or not secrets.compare_digest(proof, secret.proof("reader", nonces)):
        raise Refused("the reader does not know the token")
    link.sendall(secret.proof("holder", nonces))
    return secret, nonces


def hang_up(link: socket.socket) -> None:
    """End a connection, or listening, also for threads that wait for it."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
