"""Requests to workers or agents from a process outside the run: one after another, or in the background to several."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Self

import zmq

from distflow.comm.addresses import place_of
from distflow.comm.curve import CLIENT, Watch, leaves_machine, present_key, tune
from distflow.comm.keys import Keys
from distflow.comm.message import Buffer, Message, decode, decode_all, encode, header_of, pack, prefix_of
from distflow.comm.outbox import Delivery, Outbox, Posted, bundles
from distflow.comm.sockets import send_message
from distflow.errors import ProtocolError
from distflow.log import logger

TICK_S = 0.25
LINGER_S = 1.0

log = logger(__name__)


class RequestClient:
    """Sends one request after another over one connection, which is opened with the first.

    `keys` are the run's, for an address on another host. Use as a context, or `close` it.
    """

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        self._address = address
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connection: _Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def ask(self, kind: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Send one request and return the body of the reply, or None without a reply within `timeout_s` seconds.

        Raises ProtocolError if the keys are missing or refused.
        """
        frames = None
        try:
            if self._connection is None:
                self._connection = _connect(self._context, self._address, self._keys)
            self._connection.socket.send(encode(kind, CLIENT, 0, body))
            frames = _reply(self._connection, time.monotonic() + timeout_s)
        finally:
            if frames is None:
                # A late reply must not be mistaken for the reply to the next request.
                self._hang_up()
        return None if frames is None else dict(decode(frames[0]).body)

    def close(self) -> None:
        """Close the connection."""
        self._hang_up()
        self._context.term()

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


class BackgroundClient:
    """Sends requests to several workers by name, from any thread; replies come on a thread of its own.

    `on_reply(name, message)` runs on that thread for every reply, and `on_tick()` a few times a second; neither may
    block. An exception in either ends the thread and is handed to `on_fault`.
    """

    def __init__(
        self,
        keys: Keys | None,
        on_reply: Callable[[str, Message], None],
        on_tick: Callable[[], None],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._keys = keys
        self._on_reply, self._on_tick, self._on_fault = on_reply, on_tick, on_fault
        self._outbox = Outbox()
        self._addresses: dict[str, str] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="client", daemon=True)

    def start(self) -> None:
        """Begin to send and receive."""
        self._thread.start()

    def know(self, name: str, address: str) -> None:
        """Set the address of a worker; the connection to a former one is closed with the next request."""
        self._addresses = {**self._addresses, name: address}

    def send(self, to: str, kind: str, body: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> Delivery:
        """Queue a request. It may be lost, as any message: repeat it until the reply comes."""
        return self._outbox.put(to, [pack(kind, body, len(payload)), *payload])

    def close(self) -> None:
        """Send what is queued, for at most a second, and close all connections."""
        self._closing = True
        self._outbox.refuse()
        self._outbox.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * LINGER_S)

    def _serve(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        connections: dict[str, _Connection] = {}
        try:
            self._loop(context, connections)
        except Exception as error:
            self._on_fault(error)
        finally:
            self._outbox.close()
            for connection in connections.values():
                connection.close(LINGER_S)
            context.term()

    def _loop(self, context: zmq.Context[zmq.Socket[bytes]], connections: dict[str, _Connection]) -> None:
        next_tick = time.monotonic() + TICK_S
        while not (self._closing and not self._outbox):
            poller = zmq.Poller()
            poller.register(self._outbox.fileno(), zmq.POLLIN)
            for connection in connections.values():
                connection.register(poller)
            ready = dict(poller.poll(ceil(max(0.0, next_tick - time.monotonic()) * 1000)))
            if self._outbox.fileno() in ready:
                self._outbox.woken()
            for name, connection in connections.items():
                connection.check()
                if connection.socket in ready:
                    self._receive(name, connection.socket)
            if time.monotonic() >= next_tick:
                self._on_tick()
                self._outbox.sweep()
                next_tick = time.monotonic() + TICK_S
            self._flush(context, connections)

    def _receive(self, name: str, socket: zmq.Socket[bytes]) -> None:
        for _ in range(100):
            try:
                header, *payload = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            for message in decode_all(header.buffer, [frame.buffer for frame in payload]):
                self._on_reply(name, message)

    def _flush(self, context: zmq.Context[zmq.Socket[bytes]], connections: dict[str, _Connection]) -> None:
        for bundle in bundles(self._outbox.take()):
            name = str(bundle[0].to)
            address = self._addresses.get(name, "")
            known = connections.get(name)
            if known is not None and known.address != address:
                connections.pop(name).close()
            if name not in connections and address:
                connections[name] = _connect(context, address, self._keys)
            _send(connections[name].socket if name in connections else None, bundle)
            self._outbox.handed_over(bundle)


def _send(socket: zmq.Socket[bytes] | None, bundle: Sequence[Posted]) -> None:
    header = header_of(prefix_of(CLIENT, 0), [posted.frames[0] for posted in bundle])
    try:
        if socket is None:
            raise zmq.Again
        # What the other end has not taken yet counts as under way, so that there is a bound to it.
        trackers = send_message(socket, [], header, [frame for posted in bundle for frame in posted.frames[1:]])
    except zmq.Again:
        for posted in bundle:
            posted.delivery.drop()
        return
    for posted in bundle:
        posted.delivery.hand_over(trackers)


def ask(
    address: str, kind: str, body: Mapping[str, Any], timeout_s: float, keys: Keys | None = None
) -> dict[str, Any] | None:
    """A single request; see `RequestClient.ask`."""
    with RequestClient(address, keys) as client:
        return client.ask(kind, body, timeout_s)


@dataclass(frozen=True, slots=True)
class _Connection:
    """One DEALER, and what watches it where it leaves this machine."""

    address: str
    socket: zmq.Socket[bytes]
    watch: Watch | None

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self.socket, zmq.POLLIN)
        if self.watch is not None:
            poller.register(self.watch.monitor, zmq.POLLIN)

    def check(self) -> None:
        """Raise ProtocolError if the other end refuses this connection."""
        if self.watch is not None and (why := self.watch.refused()):
            raise ProtocolError(f"{place_of(self.address)} refused the connection — {why[0]}")

    def close(self, linger_s: float = 0.0) -> None:
        if self.watch is not None:
            self.watch.close()
        self.socket.close(linger=int(linger_s * 1000))


def _connect(context: zmq.Context[zmq.Socket[bytes]], address: str, keys: Keys | None) -> _Connection:
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    watch = None
    if leaves_machine(address):
        if keys is None:
            socket.close(linger=0)
            raise ProtocolError(
                f"{place_of(address)} cannot be asked without the run's key — pass the keys of <run_dir>/keys/run.key"
            )
        tune(socket, address)
        present_key(socket, keys)
        watch = Watch(socket)
    socket.connect(place_of(address))
    return _Connection(address, socket, watch)


def _reply(connection: _Connection, deadline: float) -> list[bytes] | None:
    poller = zmq.Poller()
    connection.register(poller)
    while (left := deadline - time.monotonic()) > 0:
        ready = dict(poller.poll(max(1, int(left * 1000))))
        if connection.socket in ready:
            return connection.socket.recv_multipart()
        connection.check()
    return None
