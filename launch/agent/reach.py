"""Whether listeners on other hosts are reached from this one: an agent tries it for whoever adds hosts to a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from distflow.comm.message import Message
from distflow.data.decoding import read
from distflow.launch.agent.remote_helper import try_all

HostName = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-zA-Z_:%-]{1,63}(\.[0-9a-zA-Z_:%-]{1,63})*\Z")]
Port = Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]


class _Reach(msgspec.Struct, frozen=True):
    nonce: str
    targets: Annotated[list[tuple[str, HostName, Port]], msgspec.Meta(max_length=4096)]
    """Name, address and port of each listener."""


def reach(message: Message, reply: Callable[[Message, Mapping[str, Any]], None]) -> None:
    """Answer `hosts.reach`; on a thread, since trying may take seconds. Raises ProtocolError."""
    request = read(message.body, _Reach, message.kind)

    def answer() -> None:
        reply(message, {"faults": try_all(request.targets, request.nonce)})

    threading.Thread(target=answer, name="reach", daemon=True).start()
