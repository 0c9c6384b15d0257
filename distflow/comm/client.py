"""One question to one worker, for commands that only look: connect, ask, wait a moment, go."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import zmq

from distflow.comm.addresses import place_of
from distflow.comm.curve import CLIENT, CURE, Watch, leaves_machine, present_key, tune
from distflow.comm.keys import Keys
from distflow.comm.message import decode, encode
from distflow.errors import ProtocolError


def ask(
    address: str, kind: str, body: Mapping[str, Any], timeout_s: float, keys: Keys | None = None
) -> dict[str, Any] | None:
    """Send one request and return the body of the reply, or None if nobody answered within `timeout_s` seconds.

    `keys` are the run's, for an address on another host. Raises ProtocolError when they are missing or refused there.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    watch = None
    try:
        if leaves_machine(address):
            watch = _unlock(socket, address, keys)
        socket.connect(place_of(address))
        socket.send(encode(kind, CLIENT, 0, body))
        frames = _reply(socket, watch, address, time.monotonic() + timeout_s)
        return None if frames is None else dict(decode(frames[0]).body)
    finally:
        if watch is not None:
            watch.close()
        socket.close(linger=0)
        context.term()


def _unlock(socket: zmq.Socket[bytes], address: str, keys: Keys | None) -> Watch:
    if keys is None:
        raise ProtocolError(
            f"{place_of(address)} is asked without the run's key — pass the keys of <run_dir>/keys/run.key"
        )
    tune(socket, address)
    present_key(socket, keys)
    return Watch(socket)


def _reply(socket: zmq.Socket[bytes], watch: Watch | None, address: str, deadline: float) -> list[bytes] | None:
    poller = zmq.Poller()
    for polled in [socket, *([] if watch is None else [watch.monitor])]:
        poller.register(polled, zmq.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        ready = dict(poller.poll(max(1, int(left * 1000))))
        if socket in ready:
            return socket.recv_multipart()
        if watch is not None and watch.refused():
            raise ProtocolError(f"{place_of(address)} refuses the connection — {CURE}")
    return None
