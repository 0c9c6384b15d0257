"""Writes checkpoints on a thread: the copy, the parts, COMMIT, and the messages when the disk refuses.

`HostCopies` copies a model's state into host memory, always into the same buffers. `Background` is the thread, which
runs one job after another while training continues.
"""

from __future__ import annotations

import math
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
from distflow.runtime.checkpoint.commit import Note
from distflow.runtime.checkpoint.format import Shard
from distflow.runtime.checkpoint.parts import CheckpointWriter, ModelFolders
from distflow.runtime.metrics import MetricStore
from distflow.types import Version

log = logger(__name__)

Parts = Mapping[str, Sequence[object]]
"""Size in bytes and checksum of each file, by name."""
FAILED = "checkpoint/failed/count"
FAILED_FOLDER = "checkpoint/hf_failed/count"
T = TypeVar("T")


@dataclass(slots=True)
class Flight:
    """A checkpoint under way."""

    version: Version
    score: tuple[float, float]
    """Sum and weight of the metric that checkpoints are kept for, on this replica."""
    validated: Mapping[int, float] = field(default_factory=dict)
    """What validation has measured of it, as far as this replica knows, by version."""
    copied: Future[dict[str, list[Shard]]] = field(default_factory=Future)
    written: Future[Parts] = field(default_factory=Future)
    as_folder: bool = False
    """Whether its model is also written as a Hugging Face folder."""
    seconds: float = 0.0
    """From its begin until the parts were written, or had failed."""


