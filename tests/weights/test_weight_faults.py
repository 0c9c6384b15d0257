"""Processes of the weights' way that are killed in the middle of it, and damaged chunks: real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from distflow.flow.sizes import PINNED, PUBLISHED
from tests.polling import eventually
from tests.weights.swarm_kit import Proxy, new_tag
from tests.weights.weight_processes import Actor, FarReader, Generating, Publisher, arrived, start, tidy

SIZE = 6_000_000
"""Values of the largest tensor: 23 chunks."""
CHUNKS = 23
FEW = 100_000

Cast = Callable[..., Actor]


@pytest.fixture
def cast() -> Iterator[Cast]:
    """Starts actors, which end with the test."""
    with ExitStack() as stack:
        yield lambda role, *setting: start(stack, role, *setting)


@pytest.fixture
def tag() -> Iterator[str]:
    """A host whose shared memory is tidied up behind what was killed there."""
    made = new_tag()
    yield made
    tidy(made)


def test_readers_stay_where_a_publisher_is_killed_in_mid_publish_and_go_on_with_the_next(cast: Cast, tag: str) -> None:
    publisher = cast(Publisher, tag, 0, FEW)
    readers = [cast(Generating, FEW), cast(Generating, FEW)]
    wires = [publisher.ask("publish", number)[0] for number in range(1, 1 + PUBLISHED + PINNED)]
    readers[0].ask("announce", wires[-1])
    assert readers[0].ask("load") == (0, len(wires))
    # One that was busy: it has heard of the version that is overwritten now.
    readers[1].ask("announce", wires[0])
    publisher.tell("stop_halfway", len(wires) + 1)
    assert publisher.answer() == "halfway"
    publisher.kill()
    assert readers[0].ask("serves") == (0, len(wires))
    assert readers[1].ask("load") is None, "never a mixture of two versions"
    readers[1].ask("announce", wires[-1])
    assert readers[1].ask("load") == (0, len(wires)), "the last whole version outlives its publisher"
    heir = cast(Publisher, tag, 1, FEW)
    near, _ = heir.ask("publish", 2)
    for reader in readers:
        reader.ask("begin_term", 1, {1: 2})
        reader.ask("announce", near)
        assert reader.ask("load") == (1, 2)


def test_readers_elsewhere_go_on_with_the_next_publisher_too(cast: Cast, tag: str) -> None:
    publisher, reader = cast(Publisher, tag, 0, FEW), cast(FarReader, new_tag(), FEW)
    _, far = publisher.ask("publish", 1)
    assert reader.ask("fetch", far)
    publisher.tell("stop_halfway", 2)
    assert publisher.answer() == "halfway"
    publisher.kill()
    assert reader.ask("fetch", far), "what it has it keeps"
    _, far = cast(Publisher, tag, 1, FEW).ask("publish", 2)
    assert reader.ask("fetch", far)


def test_a_reader_that_is_killed_while_it_compares_the_checksums_for_all_is_replaced(cast: Cast, tag: str) -> None:
    publisher, lost, other = cast(Publisher, tag, 0, FEW), cast(Generating, FEW), cast(Generating, FEW)
    near, _ = publisher.ask("publish", 1)
    for reader in (lost, other):
        reader.ask("announce", near)
    lost.tell("stop_in_check")
    assert lost.answer() == "comparing"
    other.tell("load")
    lost.kill()
    assert other.answer() == (0, 1)


def test_hosts_that_fetch_from_a_reader_that_is_killed_finish_and_so_does_its_neighbour(cast: Cast, tag: str) -> None:
    publisher = cast(Publisher, new_tag(), 0, SIZE)
    relay, neighbour = cast(FarReader, tag, SIZE), cast(FarReader, tag, SIZE)
    hosts = [new_tag() for _ in range(2)]
    others = [cast(FarReader, host, SIZE) for host in hosts]
    _, far = publisher.ask("publish", 1)
    relay.tell("stop_after", far, CHUNKS // 2)
    assert relay.answer() == "fetching"
    for reader in (neighbour, *others):
        reader.tell("fetch", far)
    eventually(lambda: all(map(arrived, hosts)), "they have chunks that the relay was given")
    relay.kill()
    assert all(reader.answer() for reader in (neighbour, *others))
    assert 0 < neighbour.ask("counts")[0] <= CHUNKS - CHUNKS // 2, "it took the turn to fetch, and goes on from there"
    assert publisher.ask("sent") <= 2 * CHUNKS << 20, "what the lost one was given is sent once more"


def test_a_flipped_bit_at_a_reader_that_serves_is_refused_and_the_chunk_comes_from_elsewhere(cast: Cast) -> None:
    publisher = cast(Publisher, new_tag(), 0, SIZE)
    bad, late = (cast(FarReader, new_tag(), SIZE) for _ in range(2))
    _, far = publisher.ask("publish", 1)
    assert bad.ask("fetch", far)
    before = publisher.ask("sent")
    bad.ask("flip", 100_000)
    assert late.ask("fetch", far)
    assert publisher.ask("sent") - before <= 1 << 20, "one chunk"


def test_one_that_comes_late_takes_nothing_but_the_manifest_from_the_publisher(cast: Cast) -> None:
    publisher = cast(Publisher, new_tag(), 0, SIZE)
    early = [cast(FarReader, new_tag(), SIZE) for _ in range(2)]
    _, far = publisher.ask("publish", 1)
    for reader in early:
        reader.tell("fetch", far)
    assert all(reader.answer() for reader in early)
    before = publisher.ask("sent")
    with closing(Proxy(far["place"])) as way:
        assert cast(FarReader, new_tag(), SIZE).ask("fetch", {**far, "place": way.place})
        assert way.passed < 16 << 10, "both ways, all that is said included"
    assert publisher.ask("sent") == before
    assert sum(reader.ask("counts")[1] for reader in early) >= CHUNKS
