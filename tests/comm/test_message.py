import struct
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distflow.comm.message import decode, decode_all, encode, header_of, pack, prefix_of
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
        (msgpack.packb([]), "not \\[format, sender, incarnation, entries\\]"),
        (msgpack.packb({}), "not \\[format, sender, incarnation, entries\\]"),
        (msgpack.packb([3, "a"]), "not \\[format, sender, incarnation, entries\\]"),
        (msgpack.packb([1, "ask", "a", 0, {}]), "wire format 1; expected 3"),
        (msgpack.packb([True, "a", 0, []]), "wire format True; expected 3"),
        (msgpack.packb([3, "a", -1, [["ask", {}, 0]]]), "wrong types: sender 'a', incarnation -1"),
        (msgpack.packb([3, "", 0, [["ask", {}, 0]]]), "wrong types: sender ''"),
        (msgpack.packb([3, "a", 0, {}]), "wrong types"),
        (msgpack.packb([3, "a", 0, []]), "0 messages from a in one; expected 1 … 256"),
        (msgpack.packb([3, "a", 0, [["ask", {}, 0]] * 257]), "257 messages from a in one"),
        (msgpack.packb([3, "a", 0, [["ask", {}]]]), "an entry from a that is not"),
        (msgpack.packb([3, "a", 0, [["ask", {}, 0], 7]]), "an entry from a that is not"),
        (msgpack.packb([3, "a", 0, [[7, {}, 0]]]), "wrong types: kind 7"),
        (msgpack.packb([3, "a", 0, [["ask", [1], 0]]]), "wrong types: kind 'ask'"),
        (msgpack.packb([3, "a", 0, [["ask", {}, True]]]), "wrong types: kind 'ask', payload frames True"),
        (msgpack.packb([3, "a", 0, [["ask", {}, -1]]]), "wrong types: kind 'ask', payload frames -1"),
        (msgpack.packb([3, "a", 0, [["ask", {}, 2]]]), "0 payload frames; their header announces 2"),
        (msgpack.packb([3, "a", 0, [["ask", {1: 2}, 0]]]), "not msgpack"),
        (msgpack.packb([3, "a", 0, [["ask", {}, 0]] * 2]), "2 messages from a in one; expected a single one here"),
    ],
)
def test_nonsense_is_refused(header: bytes, what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        decode(header)


Plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
Entry = st.tuples(
    st.text(min_size=1, max_size=20), st.dictionaries(st.text(), Plain, max_size=3), st.lists(st.binary(), max_size=3)
)
Bundle = st.lists(Entry, min_size=1, max_size=8)


def framed(bundle: list[tuple[str, dict[str, Any], list[bytes]]]) -> tuple[bytes, list[memoryview]]:
    header = header_of(prefix_of("rollout/0", 3), [pack(kind, body, len(parts)) for kind, body, parts in bundle])
    return header, [memoryview(part) for _, _, parts in bundle for part in parts]


@given(Bundle)
def test_many_messages_travel_as_one_and_come_back_in_order(
    bundle: list[tuple[str, dict[str, Any], list[bytes]]],
) -> None:
    found = decode_all(*framed(bundle), b"route")
    assert [(one.kind, one.body, [bytes(part) for part in one.payload]) for one in found] == bundle
    assert {(one.sender, one.incarnation, one.route) for one in found} == {("rollout/0", 3, b"route")}


@given(Bundle, st.data())
def test_a_header_that_is_cut_or_has_too_many_or_too_few_frames_is_refused(
    bundle: list[tuple[str, dict[str, Any], list[bytes]]], data: st.DataObject
) -> None:
    header, payload = framed(bundle)
    with pytest.raises(ProtocolError):
        decode_all(header[: data.draw(st.integers(0, len(header) - 1))], payload)
    with pytest.raises(ProtocolError):
        decode_all(header + data.draw(st.binary(min_size=1)), payload)
    with pytest.raises(ProtocolError, match="payload frames; their header announces"):
        decode_all(header, [*payload, memoryview(b"")])
    if payload:
        with pytest.raises(ProtocolError, match="payload frames; their header announces"):
            decode_all(header, payload[1:])


@given(Bundle, st.data())
def test_a_header_with_a_changed_byte_is_refused_or_read(
    bundle: list[tuple[str, dict[str, Any], list[bytes]]], data: st.DataObject
) -> None:
    header, payload = framed(bundle)
    garbled = bytearray(header)
    garbled[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_all(garbled, payload)
    except ProtocolError:
        return
    assert sum(len(one.payload) for one in found) == len(payload)


def test_types_derived_from_plain_ones_travel_as_these_and_others_are_refused() -> None:
    class Name(str):
        pass

    assert decode(encode("note", "a", 0, {"name": Name("x"), "mean": np.float64(0.5)})).body == {
        "name": "x",
        "mean": 0.5,
    }
    with pytest.raises(TypeError, match="a value of type object cannot travel in a message"):
        encode("note", "a", 0, {"what": object()})


@pytest.mark.parametrize("empty", [b"\x90", b"\x80", b"\x91\x90", b"\xc7\x00\x01"])
def test_empty_things_do_not_grow_into_gigabytes(empty: bytes) -> None:
    """64 MiB of them would take 5 GB."""
    count = (5 << 18) // len(empty)
    header = b"\xdd" + struct.pack(">I", count) + empty * count
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="more than 1048576 lists and maps|an extension of type 1"):
            decode(header)
        assert tracemalloc.get_traced_memory()[1] < 192 << 20
    finally:
        tracemalloc.stop()
