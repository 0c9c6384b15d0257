"""The versions of a model as a program outside the run gets them: the newest one whenever it asks, never torn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import msgspec
from torch import Tensor

from distflow.errors import ChecksumError, Overtaken, UserError
from distflow.types import Version
from distflow.weights.client_requests import ASK_PUBLISHERS, ASK_WEIGHTS, AskedPublishers, AskedWeights
from distflow.weights.manifest import Manifest
from distflow.weights.segments.segment_file import memory_name
from distflow.weights.segments.shm import ShmReader
from distflow.weights.swarm.reader import SwarmReader

T = TypeVar("T")
Replies = Mapping[str, Mapping[str, Any]]
"""By worker."""
MOST_TRIES = 10
"""A version may be overwritten while it is read: the next one is taken then."""
HEAR_S = 1.0
"""How long to wait for what other workers say, once one has said that it publishes the model."""
LOOK_AGAIN_S = 5.0
"""After this long without a version, workers are asked again who publishes: it may be another one by now."""
OVERTAKEN_S = 1.0
"""How long a fetch to which nothing comes waits, each time, for word of a newer version."""


class AskAll(Protocol):
    """Asks these workers, with a request for each number, until `ready` makes something of their replies.

    Returns None when the run is over; raises TimeoutError after `timeout` seconds.
    """

    def __call__(
        self,
        names: Sequence[str],
        kind: str,
        body: Callable[[int], msgspec.Struct],
        timeout: float | None,
        ready: Callable[[Replies], T | None],
    ) -> T | None:
        """Ask them."""
        ...


class Publisher(NamedTuple):
    """Who is asked for versions, and how they are read."""

    name: str
    far: bool


@dataclass(frozen=True, slots=True)
class Weights:
    """One version of a model."""

    model: str
    version: int
    """How many training steps it has seen."""
    tensors: Mapping[str, Tensor]
    """By the names that they have in a Hugging Face folder of it: copies, in the memory of this process."""


class WeightSubscription:
    """Iterate over it for each new version of a model, or `take` one. Versions that nobody takes are passed over.

    On a host with a training worker they are read where that has published them, elsewhere over the network: what has
    changed since the version before, where that is less. `no_progress_s`, `site`: as `SwarmReader` has them.
    """

    def __init__(
        self,
        model: str,
        client: str,
        workers: Sequence[str],
        ask_all: AskAll,
        no_progress_s: float,
        site: str = "",
    ) -> None:
        self._model, self._client = model, client
        self._workers = workers
        self._ask_all = ask_all
        self._near = ShmReader()
        self._far = SwarmReader(None, None, no_progress_s, site)
        self._publisher: Publisher | None = None
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

        Raises UserError for a model that the run does not publish, TimeoutError if nothing has come for it after
        `timeout` seconds, WorkerFailed if the run has failed, NoProgressError if nothing of it answers, and
        ChecksumError for bytes that are not those that were published.
        """
        until = None if timeout is None else time.monotonic() + timeout
        for _ in range(MOST_TRIES):
            manifest = self._newer(self._had, until, timeout)
            if manifest is None:
                return None
            try:
                tensors = self._read(manifest, partial(self._superseded, manifest.version, until))
            except Overtaken:
                self._publisher = None
                continue
            self._had = manifest.version
            return Weights(self._model, manifest.version.number, tensors)
        raise ChecksumError(f"{self._model}: {MOST_TRIES} versions in a row were overwritten while they were read")

    def close(self) -> None:
        """Release what was read from. The tensors that were taken stay."""
        self._near.close()
        self._far.close()

    def _read(self, manifest: Manifest, superseded: Callable[[], bool]) -> dict[str, Tensor]:
        """Copies of a version's tensors; raises Overtaken."""
        if manifest.digests:
            return {name: view.clone() for name, view in self._far.fetch(manifest, superseded)}
        try:
            tensors = {name: view.clone() for name, view in self._near.fetch(manifest)}
            if not self._near.intact(manifest):
                raise Overtaken(f"{manifest.title}: overwritten by a newer version while it was copied")
        finally:
            # While the caller computes, a term may begin that needs the memory.
            self._near.close()
        return tensors

    def _superseded(self, version: Version, until: float | None) -> bool:
        """Whether there is a newer version than one to which nothing comes, or none any more."""
        now = time.monotonic()
        try:
            self._newer(version, now + OVERTAKEN_S if until is None else min(now + OVERTAKEN_S, until), OVERTAKEN_S)
        except TimeoutError:
            if until is not None and time.monotonic() >= until:
                raise
            return False
        return True

    def _newer(self, had: Version | None, until: float | None, timeout: float | None) -> Manifest | None:
        """The manifest of a newer version than `had`; None once the run is over."""
        while True:
            left = LOOK_AGAIN_S if until is None else max(0.0, min(LOOK_AGAIN_S, until - time.monotonic()))
            try:
                if self._publisher is None:
                    self._publisher = self._ask_all(self._workers, ASK_PUBLISHERS, self._around, left, self._found())
                publisher = self._publisher
                if publisher is None:
                    return None
                asked = partial(AskedWeights, self._client, model=self._model, after=had, far=publisher.far)
                return self._ask_all([publisher.name], ASK_WEIGHTS, asked, left, _published)
            except TimeoutError as error:
                self._publisher = None
                if until is not None and time.monotonic() >= until:
                    raise TimeoutError(
                        f"{self._model}: waited {timeout:g} s for a newer version — the run goes on; ask again"
                    ) from error

    def _around(self, number: int) -> AskedPublishers:
        return AskedPublishers(self._client, number, memory_name())

    def _found(self) -> Callable[[Replies], Publisher | None]:
        """Chooses a publisher by what workers say; raises UserError once all say that there is none."""
        first = time.monotonic()

        def chosen(replies: Replies) -> Publisher | None:
            having = {name: reply for name, reply in sorted(replies.items()) if self._model in reply["models"]}
            if near := [name for name, reply in having.items() if reply["near"]]:
                return Publisher(near[0], far=False)
            said = len(replies) == len(self._workers)
            if not said and (not having or time.monotonic() - first < HEAR_S):
                return None
            if far := [name for name, reply in having.items() if reply["far"]]:
                # Clients spread over the publishers, and each stays with one.
                return Publisher(far[hash(self._client) % len(far)], far=True)
            if not said:
                return None
            raise UserError(self._no_publisher(replies))

        return chosen

    def _no_publisher(self, replies: Replies) -> str:
        models = sorted({str(name) for reply in replies.values() for name in reply["models"]})
        if self._model in models:
            return (
                f"subscribe_weights: this program does not see the shared memory of the workers that publish "
                f"{self._model!r}, and they serve no other hosts — run it beside them, or launch the run with --hosts"
            )
        hint = (
            f"it publishes {', '.join(models)}" if models else "workers that train and generate hand it over in place"
        )
        return f"subscribe_weights: no training worker of this run publishes {self._model!r}; {hint}"


def _published(replies: Replies) -> Manifest | None:
    return next((Manifest.from_wire(reply["manifest"]) for reply in replies.values()), None)
