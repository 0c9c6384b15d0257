"""The sockets of one endpoint: a ROUTER on this machine, one more if there is a network door, a DEALER to each peer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from distflow.comm.addresses import place_of
from distflow.comm.curve import CURE, Gate, Watch, bind_network, door_of, leaves_machine, present_key, tune
from distflow.comm.keys import NetworkDoor
from distflow.log import logger

SEND_LIMIT = 1_000
"""Messages queued for one peer before further ones are dropped; large ones are bounded before, in bytes."""
RECEIVE_LIMIT = 16
"""Messages of one peer that lie here unread; the next ones wait with the peer, where they are bounded in bytes. Few
messages are larger than 4 MiB, so it is about the same bound."""
REPLY_LIMIT = 100
"""Answers that wait for one client before further ones are dropped."""
REPLACED_LINGER_S = 1.0
"""For what is on its way to a peer's former address, or to one that is gone."""
INTRODUCED_S = 4.0
"""How long a peer whose key is not known here waits for word of it; less than ZeroMQ waits for the handshake."""
REFUSED_PAUSE_S = 5.0
"""Before a peer that refused us is tried again: something else may listen there by then."""

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


class Sockets:
    """Made, used and closed by the endpoint's thread alone. `routers` are asked first for what came in."""

    def __init__(
        self,
        door: NetworkDoor | None,
        max_frame_bytes: int,
        name_of: Callable[[bytes], str | None] = lambda key: None,
    ) -> None:
        self._name_of = name_of
        self._max_frame_bytes = max_frame_bytes
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._door = door
        self._dealers: dict[str, _Dealer] = {}
        self._refusing: dict[str, float] = {}
        self._told: set[str] = set()
        self.routers = [self._router()]
        self.gate: Gate | None = None
        self.network_address: str | None = None

    def bind(self, address: str) -> None:
        """Listen; closes everything if that fails. Raises ZMQError, or ProtocolError for the network's side."""
        try:
            self.routers[0].bind(address)
            if self._door is not None:
                self.routers.append(self._router())
                self.gate = Gate(self._context, self.routers[1], self._door.keys, self._name_of, INTRODUCED_S)
                place = bind_network(self.routers[1], self._door.addresses)
                self.network_address = f"{place}#{bytes(z85.decode(self._door.own.public)).hex()}"
        except Exception:
            self.close(linger_s=0.0)
            raise

    def to(self, name: str, address: str) -> zmq.Socket[bytes] | None:
        """The socket that leads to a peer, connected at its first use; None while there is no way to it."""
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
        """Close the socket that leads to a peer which is gone; `to` makes a new one."""
        dealer = self._dealers.pop(name, None)
        if dealer is not None:
            dealer.close(REPLACED_LINGER_S)

    def look(self) -> int:
        """Note who refused us or was refused; returns how many since the last call. Says each address once."""
        count = 0
        for name, dealer in list(self._dealers.items()):
            if dealer.watch is None or not (refused := dealer.watch.refused()):
                continue
            count += refused
            self._tell(dealer.address, f"{name} at {place_of(dealer.address)} does not let us in — {CURE}")
            if dealer.watch.over:
                self._dealers.pop(name).close(0.0)
                self._refusing[dealer.address] = time.monotonic() + REFUSED_PAUSE_S
        if self.gate is not None and (refused := self.gate.refused()):
            count += refused
            self._tell(str(self.network_address), f"refused a client at {place_of(str(self.network_address))} — {CURE}")
        return count

    def close(self, linger_s: float) -> None:
        """Close everything; what is already queued still has `linger_s` seconds to leave."""
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
            door = door_of(address, self._door)
            tune(dealer, address)
            present_key(dealer, door.keys, door.own)
            watch = Watch(dealer)
        else:
            dealer.setsockopt(zmq.RECONNECT_IVL, 20)
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        dealer.connect(place_of(address))
        return _Dealer(address, dealer, watch)

    def _refuses(self, address: str) -> bool:
        return address in self._refusing and time.monotonic() < self._refusing[address]

    def _tell(self, address: str, text: str) -> None:
        if address not in self._told:
            self._told.add(address)
            log.warning("%s", text)