class CheckpointThread:
    """The writing thread of one replica. `alone`: it is the only one, so that COMMIT follows its parts at once.

    `flush` writes queued dumps to the disk; `wake` is called when a job is done; `folders` writes whole checkpoints as
    Hugging Face folders.
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
        self._copies = HostCopies(writer.note)
        self._background = Background("checkpoint")
        # A thread of its own: training waits for the copy of the next checkpoint, which must not wait for a folder.
        self._slow = None if folders is None else Background("model folders")
        self.folder: Future[None] | None = None
        """The Hugging Face folder begun last."""

    def prepare(self, shards: dict[str, list[Shard]]) -> Future[None]:
        """Allocate the buffers that `begin` copies into: the first touch of their memory is slower than the copy."""

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
        unread: Callable[[], bytes],
        validated: Mapping[int, float],
        as_folder: bool = False,
    ) -> Flight:
        """Copy and write. The shards must not change until `copied` is done; then they are released. `unread` gives
        the samples that consumers outside the run have yet to read.
        """
        flight, began = Flight(version, score, validated, as_folder=as_folder), time.perf_counter()

        def copy() -> dict[str, list[Shard]]:
            copies = {name: self._copies.take(name, own) for name, own in shards.items()}
            shards.clear()
            return copies

        def write() -> Parts:
            try:
                return self._write(flight, worker, unread)
            finally:
                flight.seconds = time.perf_counter() - began

        flight.copied = self._do(self._background, copy)
        flight.written = self._do(self._background, write)
        return flight

    def commit(self, flight: Flight, parts: Parts, score: float | None, validated: Mapping[int, float]) -> Future[str]:
        """Write COMMIT; the result is the text of an OSError, or empty."""

        def work() -> str:
            version = flight.version
            try:
                checkpoint = self._saved(self._writer.commit(version, parts, score, validated))
                if flight.as_folder:
                    self._make_folder(checkpoint)
            except OSError as error:
                self._complain(version, error)
                self._writer.abandon(version)
                return str(error)
            return ""

        return self._do(self._background, work)

    def catch_up(self, step: int, every: int) -> None:
        """Begin the folder that was due when an earlier term saved the checkpoint after this step, if it is missing."""
        checkpoint = None if self._folders is None else self._folders.owed(step, every)
        if checkpoint is not None:
            self._make_folder(checkpoint)

    def copy_again(self, step: int) -> None:
        """Copy the checkpoint after this step to the second place, if an earlier process did not come to it."""
        if self._writer.copies is not None:
            self._writer.copies.offer(self._writer.folder(step))

    def abandon(self, version: Version) -> Future[None]:
        """Remove the draft of this version."""

        def work() -> None:
            try:
                self._writer.abandon(version)
            except OSError as error:
                log.warning("could not delete the partial checkpoint of step %d: %s", version.number, error)

        return self._do(self._background, work)

    def close(self, limit_s: float) -> None:
        """Finish the jobs under way, as long as no `limit_s` seconds pass without progress."""
        late = f"not written: no progress for {limit_s:g} s (half of limits.drain_s)"
        if not self._background.close(limit_s, self._progress):
            log.warning("a checkpoint is %s; leaving it unfinished", late)
        if self._slow is not None and not self._slow.close(limit_s, self._progress):
            log.warning("a Hugging Face folder is %s; `distflow export` can make it", late)

    def _progress(self) -> int:
        return self._writer.written

    def _do(self, thread: Background, work: Callable[[], T]) -> Future[T]:
        """Run a job, and wake those who wait for it when it is done."""
        future = thread.submit(work)
        future.add_done_callback(lambda _: self._wake())
        return future

    def _write(self, flight: Flight, worker: Mapping[str, object], unread: Callable[[], bytes]) -> Parts:
        version, writer = flight.version, self._writer
        try:
            copies = flight.copied.result()
            self._flush()
            parts = writer.write_parts(version, copies, worker, unread())
            if self._alone:
                checkpoint = self._saved(writer.commit(version, parts, mean_of([flight.score]), flight.validated))
                if flight.as_folder:
                    self._make_folder(checkpoint)
        except OSError as error:
            self._complain(version, error)
            raise
        return parts

    def _make_folder(self, checkpoint: Path) -> None:
        """Begin the folder of a whole checkpoint, if this replica writes folders."""
        folders, writer = self._folders, self._writer
        if folders is None or self._slow is None:
            return
        writer.held.add(checkpoint)

        def work() -> None:
            try:
                folder = self._say(folders.write(checkpoint, writer.note))
                if writer.copies is not None:
                    writer.copies.offer(folder, model=True)
            except Exception as error:
                # No error costs more than this folder.
                self._metrics.add(FAILED_FOLDER, 1)
                log.error("could not write the Hugging Face folder of %s: %r", checkpoint, error)
            finally:
                writer.held.discard(checkpoint)

        self.folder = self._do(self._slow, work)

    def _saved(self, checkpoint: Path) -> Path:
        """Tell of a whole checkpoint, and have it copied to the second place, if there is one."""
        if self._writer.copies is not None:
            self._writer.copies.offer(checkpoint)
        return self._say(checkpoint)

    def _say(self, folder: Path) -> Path:
        log.info("saved %s", folder)
        return folder

    def _complain(self, version: Version, error: OSError) -> None:
        self._metrics.add(FAILED, 1)
        log.error(
            "could not write the checkpoint after training step %d (%s); the newest one is %s",
            version.number,
            error,
            self._writer.newest(),
        )


def mean_of(scores: Sequence[Sequence[float]]) -> float | None:
    """The mean of (sum, weight) pairs; None if nothing was measured, or if it is NaN."""
    total, weight = (sum(float(score[place]) for score in scores) for place in (0, 1))
    value = total / weight if weight > 0 else None
    return None if value is None or math.isnan(value) else value


class HostCopies:
    """One copy at a time. The first one allocates; later ones reuse the memory as long as shapes stay the same.

    `note` gets the bytes as they are copied.
    """

    def __init__(self, note: Note) -> None:
        self._note = note
        self._buffers: dict[tuple[str, str, int], Tensor] = {}

    def take(self, model: str, shards: Iterable[Shard]) -> list[Shard]:
        """Copy shards; the next `take` of the same model overwrites the copies."""
        copies: list[Shard] = []
        for shard in shards:
            key = (model, shard.name, shard.start)
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != shard.data.shape or buffer.dtype != shard.data.dtype:
                # Pinned, so that a copy from a GPU runs at the full speed of the bus.
                pinned = shard.data.is_cuda
                buffer = torch.empty(shard.data.shape, dtype=shard.data.dtype, pin_memory=pinned)
                self._buffers[key] = buffer
            buffer.copy_(shard.data.detach())
            self._note(buffer.nbytes)
            copies.append(replace(shard, data=buffer))
        return copies


class Background:
    """Runs jobs in the order given; their futures hold what they return or raise."""

    def __init__(self, name: str) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run this after all jobs given before."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                result = work()
            except Exception as error:
                # Raised where the future is waited for.
                future.set_exception(error)
            else:
                future.set_result(result)

        self._queue.put(job)
        return future

    def close(self, limit_s: float, progress: Callable[[], int]) -> bool:
        """Finish the jobs given; return whether all are done, or False after `limit_s` seconds without progress."""
        self._queue.put(None)
        last = None
        while self._thread.is_alive() and (now := progress()) != last:
            last = now
            self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            # Jobs hold views of the model's state: release them at once.
            del job
