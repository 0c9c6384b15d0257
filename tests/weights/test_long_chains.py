"""A hundred versions as what has changed, with the real limits: real sockets on loopback, real shared segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from distflow.flow.sizes import CHAINED, MOST_DELTAS
from distflow.weights.manifest import Manifest
from distflow.weights.swarm.client import SwarmClient
from distflow.weights.swarm.reader import SwarmReader
from tests.weights.swarm_kit import Host, new_reader

VALUES = 600_000
"""Two chunks."""
VERSIONS = 100
LARGE_FROM = 60
"""From this version on a delta takes a tenth of a version, so that fewer than seven fit into half of it; before that
hardly anything changes, and their number is the limit."""


class Weights:
    """Those of the newest version."""

    def __init__(self) -> None:
        self.values = torch.arange(VALUES, dtype=torch.int32).mul_(2654435761 % (1 << 31)).to(torch.int16)

    def step(self, number: int) -> list[tuple[str, torch.Tensor]]:
        """Change some of them, and return all."""
        apart = 500 if number < LARGE_FROM else 15
        self.values[number % apart :: apart] ^= number % 127 + 1
        return [("embed", self.values.view(torch.bfloat16))]

    def are(self, found: Any) -> bool:
        """Bit for bit: some are NaN."""
        ((name, tensor),) = found
        return name == "embed" and torch.equal(tensor.view(torch.int16), self.values)


class Sleeper:
    """A reader that takes some of the versions, and what it is to fetch for each, by the sizes of all deltas."""

    def __init__(self, takes: Callable[[int], bool]) -> None:
        self.reader: SwarmReader = new_reader()
        self.takes = takes
        self.whole: list[int] = []
        """The versions of which it took all."""
        self._has: int | None = None

    def expected(self, manifest: Manifest, deltas: Sequence[int]) -> int:
        """Bytes to fetch. `deltas`: the size of each one that was ever made, by the version that it leads to."""
        number, had = manifest.version.number, self._has
        self._has = number
        if had is not None and number - had <= MOST_DELTAS:
            changes = sum(deltas[had + 1 : number + 1])
            if changes <= CHAINED * manifest.size:
                return changes
        self.whole.append(number)
        return manifest.size

    @property
    def kept(self) -> int:
        """Bytes of the deltas that it has, for readers on other hosts."""
        assert self.reader._deltas is not None
        return sum(held.manifest.size for held in self.reader._deltas._held)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of all chunks that have arrived at any reader, whoever sent them."""
    sizes: list[int] = []
    fetch = SwarmClient.fetch

    def counted(self: SwarmClient, manifest: Manifest, into: memoryview, arrived: Any, *rest: Any) -> None:
        def noted(chunk: int) -> None:
            sizes.append(manifest.size_of(chunk))
            arrived(chunk)

        fetch(self, manifest, into, noted, *rest)

    monkeypatch.setattr(SwarmClient, "fetch", counted)
    return sizes


@pytest.fixture
def readers() -> Iterator[dict[str, Sleeper]]:
    made = {
        "all": Sleeper(lambda number: True),
        "each seventh": Sleeper(lambda number: number % 7 == 0),
        "slept for 32": Sleeper(lambda number: number <= 10 or number >= 10 + MOST_DELTAS),
        "slept for 40": Sleeper(lambda number: number <= 10 or number >= 50),
    }
    yield made
    for one in made.values():
        one.reader.close()


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(deltas=True)
    yield made
    made.close()


def test_readers_that_skip_versions_have_the_same_bytes_and_fetch_no_more_than_is_said(
    host: Host, readers: dict[str, Sleeper], fetched: list[int]
) -> None:
    """docs/weights.md: who is more than 32 versions or half the model's bytes behind takes all, others what changed."""
    weights, deltas = Weights(), [0]
    for number in range(VERSIONS):
        manifest = host.publish(number, weights.step(number))
        deltas += [manifest.deltas[-1].size] if number else []
        assert len(manifest.deltas) <= MOST_DELTAS
        assert sum(delta.size for delta in manifest.deltas) <= CHAINED * manifest.size
        for name, one in readers.items():
            if one.takes(number):
                fetched.clear()
                assert weights.are(one.reader.fetch(manifest)), (name, number)
                assert sum(fetched) == one.expected(manifest, deltas), (name, number)
                assert one.kept <= CHAINED * manifest.size, (name, number)
    assert {name: one.whole for name, one in readers.items()} == {
        "all": [0],
        "each seventh": [0, 70, 77, 84, 91, 98],
        "slept for 32": [0],
        "slept for 40": [0, 50],
    }
