"""What makes a folder a checkpoint, which checkpoints count, and which are kept. Imports no torch.

    checkpoints/step_000100/model-policy-trainer-0.safetensors   parameters, optimizer moments, counters
                            worker-trainer-0.json                its home, ledgers, step states
                            COMMIT                               lists every part with its size and checksum
    checkpoints/draft_000200_term_1/…                            being written, or never finished
    checkpoints/term_000002.json                                 {"number": 2, "step": 40, "members": ["trainer/0"]}
    hf/step_000100/   a model's weights (safetensors), configuration, generation configuration, tokenizer
    hf/draft_000200/  being written, or never finished

Parts and COMMIT are written into the draft, which is then renamed: a folder step_… is whole from the start, and two
terms of a run never write into the same folder.

A term of the training pool has one file, created once: a second writer with other contents fails. A checkpoint of an
earlier term counts if every later term began at its training step or at a later one. So a stray process of an earlier
term that finishes a checkpoint behind that step changes nothing, whenever it does so.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import xxhash

from distflow.errors import UserError, WorkerFailed
from distflow.types import Version

FORMAT = 5
COMMIT, LATER = "COMMIT", "validated.json"
"""Written last into a checkpoint; and values of validation that come after it."""
Fingerprint = tuple[int, str]
"""Size in bytes and xxh3 of a file."""
Note = Callable[[int], None]
"""Gets the bytes of a checkpoint as they are read or written, for those who wait."""
COPIED, COPY_FAILED = "checkpoint/copied/count", "checkpoint/copy_failed/count"
"""Metrics of copies to `run.copy_to`: those made, and tries that failed."""
SMALL_BYTES = 8 << 20
_DRAFT = re.compile(r"draft_(\d+)_term_(\d+)(_replaced)?")
_READ_BYTES = 8 << 20
_TERM = re.compile(r"term_(\d+)\.json")
_FOLDER = re.compile(r"step_(\d+)")
_MODEL_DRAFT = re.compile(r"draft_\d+")


def unnoted(amount: int) -> None:
    """Nobody waits."""


class KeptScore(msgspec.Struct, frozen=True):
    """What a checkpoint is kept for, where that is measured."""

    metric: str | None
    value: float


class Commit(msgspec.Struct, frozen=True):
    """The contents of COMMIT.

    Example:

        Commit(5, 100, 0, 100, "9f2c…", {"run.seed": 0}, None, {"worker-trainer-0.json": (812, "51fe…")})
    """

    format: int
    step: int
    term: int
    version: int
    digest: str
    """Interface digest of the run's plan."""
    recipe: dict[str, Any]
    """What a resumed run must have in common (`flow/lineage.py`)."""
    score: KeptScore | None
    parts: dict[str, Fingerprint]
    """Every other file of the folder."""
    validated: dict[int, KeptScore] = {}
    """What checkpoints are kept for if validation measures it, by version: all that was known at this one."""

    @property
    def saved(self) -> Version:
        """The version that was saved."""
        return Version(self.term, self.version)


class _AnyFormat(msgspec.Struct, frozen=True):
    format: int


class _TermRecord(msgspec.Struct, frozen=True):
    number: int
    step: int


def checkpoints_of(run_dir: Path) -> Path:
    """The folder of all checkpoints of a run."""
    return run_dir / "checkpoints"


def folder_of(root: Path, version: Version) -> Path:
    """Where the checkpoint after `version.number` training steps lies."""
    return root / f"step_{version.number:06d}"


def draft_of(root: Path, version: Version) -> Path:
    """Where it is written."""
    return root / f"draft_{version.number:06d}_term_{version.term}"


def drafts(root: Path) -> list[Path]:
    """Folders of checkpoints that are being written, or that were never finished."""
    return sorted(path for path in root.glob("draft_*") if _DRAFT.fullmatch(path.name))


def step_of(folder: Path) -> int:
    """The training step that a checkpoint or draft comes after; raises UserError for a folder of another name."""
    draft = _DRAFT.fullmatch(folder.name)
    number = draft[1] if draft else folder.name.removeprefix("step_")
    if not number.isdecimal():
        raise UserError(
            f"{folder}: expected a name such as step_000100 — move it out of the {folder.parent.name} folder"
        )
    return int(number)


def newest_first(root: Path) -> list[Path]:
    """Folders that may be checkpoints, the newest first; raises UserError for one of another name."""
    return sorted(root.glob("step_*"), key=step_of, reverse=True)


def commits(root: Path) -> Iterator[tuple[Path, Commit]]:
    """Folders with a readable COMMIT of this format that still counts, oldest first, without a check of their parts.

    Folders of other names are ignored. Raises UserError if it cannot be known which checkpoints count.
    """
    begun = begins(root)
    for folder in sorted((path for path in root.glob("step_*") if _FOLDER.fullmatch(path.name)), key=step_of):
        found, _ = read_file(folder / COMMIT)
        if found is not None and found.saved.survives(begun):
            yield folder, found


