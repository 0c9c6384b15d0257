"""The files that a data source names, found without reading them, and what tells that they have changed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distflow.config.yamlfile import shown
from distflow.errors import UserError, nearest

_TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
SUFFIXES = (*_TEXTS, ".parquet")
PACKED = (".gz", ".zst")
"""What files of text may be compressed by; named behind their own suffix."""
_EXPECTED = f"{', '.join(SUFFIXES)} (text compressed or not: {', '.join(PACKED)})"
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""Names of files of a folder that are not to be mixed up begin with these."""
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"
"""What Hugging Face datasets writes into the folder of a data set, and into that of several splits."""

_END_BYTES, _LOOKED_INTO = 1 << 20, 64
"""A fingerprint takes so many bytes of each end of a file, and of so many files."""


@dataclass(frozen=True, slots=True)
class DataFiles:
    """Files in the order of their prompts; `saved`: Arrow files written by Hugging Face datasets."""

    files: tuple[Path, ...]
    saved: bool = False


def kind_of(file: Path) -> str:
    """The suffix that says what is in a file of prompts, compressed or not; empty for other files."""
    packed = file.suffix in PACKED
    suffix = file.with_suffix("").suffix if packed else file.suffix
    return suffix if suffix in (_TEXTS if packed else SUFFIXES) else ""


def data_files(path: Path, split: str | None = None) -> DataFiles:
    """The files at a path; `split` chooses among those of a folder. Raises UserError, with a hint."""
    if path.is_dir():
        return _of_folder(path, split)
    if not path.is_file():
        raise UserError(_absent(path))
    if not kind_of(path):
        raise UserError(f"{shown(path)} is no file of prompts: expected {_EXPECTED}, or a folder of these")
    if split is not None:
        raise UserError(f"{shown(path)} is one file, which has no split {split!r}: remove data.with.split")
    return DataFiles((path,))


def in_arrow(path: Path, split: str | None = None) -> bool:
    """Tell whether Arrow reads the files at a path: Parquet, or what Hugging Face datasets saved; not if they are not
    here."""
    try:
        found = data_files(path, split)
    except (OSError, UserError):
        return False
    return found.saved or any(kind_of(file) == ".parquet" for file in found.files)


def fingerprint(path: Path, split: str | None = None) -> str | None:
    """A hash of the names and sizes of the files at a path, and of what they begin and end with; None: not here.

    That is quick however large they are. A change of a few bytes in the middle of a large file goes unnoticed.
    """
    try:
        files = data_files(path, split).files
        known = hashlib.blake2b(digest_size=8)
        for number, file in enumerate(files):
            size = file.stat().st_size
            known.update(f"{file.name}:{size}\n".encode())
            if number < _LOOKED_INTO:
                known.update(_ends(file, size))
    except (OSError, UserError):
        return None
    return known.hexdigest()


def _ends(file: Path, size: int) -> bytes:
    with file.open("rb") as opened:
        first = opened.read(_END_BYTES)
        opened.seek(max(len(first), size - _END_BYTES))
        return first + opened.read(_END_BYTES)


def _absent(path: Path) -> str:
    if os.path.lexists(path):
        return f"{shown(path)} is neither a file nor a folder, or a link to none: write the prompts into a file"
    beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    close = nearest(path.name, beside)
    guess = f"; did you mean {shown(path.with_name(close))}?" if close is not None else ""
    return (
        f"there is no file or folder {shown(path)}{guess} — functions are named module:name or ./file.py:name, data "
        "sets of the Hugging Face hub hub:ID"
    )


def _of_folder(folder: Path, split: str | None) -> DataFiles:
    if (folder / _SAVED_SPLITS).is_file():
        splits = sorted(inner.name for inner in folder.iterdir() if (inner / _SAVED).is_file())
        return _saved(folder / _chosen(folder, split, splits))
    if (folder / _SAVED).is_file():
        if split is not None:
            raise UserError(f"{shown(folder)} is one data set, which has no split {split!r}: remove data.with.split")
        return _saved(folder)
    files = _files(folder) or (_files(folder / "data") if (folder / "data").is_dir() else [])
    if not files:
        raise UserError(f"the folder {shown(folder)} has no file of prompts: expected {_EXPECTED}")
    splits = sorted({found for file in files if (found := _split_of(file))})
    if split is None and len(splits) < 2:
        return DataFiles(tuple(files))
    chosen = _chosen(folder, split, splits)
    return DataFiles(tuple(file for file in files if _split_of(file) == chosen))


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if kind_of(file) and file.is_file())


def _split_of(file: Path) -> str:
    """The split that a file's name begins with: `train` of train-00000-of-00002.parquet; empty if there is none."""
    first = file.stem.replace(".", "-").replace("_", "-").partition("-")[0]
    return first if first in _SPLITS else ""


def _chosen(folder: Path, split: str | None, splits: Sequence[str]) -> str:
    if split is None and len(splits) == 1:
        return splits[0]
    if split is None and "train" in splits:
        raise UserError(f"the folder {shown(folder)} has the splits {', '.join(splits)}: add data.with.split=train")
    if split is None or split not in splits:
        wanted = "" if split is None else f", and no {split!r}"
        found = ", ".join(splits) or "no split"
        raise UserError(f"the folder {shown(folder)} has {found}{wanted}: give data.with.split one of its splits")
    return split


def _saved(folder: Path) -> DataFiles:
    state = folder / _SAVED
    try:
        names = [str(entry["filename"]) for entry in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{shown(state)} is not what save_to_disk of Hugging Face datasets writes: {error}") from error
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise UserError(f"the data set {shown(folder)} lacks its file {absent[0]}: copy it again")
    return DataFiles(tuple(folder / name for name in names), saved=True)
