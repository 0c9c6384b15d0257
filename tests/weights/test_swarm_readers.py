"""Weights across hosts, several readers: what the publisher sends, what they give each other, one fetch a host."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from distflow.errors import UserError
from distflow.flow.sizes import FETCHED
from distflow.weights.manifest import CHUNK_BYTES, Manifest
from distflow.weights.segments import host_segments
from distflow.weights.segments.host_segments import HostSegments
from distflow.weights.segments.segment_file import SEGMENTS
from distflow.weights.segments.shm import HEADER_BYTES, segment_prefix
from distflow.weights.swarm import fetch_core
from distflow.weights.swarm import sockets as swarm_socket
from distflow.weights.swarm.chunk_server import ChunkServer
from distflow.weights.swarm.held_version import HeldVersion
from distflow.weights.swarm.reader import SwarmReader
from distflow.weights.swarm.sockets import address_of, listen
from tests.polling import WAIT_S, eventually
from tests.weights.swarm_kit import Host, Proxy, holds, left_of, new_reader, new_tag, newest_memory

SIZE = 6_000_000
"""Values of the largest tensor: 23 chunks."""


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(size=SIZE)
    yield made
    made.close()


def fetch_together(readers: Sequence[SwarmReader], manifest: Manifest) -> list[Any]:
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda n=n, reader=reader: found.update({n: reader.fetch(manifest)}))
        for n, reader in enumerate(readers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return [found[n] for n in range(len(readers))]


@pytest.mark.parametrize("count", [1, 4, 12])
def test_the_publisher_sends_the_model_once_however_many_hosts_read(host: Host, count: int) -> None:
    readers = [new_reader() for _ in range(count)]
    for number in (1, 2):
        before = host.server.traffic.sent_bytes
        manifest = host.publish(number)
        assert all(holds(found, number, SIZE) for found in fetch_together(readers, manifest))
        assert host.server.traffic.sent_bytes - before <= 1.25 * manifest.size
    for reader in readers:
        reader.close()


def test_a_version_enters_each_site_once(host: Host) -> None:
    readers = [new_reader(site=site) for site in ("", "", "far", "far", "far")]
    first = host.publish(1)
    assert all(holds(found, 1, SIZE) for found in fetch_together(readers, first))
    before = host.server.traffic.sent_bytes
    assert before <= 2 * 1.25 * first.size
    late = new_reader(site="far")
    assert holds(late.fetch(first), 1, SIZE)
    assert host.server.traffic.sent_bytes == before, "its site has all of it"
    for reader in (*readers, late):
        reader.close()


def test_a_version_crosses_a_slow_link_once_though_each_chunk_takes_longer_than_anybody_waits() -> None:
    host, readers = Host(size=700_000), [new_reader(site="far") for _ in range(3)]
    manifest = host.publish(1)
    with closing(Proxy(manifest.place, rate=0.4 * CHUNK_BYTES)) as link:
        found = fetch_together(readers, structs.replace(manifest, place=link.place))
        assert all(holds(tensors, 1, 700_000) for tensors in found)
        assert manifest.size < link.passed < 1.05 * manifest.size
    assert host.server.traffic.sent_bytes == manifest.size
    for each in (*readers, host):
        each.close()


def test_one_of_three_readers_on_a_host_fetches_and_the_others_map_it(host: Host) -> None:
    tag = new_tag()
    readers = [new_reader(tag) for _ in range(3)]
    manifest = host.publish(1)
    assert all(holds(found, 1, SIZE) for found in fetch_together(readers, manifest))
    assert sorted(reader.fetched for reader in readers) == [0, 0, manifest.chunks]
    assert host.server.traffic.sent_bytes == manifest.size
    readers.pop().close()
    assert left_of(tag), "those who stay go on using it"
    for reader in readers:
        reader.close()
    assert left_of(tag) == []


def test_readers_that_are_behind_keep_no_memory_of_a_host(host: Host) -> None:
    """Each has fetched another version, and two have not used theirs when the third goes on."""
    tag = new_tag()
    readers = [new_reader(tag) for _ in range(3)]
    manifests = [host.publish(number) for number in (1, 2, 3)]
    for reader, manifest in zip(readers, manifests, strict=True):
        reader.fetch(manifest)
    assert len([name for name in left_of(tag) if "-t0-" in name]) == FETCHED
    assert [reader.hold(manifest) for reader, manifest in zip(readers, manifests, strict=True)] == [False, True, True]
    # Both segments are in use now: the next version waits for one of them.
    found: list[Any] = []
    newest = host.publish(4)
    thread = threading.Thread(target=lambda: found.append(readers[0].fetch(newest)))
    thread.start()
    thread.join(0.2)
    assert found == []
    readers[1].release()
    thread.join(WAIT_S)
    assert holds(found[0], 4, SIZE)
    assert len([name for name in left_of(tag) if "-t0-" in name]) == FETCHED
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("told", [0, 5])
def test_an_interrupted_fetch_goes_on_and_trusts_only_what_is_right(host: Host, told: int) -> None:
    tag, source = new_tag(), new_reader()
    manifest = host.publish(1)
    source.fetch(manifest)
    lost = HostSegments(tag, "policy")
    torn = lost.writable(manifest)
    assert torn is not None
    end = HEADER_BYTES + 5 * CHUNK_BYTES
    torn.memory[HEADER_BYTES:end] = newest_memory(source)[HEADER_BYTES:end]
    torn.memory[HEADER_BYTES + CHUNK_BYTES] ^= 0xFF
    if told:
        lost.note_progress(manifest.version, told)
    lost.let_go(torn)
    reader = new_reader(tag)
    assert holds(reader.fetch(manifest), 1, SIZE)
    assert reader.fetched == manifest.chunks - (4 if told else 0), "nobody says that there is something to go on with"
    assert reader.chunks == manifest.chunks
    for one in (reader, lost, source):
        one.close()


def test_nothing_of_an_earlier_term_stays_mapped(host: Host) -> None:
    tag = new_tag()
    readers = [new_reader(tag) for _ in range(2)]
    for number in (1, 2, 3):
        manifest = host.publish(number)
        for reader in readers if number % 2 else readers[::-1]:
            reader.fetch(manifest)
    later = Host(size=SIZE, term=1)
    manifest = later.publish(4)
    for reader in readers:
        reader.fetch(manifest)
    del reader
    gone = [line for line in Path("/proc/self/maps").read_text().splitlines() if tag in line and "(deleted)" in line]
    assert gone == []
    for reader in readers:
        reader.close()
    later.close()


def test_a_late_reader_is_served_by_the_others(host: Host) -> None:
    readers = [new_reader() for _ in range(2)]
    manifest = host.publish(1)
    fetch_together(readers, manifest)
    sent = host.server.traffic.chunks
    late = new_reader()
    assert holds(late.fetch(manifest), 1, SIZE)
    assert host.server.traffic.chunks == sent
    assert sum(reader.traffic.chunks for reader in readers) >= manifest.chunks
    (told,) = host.server.status()
    assert (told["sent_bytes"], told["chunks"], told["readers"]) == (manifest.size, manifest.chunks, 3)
    assert [one.status()[0]["fetched_bytes"] for one in (*readers, late)] == 3 * [manifest.size]
    for reader in (*readers, late):
        reader.close()


def test_without_the_readers_that_were_given_chunks_the_publisher_sends_them_again(host: Host) -> None:
    first = new_reader()
    manifest = host.publish(1)
    first.fetch(manifest)
    first.close()
    late = new_reader()
    assert holds(late.fetch(manifest), 1, SIZE)
    assert host.server.traffic.sent_bytes == 2 * manifest.size
    late.close()


def test_a_reader_whose_memory_is_corrupt_is_left_and_the_chunk_comes_from_elsewhere(host: Host) -> None:
    bad, late = new_reader(), new_reader()
    manifest = host.publish(1)
    bad.fetch(manifest)
    newest_memory(bad)[100_000] ^= 0xFF
    assert holds(late.fetch(manifest), 1, SIZE)
    assert host.server.traffic.chunks == manifest.chunks + 1, "the one chunk that no reader has right"
    for reader in (bad, late):
        reader.close()


def test_a_reader_that_was_wrong_is_asked_again_later(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_core, "BAN_S", 0.2)
    bad, late = new_reader(), new_reader()
    manifest = host.publish(1)
    bad.fetch(manifest)
    memory = newest_memory(bad)
    for chunk in range(3):
        memory[HEADER_BYTES + chunk * CHUNK_BYTES] ^= 0xFF
    late.fetch(manifest)
    client, address = late._client, bad._server and bad._server.address
    assert client is not None
    eventually(lambda: client._core._usable(str(address), time.monotonic()), "the end of the ban")
    manifest = host.publish(2)
    bad.fetch(manifest)
    before = host.server.traffic.chunks
    assert holds(late.fetch(manifest), 2, SIZE)
    assert host.server.traffic.chunks - before < manifest.chunks // 2
    for reader in (bad, late):
        reader.close()


def test_a_neighbour_that_stands_still_holds_up_no_fetch(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system accepts connections for it, and nobody says anything on them."""
    monkeypatch.setattr(swarm_socket, "HANDSHAKE_S", 2 * WAIT_S)
    reader = new_reader()
    reader.fetch(host.publish(1))
    assert reader._client is not None
    with listen("127.0.0.1") as mute:
        reader._client.met((address_of(mute),))
        done = threading.Event()
        manifest = host.publish(2)
        thread = threading.Thread(target=lambda: (reader.fetch(manifest), done.set()))
        with monkeypatch.context() as still:
            # The publisher does not know of it.
            still.setattr(reader._client, "met", lambda peers: None)
            thread.start()
            assert done.wait(WAIT_S)
        reader.close()
    thread.join(WAIT_S)


