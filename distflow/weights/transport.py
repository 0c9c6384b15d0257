"""The two ends of a weight link, and the link inside one process (colocated layouts).

An adapter (shared memory, collective, swarm) is a publisher and a reader. Inside one process the engine copies straight
from the trainer's parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from distflow.errors import Overtaken
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


class InprocLink:
    """Publisher and reader in one. Only the newest version can be fetched: older parameters are gone by then.

    What is published lives on while it is referred to here, also after the trainer has left the device.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._version: Version | None = None
        self._tensors: list[tuple[str, Tensor]] = []

    def publish(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
        """Remember references; nothing is copied."""
        self._version, self._tensors = version, []  # before the new ones, which may be copies, are there
        self._tensors = list(tensors)
        return Manifest(self._model, version, "", 0, (), ())

    def fetch(self, manifest: Manifest) -> NamedTensors:
        """The live parameters; raises Overtaken for a version that is no longer the newest."""
        if manifest.version != self._version:
            raise Overtaken(f"version {tuple(manifest.version)} of {self._model!r} is gone; newest: {self._version}")
        return self._tensors

    def intact(self, manifest: Manifest) -> bool:
        """Nothing can change while the same thread copies."""
        return manifest.version == self._version

    def begin_term(self, term: int) -> None:
        """Training workers of a new term are new processes."""

    def keep_on_host(self) -> None:
        """Refer to copies in the host's memory: what was published leaves the device."""
        self._tensors = [(name, tensor.cpu()) for name, tensor in self._tensors]

    def let_go(self) -> None:
        """Refer to nothing: nobody fetches this version any more, or finds it gone."""
        self._version, self._tensors = None, []

    def close(self) -> None:
        """Let go."""
        self._tensors = []
