"""Rollout dumps: one JSON line for every sample, or each of its sequences, written by the owner when its group is
trained on.

A thread formats and writes the lines, so that training does not wait for a disk. What a full disk refuses is kept in
memory and tried again with every later training step, up to a limit; beyond it the oldest training steps are dropped
and counted.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from distflow.data.batch import Batch, Column, Ragged
from distflow.flow.edges import DUMPED
from distflow.log import logger
from distflow.runtime.assembly import Setting
from distflow.runtime.checkpoint.commit import step_of
from distflow.runtime.disk import ROLLOUTS, Disk, finite
from distflow.types import FINISH_REASONS, LEFT_OUT, LOGGED, REWARD_PARTS, SEQUENCE, WorkerName, written

PENDING_STEPS = 64
"""Training steps that may wait for a slow disk before training waits too, or be kept while the disk is full."""
KEPT_BYTES = 256 << 20
"""The most memory for steps that are kept; the newest one is kept in any case."""
LINES_AT_ONCE = 64
WHAT = "dumps"
DROPPED, NOT_FINITE = "dropped", "nonfinite"
"""Key of lines of training steps with a skipped update, and what it says of a group that only such updates had."""
log = logger(__name__)
_Job = tuple[int, int, list[tuple[Batch, list[str]]]]


_AGAIN = "again"
_ENCODER = msgspec.json.Encoder()


class DumpWriter:
    """Writes `rollouts/step_000017/<pool>-<i>.jsonl`, or below `folder`; a step is called by the training steps done.

    What a full disk refuses is kept for up to PENDING_STEPS training steps and KEPT_BYTES, then dropped. When the files
    exceed `limit_bytes` in all, those of the oldest training steps are removed.
    """

    def __init__(self, run_dir: Path, worker: WorkerName, disk: Disk, limit_bytes: int, folder: str = ROLLOUTS) -> None:
        self._disk = disk
        self._limit_bytes = limit_bytes
        self._removed = 0
        self._folder = run_dir / folder
        self._file = f"{worker.file_stem}.jsonl"
        self._queue: queue.Queue[_Job | str | None] = queue.Queue(PENDING_STEPS)
        self._kept: deque[_Job] = deque()
        self._refused: OSError | None = None
        self._error: Exception | None = None
        found = self._folder.glob(f"step_*/{self._file}")
        self._sizes = {path: path.stat().st_size for path in sorted(found, key=lambda path: step_of(path.parent))}
        """Bytes of this worker's files, oldest training step first."""
        self._thread = threading.Thread(target=self._serve, name="dumps", daemon=True)
        self._thread.start()

    def forget_after(self, step: int) -> None:
        """Remove what an earlier incarnation of this worker wrote for later training steps: they are trained again."""
        for path in self._folder.glob(f"step_*/{self._file}"):
            if step_of(path.parent) > step:
                path.unlink(missing_ok=True)
                self._sizes.pop(path, None)

    def write(self, step: int, term: int, groups: list[tuple[Batch, list[str]]]) -> None:
        """Queue the batches of one training step, each with the name of the generating worker for every row."""
        if self._error is not None:
            raise self._error
        self._queue.put((step, term, groups))

    def flush(self) -> None:
        """Wait until the queue is written; raises errors of writing (after an OSError it can be tried again)."""
        self._queue.put(_AGAIN)
        self._queue.join()
        self._raise()

    def close(self) -> None:
        """Write the queue and end; what the disk still refuses is dropped. Raises other errors of writing."""
        self._queue.put(None)
        self._thread.join()
        if self._kept:
            self._disk.dropped(WHAT, len(self._kept))
            self._kept.clear()
        if self._error is not None:
            raise self._error

    def _raise(self) -> None:
        error = self._error or self._refused
        if error is not None:
            raise error

    def _serve(self) -> None:
        job: _Job | str | None = _AGAIN
        while job is not None:
            job = self._queue.get()
            if isinstance(job, tuple):
                self._kept.append(job)
            if self._error is None:
                try:
                    self._write_kept()
                except Exception as error:
                    # Raised by the next call: if the thread died of it, the queue would fill up and block training.
                    self._error = error
            self._queue.task_done()

    def _write_kept(self) -> None:
        try:
            while self._kept:
                self._write(*self._kept[0])
                self._kept.popleft()
            self._refused = None
            self._disk.taken(WHAT)
        except OSError as error:
            self._refused = error
            self._disk.refused(WHAT, error)
            while len(self._kept) > 1 and (len(self._kept) > PENDING_STEPS or _nbytes(self._kept) > KEPT_BYTES):
                self._kept.popleft()
                self._disk.dropped(WHAT, 1)

    def _write(self, step: int, term: int, groups: list[tuple[Batch, list[str]]]) -> None:
        folder = self._folder / f"step_{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self._file
        try:
            with path.open("wb") as file:
                for batch, workers in groups:
                    # A few rows at a time: as Python's numbers, tokens take many times the memory.
                    for row in range(0, batch.rows, LINES_AT_ONCE):
                        part = batch.slice(row, min(row + LINES_AT_ONCE, batch.rows))
                        lines = _lines(part, workers[row : row + LINES_AT_ONCE])
                        file.write(_ENCODER.encode_lines({**line, "step": step, "term": term} for line in lines))
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self._sizes[path] = path.stat().st_size
        self._keep_within_limit()

    def _keep_within_limit(self) -> None:
        while sum(self._sizes.values()) > self._limit_bytes and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            del self._sizes[oldest]
            oldest.unlink(missing_ok=True)
            with suppress(OSError):
                # Other workers may have files there.
                oldest.parent.rmdir()
            if self._removed == 0:
                limit = self._limit_bytes >> 20
                log.info("dumps have reached run.dump_limit_mb (%d): removing those of the oldest steps", limit)
            self._removed += 1


