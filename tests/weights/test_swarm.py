"""Weights across hosts, one publisher and one reader: real sockets on loopback, real shared segments."""

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from distflow.errors import ChecksumError, NoProgressError, Overtaken, ProtocolError
from distflow.flow.sizes import PUBLISHED
from distflow.types import Version
from distflow.weights.manifest import CHUNK_BYTES, Manifest, digest
from distflow.weights.segments.shm import HEADER_BYTES, AnnouncedSegment, ShmReader
from distflow.weights.swarm import chunk_server, patience
from distflow.weights.swarm import client as swarm_client
from distflow.weights.swarm import sockets as swarm_socket
from distflow.weights.swarm.reader import SwarmReader
from distflow.weights.swarm.server import SwarmServer
from distflow.weights.swarm.sockets import connect
from distflow.weights.swarm_messages import ChunkAsk, Opening, Secret, SwarmPlace, pack, read_ask, read_opening
from tests.polling import WAIT_S, eventually
from tests.weights.swarm_kit import Host, Proxy, flip, holds, left_of, new_reader, new_tag, weights


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


@pytest.fixture
def reader() -> Iterator[SwarmReader]:
    made = new_reader()
    yield made
    made.close()


def test_a_reader_on_another_host_gets_the_tensors_bit_for_bit(host: Host) -> None:
    tag = new_tag()
    reader = new_reader(tag)
    manifest = host.publish(5)
    found = reader.fetch(manifest)
    assert holds(found, 5)
    assert reader.hold(manifest)
    assert reader.chunks == manifest.chunks == 4
    assert manifest.checksums == (), "what another host checks is the digests"
    assert holds(reader.fetch(host.publish(6)), 6)
    assert holds(reader.fetch(host.publish(7)), 7)
    assert not reader.hold(manifest), "its memory has been used for the last one"
    assert len([name for name in left_of(tag) if "-t0-" in name]) == 2, "memory is used again, in turn"
    assert host.server.traffic.sent_bytes == 3 * manifest.size
    reader.close()
    assert left_of(tag) == []


def test_the_same_version_is_read_on_its_own_host_too(host: Host) -> None:
    local = host.publisher.publish(Version(0, 3), weights(3))
    host.server.describe(local)
    assert holds(ShmReader().fetch(local), 3)


@pytest.mark.parametrize("encrypted", [False, True])
def test_who_reads_along_sees_encrypted_chunks_and_never_the_token(encrypted: bool) -> None:
    host, reader = Host(encrypted=encrypted), new_reader()
    manifest = host.publish(1)
    proxy = Proxy(manifest.place)
    assert holds(reader.fetch(structs.replace(manifest, place=proxy.place)), 1)
    assert (torch.ones(4096).numpy().tobytes() in proxy.seen) is not encrypted
    assert host.server.place.token not in proxy.seen
    for each in (reader, proxy, host):
        each.close()


def test_who_only_found_the_port_gets_nothing(host: Host) -> None:
    manifest = host.publish(1)
    stranger = new_reader(no_progress_s=0.6)
    forged = structs.replace(manifest, place=str(replace(SwarmPlace.parse(manifest.place), token=b"x" * 16)))
    with pytest.raises(NoProgressError, match="no chunk for 1 s, 0 of 4 arrived — another run's key"):
        stranger.fetch(forged)
    assert host.server.traffic.refused > 0
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


def test_what_ends_the_thread_that_describes_versions_is_told() -> None:
    """Here shared memory has gone; readers on other hosts would wait for ever."""
    faults: list[BaseException] = []
    host = Host(on_fault=faults.append)
    local = host.publisher.publish(Version(0, 1), weights(1))
    Path(local.place).write_bytes(b"")
    host.server.offer(local, lambda described: None)
    eventually(lambda: faults, "the fault")
    assert "is smaller than the announced" in str(faults[0])
    host.close()


