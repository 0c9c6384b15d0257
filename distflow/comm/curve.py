"""Sockets that leave the machine: encrypted, open only to the run's key, and quick to recover from a cut link.

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

from distflow.comm.keys import Keys, NetworkListener
from distflow.errors import ProtocolError

Context = zmq.Context[zmq.Socket[bytes]]

CLIENT = "client"
"""Sender name of commands: they have the run's key, are in no roster, and may only ask for status, stacks and stop."""
KEY_HINT = "another run's key, or not a port of this run: every host needs the same <run_dir>/keys/run.key"
UNKNOWN_HINT = "the run's key is right, but the server does not know the client's own (yet): it comes with its address"
LOST_HINT = "not finished within {:g} s and is tried again: one of the two, or the link between them, is too busy"

IDLE_LINK_S = 1
"""On a connection without traffic the kernel asks the other one so often whether it is there (TCP keepalive).

ZeroMQ's own pings would do that, too, but end the process: 4.3.5 aborts when it pings a peer that closed its connection
while the receiver's queue was full (`Assertion failed: !_io_error`, libzmq issue 4364).
"""
DEAD_LINK_MS = 3000
"""After this long without an answer of the other kernel the connection is closed; ZeroMQ makes a new one.

Waiting for the old one would take as long again as the link was cut: retransmissions back off exponentially. What
counts is that bytes are acknowledged, not that answers come: a slow link is not a dead link. Since Linux 5.11 a process
that is stopped for longer than this is taken for one once its buffers are full: what ZeroMQ had queued for it is lost.
"""
CONNECT_MS = 1000
HANDSHAKE_MS = 5000
RECONNECT_MS = 100
RECONNECT_MAX_MS = 500
HANGS_UP = 2
"""Consecutive connections that the other end ends in the handshake and that count as a refusal, if they come faster
than handshakes time out; a single one may be a peer that just ended."""

_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"distflow"
_REQUEST_FRAMES = 9
_UNKNOWN = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_FAILED = _UNKNOWN | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_HUNG_UP = (errno.EPIPE, errno.ECONNRESET)


def leaves_machine(address: str) -> bool:
    """Whether a socket with this address needs the run's key."""
    return address.startswith("tcp://")


def tune(socket: zmq.Socket[bytes], address: str) -> None:
    """Notice a dead link within seconds and connect again as soon as it is healed."""
    options: dict[int, int] = {
        zmq.IPV6: int("[" in address),
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: IDLE_LINK_S,
        zmq.TCP_KEEPALIVE_INTVL: IDLE_LINK_S,
        zmq.TCP_MAXRT: DEAD_LINK_MS,
        zmq.CONNECT_TIMEOUT: CONNECT_MS,
        zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
        zmq.RECONNECT_IVL: RECONNECT_MS,
        zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MS,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)


def present_key(socket: zmq.Socket[bytes], keys: Keys, own: Keys | None = None) -> None:
    """Authenticate future connections of this socket with the run's key, or with `own`."""
    socket.curve_serverkey = keys.public
    socket.curve_publickey = (own or keys).public
    socket.curve_secretkey = (own or keys).secret


def bind_network(socket: zmq.Socket[bytes], addresses: Sequence[str]) -> str:
    """Listen on the first available address; returns it with its port. Raises ProtocolError that says what to do."""
    *former, address = addresses
    tune(socket, address)
    for known in former:
        try:
            socket.bind(known)
        except zmq.ZMQError:
            # Another process listens there by now.
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
    """The server's side of one ROUTER: requires the key, answers ZeroMQ's authentication requests, counts refusals.

    Peers with the run's key are authenticated as CLIENT, others by the name that `name_of` returns for their key. An
    unknown key is looked up again for `patience_s` seconds: the address of a new worker may still be on its way.
    At most one per context. Created, used and closed by one thread, which polls `questions`.
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
        """Read one authentication request."""
        self._parked.append((time.monotonic() + self._patience_s, self.questions.recv_multipart()))
        self.settle()

    def settle(self) -> None:
        """Answer the requests that can be answered by now."""
        now, parked, self._parked = time.monotonic(), self._parked, []
        for deadline, frames in parked:
            name = self._name(frames)
            if name is None and now < deadline:
                self._parked.append((deadline, frames))
                continue
            status, text = (b"400", b"not a key of this run") if name is None else (b"200", b"")
            # Route, delimiter, version and number of the request; ZeroMQ attaches the name to each message.
            self.questions.send_multipart([*frames[:4], status, text, (name or "").encode(), b""])

    def _name(self, frames: list[bytes]) -> str | None:
        if len(frames) != _REQUEST_FRAMES or frames[7] != b"CURVE":
            return None
        return CLIENT if frames[8] == self._run else self._name_of(frames[8])

    def refused(self) -> list[str]:
        """For each connection refused since the last call, why."""
        return [_hint(event) for event in _events(self._monitor)]

    def close(self) -> None:
        """Stop authenticating."""
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self.questions.close(linger=0)


class Watch:
    """The client's side of one connecting socket: whether the other end refuses it. Used by the socket's thread.

    A server that cannot read our first message, since the run's key is another one, only hangs up, and so does one that
    ends a handshake which takes too long. What tells them apart is how fast one hang-up follows the other.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.monitor = _monitor(socket, _FAILED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._hung_up = 0
        self._hung_up_after = self._looked_at = time.monotonic()
        """The first hang-up came after this moment, and what is found by the next look after that one."""
        self.lost = 0
        """Handshakes that took too long."""
        self.over = False
        """ZeroMQ has given up on this socket: another attempt needs a new one."""

    def refused(self) -> list[str]:
        """For each refusal by the other end since the last call, why."""
        found: list[str] = []
        looked_at, self._looked_at = self._looked_at, time.monotonic()
        for event in _events(self.monitor):
            if event["event"] & _FAILED:
                self.over = True
                found.append(_hint(event))
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._hung_up = 0
            elif event["value"] not in _HUNG_UP:
                self.lost += event["value"] == errno.EAGAIN
            elif self._hangs_up_quickly(looked_at):
                found.append(KEY_HINT)
        return found

    def _hangs_up_quickly(self, looked_at: float) -> bool:
        """Whether so many connections were ended in less time than it takes handshakes to time out."""
        if not self._hung_up:
            self._hung_up_after = looked_at
        self._hung_up += 1
        quickly = self._looked_at - self._hung_up_after < (self._hung_up - 1) * HANDSHAKE_MS / 1000
        self.lost += self._hung_up >= HANGS_UP and not quickly
        return quickly

    def close(self) -> None:
        """Stop watching; the socket stays open."""
        self._socket.disable_monitor()
        self.monitor.close(linger=0)


def _hint(event: dict[str, Any]) -> str:
    return UNKNOWN_HINT if event["event"] == _UNKNOWN else KEY_HINT


def _monitor(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    return socket.get_monitor_socket(events)


def _events(monitor: zmq.Socket[bytes]) -> list[dict[str, Any]]:
    """New events, a bounded number at a time."""
    found = []
    for _ in range(1000):
        if not monitor.poll(0):
            break
        found.append(dict(recv_monitor_message(monitor)))
    return found


def listener_for(address: str, listener: NetworkListener | None) -> NetworkListener:
    """The listener whose key is valid at `address`; raises ProtocolError if this worker has none."""
    if listener is None:
        raise ProtocolError(
            f"{address} is on another host, but this worker has neither a network address nor the run's key — its "
            f"document must have an `address`, and <run_dir>/keys/run.key must be there"
        )
    return listener
