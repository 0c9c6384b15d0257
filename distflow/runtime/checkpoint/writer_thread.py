"""What becomes of a checkpoint on its thread: the copy, the parts, COMMIT; and what is said when the disk refuses.

`HostCopies` are copies of a model's state in host memory, into the same buffers every time. `Background` is the thread:
it does one job after another, for what training must not wait for.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from distflow.log import logger
from distflow.runtime.checkpoint.format import Shard
from distflow.runtime.checkpoint.parts import CheckpointWriter, ModelFolders
from distflow.runtime.metrics import MetricStore
from distflow.types import Version

log = logger(__name__)

Parts = Mapping[str, Sequence[object]]
"""Size in bytes and checksum of files, by name."""
FAILED = "checkpoint/failed/count"
FAILED_FOLDER = "checkpoint/hf_failed/count"
T = TypeVar("T")


@dataclass(slots=True)
class Flight:
    """A checkpoint under way."""

    version: Version
    score: tuple[float, float]
    """Sum and weight of the metric that checkpoints are kept for, on this replica."""
    copied: Future[dict[str, list[Shard]]] = field(default_factory=Future)
    written: Future[Parts] = field(default_factory=Future)
    as_folder: bool = False
    """Its model is written as a Hugging Face folder, too."""
    seconds: float = 0.0
    """From its begin until the parts were on the disk, or were not."""


class CheckpointThread:
    """Of one replica. `alone`: it is the only one, so that COMMIT follows its parts at once.

    `flush` brings the record of trained samples to the disk; `wake` is called when something is done; `folders` writes
    whole checkpoints as Hugging Face folders.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        flush: Callable[[], None],
        metrics: MetricStore,
        wake: Callable[[], None],
        *,
        alone: bool,
        folders: ModelFolders | None = None,
    ) -> None:
        self._writer = writer
        self._folders = folders
        self._flush = flush
        self._metrics = metrics
        self._wake = wake
        self._alone = alone
        self._copies = HostCopies()
        self._background = Background("checkpoint")
        # Its own thread: the copy for the next checkpoint, which training waits for, shall not wait for a folder.
        self._slow = None if folders is None else Background("model folders")
        self.folder: Future[None] | None = None
        """The Hugging Face folder that was begun last."""

    def prepare(self, shards: dict[str, list[Shard]]) -> Future[None]:
        """Allocate the buffers that `begin` copies into: touching their memory first takes longer than the copy."""

        def work() -> None:
            for name, own in shards.items():
                self._copies.take(name, own)
            shards.clear()

        return self._do(self._background, work)

    def begin(
        self,
        version: Version,
        score: tuple[float, float],
        shards: dict[str, list[Shard]],
        worker: Mapping[str, object],
        *,
        as_folder: bool = False,
    ) -> Flight:
        """Copy and write. Until `copied` is done the shards must not change; then they are let go."""
        flight, began = Flight(version, score, as_folder=as_folder), time.perf_counter()

        def copy() -> dict[str, list[Shard]]:
            copies = {name: self._copies.take(name, own) for name, own in shards.items()}
            shards.clear()
            return copies

        def write() -> Parts:
            try:
                return self._write(flight, worker)
            finally:
                flight.seconds = time.perf_counter() - began

        flight.copied = self._do(self._background, copy)
        flight.written = self._do(self._background, write)
        return flight

    def commit(self, flight: Flight, parts: Parts, score: float | None) -> Future[str]:
        """Write COMMIT; gives what the disk had against it, or nothing."""

        def work() -> str:
            version = flight.version
            try:
                checkpoint = self._say(self._writer.commit(version, parts, score))
                if flight.as_folder:
                    self._make_folder(checkpoint)
            except OSError as error:
                self._complain(version, error)
                self._writer.abandon(version)
                return str(error)
            return ""

        return self._do(self._background, work)

    def catch_up(self, step: int, every: int) -> None:
        """Begin the folder that an earlier life of the run owed when it saved the checkpoint after this step."""
        checkpoint = None if self._folders is None else self._folders.owed(step, every)
        if checkpoint is not None:
            self._make_folder(checkpoint)

    def abandon(self, version: Version) -> Future[None]:
        """Remove what there is of it."""

        def work() -> None:
            try:
                self._writer.abandon(version)
            except OSError as error:
                log.warning("could not delete the partial checkpoint of step %d: %s", version.number, error)

        return self._do(self._background, work)

    def close(self, limit_s: float) -> None:
        """Finish what was begun, for at most so many seconds."""
        if not self._background.close(limit_s):
            log.warning("a checkpoint was still being written after %g s: it is left unfinished", limit_s)
        if self._slow is not None and not self._slow.close(limit_s):
            log.warning("a Hugging Face folder was still being written after %g s: `distflow export` makes it", limit_s)

    def _do(self, thread: Background, work: Callable[[], T]) -> Future[T]:
        """Who waits for it is woken when it is done."""
        future = thread.submit(work)
        future.add_done_callback(lambda _: self._wake())
        return future

    def _write(self, flight: Flight, worker: Mapping[str, object]) -> Parts:
        version, writer = flight.version, self._writer
        try:
            copies = flight.copied.result()
            self._flush()
            parts = writer.write_parts(version, copies, worker)
            if self._alone:
                checkpoint = self._say(writer.commit(version, parts, mean_of([flight.score])))
                if flight.as_folder:
                    self._make_folder(checkpoint)
        except OSError as error:
            self._complain(version, error)
            raise
        return parts

    def _make_folder(self, checkpoint: Path) -> None:
        """Begin the folder of a whole checkpoint, if this replica makes folders."""
        folders, writer = self._folders, self._writer
        if folders is None or self._slow is None:
            return
        writer.held.add(checkpoint)

        def work() -> None:
            try:
                self._say(folders.write(checkpoint, writer.note))
            except Exception as error:
                # Whatever it is, it costs the folder and no more.
                self._metrics.add(FAILED_FOLDER, 1)
                log.error("no Hugging Face folder of %s could be written: %r", checkpoint, error)
            finally:
                writer.held.discard(checkpoint)

        self.folder = self._do(self._slow, work)

    def _say(self, folder: Path) -> Path:
        log.info("saved %s", folder)
        return folder

    def _complain(self, version: Version, error: OSError) -> None:
        self._metrics.add(FAILED, 1)
        log.error(
            "the checkpoint after training step %d could not be written (%s); the newest one is %s",
            version.number,
            error,
            self._writer.newest(),
        )