def test_a_host_without_file_descriptors_is_told_once_and_serves_again(
    host: Host, reader: SwarmReader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chunk_server, "ACCEPT_PAUSE_S", 0.05)
    manifest = host.publish(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    links, taken = [socket.socket() for _ in range(9)], [os.dup(0)]
    door = SwarmPlace.parse(manifest.place).address.removeprefix("tcp://").split(":")
    looks, waiting = count(), iter(links)

    def refused() -> bool:
        with suppress(OSError):  # other threads may have closed some since
            while True:
                taken.append(os.dup(0))
        if next(looks) % 50 == 0:
            # The last connection may have been accepted meanwhile.
            next(waiting).connect((door[0], int(door[1])))
        return "cannot accept connections" in caplog.text

    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, hard))
    try:
        eventually(refused, "the warning", every_s=0.04)
        threading.Event().wait(0.3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for link in links:
            link.close()
        for descriptor in taken:
            os.close(descriptor)
    assert caplog.text.count("cannot accept connections") == 1
    assert holds(reader.fetch(manifest), 1)


def test_a_host_without_threads_serves_again(
    host: Host, reader: SwarmReader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chunk_server, "ACCEPT_PAUSE_S", 0.05)
    manifest, start = host.publish(1), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "swarm-requests":
            raise RuntimeError("can't start new thread")
        start(thread)

    address, port = SwarmPlace.parse(manifest.place).address.removeprefix("tcp://").split(":")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with socket.create_connection((address, int(port))):
            eventually(lambda: "cannot serve another reader" in caplog.text, "the warning")
    assert holds(reader.fetch(manifest), 1)


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


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_wrong_chunk_is_fetched_again(encrypted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    host, reader = Host(encrypted=encrypted), new_reader()
    local = host.publisher.publish(Version(0, 1), weights(1))
    manifest = host.server.describe(local)
    flip(local, 2)
    said: list[str] = []

    def heal(text: str, *values: object) -> None:
        said.append(text % values)
        flip(local, 2)

    monkeypatch.setattr(swarm_client.log, "warning", heal)
    assert holds(reader.fetch(manifest), 1)
    assert len(said) == 1
    assert "chunk 2 of 4" in said[0]
    assert said[0].endswith("does not have the announced digest; requesting it again")
    reader.close()
    host.close()


def test_a_chunk_that_stays_wrong_ends_the_fetch(host: Host, reader: SwarmReader) -> None:
    local = host.publisher.publish(Version(0, 1), weights(1))
    manifest = host.server.describe(local)
    flip(local, 2)
    with pytest.raises(ChecksumError, match="version 1: chunk 2 of 4 from tcp://.* announced digest, 3 times"):
        reader.fetch(manifest)
    flip(local, 2)
    assert holds(reader.fetch(manifest), 1), "a later fetch begins anew"


@pytest.mark.parametrize("reset", [False, True])
def test_a_link_that_is_cut_in_the_middle_heals(
    host: Host, reader: SwarmReader, reset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "RETRY_S", 0.3)
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
    monkeypatch.setattr(patience, "RETRY_S", 0.2)
    host, reader = Host(), new_reader(no_progress_s=0.7)
    manifest = host.publish(1)
    host.close()
    with pytest.raises(NoProgressError, match="version 1 from tcp://.*: no chunk for 1 s, 0 of 4 arrived — is that"):
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
    address, secret = host.server.place.address, Secret(host.server.place.token)
    opening = pack(Opening("tcp://127.0.0.1:1"))
    nobody = ChunkAsk("want", "policy", 0, 99, (3,))
    for data in (b"\xff\xff\xff\xff", b"\3\0\0\0\x93\x01\x02", opening + b"\1\0\0\0\x80", opening + pack(nobody)):
        link, _ = connect(address, secret)
        link.sendall(data)
        link.shutdown(socket.SHUT_WR)
        while link.recv(4096):
            pass
        link.close()
    assert holds(reader.fetch(host.publish(1)), 1)


def test_strangers_shut_no_reader_out_however_slowly_they_speak(
    host: Host, reader: SwarmReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_server, "MOST_STRANGERS", 4)
    target = host.server.place.target
    strangers = [socket.create_connection(target) for _ in range(12)]
    for link in strangers[:8]:
        link.settimeout(WAIT_S)
        while link.recv(4096):
            pass
    assert holds(reader.fetch(host.publish(1)), 1)
    for link in strangers:
        link.close()


def test_a_handshake_has_one_deadline(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many bytes of it come one by one."""
    monkeypatch.setattr(swarm_socket, "HANDSHAKE_S", 0.5)
    with socket.create_connection(host.server.place.target) as link:
        link.settimeout(0.1)

        def hung_up() -> bool:
            try:
                link.sendall(b"x")
                return not link.recv(4096)
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        # Not more than it would take to the end of what the server reads there: 56 bytes.
        assert any(hung_up() for _ in range(40))


def test_manifests_of_other_links_are_refused(host: Host, reader: SwarmReader) -> None:
    manifest = host.publish(0)
    with pytest.raises(ProtocolError, match="expected swarm:tcp://HOST:PORT#TOKEN"):
        reader.fetch(structs.replace(manifest, place="/dev/shm/distflow-x"))
    with pytest.raises(ProtocolError, match="3 digests for 4 chunks"):
        reader.fetch(structs.replace(manifest, digests=manifest.digests[:48]))


def test_digests_are_of_the_bytes_that_were_published(host: Host) -> None:
    local = host.publisher.publish(Version(0, 1), weights(1))
    data = bytes(AnnouncedSegment(local).memory)[HEADER_BYTES:]
    assert host.server.describe(local).digests == b"".join(
        digest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)
    )


def test_proofs_are_of_one_token_one_end_and_one_connection() -> None:
    token = Secret(b"token")
    proof = token.proof("reader", b"12")
    others = (Secret(b"other").proof("reader", b"12"), token.proof("holder", b"12"), token.proof("reader", b"13"))
    assert proof not in others
    assert proof == Secret(b"token").proof("reader", b"12")


def test_requests_are_read_as_they_were_written() -> None:
    ask, opening = ChunkAsk("want", "policy", 1, 2, (3, 4)), Opening("tcp://10.0.0.1:5")
    assert read_ask(pack(ask)[4:]) == ask
    assert read_opening(pack(opening)[4:]) == opening
    with pytest.raises(ProtocolError, match="malformed request for weights"):
        read_ask(pack(opening)[4:])
    with pytest.raises(ProtocolError, match="malformed opening for weights"):
        read_opening(pack(Opening("anywhere"))[4:])
