"""The two ends of a weight link. An adapter (shared memory, collective, swarm) is a publisher and a reader."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from distflow.types import Version
from distflow.weights.manifest import Manifest

NamedTensors = Sequence[tuple[str, Tensor]]


class WeightPublisher(Protocol):
    """On the training side; never waits for a reader."""

    def publish(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
        """Make a version available and return what to announce. Recent versions stay available."""
        ...

    def close(self) -> None:
        """Withdraw everything."""
        ...


class WeightReader(Protocol):
    """On the generating side."""

    def fetch(self, manifest: Manifest) -> NamedTensors:
        """The announced tensors, checked; raises ChecksumError when they are not what was announced, Overtaken (a
        ChecksumError) when they no longer are.

        They may be views of memory that the publisher will use again: copy them, then ask `intact`.
        """
        ...

    def intact(self, manifest: Manifest) -> bool:
        """Whether tensors of this manifest, copied since `fetch`, were still whole when the copy ended."""
        ...

    def begin_term(self, term: int) -> None:
        """Nothing of earlier terms is fetched any more. Called on any thread."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...
