"""Weights across hosts: real sockets on loopback, real shared segments."""

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from distflow.comm.keys import Keys, make_keys
from distflow.errors import ChecksumError, NoProgressError, Overtaken, ProtocolError
from distflow.flow.sizes import PUBLISHED
from distflow.types import Version
from distflow.weights import swarm_reader
from distflow.weights.manifest import CHUNK_BYTES, Manifest, digest
from distflow.weights.shm import HEADER_BYTES, ShmPublisher, ShmReader, open_segment
from distflow.weights.swarm import Chunks, Reply, Request, SwarmPlace
from distflow.weights.swarm_reader import SwarmReader
from distflow.weights.swarm_server import SwarmServer
from tests.polling import WAIT_S, eventually


def weights(number: float, size: int = 1_000_000) -> list[tuple[str, torch.Tensor]]:
    return [
        ("embed", torch.full((size,), float(number))),
        ("norm", torch.full((3, 7), number + 1.0, dtype=torch.bfloat16)),
        ("head", torch.full((5,), number + 2.0, dtype=torch.float64)),
    ]


def holds(tensors: Any, number: float) -> bool:
    expected = dict(weights(number))
    return all(torch.equal(tensor, expected[name]) for name, tensor in tensors)


class Host:
    """One training host: a publisher, and a server beside it."""

    def __init__(self, keys: Keys | None = None) -> None:
        self.server = SwarmServer("127.0.0.1", keys)
        self.publisher = ShmPublisher(f"test-{uuid.uuid4().hex[:8]}", "policy", 0, self.server.pinned)

    def publish(self, number: int) -> Manifest:
        described = self.server.describe(self.publisher.publish(Version(0, number), weights(number)))
        return Manifest.from_wire(described.to_wire())

    def close(self) -> None:
        self.server.close()
        self.publisher.close()


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


@pytest.fixture
def reader() -> Iterator[SwarmReader]:
    made = SwarmReader(None, WAIT_S)
    yield made
    made.close()


def test_a_reader_on_another_host_gets_the_tensors_bit_for_bit(host: Host, reader: SwarmReader) -> None:
    manifest = host.publish(5)
    found = reader.fetch(manifest)
    assert holds(found, 5)
    assert reader.intact(manifest)
    assert reader.chunks == manifest.chunks == 4
    assert manifest.checksums == (), "what another host checks is the digests"
    memory = found[0][1].data_ptr()
    assert reader.fetch(host.publish(6))[0][1].data_ptr() == memory, "memory is used again"
    assert not reader.intact(manifest)


def test_the_same_version_is_read_on_its_own_host_too(host: Host) -> None:
    local = host.publisher.publish(Version(0, 3), weights(3))
    host.server.describe(local)
    assert holds(ShmReader().fetch(local), 3)


def test_encrypted_chunks_need_the_runs_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm_reader, "RETRY_S", 0.2)
    keys = make_keys()
    host = Host(keys)
    right, wrong, none = SwarmReader(keys, WAIT_S), SwarmReader(make_keys(), 1.0), SwarmReader(None, 1.0)
    manifest = host.publish(1)
    assert holds(right.fetch(manifest), 1)
    with pytest.raises(NoProgressError, match="no chunk for 1 s, 0 of 4 arrived — another run's key"):
        wrong.fetch(manifest)
    with pytest.raises(ProtocolError, match="encrypts weights — the reader needs the run's key"):
        none.fetch(manifest)
    assert host.server.traffic.refused > 0
    for each in (right, wrong, none, host):
        each.close()


def test_who_only_found_the_port_gets_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm_reader, "RETRY_S", 0.2)
    manifest = host.publish(1)
    stranger = SwarmReader(None, 1.0)
    forged = structs.replace(manifest, place=str(replace(SwarmPlace.parse(manifest.place), token=b"x" * 16)))
    with pytest.raises(NoProgressError, match="0 of 4 arrived — is that host up and its port reachable"):
        stranger.fetch(forged)
    assert host.server.traffic.refused >= 4
    assert host.server.traffic.chunks == 0
    stranger.close()


def test_an_overwritten_version_is_overtaken(host: Host, reader: SwarmReader) -> None:
    first = host.publish(0)
    for number in range(1, PUBLISHED + 2):
        host.publish(number)
    with pytest.raises(Overtaken, match="term 0, version 0: overwritten by a newer version while it was fetched"):
        reader.fetch(first)


