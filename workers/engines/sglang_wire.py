"""Frames between the SGLang adapter and the process that SGLang runs in: a length, then a msgpack map. Nothing else.

To SGLang's process, by key `do`:
    start     folder, args, env              the first frame; answered by `ready`, `refused` or `broken`
    generate  samples: [{rid, ids, params, filtered, cache_salt}]
    abort     rids
    load      ask, version, staged           new weights between two decode steps; answered by `done` or `failed`
    score     ask, rows                      log-probs of given tokens; answered by `done` with `logprobs`, or `failed`
    release, resume  ask                     device memory; answered by `done` or `failed`
From there:
    ready, refused, broken                   after `start`: the last two with the reason
    tokens    samples: [[rid, ids, logprobs, marks, finish]]     new tokens; marks: [[term, number, start]] of all
    lost      rid, text                      SGLang refused the sample
    done, failed  ask, and for `failed` text
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
    """One message as bytes; raises ProtocolError for one that the other side would refuse."""
    body: bytes = msgpack.packb(message)
    if len(body) > MAX_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes to or from SGLang's process; at most {MAX_BYTES} pass")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class Frames:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are whole now; raises ProtocolError for an impossible length."""
        self._received += data
        while len(self._received) >= LENGTH_BYTES:
            size = int.from_bytes(self._received[:LENGTH_BYTES], "big")
            if size > MAX_BYTES:
                raise ProtocolError(
                    f"a message of {size} bytes announced by SGLang's process; at most {MAX_BYTES} pass"
                )
            if len(self._received) < LENGTH_BYTES + size:
                return
            body = bytes(self._received[LENGTH_BYTES : LENGTH_BYTES + size])
            del self._received[: LENGTH_BYTES + size]
            yield msgpack.unpackb(body)