def test_a_fetch_that_was_given_up_is_served_no_more(host: Host) -> None:
    manifest = host.publish(1)
    segments = HostSegments(new_tag(), "policy")
    segment = segments.writable(manifest)
    assert segment is not None
    held = HeldVersion(manifest, segment.path)
    server = ChunkServer("127.0.0.1", introduces=False)
    server.hold(held)
    held.add(3)
    assert held.has(3)
    server.forget(held)
    assert not held.has(3), "its memory is written over"
    server.close()
    segments.close()


def test_what_anyone_put_there_is_no_version(host: Host) -> None:
    """In /dev/shm any user may leave a file of that name."""
    tag, reader = new_tag(), new_reader()
    manifest = host.publish(1)
    reader.fetch(manifest)
    planted = SEGMENTS / f"{segment_prefix(tag)}policy-swarm-t0-0"
    planted.write_bytes(bytes(newest_memory(reader)))
    planted.chmod(0o666)
    with planted.open("r+b") as file:
        file.seek(HEADER_BYTES + 64)
        file.write(b"\x77" * 64)
    mine = new_reader(tag)
    assert holds(mine.fetch(manifest), 1, SIZE)
    mine.close()
    planted.unlink(missing_ok=True)
    (SEGMENTS / f"{segment_prefix(tag)}policy-swarm-turn").touch(0o666)
    (SEGMENTS / f"{segment_prefix(tag)}policy-swarm-turn").chmod(0o666)
    with pytest.raises(UserError, match="-turn: expected a file of user .* with mode 0600, .* mode 666 — remove it"):
        new_reader(tag).fetch(manifest)
    for path in SEGMENTS.glob(f"{segment_prefix(tag)}*"):
        path.unlink()
    reader.close()


def test_without_room_for_one_more_a_neighbour_is_waited_for(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    tag, manifest = new_tag(), host.publish(1)
    *others, segments = [HostSegments(tag, "policy") for _ in range(FETCHED + 1)]
    assert None not in [other.writable(manifest) for other in others]

    def full(*about: object) -> None:
        raise UserError("no room for weights")

    monkeypatch.setattr(host_segments, "reserve", full)
    assert segments.writable(manifest, further=True) is None
    for each in (*others, segments):
        each.close()
    with pytest.raises(UserError, match="no room"):
        HostSegments(new_tag(), "policy").writable(manifest)