def abandoned(folder: Path) -> str:
    """Why a checkpoint no longer counts; empty if it does, or if the folder is not one."""
    found, _ = read_file(folder / COMMIT)
    if found is None or found.saved.survives(begins(folder.parent)):
        return ""
    return f"it is of term {found.term}, and a later term of the run began before its training step"


def examine(folder: Path, note: Note = unnoted, *, small_only: bool = False) -> tuple[Commit | None, str]:
    """Its COMMIT, if readable, and why the folder is not a whole checkpoint of this format; reads all parts.

    `note` gets the bytes as they are read. `small_only`: of parts above SMALL_BYTES only the size is checked.
    """
    commit, fault = read_file(folder / COMMIT)
    if commit is None:
        return None, fault
    for name, expected in commit.parts.items():
        whole = not small_only or expected[0] <= SMALL_BYTES
        if fault := _fault_of_part(folder / name, expected, note if whole else None):
            return commit, f"its part {name} {fault}"
    return commit, ""


def read_commit(folder: Path, note: Note = unnoted, *, small_only: bool = False) -> Commit:
    """The COMMIT of a checkpoint after comparing its parts with it, as `examine` does; raises UserError."""
    commit, fault = examine(folder, note, small_only=small_only)
    if commit is None or fault:
        raise UserError(f"{folder}: not a whole checkpoint: {fault} — resume from an older one")
    return commit


def vanished(folder: Path) -> bool:
    """Whether a checkpoint is being removed, or is gone: COMMIT is deleted first."""
    return not (folder / COMMIT).exists()


def term_of(folder: Path) -> int | None:
    """The term that wrote a checkpoint; None if that cannot be read."""
    commit, _ = read_file(folder / COMMIT)
    return None if commit is None else commit.term


def fingerprint(path: Path, note: Note = unnoted) -> Fingerprint:
    """Size and checksum of a file, which is read whole; `note` gets the bytes as they are read."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as handle:
        while chunk := handle.read(_READ_BYTES):
            digest.update(chunk)
            note(len(chunk))
    return path.stat().st_size, digest.hexdigest()


def write_text(path: Path, text: str | bytes) -> Fingerprint:
    """Write a file through to the disk."""
    data = text.encode() if isinstance(text, str) else text
    with path.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    return len(data), xxhash.xxh3_64(data).hexdigest()


def sync_folder(folder: Path) -> None:
    """Write the names in a folder through to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_file(path: Path) -> tuple[Commit | None, str]:
    """What a COMMIT file says, without a check of the parts, or why it cannot be used."""
    try:
        data = path.read_bytes()
        if (found := msgspec.json.decode(data, type=_AnyFormat).format) != FORMAT:
            return None, f"it has format {found}, this version of distflow reads {FORMAT}"
        commit = msgspec.json.decode(data, type=Commit)
        return msgspec.structs.replace(commit, validated=commit.validated | _read_later(path.with_name(LATER))), ""
    except FileNotFoundError:
        return None, "it has no COMMIT, so it was not finished"
    except msgspec.ValidationError as error:
        return None, f"its COMMIT is damaged: {error}"
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        return None, f"its COMMIT cannot be read ({error})"


def note_validated(folder: Path, scores: Mapping[int, KeptScore]) -> None:
    """Add values of validation that came after a checkpoint's COMMIT, which never changes; raises OSError."""
    draft = folder / f".{LATER}.{secrets.token_hex(4)}"
    write_text(draft, msgspec.json.encode(scores).decode())
    os.rename(draft, folder / LATER)


def _read_later(path: Path) -> dict[int, KeptScore]:
    with suppress(OSError, msgspec.DecodeError):  # they only decide what is kept besides the newest
        return msgspec.json.decode(path.read_bytes(), type=dict[int, KeptScore])
    return {}


