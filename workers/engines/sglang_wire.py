"""Frames between the SGLang adapter and the process that SGLang runs in: a length, then a msgpack map.

To SGLang's process, by key `do`:
    start     folder, args, env, update_by   the first frame; answered by `ready`, `refused` or `broken`
    generate  samples: [{rid, ids, params, filtered, cache_salt}]
    abort     rids
    load      ask, version, staged           new weights between two decode steps; answered by `done` or `failed`
    score     ask, rows                      log-probs of given tokens; answered by `done` with `logprobs`, or `failed`
    release, resume  ask                     device memory; answered by `done` or `failed`
From SGLang's process, by its only or first key:
    ready, refused, broken                   after `start`: SGLang's version, or the reason
    tokens    [[rid, ids, logprobs, starts, finish]]     new tokens; starts: [[term, number, start]] of the whole sample
              behind these, where `generate` asks for `filtered`, the log-probs of what filters have left
    lost      rid, text                      SGLang refused or aborted the sample
    done, failed  the number of the `ask`; `failed` with text
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack

from distflow.errors import ProtocolError

LENGTH_BYTES = 4
MAX_BYTES = 256 << 20

Message = dict[str, Any]


def frame(message: Message) -> bytes:
    """One message as bytes; raises ProtocolError if it is too large for the other side."""
    body: bytes = msgpack.packb(message)
    if len(body) > MAX_BYTES:
        raise ProtocolError(f"message of {len(body)} bytes to or from SGLang's process; the limit is {MAX_BYTES}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class Frames:
    """Splits the received bytes into messages."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete now; raises ProtocolError for an impossible length."""
        self._received += data
        while len(self._received) >= LENGTH_BYTES:
            size = int.from_bytes(self._received[:LENGTH_BYTES], "big")
            if size > MAX_BYTES:
                raise ProtocolError(f"message of {size} bytes announced by SGLang's process; the limit is {MAX_BYTES}")
            if len(self._received) < LENGTH_BYTES + size:
                return
            body = bytes(self._received[LENGTH_BYTES : LENGTH_BYTES + size])
            del self._received[: LENGTH_BYTES + size]
            yield msgpack.unpackb(body)
