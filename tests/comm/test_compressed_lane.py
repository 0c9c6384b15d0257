"""What crosses from site to site is compressed, and what a peer says of it is not believed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import zstandard

from distflow.comm.compressed_lane import unpacked
from distflow.comm.keys import make_keys
from distflow.comm.message import Message, decode_all, header_of, pack, prefix_of
from distflow.errors import ProtocolError
from tests.comm.test_network import Peer
from tests.polling import eventually

MOST = 1 << 20
TEXT = b"the same words again and again; " * 4096


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[tuple[Peer, Peer]]:
    keys = make_keys()
    there = Peer("trainer/0", tmp_path, keys)
    here = Peer("rollout/0", tmp_path, keys, {"trainer/0": there.address})
    there.endpoint.know("rollout/0", here.address)
    here.endpoint.afar = {"trainer/0"}.__contains__
    yield here, there
    for peer in (here, there):
        peer.endpoint.close()


def test_a_payload_for_another_site_arrives_as_it_was_sent(peers: tuple[Peer, Peer]) -> None:
    here, there = peers
    payload = [TEXT, b"", memoryview(bytearray(range(256)) * 8)]
    here.endpoint.send("trainer/0", "results", {"n": 1}, payload)
    got = there.next()
    assert (got.kind, got.body) == ("results", {"n": 1})
    assert [*map(bytes, got.payload)] == [*map(bytes, payload)]
    lanes = here.endpoint.traffic.lanes
    assert (lanes["zstd"].messages, lanes["zmq"].messages) == (1, 0)
    assert 0 < lanes["zstd"].bytes < len(TEXT) / 10


@pytest.mark.parametrize("payload", [[b"short"], [os.urandom(100_000)], []], ids=["short", "random", "none"])
def test_what_compression_gains_nothing_from_is_sent_as_it_is(peers: tuple[Peer, Peer], payload: list[bytes]) -> None:
    here, there = peers
    here.endpoint.send("trainer/0", "results", {}, payload)
    assert [bytes(frame) for frame in there.next().payload] == payload
    assert here.endpoint.traffic.lanes["zstd"].messages == 0


def compressed(sizes: Sequence[int], content: bytes) -> Message:
    header = header_of(prefix_of("rollout/0", 0), [pack("results", {}, sizes)])
    (message,) = decode_all(header, [memoryview(content)])
    return message


@pytest.mark.parametrize(
    ("sizes", "content", "why"),
    [
        ([MOST + 1], b"", "rollout/0 compressed 1048577 bytes; at most 1048576"),
        ([MOST, MOST], b"", "compressed 2097152 bytes"),
        ([100], zstandard.compress(bytes(99)), "other than the 100 bytes"),
        ([10], zstandard.compress(bytes(MOST)), "other than the 10 bytes"),
        ([10], b"no frame at all", "cannot be unpacked"),
        ([1 << 15], zstandard.compress(os.urandom(1 << 15))[:-9], "cannot be unpacked"),
    ],
)
def test_a_payload_that_is_not_what_its_lengths_say_is_refused(sizes: list[int], content: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        unpacked(compressed(sizes, content), MOST)


@pytest.mark.parametrize("sizes", [[-1], [True], ["1"], [1 << 63], [[1]]])
def test_lengths_that_are_none_are_refused(sizes: list[object]) -> None:
    with pytest.raises(ProtocolError, match="of lengths"):
        compressed(sizes, b"")  # type: ignore[arg-type]


def test_a_peer_that_compresses_nonsense_is_dropped_and_the_next_message_arrives(peers: tuple[Peer, Peer]) -> None:
    here, there = peers
    here.endpoint._outbox.put("trainer/0", [pack("results", {}, [7]), b"nonsense"])
    eventually(lambda: there.endpoint.traffic.dropped == 1, "dropped")
    here.endpoint.send("trainer/0", "results", {}, [TEXT])
    assert bytes(there.next().payload[0]) == TEXT
