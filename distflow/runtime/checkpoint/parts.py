"""Writes and reads checkpoints: parts first, then COMMIT, then Hugging Face folders (`commit.py` has the files)."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from safetensors import safe_open
from torch import Tensor

from distflow.errors import UserError, WorkerFailed
from distflow.flow.lineage import ARITHMETIC
from distflow.log import logger
from distflow.runtime.checkpoint.commit import (
    COMMIT,
    FORMAT,
    LAST,
    Commit,
    Fingerprint,
    Keeping,
    KeptScore,
    Note,
    begins,
    checkpoints_of,
    commits,
    draft_of,
    folder_of,
    forget_model_drafts,
    model_owed,
    models_of,
    note_validated,
    read_commit,
    sync_folder,
    term_of,
    unnoted,
    write_text,
)
from distflow.runtime.checkpoint.format import SavedTensor, Shard, assemble, write_tensors
from distflow.types import Version

AT = "@"
"""Separates name and start in the key of a shard that is not the whole tensor: name@start."""
SHAPES = "shapes"
"""Key in a part's metadata: the shapes of the tensors whose shards it holds."""
HOME, LEDGER, DIFFICULTY = "home", "ledger", "difficulty"
"""Keys of what a worker saves about itself: the pool that it trains in, and, of owners, their ledgers; the first owner
saves what all know of the prompts' pass rates."""
UNREAD = "unread-"
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
WriteModel = Callable[[Mapping[str, Tensor], Mapping[str, Any], Path, Note], object]
"""Writes a state, by the model's section of the recipe, into an empty folder; reports bytes as they are written."""

log = logger(__name__)


class Copying(Protocol):
    """Copies to a second place, in the background."""

    def offer(self, folder: Path, *, model: bool = False) -> None:
        """Copy this: a whole checkpoint, or a Hugging Face folder. Returns at once."""

    def close(self, limit_s: float, progress: Callable[[], int]) -> None:
        """Copy what is left, as long as no `limit_s` seconds pass without progress."""