def mean_of(scores: Sequence[Sequence[float]]) -> float | None:
    """The mean of (sum, weight) pairs; None where nothing was measured, or no number."""
    total, weight = (sum(float(score[place]) for score in scores) for place in (0, 1))
    value = total / weight if weight > 0 else None
    return value if value is not None and value == value else None


class HostCopies:
    """One copy at a time. The first one allocates; from then on nothing is allocated as long as shapes stay."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str, int], Tensor] = {}

    def take(self, model: str, shards: Iterable[Shard]) -> list[Shard]:
        """Copies of shards, which the next `take` of the same model overwrites."""
        copies: list[Shard] = []
        for shard in shards:
            key = (model, shard.name, shard.start)
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != shard.data.shape or buffer.dtype != shard.data.dtype:
                # Pinned: a copy from a GPU then runs at the full speed of the bus.
                pinned = shard.data.is_cuda
                buffer = torch.empty(shard.data.shape, dtype=shard.data.dtype, pin_memory=pinned)
                self._buffers[key] = buffer
            buffer.copy_(shard.data.detach())
            copies.append(replace(shard, data=buffer))
        return copies


class Background:
    """Jobs run in the order in which they were given; what they return or raise is in their futures."""

    def __init__(self, name: str) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do this when all that was given before is done."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                result = work()
            except Exception as error:
                # Whoever waits for the future gets it.
                future.set_exception(error)
            else:
                future.set_result(result)

        self._queue.put(job)
        return future

    def close(self, limit_s: float) -> bool:
        """Finish what was given, for at most so many seconds; whether all is done."""
        self._queue.put(None)
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            # Jobs hold views of the model's state: not a moment longer than they need them.
            del job
