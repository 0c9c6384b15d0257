"""Sockets that leave the machine: encrypted, open to the run's key alone, and quick to recover from a cut link.

Both ends prove that they hold the run's key (ZeroMQ's CURVE, RFC 26). A client with another key is refused: the server
cannot even read its first message, so it hangs up, and the client sees a connection that is made and lost at once.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from distflow.comm.keys import Keys, NetworkDoor
from distflow.errors import ProtocolError

Context = zmq.Context[zmq.Socket[bytes]]

CLIENT = "client"
"""Sender name of whoever has the run's key and is in no roster; it may ask for status, stacks and stop alone."""
CURE = "another run's key, or no door of this run: the same <run_dir>/keys/run.key must lie on all hosts"

HEARTBEAT_MS = 1000
"""A ping this often keeps unacknowledged bytes under way, by which the kernel notices a dead link."""
DEAD_LINK_MS = 3000
"""Bytes that the other machine's kernel did not acknowledge for so long end the connection; ZeroMQ makes a new one.

Waiting for the old one would take as long again as the link was cut: retransmissions back off exponentially. That bytes
are acknowledged, not that answers come, is what counts: neither a slow link nor a stopped process is a dead link.
"""
SILENT_PEER_MS = 30_000
"""No pong for so long: the other machine is there, its process is not."""
CONNECT_MS = 1000
HANDSHAKE_MS = 5000
RECONNECT_MS = 100
RECONNECT_MAX_MS = 500
HANGS_UP = 2
"""Connections lost in the handshake, one after another, that mean refusal; one may be a peer that just ended."""

_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"distflow"
_REQUEST_FRAMES = 9
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_HUNG_UP = (errno.EPIPE, errno.ECONNRESET)


def leaves_machine(address: str) -> bool:
    """Whether a socket with this address needs the run's key."""
    return address.startswith("tcp://")


def tune(socket: zmq.Socket[bytes], address: str) -> None:
    """Notice a dead link within seconds and connect again as soon as it is healed."""
    options: dict[int, int] = {
        zmq.IPV6: int("[" in address),
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 10,
        zmq.TCP_KEEPALIVE_INTVL: 5,
        zmq.TCP_KEEPALIVE_CNT: 3,
        zmq.TCP_MAXRT: DEAD_LINK_MS,
        zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
        zmq.HEARTBEAT_TIMEOUT: SILENT_PEER_MS,
        zmq.CONNECT_TIMEOUT: CONNECT_MS,
        zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
        zmq.RECONNECT_IVL: RECONNECT_MS,
        zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MS,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)


def present_key(socket: zmq.Socket[bytes], keys: Keys, own: Keys | None = None) -> None:
    """Connect to a door of the run from now on, with the run's key or with one's own."""
    socket.curve_serverkey = keys.public
    socket.curve_publickey = (own or keys).public
    socket.curve_secretkey = (own or keys).secret


def bind_network(socket: zmq.Socket[bytes], addresses: Sequence[str]) -> str:
    """Listen on the first of these that can be had; returns it with its port. Raises ProtocolError with the cure."""
    *former, address = addresses
    tune(socket, address)
    for known in former:
        try:
            socket.bind(known)
        except zmq.ZMQError:
            # Somebody else listens there by now.
            continue
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ProtocolError(
            f"cannot listen on {address}: {error.strerror} — a host's address must be one of its own, as `ip address` "
            f"shows them, and written as an IP address"
        ) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _nobody(key: bytes) -> str | None:
    return None


class Gate:
    """The server's side of one ROUTER: asks for the key, answers ZeroMQ's questions about it, counts who was refused.

    Holders of the run's key come in as CLIENT, others by the name that `name_of` gives for their key. A key that it
    does not know yet is asked about for `patience_s` seconds: word of a new worker may still be on its way.
    There can be one in a context. Made, used and closed by one thread, which polls `questions`.
    """

    def __init__(
        self,
        context: Context,
        router: zmq.Socket[bytes],
        keys: Keys,
        name_of: Callable[[bytes], str | None] = _nobody,
        patience_s: float = 0.0,
    ) -> None:
        self._run = bytes(z85.decode(keys.public))
        self._name_of = name_of
        self._patience_s = patience_s
        self._parked: list[tuple[float, list[bytes]]] = []
        self.questions: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.questions.bind(_ZAP)
        self._router = router
        router.curve_server = True
        router.curve_publickey = keys.public
        router.curve_secretkey = keys.secret
        router.zap_domain = _DOMAIN
        self._monitor = _monitor(router, _FAILED)

    def answer(self) -> None:
        """Take one question: may the client with this key come in, and by which name?"""
        self._parked.append((time.monotonic() + self._patience_s, self.questions.recv_multipart()))
        self.settle()

    def settle(self) -> None:
        """Answer what can be answered by now."""
        now, parked, self._parked = time.monotonic(), self._parked, []
        for deadline, frames in parked:
            name = self._name(frames)
            if name is None and now < deadline:
                self._parked.append((deadline, frames))
                continue
            status, text = (b"400", b"not a key of this run") if name is None else (b"200", b"")
            # Route, delimiter, version and number of the question; the user's name is told with each message.
            self.questions.send_multipart([*frames[:4], status, text, (name or "").encode(), b""])

    def _name(self, frames: list[bytes]) -> str | None:
        if len(frames) != _REQUEST_FRAMES or frames[7] != b"CURVE":
            return None
        return CLIENT if frames[8] == self._run else self._name_of(frames[8])

    def refused(self) -> int:
        """How many were refused since the last call."""
        return len(_events(self._monitor))

    def close(self) -> None:
        """Nobody is let in any more."""
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self.questions.close(linger=0)


class Watch:
    """The client's side of one connecting socket: whether the other end refuses it. Used by the socket's thread."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.monitor = _monitor(socket, _FAILED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._hung_up = 0
        self.over = False
        """ZeroMQ has given up on this socket: it takes a new one to try again."""

    def refused(self) -> int:
        """How often the other end was found to refuse us since the last call."""
        count = 0
        for event in _events(self.monitor):
            if event["event"] & _FAILED:
                self.over = True
                count += 1
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._hung_up = 0
            elif event["value"] in _HUNG_UP:
                self._hung_up += 1
                count += self._hung_up >= HANGS_UP
        return count

    def close(self) -> None:
        """Watch no more; the socket stays open."""
        self._socket.disable_monitor()
        self.monitor.close(linger=0)


def _monitor(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    return socket.get_monitor_socket(events)


def _events(monitor: zmq.Socket[bytes]) -> list[dict[str, Any]]:
    """What has happened; a bounded number at a time."""
    found = []
    for _ in range(1000):
        if not monitor.poll(0):
            break
        found.append(dict(recv_monitor_message(monitor)))
    return found


def door_of(address: str, door: NetworkDoor | None) -> NetworkDoor:
    """The door whose key opens `address`; raises ProtocolError when there is none."""
    if door is None:
        raise ProtocolError(
            f"{address} is on another host, but this worker has neither a network address nor the run's key — its "
            f"document must have an `address`, and <run_dir>/keys/run.key must be there"
        )
    return door