def test_a_version_that_is_overwritten_while_it_is_hashed_is_not_announced(host: Host) -> None:
    first = host.publisher.publish(Version(0, 0), weights(0))
    for number in range(1, PUBLISHED + 2):
        host.publisher.publish(Version(0, number), weights(number))
    with pytest.raises(Overtaken, match="overwritten by a newer version before it was hashed"):
        host.server.describe(first)


def test_what_is_being_read_is_not_overwritten_however_fast_versions_come(host: Host, reader: SwarmReader) -> None:
    """Each fetch meets a publisher that goes round its segments many times meanwhile."""
    stop = threading.Event()
    newest = [host.publish(0)]

    def publish() -> None:
        for number in range(1, 100_000):
            if stop.is_set():
                return
            newest.append(host.publish(number))

    thread = threading.Thread(target=publish)
    thread.start()
    read = []
    deadline = time.monotonic() + WAIT_S
    while len(read) < 5 and time.monotonic() < deadline:
        manifest = newest[-1]
        try:
            assert holds(reader.fetch(manifest), manifest.version.number), "never a mixture of two versions"
        except Overtaken:
            continue
        read.append(manifest.version.number)
    stop.set()
    thread.join()
    assert len(read) == 5
    assert read == sorted(read)


def flip(manifest: Manifest, chunk: int) -> None:
    """Flip the bits of one byte of a segment."""
    at = HEADER_BYTES + chunk * CHUNK_BYTES + 17
    with open(manifest.place, "r+b") as file:
        file.seek(at)
        before = file.read(1)[0]
        file.seek(at)
        file.write(bytes([before ^ 0xFF]))


def test_a_wrong_chunk_is_fetched_again(host: Host, reader: SwarmReader, monkeypatch: pytest.MonkeyPatch) -> None:
    local = host.publisher.publish(Version(0, 1), weights(1))
    manifest = host.server.describe(local)
    flip(local, 2)
    said: list[str] = []

    def heal(text: str, *values: object) -> None:
        said.append(text % values)
        flip(local, 2)

    monkeypatch.setattr(swarm_reader.log, "warning", heal)
    assert holds(reader.fetch(manifest), 1)
    assert len(said) == 1
    assert "chunk 2 of 4" in said[0]
    assert said[0].endswith("does not have the announced digest; requesting it again")


def test_a_chunk_that_stays_wrong_ends_the_fetch(host: Host, reader: SwarmReader) -> None:
    local = host.publisher.publish(Version(0, 1), weights(1))
    manifest = host.server.describe(local)
    flip(local, 2)
    with pytest.raises(ChecksumError, match="version 1: chunk 2 of 4 from tcp://.* announced digest, 3 times"):
        reader.fetch(manifest)