class CheckpointWriter:
    """Writes one worker's parts, and COMMIT once the parts of all workers are known; removes old checkpoints.

    `recipe`, `arithmetic`: what a run that resumes from its checkpoints is compared with (`flow/lineage.py`).
    """

    def __init__(
        self,
        run_dir: Path,
        worker_stem: str,
        digest: str,
        keeping: Keeping = LAST,
        recipe: Mapping[str, Any] | None = None,
        arithmetic: Mapping[str, Any] | None = None,
    ) -> None:
        self._root = checkpoints_of(run_dir)
        self._stem = worker_stem
        self._digest = digest
        self._keeping = keeping
        self._recipe = dict(recipe or {})
        self._arithmetic = dict(arithmetic or {})
        self._counting = threading.Lock()
        self.written = 0
        """Bytes copied and written so far, in all checkpoints."""
        self.held: set[Path] = set()
        """Checkpoints that are being read and must not be removed."""
        self.copied: set[Path] = set()
        """The same of those that are being copied to a second place, or wait for it."""
        self.copies: Copying | None = None
        """Where they are copied, by the worker of each host that writes COMMIT."""

    def write_parts(
        self, version: Version, models: Mapping[str, Iterable[Shard]], worker: Mapping[str, Any], unread: bytes = b""
    ) -> dict[str, Fingerprint]:
        """Write this worker's share of the state after `version.number` training steps, through to the disk.

        Returns fingerprints by file name. `models`: what this worker saves of each model. `worker` must be plain JSON
        values. `unread`: samples for consumers outside the run. Raises OSError when the disk refuses.
        """
        folder = draft_of(self._root, version)
        folder.mkdir(parents=True, exist_ok=True)
        files = {name: f"model-{name}-{self._stem}.safetensors" for name in models}
        parts = {files[name]: self._save(shards, folder / files[name]) for name, shards in models.items()}
        own = f"worker-{self._stem}.json"
        parts[own] = write_text(folder / own, json.dumps({**worker, ARITHMETIC: self._arithmetic, "models": files}))
        if unread:
            parts[UNREAD + self._stem] = write_text(folder / (UNREAD + self._stem), unread)
        return parts

    def commit(
        self,
        version: Version,
        parts: Mapping[str, Sequence[Any]],
        score: float | None = None,
        validated: Mapping[int, float] | None = None,
    ) -> Path:
        """Make it a checkpoint: `parts` are those of all workers, `score` is the metric it is kept for, if measured;
        `validated`: its values by version, if validation measures it.

        Raises OSError when the disk refuses, WorkerFailed if a newer term of the run has written this one.
        """
        draft, folder = draft_of(self._root, version), folder_of(self._root, version)
        known: dict[int, KeptScore] = {}
        if self._keeping.due:
            known = self._keeping.validated(commit for _, commit in commits(self._root))
            known |= self._kept(validated or {})
        commit = Commit(
            format=FORMAT,
            step=version.number,
            term=version.term,
            version=version.number,
            digest=self._digest,
            recipe=self._recipe,
            score=None if score is None or not math.isfinite(score) else KeptScore(self._keeping.metric, score),
            parts={name: (int(size), str(checksum)) for name, (size, checksum) in sorted(parts.items())},
            validated=known,
        )
        # On hosts that share the folder, one worker of each writes the same COMMIT; the first rename is enough.
        try:
            own = draft / f"{COMMIT}.{self._stem}"
            write_text(own, json.dumps(msgspec.to_builtins(commit), indent=1))
            os.rename(own, draft / COMMIT)
            sync_folder(draft)
            self._check_term(version.term)
            self._place(draft, folder, version.term)
        except FileNotFoundError:
            if term_of(folder) != version.term:
                raise
        sync_folder(self._root)
        try:
            self._forget_old()
        except OSError as error:
            # The new checkpoint is whole; the old one can be removed after the next.
            log.warning("could not remove an old checkpoint, trying again after the next: %s", error)
        return folder

    def note_validated(self, values: Mapping[int, float]) -> None:
        """Keep what validation has measured by now, by version, and remove what is not to be kept for it."""
        found = dict(commits(self._root))
        if not values or not found:
            return
        try:
            note_validated(list(found)[-1], self._keeping.validated(found.values()) | self._kept(values))
            self._forget_old()
        except OSError as error:
            log.warning("could not note what validation has measured for run.keep_best: %s", error)

    def abandon(self, version: Version) -> None:
        """Remove the draft of a checkpoint that cannot be finished."""
        _remove(draft_of(self._root, version))

    def _kept(self, values: Mapping[int, float]) -> dict[int, KeptScore]:
        """Values by version, without those that are no number: nothing is kept for them, and JSON has none."""
        return {n: KeptScore(self._keeping.metric, value) for n, value in values.items() if math.isfinite(value)}

    def folder(self, step: int) -> Path:
        """Where the checkpoint after this training step lies."""
        return folder_of(self._root, Version(0, step))

    def newest(self) -> str:
        """The newest checkpoint, human-readable."""
        found = [folder.name for folder, _ in commits(self._root)]
        return found[-1] if found else "none"

    def _save(self, shards: Iterable[Shard], path: Path) -> Fingerprint:
        tensors: dict[str, Tensor] = {}
        entries: dict[str, SavedTensor] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for shard in shards:
            key = shard.name if shard.is_whole else f"{shard.name}{AT}{shard.start}"
            shape = shard.shape if shard.is_whole else (shard.data.numel(),)
            tensors[key], entries[key] = shard.data.cpu(), SavedTensor(shard.data.dtype, shape)
            if not shard.is_whole:
                shapes[shard.name] = shard.shape
        return write_tensors(path, entries, tensors.__getitem__, {SHAPES: json.dumps(shapes)}, self.note)

    def note(self, amount: int) -> None:
        """Count further bytes. Safe to call from several threads: parts, folders and copies are written by others."""
        with self._counting:
            self.written += amount

    def _check_term(self, term: int) -> None:
        """Refuse to write for a term that a later one has replaced: this worker was cut off while others restarted."""
        newest = max(begins(self._root), default=term)
        if newest > term:
            raise WorkerFailed(
                f"term {newest} of this run has begun, and this is term {term}: its checkpoint no longer counts"
            )

    def _place(self, draft: Path, folder: Path, term: int) -> None:
        """Rename a draft to its final name, replacing a checkpoint of an earlier term that was not resumed from."""
        try:
            os.rename(draft, folder)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            there = term_of(folder)
            if there is not None and there > term:
                raise WorkerFailed(
                    f"{folder}: was written by term {there} of this run, and this is term {term}: the run was resumed "
                    "elsewhere — end one of the two with `distflow stop`"
                ) from None
            aside = folder.with_name(f"{draft.name}_replaced")
            os.rename(folder, aside)
            os.rename(draft, folder)
            _remove(aside)

    def _forget_old(self) -> None:
        for folder in self._keeping.superfluous(dict(commits(self._root))):
            if folder not in self.held | self.copied:
                _remove(folder)


