"""The versions of a model as a program outside the run gets them: the newest one whenever it asks, never torn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from distflow.errors import ChecksumError, Overtaken, UserError
from distflow.runtime.weight_publisher import ASK_WEIGHTS, AskedWeights
from distflow.types import Version
from distflow.weights.manifest import Manifest
from distflow.weights.shm import ShmReader

Ready = Callable[[Collection[Mapping[str, Any]]], Manifest | None]
"""The version in these replies; None: wait for more."""
AskAll = Callable[[Sequence[str], str, Callable[[int], AskedWeights], float | None, Ready], Manifest | None]
"""Asks workers, with a request for each number, for so many seconds; None: the run is over."""
MOST_TRIES = 10
"""A version may be overwritten while it is read: the next one is taken then."""


@dataclass(frozen=True, slots=True)
class Weights:
    """One version of a model."""

    model: str
    version: int
    """How many training steps it has seen."""
    tensors: Mapping[str, Tensor]
    """By the names that they have in a Hugging Face folder of it: copies, in the memory of this process."""


class WeightSubscription:
    """Iterate over it for each new version of a model, or `take` one. Versions that nobody takes are passed over."""

    def __init__(self, model: str, client: str, workers: Sequence[str], ask_all: AskAll) -> None:
        self._model, self._client = model, client
        self._workers = workers
        self._ask_all = ask_all
        self._reader = ShmReader()
        self._had: Version | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Weights:
        found = self.take()
        if found is None:
            raise StopIteration
        return found

    def take(self, timeout: float | None = None) -> Weights | None:
        """Wait for a version that is newer than the last one taken, or is the first; None once the run is over.

        Raises UserError for a model that the run does not publish, TimeoutError after `timeout` seconds, WorkerFailed
        if the run has failed, and ChecksumError for bytes that are not those that were published.
        """
        for _ in range(MOST_TRIES):
            manifest = self._ask_all(self._workers, ASK_WEIGHTS, self._asked, timeout, self._published)
            if manifest is None:
                return None
            try:
                tensors = {name: view.clone() for name, view in self._reader.fetch(manifest)}
                whole = self._reader.intact(manifest)
            except Overtaken:
                continue
            if whole:
                self._had = manifest.version
                return Weights(self._model, manifest.version.number, tensors)
        raise ChecksumError(f"{self._model}: {MOST_TRIES} versions in a row were overwritten while they were read")

    def close(self) -> None:
        """Release the shared memory of the run. The tensors that were taken stay."""
        self._reader.close()

    def _asked(self, number: int) -> AskedWeights:
        return AskedWeights(self._client, number, self._model, self._had)

    def _published(self, replies: Collection[Mapping[str, Any]]) -> Manifest | None:
        """The version that a worker has answered with; raises UserError once all say that they have none."""
        for reply in replies:
            if "manifest" in reply:
                return Manifest.from_wire(reply["manifest"])
        if len(replies) < len(self._workers):
            return None
        known = ", ".join(sorted({str(name) for reply in replies for name in reply["models"]}))
        cure = f"it publishes {known}" if known else "workers that train and generate hand weights over in place"
        raise UserError(f"subscribe_weights: no training worker on this host publishes {self._model!r}; {cure}")