class Proxy:
    """A link that can be cut: then nothing goes through; with `reset`, connections end too."""

    def __init__(self, place: str) -> None:
        self._place = SwarmPlace.parse(place)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = threading.Event()
        self._open.set()
        self._ends: list[socket.socket] = []
        self.passed = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def place(self) -> str:
        return str(replace(self._place, address=f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"))

    def cut(self, *, reset: bool) -> None:
        self._open.clear()
        if reset:
            self._hang_up(self._ends)

    def heal(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._hang_up([self._listener, *self._ends])
        self._open.set()

    def _hang_up(self, ends: list[socket.socket]) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        host, port = self._place.address.removeprefix("tcp://").rsplit(":", 1)
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((host, int(port)))
                self._ends += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                assert self._open.wait(WAIT_S), "the test healed the link"
                target.sendall(data)
                self.passed += len(data)
                # Slow enough that a test can cut the link in the middle.
                time.sleep(0.002)
        self._hang_up([source, target])


@pytest.mark.parametrize("reset", [False, True])
def test_a_link_that_is_cut_in_the_middle_heals(
    host: Host, reader: SwarmReader, reset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm_reader, "RETRY_S", 0.3)
    manifest = host.publish(4)
    proxy = Proxy(manifest.place)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(reader.fetch(structs.replace(manifest, place=proxy.place))))
    thread.start()
    eventually(lambda: proxy.passed > CHUNK_BYTES, "the first chunk")
    proxy.cut(reset=reset)
    thread.join(1.0)
    assert thread.is_alive(), "a cut link ends nothing"
    proxy.heal()
    thread.join(WAIT_S)
    assert holds(found[0], 4)
    proxy.close()


def test_a_server_that_is_gone_ends_the_fetch_with_what_was_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm_reader, "RETRY_S", 0.2)
    host, reader = Host(), SwarmReader(None, 0.7)
    manifest = host.publish(1)
    host.close()
    with pytest.raises(NoProgressError, match="version 1 from tcp://.*: no chunk for 1 s, 0 of 4 arrived"):
        reader.fetch(manifest)
    with pytest.raises(Overtaken, match="no chunk from tcp://.*, and there is a newer version"):
        reader.fetch(manifest, lambda: True)
    reader.close()


def test_an_offer_is_described_in_the_background(host: Host, reader: SwarmReader) -> None:
    told: list[Manifest] = []
    host.server.offer(host.publisher.publish(Version(0, 2), weights(2)), told.append)
    eventually(lambda: told, "announced")
    assert holds(reader.fetch(told[0]), 2)


def test_a_host_that_cannot_listen_says_so() -> None:
    with pytest.raises(ProtocolError, match=r"cannot listen on tcp://192\.0\.2\.1:\*: .* must be one of its own"):
        SwarmServer("192.0.2.1")


def test_nonsense_is_dropped_and_the_server_goes_on(host: Host, reader: SwarmReader) -> None:
    place = host.server.place
    for data in (b"\x80", b"\x93\x01\x02\x03", Request.make(place.token, "policy", Version(0, 0), -1).pack()):
        link, watch = reader.connect(place)
        link.send(data)
        link.poll(50)
        watch.close()
        link.close()
    assert holds(reader.fetch(host.publish(1)), 1)


def test_manifests_of_other_links_are_refused(host: Host, reader: SwarmReader) -> None:
    manifest = host.publish(0)
    with pytest.raises(ProtocolError, match="expected swarm:tcp://HOST:PORT#TOKEN"):
        reader.fetch(structs.replace(manifest, place="/dev/shm/distflow-x"))
    with pytest.raises(ProtocolError, match="3 digests for 4 chunks"):
        reader.fetch(structs.replace(manifest, digests=manifest.digests[:48]))


def test_digests_are_of_the_bytes_that_were_published(host: Host) -> None:
    local = host.publisher.publish(Version(0, 1), weights(1))
    data = bytes(open_segment(local))[HEADER_BYTES:]
    assert host.server.describe(local).digests == b"".join(
        digest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)
    )


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 2**32))
def test_every_chunk_arrives_once_through_loss_and_damage(count: int, window: int, seed: int) -> None:
    chunks, random = Chunks(count, window), Random(seed)
    under_way: list[int] = []
    arrived: list[int] = []
    for _ in range(2000):
        if chunks.done:
            break
        under_way += chunks.ask()
        assert 0 < len(under_way) <= window
        chunk = under_way.pop(random.randrange(len(under_way)))
        match random.randrange(4):
            case 0:
                chunks.lost()
                under_way.clear()
            case 1:
                chunks.wrong(chunk)
            case _:
                assert chunks.expects(chunk)
                chunks.right(chunk)
                arrived.append(chunk)
                assert not chunks.expects(chunk), "a second copy is not expected"
    assert sorted(arrived) == list(range(count))


def test_who_reads_along_learns_no_token_and_can_ask_for_nothing_else() -> None:
    request = Request.make(b"token", "policy", Version(1, 2), 3)
    assert b"token" not in request.pack()
    assert request.proven(b"token")
    assert not request.proven(b"other")
    others = (structs.replace(request, **change) for change in ({"chunk": 4}, {"number": 3}, {"model": "critic"}))
    assert not any(other.proven(b"token") for other in others)


def test_requests_and_replies_are_read_as_they_were_written() -> None:
    request, reply = Request.make(b"t", "policy", Version(1, 2), 3), Reply(1, 2, 3, True)
    assert Request.unpack(request.pack()) == request
    assert Reply.unpack(reply.pack()) == reply
    with pytest.raises(ProtocolError, match="malformed reply with weights: Expected `int`, got `bytes`"):
        Reply.unpack(request.pack())