class CheckpointReader:
    """One checkpoint, verified when opened; raises UserError that names a part that is missing or differs.

    `note` gets the bytes as they are read. `unread`: of large parts only the size is checked, until `verify` is called.
    """

    def __init__(self, folder: Path, worker_stem: str, note: Note = unnoted, *, unread: bool = False) -> None:
        self._folder = folder
        self._stem = worker_stem
        self.read = 0
        """Bytes of parts that were read so far."""
        self._note = note
        commit = read_commit(folder, self._count, small_only=unread)
        self.version = commit.saved
        self.digest = commit.digest
        self._parts = sorted(commit.parts)

    def verify(self, go_on: Callable[[], None]) -> None:
        """Compare every byte with COMMIT; raises UserError. Calls `go_on` all the while, which may raise to end it."""

        def note(amount: int) -> None:
            self._count(amount)
            go_on()

        read_commit(self._folder, note)

    def model(self, name: str) -> SavedState:
        """The whole state of a model, no matter which workers saved it."""
        files = [worker["models"][name] for worker in self.workers() if name in worker["models"]]
        if not files:
            raise UserError(f"{self._folder}: no part holds model {name!r}: the run that wrote it did not train it")
        return SavedState([self._folder / part for part in files], self._count)

    def workers(self) -> list[dict[str, Any]]:
        """What each worker saved about itself."""
        names = [part for part in self._parts if part.startswith("worker-")]
        return [self._worker(name) for name in names]

    def ledgers(self) -> list[dict[str, Any]]:
        """The ledgers of all owners: replicas of further homes have none."""
        return [worker[LEDGER] for worker in self.workers() if LEDGER in worker]

    def unread(self) -> list[bytes]:
        """The samples that consumers outside the run had yet to read, of all owners."""
        return [(self._folder / part).read_bytes() for part in self._parts if part.startswith(UNREAD)]

    def difficulty(self) -> dict[str, Any] | None:
        """What was known of the prompts' pass rates, if they mattered."""
        return next((worker[DIFFICULTY] for worker in self.workers() if DIFFICULTY in worker), None)

    def worker(self, home: str) -> dict[str, Any]:
        """What this worker of a home saved about itself; for a new one, what the first of that home saved, or of all.

        Under "steps" are the states of all steps, each as the first of these saved it that ran the step.
        """
        own = f"worker-{self._stem}.json"
        workers = self.workers()
        nearest = [worker for worker in workers if worker[HOME] == home] + workers
        if own in self._parts:
            nearest.insert(0, self._worker(own))
        steps = {name: state for worker in reversed(nearest) for name, state in worker["steps"].items()}
        return {**nearest[0], "steps": steps}

    def _worker(self, part: str) -> dict[str, Any]:
        return dict(json.loads((self._folder / part).read_text()))

    def _count(self, amount: int) -> None:
        self.read += amount
        self._note(amount)


class SavedState(Mapping[str, Tensor]):
    """All tensors of a model by name, assembled from the parts of all workers when they are asked for.

    Raises ValueError for a tensor whose elements are not all saved exactly once.
    """

    def __init__(self, parts: Sequence[Path], note: Note = unnoted) -> None:
        self._note = note
        self._pieces: dict[str, list[tuple[int, Path, str]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for part in parts:
            with safe_open(part, "pt") as file:
                shapes = json.loads((file.metadata() or {}).get(SHAPES, "{}"))
                for key in list(file.keys()):
                    name, _, start = key.partition(AT)
                    self._pieces.setdefault(name, []).append((int(start or 0), part, key))
                    self._shapes[name] = tuple(shapes[name] if start else file.get_slice(key).get_shape())

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor."""
        return assemble(name, self._shapes[name], self._read(name))

    def __iter__(self) -> Iterator[str]:
        """Names of the tensors."""
        return iter(self._pieces)

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._pieces)

    def _read(self, name: str) -> Iterator[tuple[int, Tensor]]:
        for start, part, key in self._pieces[name]:
            with safe_open(part, "pt") as file:
                tensor = file.get_tensor(key)
            self._note(tensor.nbytes)
            yield start, tensor


def _remove(folder: Path) -> None:
    # COMMIT first: a half-deleted checkpoint must not look whole. A worker of another host may be deleting it too.
    (folder / COMMIT).unlink(missing_ok=True)
    while folder.is_dir():
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue


class ModelFolders:
    """The Hugging Face folders of one run. `name` and `section` say which model."""

    def __init__(self, run_dir: Path, name: str, section: Mapping[str, Any], write: WriteModel) -> None:
        self._run_dir = run_dir
        self._root = models_of(run_dir)
        self._name = name
        self._section = section
        self._write = write

    def owed(self, step: int, every: int) -> Path | None:
        """The checkpoint after training step `step`, if a folder that is due by then is missing."""
        if not model_owed(self._run_dir, step, every):
            return None
        return folder_of(checkpoints_of(self._run_dir), Version(0, step))

    def write(self, checkpoint: Path, note: Note) -> Path:
        """Write the folder of a whole checkpoint, replacing one of an earlier term of the run.

        `note` gets the bytes as they are read and written. Raises OSError when the disk refuses or a part is not on
        this host, ValueError or DistflowError for a checkpoint that does not hold the model.
        """
        state = CheckpointReader(checkpoint, "", note).model(self._name)
        folder = self._root / checkpoint.name
        draft = self._root / checkpoint.name.replace("step_", "draft_")
        # One is written at a time, by one replica: any draft was left behind by a process that was killed.
        forget_model_drafts(self._run_dir)
        draft.mkdir(parents=True)
        try:
            self._write(state, self._section, draft, note)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(draft, folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return folder
