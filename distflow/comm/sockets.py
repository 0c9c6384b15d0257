"""The sockets of one endpoint: a ROUTER for this machine, one for the network if needed, a DEALER to each peer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from distflow.comm.addresses import place_of
from distflow.comm.curve import (
    HANDSHAKE_MS,
    LOST_HINT,
    Gate,
    Watch,
    bind_network,
    leaves_machine,
    listener_for,
    present_key,
    tune,
)
from distflow.comm.keys import NetworkListener, public_hex
from distflow.comm.message import Buffer, size_of
from distflow.comm.outbox import SMALL_BYTES
from distflow.log import logger

SEND_LIMIT = 1_000
"""Messages queued for one peer before further ones are dropped; large ones are bounded before, in bytes."""
RECEIVE_LIMIT = 16
"""Unread messages of one peer; further ones wait at the peer, where they are bounded in bytes. Few messages are larger
than 4 MiB, so it is about the same bound. ZeroMQ bounds frames, and hands a message on when all of it has come: how
many frames it has is up to the sender, who has the run's key or is the same user on this machine."""
MOST_SOCKETS = 16_384
"""Of one endpoint, with three for a peer on another host; ZeroMQ's own limit, 1,023, would do for 340 of them."""
REPLY_LIMIT = 100
"""Replies queued for one client before further ones are dropped."""
REPLACED_LINGER_S = 1.0
"""Linger for messages to a peer's former address, or to a peer that is gone."""
INTRODUCED_S = 4.0
"""How long the connection of an unknown key is kept waiting; less than ZeroMQ waits for the handshake."""
REFUSED_PAUSE_S = 5.0
"""Pause before a peer that refused us is tried again: another process may listen there by then."""
# Plain numbers: arithmetic with ZeroMQ's enums costs more than the calls that they are for.
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
_NOW, _AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)

log = logger(__name__)


@dataclass(slots=True)
class _Dealer:
    address: str
    socket: zmq.Socket[bytes]
    watch: Watch | None

    def close(self, linger_s: float) -> None:
        if self.watch is not None:
            self.watch.close()
        self.socket.close(linger=int(linger_s * 1000))


def frames_from(router: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """The next message that a socket has received; nothing if there is none."""
    # Asking is cheaper than the exception of a socket that has nothing.
    if not int(router.getsockopt(_EVENTS)) & _READABLE:
        return []
    frames = [router.recv(_NOW, copy=False)]
    while frames[-1].more:
        frames.append(router.recv(_NOW, copy=False))
    return frames


def send_message(
    socket: zmq.Socket[bytes], route: Sequence[bytes], header: bytes, payload: Sequence[Buffer]
) -> list[zmq.MessageTracker]:
    """Send one message; large frames are shared rather than copied. Raises zmq.Again if the socket takes no more.

    Returns what tells when the socket has released it; nothing if it was copied.
    """
    frames: list[Any] = [*route, header, *payload]
    trackers: list[zmq.MessageTracker] = []
    if payload or len(header) >= SMALL_BYTES:
        # Released frame by frame in order, so that the last one tells.
        last = zmq.Frame(frames[-1], track=True, copy=False, copy_threshold=0)
        frames[-1], trackers = last, [last.tracker]
    for frame in frames[:-1]:
        socket.send(frame, _AND_MORE, copy=size_of(frame) < SMALL_BYTES)
    socket.send(frames[-1], _NOW)
    return trackers


class Sockets:
    """Created, used and closed only by the endpoint's thread. `routers` are polled for incoming messages."""

    def __init__(
        self,
        listener: NetworkListener | None,
        max_frame_bytes: int,
        name_of: Callable[[bytes], str | None] = lambda key: None,
    ) -> None:
        self._name_of = name_of
        self._max_frame_bytes = max_frame_bytes
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MOST_SOCKETS)
        self._listener = listener
        self._dealers: dict[str, _Dealer] = {}
        self._refusing: dict[str, float] = {}
        self._told: set[str] = set()
        self.routers = [self._router()]
        self.gate: Gate | None = None
        self.network_address: str | None = None

    def bind(self, address: str) -> None:
        """Listen; closes everything if that fails. Raises ZMQError, or ProtocolError for the network address."""
        try:
            self.routers[0].bind(address)
            if self._listener is not None:
                self.routers.append(self._router())
                self.gate = Gate(self._context, self.routers[1], self._listener.keys, self._name_of, INTRODUCED_S)
                place = bind_network(self.routers[1], self._listener.addresses)
                self.network_address = f"{place}#{public_hex(self._listener.own)}"
        except Exception:
            self.close(linger_s=0.0)
            raise

    def to(self, name: str, address: str) -> zmq.Socket[bytes] | None:
        """The socket to a peer, connected at first use; None while the peer cannot be reached."""
        dealer = self._dealers.get(name)
        if dealer is not None and dealer.address == address:
            return dealer.socket
        if dealer is not None:
            self._dealers.pop(name).close(REPLACED_LINGER_S)
        if not address or self._refuses(address):
            return None
        self._dealers[name] = self._connect(address)
        return self._dealers[name].socket

    def disconnect(self, name: str) -> None:
        """Close the socket to a peer that is gone; `to` makes a new one."""
        dealer = self._dealers.pop(name, None)
        if dealer is not None:
            dealer.close(REPLACED_LINGER_S)

    def look(self) -> int:
        """Count connections refused by us or by a peer since the last call; logs each address and reason once."""
        count = 0
        for name, dealer in list(self._dealers.items()):
            if dealer.watch is None:
                continue
            refused, place = dealer.watch.refused(), place_of(dealer.address)
            count += len(refused)
            for why in refused:
                self._tell(f"{name} at {place} refused the connection — {why}")
            if dealer.watch.lost:
                self._tell(f"the handshake with {name} at {place} was {LOST_HINT.format(HANDSHAKE_MS / 1000)}")
            if dealer.watch.over:
                self._dealers.pop(name).close(0.0)
                self._refusing[dealer.address] = time.monotonic() + REFUSED_PAUSE_S
        for why in [] if self.gate is None else self.gate.refused():
            count += 1
            self._tell(f"refused a client at {place_of(str(self.network_address))} — {why}")
        return count

    def close(self, linger_s: float) -> None:
        """Close everything; queued messages have `linger_s` seconds to be sent."""
        for dealer in self._dealers.values():
            dealer.close(linger_s)
        if self.gate is not None:
            self.gate.close()
        for router in self.routers:
            router.close(linger=int(linger_s * 1000))
        self._context.term()

    def _router(self) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.RCVHWM, RECEIVE_LIMIT)
        router.setsockopt(zmq.SNDHWM, REPLY_LIMIT)
        router.setsockopt(zmq.MAXMSGSIZE, self._max_frame_bytes)
        return router

    def _connect(self, address: str) -> _Dealer:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.SNDHWM, SEND_LIMIT)
        watch = None
        if leaves_machine(address):
            listener = listener_for(address, self._listener)
            tune(dealer, address)
            present_key(dealer, listener.keys, listener.own)
            watch = Watch(dealer)
        else:
            dealer.setsockopt(zmq.RECONNECT_IVL, 20)
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        dealer.connect(place_of(address))
        return _Dealer(address, dealer, watch)

    def _refuses(self, address: str) -> bool:
        return address in self._refusing and time.monotonic() < self._refusing[address]

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)
