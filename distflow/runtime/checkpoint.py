"""Checkpoints: parts first, then COMMIT, which lists every part with its size and checksum.

A folder without COMMIT, or whose parts differ from it, is no checkpoint. COMMIT appears by a rename, so it is there
whole or not at all.

    checkpoints/step_000100/model-policy-trainer-0.safetensors   parameters, optimizer moments, counters
                            worker-trainer-0.json                ledgers, step states
                            COMMIT
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from distflow.errors import UserError
from distflow.runtime.state import Shard, assemble
from distflow.types import Version

FORMAT = 3
COMMIT = "COMMIT"
AT = "@"
"""In a key of a part: name@start, for a shard that is not the whole tensor."""
SHAPES = "shapes"
"""In a part's metadata: the shapes of the tensors of which it has shards."""
_READ_BYTES = 8 << 20


class CheckpointWriter:
    """Writes one worker's parts, and COMMIT when those of all workers are known; keeps the last `keep` checkpoints."""

    def __init__(self, run_dir: Path, worker_stem: str, digest: str, keep: int) -> None:
        self._root = run_dir / "checkpoints"
        self._stem = worker_stem
        self._digest = digest
        self._keep = keep

    def write_parts(
        self, version: Version, models: Mapping[str, Iterable[Shard]], worker: Mapping[str, Any]
    ) -> dict[str, list[Any]]:
        """Write this worker's share of the state after `version.number` training steps.

        Returns [size in bytes, checksum] by file name. `models`: what this worker saves of each model.
        `worker` must be plain JSON values.
        """
        folder = self._folder(version)
        folder.mkdir(parents=True, exist_ok=True)
        # What is written over now is no checkpoint any more.
        (folder / COMMIT).unlink(missing_ok=True)
        files = {name: f"model-{name}-{self._stem}.safetensors" for name in models}
        for name, shards in models.items():
            _save(shards, folder / files[name])
        own = f"worker-{self._stem}.json"
        (folder / own).write_text(json.dumps({**worker, "models": files}))
        return {name: _fingerprint(folder / name, sync=True) for name in (*files.values(), own)}

    def commit(self, version: Version, parts: Mapping[str, Sequence[Any]]) -> Path:
        """Make it a checkpoint: `parts` are those of all workers. What else lies in the folder is removed."""
        folder = self._folder(version)
        for path in folder.iterdir():
            if path.name not in parts and COMMIT not in path.name:
                path.unlink(missing_ok=True)
        commit = {
            "format": FORMAT,
            "step": version.number,
            "term": version.term,
            "version": version.number,
            "digest": self._digest,
            "parts": {name: list(part) for name, part in sorted(parts.items())},
        }
        # Named by its writer: where hosts share the folder, one worker of each writes the same COMMIT.
        draft = folder / f"COMMIT.draft-{self._stem}"
        draft.write_text(json.dumps(commit, indent=1))
        _fingerprint(draft, sync=True)
        os.rename(draft, folder / COMMIT)
        self._forget_old()
        return folder

    def _folder(self, version: Version) -> Path:
        return self._root / f"step_{version.number:06d}"

    def _forget_old(self) -> None:
        whole = sorted(path.parent for path in self._root.glob("step_*/COMMIT"))
        for folder in whole[: -self._keep]:
            # COMMIT first: a half-deleted checkpoint must not look like one.
            (folder / COMMIT).unlink(missing_ok=True)
            shutil.rmtree(folder)


class CheckpointReader:
    """One checkpoint, verified when opened; raises UserError saying which part is missing or differs."""

    def __init__(self, folder: Path, worker_stem: str) -> None:
        self._folder = folder
        self._stem = worker_stem
        commit = read_commit(folder)
        self.version = Version(commit["term"], commit["version"])
        self.digest = str(commit["digest"])
        self._parts = sorted(commit["parts"])

    def model(self, name: str) -> SavedState:
        """The whole state of a model, whichever workers saved it."""
        files = [worker["models"][name] for worker in self.workers() if name in worker["models"]]
        if not files:
            raise UserError(f"{self._folder}: no part holds model {name!r}: the run that wrote it did not train it")
        return SavedState([self._folder / part for part in files])

    def workers(self) -> list[dict[str, Any]]:
        """What each worker gave as `worker`."""
        names = [part for part in self._parts if part.startswith("worker-")]
        return [dict(json.loads((self._folder / name).read_text())) for name in names]

    def worker(self) -> dict[str, Any]:
        """What this worker gave as `worker`; the first one's, if it is new among them."""
        own = f"worker-{self._stem}.json"
        return dict(json.loads((self._folder / own).read_text())) if own in self._parts else self.workers()[0]


class SavedState(Mapping[str, Tensor]):
    """All tensors of a model by name, put together from the parts of all workers when they are asked for.

    Raises ValueError for a tensor of which the parts do not give every element once.
    """

    def __init__(self, parts: Sequence[Path]) -> None:
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
        """Read now."""
        return assemble(name, self._shapes[name], self._read(name))

    def __iter__(self) -> Iterator[str]:
        """Names."""
        return iter(self._pieces)

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._pieces)

    def _read(self, name: str) -> Iterator[tuple[int, Tensor]]:
        for start, part, key in self._pieces[name]:
            with safe_open(part, "pt") as file:
                yield start, file.get_tensor(key)


def _save(shards: Iterable[Shard], path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        key = shard.name if shard.is_whole else f"{shard.name}{AT}{shard.start}"
        tensors[key] = shard.data.detach().cpu().contiguous()
        if shard.is_whole:
            tensors[key] = tensors[key].reshape(shard.shape)
        else:
            shapes[shard.name] = shard.shape
    save_file(tensors, path, {SHAPES: json.dumps(shapes)})


def read_commit(folder: Path) -> dict[str, Any]:
    """The COMMIT of a checkpoint after comparing all parts with it; raises UserError if it is not whole."""
    path = folder / COMMIT
    if not path.is_file():
        raise UserError(f"{folder}: no checkpoint, it has no COMMIT — resume from one that has")
    commit = dict(json.loads(path.read_text()))
    if commit["format"] != FORMAT:
        raise UserError(f"{path}: format {commit['format']}, this code reads {FORMAT} — use the version that wrote it")
    for name, expected in commit["parts"].items():
        part = folder / name
        if not part.is_file():
            raise UserError(f"{part}: listed in COMMIT but missing — resume from an older checkpoint")
        if _fingerprint(part) != expected:
            raise UserError(f"{part}: not the bytes that COMMIT lists — resume from an older checkpoint")
    return commit


def _fingerprint(path: Path, *, sync: bool = False) -> list[Any]:
    digest = xxhash.xxh3_64()
    with path.open("rb+" if sync else "rb") as handle:
        while chunk := handle.read(_READ_BYTES):
            digest.update(chunk)
        if sync:
            os.fsync(handle.fileno())
    return [path.stat().st_size, digest.hexdigest()]
