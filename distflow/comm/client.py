"""One question to one worker, for commands that only look: connect, ask, wait a moment, go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import zmq

from distflow.comm.message import decode, encode

CLIENT = "client"
"""Sender name of peers that are not in the roster; they may ask for status, stacks and stop, nothing else."""


def ask(address: str, kind: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | None:
    """Send one request and return the body of the reply, or None if nobody answered within `timeout_s` seconds."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(address)
        socket.send(encode(kind, CLIENT, 0, body))
        if not socket.poll(int(timeout_s * 1000)):
            return None
        frames = socket.recv_multipart()
        return dict(decode(frames[0]).body)
    finally:
        socket.close()
        context.term()
