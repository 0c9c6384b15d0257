"""Readers outside the run: they get what hosts of the run get, and nobody waits for them or is given less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from distflow.errors import Overtaken, UserError
from distflow.weights.manifest import CHUNK_BYTES
from distflow.weights.swarm import client as swarm_client
from distflow.weights.swarm import patience, private_segments
from distflow.weights.swarm.private_segments import PrivateSegments
from distflow.weights.swarm.reader import SwarmReader
from tests.polling import WAIT_S
from tests.weights.swarm_kit import Host, Proxy, holds, new_reader, new_tag
from tests.weights.test_swarm_readers import SIZE, fetch_together
from tests.weights.weight_processes import Actor, FarReader, Publisher, start

CHUNKS = 23
Cast = Callable[..., Actor]


def outside(no_progress_s: float = WAIT_S, site: str = "") -> SwarmReader:
    return SwarmReader(None, None, no_progress_s, site)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(size=SIZE)
    yield made
    made.close()


@pytest.fixture
def cast() -> Iterator[Cast]:
    with ExitStack() as stack:
        yield partial(start, stack)


def test_they_take_from_hosts_of_the_run_what_these_were_given(host: Host) -> None:
    within, beyond = [new_reader() for _ in range(2)], [outside() for _ in range(2)]
    for number in (1, 2):
        manifest = host.publish(number)
        assert all(holds(found, number, SIZE) for found in fetch_together(within, manifest))
        sent = host.server.traffic.sent_bytes
        assert all(holds(found, number, SIZE) for found in fetch_together(beyond, manifest))
        assert host.server.traffic.sent_bytes == sent
        assert all(holds(found, number, SIZE) for found in fetch_together([*beyond, *within], host.publish(number)))
    assert host.server.status()[0]["readers"] == len(within), "nobody is sent to them"
    for reader in beyond:
        reader.close()
    assert "memfd:distflow-weights" not in Path("/proc/self/maps").read_text(), "they keep no memory"
    for reader in within:
        reader.close()


def test_at_a_site_they_take_nothing_from_elsewhere_that_hosts_there_fetch(host: Host) -> None:
    within, beyond, lost = new_reader(site="far"), outside(site="far"), outside()
    for number in (1, 2, 3):
        manifest, before = host.publish(number), host.server.traffic.sent_bytes
        assert all(holds(found, number, SIZE) for found in fetch_together([within, beyond], manifest))
        if number > 1:
            assert host.server.traffic.sent_bytes - before == manifest.size
    before = host.server.traffic.sent_bytes
    assert holds(lost.fetch(manifest), 3, SIZE)
    assert host.server.traffic.sent_bytes - before == manifest.size, "it has not said where it stands"
    for reader in (within, beyond, lost):
        reader.close()


def test_one_that_is_killed_in_the_middle_costs_a_host_of_the_run_no_chunk(cast: Cast) -> None:
    publisher = cast(Publisher, new_tag(), 0, SIZE)
    lost, reader = cast(FarReader, None, SIZE), cast(FarReader, new_tag(), SIZE)
    _, far = publisher.ask("publish", 1)
    lost.tell("stop_after", far, CHUNKS // 2)
    assert lost.answer() == "fetching"
    before = publisher.ask("sent")
    assert reader.ask("fetch", far), "while the other one stands still"
    assert publisher.ask("sent") - before <= (CHUNKS + swarm_client.CONNECTIONS * 8) * CHUNK_BYTES
    lost.kill()
    _, far = publisher.ask("publish", 2)
    assert reader.ask("fetch", far)
    assert cast(FarReader, None, SIZE).ask("fetch", far)


def test_an_interrupted_fetch_goes_on_where_it_was(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "RETRY_S", 0.3)
    reader, manifest = outside(), host.publish(1)
    way = Proxy(manifest.place)
    through = type(manifest).from_wire({**manifest.to_wire(), "place": way.place})

    def gone() -> bool:
        return True

    def cut() -> None:
        if reader.fetched == 5:
            way.cut(reset=False)

    note = PrivateSegments.note_progress
    monkeypatch.setattr(PrivateSegments, "note_progress", lambda *noted: (note(*noted), cut())[0])
    with pytest.raises(Overtaken, match="no chunk from"):
        reader.fetch(through, gone)
    had = reader.fetched
    way.heal()
    assert 5 <= had < manifest.chunks
    assert holds(reader.fetch(manifest), 1, SIZE)
    assert reader.fetched == manifest.chunks
    reader.close()
    way.close()


def test_two_versions_are_kept_and_those_of_another_size_are_freed(host: Host) -> None:
    reader = outside()
    made = [host.publish(number) for number in (1, 2, 3)]
    for manifest in made:
        reader.fetch(manifest)
    assert [reader.hold(manifest) for manifest in made] == [False, True, True]
    later = Host(size=SIZE // 2, term=1)
    reader.fetch(later.publish(4))
    assert [reader.hold(manifest) for manifest in made] == [False] * 3
    reader.close()
    later.close()


def test_without_memory_it_says_so(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*about: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(private_segments.os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"no memory for weights of 24\.0 MB \(No space left on device\): 2 versions"):
        outside().fetch(host.publish(1))