def build_dumps(setting: Setting, disk: Disk, folder: str = ROLLOUTS) -> DumpWriter:
    """The dumps of an owner, without those of training steps that will be repeated."""
    dumps = DumpWriter(setting.run_dir, setting.me.name, disk, setting.recipe.run.dump_limit_mb << 20, folder)
    if setting.document.term:
        dumps.forget_after(setting.start.number)
    return dumps


def _nbytes(jobs: Iterable[_Job]) -> int:
    return sum(batch.nbytes for _, _, groups in jobs for batch, _ in groups)


def dumped(batch: Batch, further: Sequence[str], lost: Collection[int] = ()) -> Batch:
    """The fields for the dumps: standard fields, parts of the reward, and `further` ones (or patterns).

    `lost`: positions of groups that were consumed although nothing was learnt from them.
    """
    patterns = (*DUMPED, *(f"{above}{names}*" for names in (REWARD_PARTS, LOGGED) for above in ("", "*/")), *further)
    found = batch.only([name for name in batch.columns if written(name, patterns)])
    if not lost:
        return found
    reasons = [NOT_FINITE if position in lost else "" for position in batch.dense("group").tolist()]
    return found.with_columns(**{DROPPED: Ragged.from_texts(reasons)})


def _lines(batch: Batch, workers: list[str]) -> list[dict[str, Any]]:
    columns: dict[str, list[Any]] = {
        "uid": batch.dense("uid").tolist(),
        "sample": batch.dense("sample").tolist(),
        **({SEQUENCE: batch.dense(SEQUENCE).tolist()} if SEQUENCE in batch else {}),
        "prompt": _prompts(batch),
        "response": batch.texts("response_text"),
        "response_ids": _rows(batch.ragged("response_ids")),
        **({"policy_versions": _rows(batch.ragged("policy_versions"))} if "policy_versions" in batch else {}),
        "finish_reason": [FINISH_REASONS[code] for code in batch.dense("finish_reason").tolist()],
    }
    columns |= {name: _rounded(batch.dense(name)) for name in ("reward", "score") if name in batch}
    own = [name for name in batch.columns if name not in DUMPED and not name.startswith((REWARD_PARTS, LOGGED))]
    columns |= {name: _plain(batch[name]) for name in own if name not in columns}
    names = [name for name in batch.columns if name.startswith(REWARD_PARTS)]
    parts = {name.removeprefix(REWARD_PARTS): _rounded(batch.dense(name)) for name in names}
    logged = {name.removeprefix(LOGGED): batch.texts(name) for name in batch.columns if name.startswith(LOGGED)}
    left_out = batch.texts(LEFT_OUT) if LEFT_OUT in batch else [""] * batch.rows
    lines = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for index, line in enumerate(lines):
        line["rewards"] = {name: values[index] for name, values in parts.items()}
        if extra := {name: json.loads(texts[index]) for name, texts in logged.items() if texts[index]}:
            line["extra"] = extra
        if left_out[index]:
            line[LEFT_OUT] = left_out[index]
        line["worker"] = workers[index]
    return lines


def _prompts(batch: Batch) -> list[str]:
    """What each sequence begins with, as text."""
    prompts = batch.texts("prompt_text")
    if SEQUENCE not in batch:
        return prompts
    return [own or prompt for own, prompt in zip(batch.texts("sequence_prompt"), prompts, strict=True)]


def _plain(column: Column) -> list[Any]:
    """The rows of a user's field of any shape: a value, a list or a text per sample."""
    if isinstance(column, Ragged) and column.values.dtype == torch.uint8:
        return column.texts()
    values = column.values if isinstance(column, Ragged) else column
    if values.is_floating_point():
        # Six decimals, as for rewards; in float64, so that they are written with no more digits than that.
        values = values.detach().double().round(decimals=6)
    rows = _rows(Ragged(values, column.offsets)) if isinstance(column, Ragged) else values.tolist()
    return [finite(row) for row in rows]


def _rounded(values: Tensor) -> list[float | None]:
    """The values with six decimals; NaN stands for a part of the reward that a sample lacks."""
    return [finite(round(value, 6)) for value in values.tolist()]


def _rows(column: Ragged) -> list[list[Any]]:
    values, bounds = column.values.tolist(), column.offsets.tolist()
    return [values[a:b] for a, b in pairwise(bounds)]
