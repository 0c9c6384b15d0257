import struct
import tracemalloc

import msgpack
import pytest

from distflow.comm.message import decode, encode
from distflow.errors import ProtocolError


def test_a_message_comes_back_as_it_was() -> None:
    message = decode(encode("ask", "rollout/0", 3, {"groups": 2, "held": [1, 2]}))
    assert (message.kind, message.sender, message.incarnation) == ("ask", "rollout/0", 3)
    assert message.body == {"groups": 2, "held": [1, 2]}


@pytest.mark.parametrize(
    ("header", "what"),
    [
        (b"\xc1", "not msgpack"),
        (b"", "not msgpack"),
        (msgpack.packb([1, 2]), "not \\[format, kind, sender, incarnation, body\\]"),
        (msgpack.packb([99, "ask", "a", 0, {}]), "wire format 99 from 'a'; expected 1"),
        (msgpack.packb([1, 7, "a", 0, {}]), "wrong types: kind 7"),
        (msgpack.packb([1, "ask", "a", 0, [1]]), "wrong types"),
        (msgpack.packb([1, "ask", "a", 0, {1: 2}]), "not msgpack"),
    ],
)
def test_nonsense_is_refused(header: bytes, what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        decode(header)


@pytest.mark.parametrize("empty", [b"\x90", b"\x80", b"\x91\x90", b"\xc7\x00\x01"])
def test_empty_things_do_not_grow_into_gigabytes(empty: bytes) -> None:
    """64 MiB of them would take 5 GB."""
    count = (2 << 20) // len(empty)
    header = b"\xdd" + struct.pack(">I", count) + empty * count
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="more than 1048576 lists and maps|an extension of type 1"):
            decode(header)
        assert tracemalloc.get_traced_memory()[1] < 192 << 20
    finally:
        tracemalloc.stop()
