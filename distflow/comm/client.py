"""Requests to one worker or agent from a process outside the run, such as a command."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Self

import zmq

from distflow.comm.addresses import place_of
from distflow.comm.curve import CLIENT, KEY_HINT, Watch, leaves_machine, present_key, tune
from distflow.comm.keys import Keys
from distflow.comm.message import decode, encode
from distflow.errors import ProtocolError


class Client:
    """Sends one request after another over one connection, which is opened with the first.

    `keys` are the run's, for an address on another host. Use as a context, or `close` it.
    """

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        self._address = address
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._watch: Watch | None = None

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
            socket = self._socket or self._connect()
            socket.send(encode(kind, CLIENT, 0, body))
            frames = _reply(socket, self._watch, self._address, time.monotonic() + timeout_s)
        finally:
            if frames is None:
                # A late reply must not be mistaken for the reply to the next request.
                self._hang_up()
        return None if frames is None else dict(decode(frames[0]).body)

    def close(self) -> None:
        """Close the connection."""
        self._hang_up()
        self._context.term()

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._socket = self._context.socket(zmq.DEALER)
        if leaves_machine(self._address):
            self._watch = _unlock(socket, self._address, self._keys)
        socket.connect(place_of(self._address))
        return socket

    def _hang_up(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = self._watch = None


def ask(
    address: str, kind: str, body: Mapping[str, Any], timeout_s: float, keys: Keys | None = None
) -> dict[str, Any] | None:
    """A single request; see `Client.ask`."""
    with Client(address, keys) as client:
        return client.ask(kind, body, timeout_s)


def _unlock(socket: zmq.Socket[bytes], address: str, keys: Keys | None) -> Watch:
    if keys is None:
        raise ProtocolError(
            f"{place_of(address)} cannot be asked without the run's key — pass the keys of <run_dir>/keys/run.key"
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
            raise ProtocolError(f"{place_of(address)} refused the connection — {KEY_HINT}")
    return None
