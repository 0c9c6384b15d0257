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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from distflow.errors import UserError
from distflow.types import Version

FORMAT = 1
_READ_BYTES = 8 << 20


class CheckpointWriter:
    """Saves one worker's part of a run, keeps the last `keep` checkpoints."""

    def __init__(self, run_dir: Path, worker_stem: str, digest: str, keep: int) -> None:
        self._root = run_dir / "checkpoints"
        self._stem = worker_stem
        self._digest = digest
        self._keep = keep

    def save(self, version: Version, models: Mapping[str, Mapping[str, Tensor]], worker: Mapping[str, Any]) -> Path:
        """Write the state after `version.number` training steps. `worker` must be plain JSON values."""
        folder = self._root / f"step_{version.number:06d}"
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        for name, tensors in models.items():
            whole = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
            save_file(whole, folder / f"model-{name}-{self._stem}.safetensors")
        (folder / f"worker-{self._stem}.json").write_text(json.dumps(worker))
        parts = {path.name: _fingerprint(path, sync=True) for path in sorted(folder.iterdir())}
        commit = {
            "format": FORMAT,
            "step": version.number,
            "term": version.term,
            "version": version.number,
            "digest": self._digest,
            "parts": parts,
        }
        draft = folder / "COMMIT.draft"
        draft.write_text(json.dumps(commit, indent=1))
        _fingerprint(draft, sync=True)
        os.rename(draft, folder / "COMMIT")
        self._forget_old()
        return folder

    def _forget_old(self) -> None:
        whole = sorted(path.parent for path in self._root.glob("step_*/COMMIT"))
        for folder in whole[: -self._keep]:
            # COMMIT first: a half-deleted checkpoint must not look like one.
            (folder / "COMMIT").unlink()
            shutil.rmtree(folder)


class CheckpointReader:
    """One checkpoint, verified when opened; raises UserError saying which part is missing or differs."""

    def __init__(self, folder: Path, worker_stem: str) -> None:
        self._folder = folder
        self._stem = worker_stem
        commit = read_commit(folder)
        self.version = Version(commit["term"], commit["version"])
        self.digest = str(commit["digest"])

    def model(self, name: str) -> dict[str, Tensor]:
        """What `save` was given for this model."""
        return dict(load_file(self._folder / f"model-{name}-{self._stem}.safetensors"))

    def worker(self) -> dict[str, Any]:
        """What `save` was given as `worker`."""
        return dict(json.loads((self._folder / f"worker-{self._stem}.json").read_text()))


def read_commit(folder: Path) -> dict[str, Any]:
    """The COMMIT of a checkpoint after comparing all parts with it; raises UserError if it is not whole."""
    path = folder / "COMMIT"
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
