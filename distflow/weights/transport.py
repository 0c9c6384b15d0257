"""The two ends of a weight link, and the link inside one process (colocated layouts).

A link is a WeightPublisher and a WeightReader. Which one leads from a worker to another is decided in
`distflow/runtime/ports.py`: inside one process the engine copies straight from the trainer's parameters (`InprocLink`,
read by `in_place.InPlace`), on one host from a shared segment (`ShmPublisher` and `ShmReader` of `segments/shm.py`,
read in the same way), and from other hosts a version is staged first (`SwarmServer` of `swarm/server.py`, `SwarmReader`
of `swarm/reader.py`, read by `prefetch.Stage`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from distflow.errors import Overtaken
from distflow.types import Version
from distflow.weights.manifest import Manifest

if TYPE_CHECKING:
    from torch import Tensor

NamedTensors: TypeAlias = "Sequence[tuple[str, Tensor]]"


class WeightPublisher(Protocol):
    """The training side; never waits for a reader."""

    def publish(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
        """Make a version available and return what is announced of it. Recent versions stay available."""
        ...

    def close(self) -> None:
        """Withdraw all versions."""
        ...


class Updatable(Protocol):
    """The part of an engine that takes weights."""

    def begin_update(self, version: Version) -> None:
        """Stop sampling; if the version is the one in use, discard what was sampled with it."""
        ...

    def update(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy these tensors in. Nothing may be written into them: others read them where they are."""
        ...

    def end_update(self) -> None:
        """Resume sampling with the new version."""
        ...


class WeightReader(Protocol):
    """The generating side: `refresh` when a version is `waiting`. `offer` and `begin_term` may come on any thread."""

    @property
    def chunks(self) -> int:
        """Chunks that have come over a network so far: progress."""
        ...

    @property
    def waiting(self) -> bool:
        """Whether a version, or the error of its transfer, is ready for `refresh`."""
        ...

    @property
    def overtaken(self) -> Version | None:
        """The last version that was gone when it was wanted."""
        ...

    def reads(self, manifest: Manifest) -> bool:
        """Whether this link leads to where the version is."""
        ...

    def offer(self, manifest: Manifest) -> None:
        """Bring this version next, instead of any that has not begun to come."""
        ...

    def refresh(self, engine: Updatable) -> Manifest | None:
        """Put what is ready into the engine; returns what that was, None if it is gone.

        Raises ChecksumError if it is not what was announced, and whatever ended its transfer.
        """
        ...

    def again(self, manifest: Manifest) -> None:
        """Bring this version once more, unless a newer one is on its way."""
        ...

    def begin_term(self, term: int, begins: Mapping[int, int]) -> None:
        """Training has restarted: forget versions that do not survive it. `begins`: training steps by term."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class InprocLink:
    """A publisher, and what `InPlace` reads. Only the newest version can be fetched: older parameters no longer exist.

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

    def doubt(self, manifest: Manifest) -> None:
        """Nothing was found out about what lies in this process."""

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