def _fault_of_part(path: Path, expected: Fingerprint, note: Note | None) -> str:
    """What is wrong with one file of a checkpoint; empty if nothing is. `note` None: it is not read."""
    try:
        if not path.is_file():
            return "is missing"
        if (size := path.stat().st_size) != expected[0]:
            return f"has {size} bytes, COMMIT says {expected[0]}"
        same = note is None or fingerprint(path, note) == expected
        return "" if same else "does not hold the bytes that COMMIT lists"
    except FileNotFoundError:
        # Its run has removed it meanwhile.
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which checkpoints are kept, from the recipe."""

    last: int | None
    """Newest checkpoints that are kept; None: all."""
    metric: str | None = None
    """The best one by this metric is kept beside them."""
    mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value is the best."""
    due: Collection[int] = ()
    """Versions that are validated, if the metric is one of validation: its values come after the checkpoints."""

    def superfluous(self, found: Mapping[Path, Commit]) -> list[Path]:
        """Which of these checkpoints (oldest first) to remove, by their values of the metric.

        It depends on the values alone, so that all hosts with the same checkpoints remove the same ones. Of equal
        values the newest is the best.
        """
        folders = list(found)
        kept = set(folders if self.last is None else folders[-self.last :])
        if self.due:
            # Rounds end in order.
            measured = max(self.validated(found.values()), default=-1)
            kept |= {folder for folder, commit in found.items() if commit.step in self.due and commit.step > measured}
        best = self.best(found)
        kept |= set() if best is None else {best[0]}
        return [folder for folder in folders if folder not in kept]

    def best(
        self, found: Mapping[Path, Commit], later: Mapping[int, float] = MappingProxyType({})
    ) -> tuple[Path, float] | None:
        """The best of these checkpoints (oldest first) and its value; None if no value is known.

        `later`: values of validation by version, which may be newer than the last COMMIT.
        """
        known = {version: score.value for version, score in self.validated(found.values()).items()} | dict(later)
        by_folder = {folder: known.get(commit.step, self._score(commit)) for folder, commit in found.items()}
        scores = {folder: value for folder, value in by_folder.items() if value is not None and not math.isnan(value)}
        if self.metric is None or not scores:
            return None
        best = max(scores.values()) if self.mode == "max" else min(scores.values())
        return [(folder, value) for folder, value in scores.items() if value == best][-1]

    def validated(self, found: Iterable[Commit]) -> dict[int, KeptScore]:
        """What these checkpoints (oldest first) know of the metric, if validation measures it."""
        known: dict[int, KeptScore] = {}
        for commit in found:
            known |= {version: score for version, score in commit.validated.items() if score.metric == self.metric}
        return known

    def _score(self, commit: Commit) -> float | None:
        return commit.score.value if commit.score is not None and commit.score.metric == self.metric else None


LAST = Keeping(2)


def term_file(number: int) -> str:
    """Name of the record of a term."""
    return f"term_{number:06d}.json"


def term_text(number: int, step: int, members: Sequence[str]) -> str:
    """The record of a term that begins at a training step."""
    return json.dumps({"number": number, "step": step, "members": sorted(members)})


def open_term(root: Path, number: int, step: int, members: Sequence[str]) -> None:
    """Record that a term begins at a training step; raises WorkerFailed if it is recorded otherwise already."""
    root.mkdir(parents=True, exist_ok=True)
    path, text = root / term_file(number), term_text(number, step, members)
    draft = root / f".{path.name}.{secrets.token_hex(4)}"
    try:
        with draft.open("w") as file:
            file.write(text)
            file.flush()
            # After a power failure the name could be there without the contents.
            os.fsync(file.fileno())
        # A link is created once, on network file systems too, and never with half the text behind it.
        os.link(draft, path)
    except FileExistsError:
        found = path.read_text(errors="replace")
        if found != text:
            raise WorkerFailed(
                f"{path}: term {number} of this run began elsewhere with {found}, here it would begin with {text} "
                "— end one of the two with `distflow stop`"
            ) from None
    finally:
        draft.unlink(missing_ok=True)


def begins(root: Path) -> dict[int, int]:
    """Training steps at which terms began, by the number of the term, as this folder records them.

    Raises UserError for a record that cannot be read: it could not be known which checkpoints count.
    """
    found = {}
    for path in root.glob("term_*.json"):
        if _TERM.fullmatch(path.name):
            try:
                term = msgspec.json.decode(path.read_bytes(), type=_TermRecord)
            except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
                raise UserError(
                    f"{path}: cannot be read ({error}), but it decides which checkpoints count — restore what it said, "
                    '{"number": TERM, "step": STEP}; the logs of the agents say at which training step the term began'
                ) from error
            found[term.number] = term.step
    return found


def models_of(run_dir: Path) -> Path:
    """The folder of all Hugging Face folders of a run."""
    return run_dir / "hf"


def model_owed(run_dir: Path, step: int, every: int) -> bool:
    """Whether the Hugging Face folder that was due last at training step `step` is missing; one is due `every` steps.

    It is made from the first checkpoint at the step at which it was due, or after it.
    """
    if every <= 0 or step < every:
        return False
    made = [int(found[1]) for path in models_of(run_dir).glob("step_*") if (found := _FOLDER.fullmatch(path.name))]
    return not any(step - step % every <= number <= step for number in made)


def forget_model_drafts(run_dir: Path) -> None:
    """Remove Hugging Face folders that were never finished."""
    for path in models_of(run_dir).glob("draft_*"):
        if _MODEL_DRAFT.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
