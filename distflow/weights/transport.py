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
    """The training side; never waits for a reader."""

    def publish(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
        """Make a version available and return what to announce. Recent versions stay available."""
        ...

    def close(self) -> None:
        """Withdraw all versions."""
        ...


class WeightReader(Protocol):
    """The generating side."""

    def fetch(self, manifest: Manifest) -> NamedTensors:
        """The announced tensors, checked. Raises ChecksumError if they differ from what was announced, Overtaken (a
        ChecksumError) if they were overwritten.

        They may be views of memory that the publisher will reuse: copy them, then call `intact`.
        """
        ...

    def intact(self, manifest: Manifest) -> bool:
        """Whether the tensors were still unchanged after they were copied."""
        ...

    def begin_term(self, term: int) -> None:
        """Fetch nothing of earlier terms any more. Thread-safe."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class InprocLink:
    """Publisher and reader in one. Only the newest version can be fetched: older parameters no longer exist.

    Published tensors are kept alive by the references here, even after the trainer has been moved off the device.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._version: Version | None = None
        self._tensors: list[tuple[str, Tensor]] = []

    def publish(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
        """Keep references; nothing is copied."""
        self._version, self._tensors = version, []  # freed before the new ones, which may be copies, exist
        self._tensors = list(tensors)
        return Manifest(self._model, version, "", 0, (), ())

    def fetch(self, manifest: Manifest) -> NamedTensors:
        """The trainer's parameters; raises Overtaken for a version that is no longer the newest."""
        if manifest.version != self._version:
            raise Overtaken(f"version {tuple(manifest.version)} of {self._model!r} is gone; newest: {self._version}")
        return self._tensors

    def intact(self, manifest: Manifest) -> bool:
        """The tensors cannot change while the same thread copies."""
        return manifest.version == self._version

    def begin_term(self, term: int) -> None:
        """Training workers of a new term are new processes."""

    def keep_on_host(self) -> None:
        """Replace the references by copies in host memory, so that device memory is freed."""
        self._tensors = [(name, tensor.cpu()) for name, tensor in self._tensors]

    def let_go(self) -> None:
        """Drop the references: nobody fetches this version any more."""
        self._version, self._tensors = None, []

    def close(self) -> None:
        """Drop the references."""
        self._tensors = []
