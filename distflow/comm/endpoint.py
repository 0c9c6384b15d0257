"""The address of a worker: a ROUTER socket that peers connect to, and a DEALER to each peer it sends to.

Peers on the same machine connect by a Unix socket; in a run on many hosts a second ROUTER accepts those on other hosts,
encrypted and only with a key of the run.

One thread owns all sockets. Other threads pass messages to it through the outbox and never block: a peer that is gone
or slow only fills its own bounded queue (`outbox.py`), where the newest messages are dropped and counted. Every
protocol above this layer expects loss and repeats what matters. All that waits for a peer when the thread gets to it
travels as one message (`message.py`). A message to oneself is handed over as it is, and payloads for a peer on the same
machine lie in shared memory: see `lanes.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

import zmq

from distflow.comm.compressed_lane import CompressedLane, unpacked
from distflow.comm.keys import NetworkListener
from distflow.comm.known_peers import KnownPeers
from distflow.comm.lanes import TO_MYSELF, InProcessLane, Lane, SharedMemoryLane, SocketLane
from distflow.comm.message import MAX_HEADER_BYTES, Body, Buffer, Message, decode_all, header_of, prefix_of
from distflow.comm.outbox import Delivery, Outbox, Posted, bundles, delivered
from distflow.comm.shared_lane import KINDS, SharedLane
from distflow.comm.shared_sending import SegmentUse
from distflow.comm.sockets import Sockets, frames_from, send_message
from distflow.comm.traffic import INPROC, Traffic
from distflow.errors import ProtocolError
from distflow.log import logger

BIND_S = 30.0
"""Time for a thread to start and bind; far more than a loaded machine needs."""

log = logger(__name__)


class Endpoint:
    """Send to peers by name; receive on a thread of its own.

    `on_message` runs on that thread for every message and must not block, `on_handled` once after all that came
    together, `on_tick` every `tick_s` seconds. An exception in any of them ends the thread and is handed to `on_fault`:
    nothing is sent or received any more, so it must be fatal for the worker. With a `listener` it listens on the
    network too: peers whose address begins with tcp:// are on other hosts. A peer with the address "" has not said
    where it listens: messages to it are dropped and counted. `shared_memory`: payloads to peers on this machine lie in
    shared memory, and take no sockets.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        roster: Mapping[str, str],
        *,
        tick_s: float = 0.25,
        listener: NetworkListener | None = None,
        max_frame_bytes: int = MAX_HEADER_BYTES,
        shared_memory: bool = False,
    ) -> None:
        if name not in roster:
            raise ProtocolError(f"{name!r} is not in the roster, which names {sorted(roster)}")
        self.name = name
        self.incarnation = incarnation
        self._prefix = prefix_of(name, incarnation)
        self._known = KnownPeers(name, listener, roster)
        self.network_address: str | None = None
        """Where peers on other hosts reach this endpoint, once it has started; None without a listener."""
        self._listener = listener
        self._max_frame_bytes = max_frame_bytes
        self.traffic = Traffic()
        self._tick_s = tick_s
        self._outbox = Outbox()
        self._shared = SharedLane(shared_memory, self._tell, self._outbox.nudge, max_frame_bytes, self._neighbours)
        self._to_myself = InProcessLane(self._outbox, name, incarnation)
        self._over_sockets = SocketLane(self._outbox, name, max_frame_bytes)
        self._through_memory = SharedMemoryLane(self._outbox, self._shared, self._over_sockets)
        self._compressed = CompressedLane(self._outbox, max_frame_bytes)
        self.afar: Callable[[str], bool] = lambda name: False  # Whether what a peer is sent is compressed.
        self._closing = False
        self._linger_s = 1.0
        self._thread: threading.Thread | None = None
        self._on_message: Callable[[Message], None] = lambda message: None
        self._on_tick: Callable[[], None] = lambda: None
        self._on_handled: Callable[[], None] = lambda: None
        self._handled = False
        """Whether there were messages since `on_handled`."""
        self._on_fault: Callable[[BaseException], None] = self._say
        self.know_all(roster)

    @property
    def roster(self) -> Mapping[str, str]:
        """Addresses of the known peers, by name: another mapping when one changes."""
        return self._known.addresses

    @property
    def segments(self) -> dict[str, SegmentUse]:
        """What went through shared memory, by peer."""
        return self._shared.uses()

    @property
    def closing(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    def start(
        self,
        on_message: Callable[[Message], None],
        on_tick: Callable[[], None] = lambda: None,
        on_fault: Callable[[BaseException], None] | None = None,
        on_handled: Callable[[], None] = lambda: None,
    ) -> None:
        """Bind and begin; raises ProtocolError with the address when it cannot be bound.

        Without `on_fault` a fault is only logged.
        """
        self._on_message, self._on_tick, self._on_fault = on_message, on_tick, on_fault or self._say
        self._on_handled = on_handled
        bound = threading.Event()
        failed: list[Exception] = []
        self._thread = threading.Thread(target=self._serve, args=(bound, failed), name="endpoint", daemon=True)
        self._thread.start()
        if not bound.wait(BIND_S):
            self._closing = True
            raise ProtocolError(f"cannot listen on {self.roster[self.name]}: not bound within {BIND_S:g} s")
        if failed and isinstance(failed[0], ProtocolError):
            raise failed[0]
        if failed:
            raise ProtocolError(f"cannot listen on {self.roster[self.name]}: {failed[0]}") from failed[0]

    def know(self, name: str, address: str) -> None:
        """Set the address of `name` ("": not known yet). May be called by any thread.

        An address on another host includes the peer's key: messages with this key are accepted only from this peer.
        Raises ProtocolError for a malformed address, for one on another host when this endpoint has no listener, and
        for the key of another peer.
        """
        self.know_all({name: address})

    def know_all(self, addresses: Mapping[str, str]) -> None:
        """`know` for many at once, which costs about as much as a single one."""
        self._known.know(addresses)

    def learn(self, name: str, address: str) -> bool:
        """`know` for addresses from another host. A bad address is logged once and ignored; returns False then."""
        return bool(self.learn_all({name: address}))

    def learn_all(self, addresses: Mapping[str, str]) -> set[str]:
        """`learn` for many at once; returns the names of those that were good."""
        return self._known.learn(addresses)

    def send(self, to: str, kind: str, body: Body, payload: Sequence[Buffer] = ()) -> Delivery:
        """Queue a message for a peer of the roster; the returned Delivery says whether it has left this process.

        Nobody may change the body or the payload afterwards: a message to oneself is the very same objects.
        Raises KeyError for a name that is not in the roster, and ProtocolError for a header that no receiver accepts.
        """
        if to not in self.roster:
            raise KeyError(f"{to!r} is not in the roster, which names {sorted(self.roster)}")
        if to != self.name:
            self._over_sockets.check(payload)
        for lane in self._lanes_to(to):
            delivery = lane.send(to, kind, body, payload)
            if delivery is not None:
                break
        else:
            raise AssertionError(f"no lane to {to} took a {kind!r} message; the sockets take all")
        return self._counted(delivery)

    def reply(self, request: Message, body: Body, payload: Sequence[Buffer] = ()) -> None:
        """Reply over the connection of the request (its sender need not be in the roster)."""
        assert request.route is not None, "only received messages can be replied to"
        kind = f"{request.kind}.reply"
        if request.route == TO_MYSELF:
            self._counted(self._to_myself.send(self.name, kind, body, payload))
        else:
            self._counted(self._over_sockets.send(request.route, kind, body, payload))

    def disconnect(self, name: str) -> None:
        """Close the connection to a peer that is gone and drop its queue. The next message opens a new one."""
        self._counted(self._outbox.put(name, []))

    def close(self, linger_s: float = 1.0) -> None:
        """Flush queued messages for at most `linger_s` seconds and close everything. Later messages are dropped.

        May be called by any thread, and more than once.
        """
        self._linger_s = linger_s
        self._outbox.refuse()
        self._closing = True
        self._outbox.wake()
        thread = self._thread
        if thread is None:
            self._outbox.close()
            self._shared.close()
        elif thread is not threading.current_thread():
            thread.join(timeout=linger_s + 2.0)
            if thread.is_alive():
                log.warning("endpoint of %s did not close within %.1f s", self.name, linger_s + 2.0)

    def _lanes_to(self, to: str) -> Sequence[Lane]:
        """In the order in which they are tried."""
        if to == self.name:
            return (self._to_myself,)
        if self.roster[to].startswith("ipc://"):
            return self._through_memory, self._over_sockets
        return (self._compressed, self._over_sockets) if self.afar(to) else (self._over_sockets,)

    def _neighbours(self) -> int:
        """Peers on this machine, as far as they are known."""
        return sum([address.startswith("ipc://") for address in self.roster.values()]) - 1

    def _counted(self, delivery: Delivery) -> Delivery:
        if delivery.dropped:
            self.traffic.count_dropped(1)
        return delivery

    def _tell(self, to: str, kind: str, body: Mapping[str, Any]) -> Delivery:
        """Send a message of the shared-memory lane."""
        return self._counted(self._over_sockets.send(to, kind, body)) if to in self.roster else delivered()

    # -- the thread that owns the sockets

    def _serve(self, bound: threading.Event, failed: list[Exception]) -> None:
        try:
            sockets = Sockets(self._listener, self._max_frame_bytes, lambda key: self._known.names.get(key))
            sockets.bind(self.roster[self.name])
            self.network_address = sockets.network_address
        except Exception as error:
            # Raised by `start`, on the thread that called it.
            failed.append(error)
            self._outbox.close()
            return
        finally:
            bound.set()
        try:
            self._loop(sockets)
        except Exception as error:
            self._on_fault(error)
        finally:
            # Messages of other threads are dropped from here on; the outbox's descriptors are closed.
            self._outbox.close()
            self._shared.close()
            sockets.close(self._linger_s)

    def _say(self, error: BaseException) -> None:
        log.error("endpoint of %s ended", self.name, exc_info=error)

    def _loop(self, sockets: Sockets) -> None:
        poller = zmq.Poller()
        gate = sockets.gate
        for socket in [*sockets.routers, *([] if gate is None else [gate.questions])]:
            poller.register(socket, zmq.POLLIN)
        wake = self._outbox.fileno()
        poller.register(wake, zmq.POLLIN)
        self._outbox.sent_by_this_thread()
        next_tick = time.monotonic() + self._tick_s
        while True:
            wait_s = 0.0 if self._outbox else max(0.0, next_tick - time.monotonic())
            ready = dict(poller.poll(ceil(wait_s * 1000)))
            if wake in ready:
                self._outbox.woken()
            if gate is not None and gate.questions in ready:
                gate.answer()
            for index, router in enumerate(sockets.routers):
                if router in ready:
                    self._receive(index, router)
            if gate is not None:
                gate.settle()
            if time.monotonic() >= next_tick:
                self._on_tick()
                self._outbox.sweep()
                self.traffic.refused += sockets.look()
                next_tick = time.monotonic() + self._tick_s
            self._shared.flush()
            self._flush(sockets)
            if self._closing and not self._outbox:
                return

    def _receive(self, index: int, router: zmq.Socket[bytes]) -> None:
        """Read a bounded number of messages, so that sending and ticking get their turn."""
        for _ in range(100):
            frames = frames_from(router)
            if not frames:
                return
            try:
                messages = self._opened(index, frames)
            except ProtocolError as error:
                # A malformed message from outside must not end the worker: log it, drop it, go on.
                log.warning("%s dropped a message: %s", self.name, error)
                self.traffic.count_dropped(1)
                continue
            self.traffic.received += len(messages)
            self.traffic.bytes_received += sum(map(len, frames))
            for message in messages:
                self._pass_on(message)

    def _pass_on(self, received: Message) -> None:
        try:
            message = unpacked(received, self._max_frame_bytes) if received.sizes else self._shared.receive(received)
        except ProtocolError as error:
            log.warning("%s dropped a %r message of %s: %s", self.name, received.kind, received.sender, error)
            self.traffic.count_dropped(1)
            return
        if message is not None:
            if message is not received:
                self.traffic.bytes_received += sum(map(len, message.payload))
            self._hand_on(message)

    def _hand_on(self, message: Message) -> None:
        self._handled = True
        self._on_message(message)

    def _opened(self, index: int, frames: Sequence[zmq.Frame]) -> list[Message]:
        """The messages in what a router has received; raises ProtocolError if it is malformed or forged."""
        if len(frames) < 2:
            raise ProtocolError("a message without a header")
        # The first byte of a route is the number of the router that received the message.
        route = bytes([index]) + frames[0].bytes
        messages = decode_all(frames[1].buffer, [frame.buffer for frame in frames[2:]], route)
        sender = messages[0].sender
        if sender == self.name:
            # Messages to oneself do not use a socket.
            raise ProtocolError(f"another peer calls itself {self.name}")
        if index and any([message.references or message.kind in KINDS for message in messages]):
            raise ProtocolError(f"{sender!r} on another host refers to shared memory")
        if index and (by := frames[1].get("User-Id")) != sender:
            raise ProtocolError(f"{sender!r} used the key of {by!r}")
        return messages

    def _flush(self, sockets: Sockets) -> None:
        """Send what is queued by now; later messages end the next wait of this thread."""
        taken = self._outbox.take() if self._outbox else []
        try:
            for bundle in bundles(taken):
                self._hand_over(sockets, bundle)
                self._outbox.handed_over(bundle)
        finally:
            for posted in taken:
                # Only after an exception, which ends this thread.
                if not posted.delivery.settled:
                    posted.delivery.drop()
        if self._handled:
            self._handled = False
            self._on_handled()

    def _hand_over(self, sockets: Sockets, bundle: Sequence[Posted]) -> None:
        first = bundle[0]
        if first.own is not None:
            first.delivery.hand_over()
            self.traffic.count(INPROC, 1, sum([part.nbytes for part in first.own.payload]))
            self._hand_on(first.own)
        elif not first.frames:
            sockets.disconnect(str(first.to))
            self._shared.forget(str(first.to))
            first.delivery.hand_over()
        elif isinstance(first.to, bytes):
            self._send(sockets.routers[first.to[0]], bundle, [first.to[1:]])
        else:
            self._send(sockets.to(first.to, self.roster[first.to]), bundle, [])

    def _send(self, socket: zmq.Socket[bytes] | None, bundle: Sequence[Posted], route: Sequence[bytes]) -> None:
        header = header_of(self._prefix, [posted.frames[0] for posted in bundle])
        payload = [frame for posted in bundle for frame in posted.frames[1:]]
        nbytes = sum([posted.nbytes for posted in bundle])
        try:
            if socket is None:
                raise zmq.Again
            trackers = send_message(socket, route, header, payload)
        except zmq.Again:
            for posted in bundle:
                posted.delivery.drop()
            self.traffic.count_dropped(len(bundle))
            return
        for posted in bundle:
            posted.delivery.hand_over(trackers)
        in_memory = [posted.shared_bytes for posted in bundle if posted.shared_bytes]
        compressed = [posted.nbytes for posted in bundle if posted.compressed]
        self.traffic.count_sent(len(bundle), nbytes, in_memory, compressed)
