"""What makes a folder a checkpoint, which checkpoints count, and which are kept. No torch here.

    checkpoints/step_000100/model-policy-trainer-0.safetensors   parameters, optimizer moments, counters
                            worker-trainer-0.json                ledgers, step states
                            COMMIT                               lists every part with its size and checksum
    checkpoints/draft_000200_term_1/…                            one that is being written, or was never finished
    checkpoints/term_000002.json                                 {"number": 2, "step": 40, "members": ["trainer/0"]}
    hf/step_000100/   a model's weights (safetensors), configuration, generation configuration, tokenizer
    hf/draft_000200/  one that is being written, or was never finished

Parts and COMMIT are written into the draft, which is then renamed: a folder step_… is whole from its first moment, and
two lives of a run (terms) never write into the same folder.

A term of the training pool has one file, made once: whoever comes second with other contents has lost. A checkpoint of
a former term counts if every later term began at its training step or at a later one; a forgotten process that still
finishes an older one (after `step` of a later term) changes nothing, whenever it does so.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from distflow.errors import UserError, WorkerFailed
from distflow.types import Version

FORMAT = 4
COMMIT = "COMMIT"
KEYS: Mapping[str, type] = {
    "step": int,
    "term": int,
    "version": int,
    "digest": str,
    "recipe": dict,
    "score": dict,
    "parts": dict,
}
"""What COMMIT says besides its format; a score may be null."""
_STEP = re.compile(r"step_\d+")
_DRAFT = re.compile(r"draft_(\d+)_term_(\d+)(_replaced)?")
_READ_BYTES = 8 << 20
_TERM = re.compile(r"term_(\d+)\.json")
_FOLDER = re.compile(r"step_(\d+)")
_MODEL_DRAFT = re.compile(r"draft_\d+")


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
    """Folders of checkpoints that are being written, or never were finished."""
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


def commits(root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folders with a readable COMMIT of this format that still counts, oldest first; their parts are not looked at.

    Those of other names are none. Raises UserError if nobody can tell what counts.
    """
    begun = begins(root)
    for folder in sorted((path for path in root.glob("step_*") if _STEP.fullmatch(path.name)), key=step_of):
        found, _ = _read(folder)
        if found is not None and Version(found["term"], found["version"]).survives(begun):
            yield folder, found


def abandoned(folder: Path) -> str:
    """Why a checkpoint does not count any more; empty if it does, or is none."""
    found, _ = _read(folder)
    if found is None or Version(found["term"], found["version"]).survives(begins(folder.parent)):
        return ""
    return f"it is of term {found['term']}, and a later term of the run began before its training step"


def examine(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Its COMMIT, if that can be read, and why the folder is no whole checkpoint of this format; reads all parts."""
    commit, fault = _read(folder)
    if commit is None:
        return None, fault
    for name, expected in commit["parts"].items():
        if fault := _fault_of_part(folder / name, expected):
            return commit, f"its part {name} {fault}"
    return commit, ""


def read_commit(folder: Path) -> dict[str, Any]:
    """The COMMIT of a checkpoint after comparing all parts with it; raises UserError if it is not whole."""
    commit, fault = examine(folder)
    if commit is None or fault:
        raise UserError(f"{folder}: no whole checkpoint: {fault} — resume from an older one")
    return commit


def vanished(folder: Path) -> bool:
    """Whether a checkpoint that was there is being removed, or is gone: COMMIT goes first."""
    return not (folder / COMMIT).exists()


def term_of(folder: Path) -> int | None:
    """The term that wrote a checkpoint; None if that cannot be read."""
    commit, _ = _read(folder)
    return None if commit is None else int(commit["term"])


def fingerprint(path: Path) -> list[Any]:
    """Size in bytes and xxh3 of a file."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as handle:
        while chunk := handle.read(_READ_BYTES):
            digest.update(chunk)
    return [path.stat().st_size, digest.hexdigest()]


def write_text(path: Path, text: str) -> list[Any]:
    """Write a file through to the disk; returns its size and checksum."""
    data = text.encode()
    with path.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    return [len(data), xxhash.xxh3_64(data).hexdigest()]


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(folder: Path) -> tuple[dict[str, Any] | None, str]:
    return read_file(folder / COMMIT)


def read_file(path: Path) -> tuple[dict[str, Any] | None, str]:
    """A COMMIT alone, parts unseen: what it says, or why that is not to be had."""
    try:
        commit = json.loads(path.read_text())
    except FileNotFoundError:
        return None, "it has no COMMIT, so it was not finished"
    except (OSError, ValueError) as error:
        return None, f"its COMMIT cannot be read ({error})"
    if not isinstance(commit, dict) or "format" not in commit:
        return None, "its COMMIT is not one of distflow"
    if commit["format"] != FORMAT:
        return None, f"it has format {commit['format']}, this version of distflow reads {FORMAT}"
    if missing := sorted(KEYS.keys() - commit.keys()):
        return None, f"its COMMIT lacks {', '.join(missing)}"
    if wrong := [name for name in KEYS if not _is_well_formed(name, commit[name])]:
        return None, f"its COMMIT is damaged: {wrong[0]} is {json.dumps(commit[wrong[0]])[:60]}"
    return commit, ""


def _is_well_formed(name: str, value: object) -> bool:
    if name == "score":
        return value is None or (isinstance(value, dict) and value.keys() >= {"metric", "value"})
    if name == "parts":
        return isinstance(value, dict) and all(isinstance(part, list) and len(part) == 2 for part in value.values())
    return isinstance(value, KEYS[name])


def _fault_of_part(path: Path, expected: list[Any]) -> str:
    """What is wrong with one file of a checkpoint; empty if nothing is."""
    try:
        if not path.is_file():
            return "is missing"
        if (size := path.stat().st_size) != expected[0]:
            return f"has {size} bytes, COMMIT says {expected[0]}"
        return "" if fingerprint(path) == expected else "does not hold the bytes that COMMIT lists"
    except FileNotFoundError:
        # Removed by its run while it was looked at.
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


@dataclass(frozen=True, slots=True)
class Keeping:
    """From the recipe."""

    last: int
    """Newest checkpoints that are kept."""
    metric: str | None = None
    """The best one by this metric is kept beside them."""
    mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value is the best."""

    def superfluous(self, scores: Mapping[Path, float | None]) -> list[Path]:
        """What is to be removed of these checkpoints (oldest first), by their values of the metric.

        A function of the values alone, so that all who keep the same checkpoints remove the same ones. Of equal values
        the newest is the best.
        """
        folders = list(scores)
        kept = set(folders[-self.last :])
        sign = 1.0 if self.mode == "max" else -1.0
        ranked = [(sign * value, place) for place, value in enumerate(scores.values()) if value is not None]
        if self.metric is not None and ranked:
            kept.add(folders[max(ranked)[1]])
        return [folder for folder in folders if folder not in kept]


LAST = Keeping(2)


def open_term(root: Path, number: int, step: int, members: Sequence[str]) -> None:
    """Note that a term begins at a training step; raises WorkerFailed if it began otherwise already."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / f"term_{number:06d}.json"
    text = json.dumps({"number": number, "step": step, "members": sorted(members)})
    draft = root / f".{path.name}.{secrets.token_hex(4)}"
    try:
        with draft.open("w") as file:
            file.write(text)
            file.flush()
            # Without power, the name could outlive what it stands for.
            os.fsync(file.fileno())
        # A link is made once, also on file systems over a network, and then the whole text is there.
        os.link(draft, path)
    except FileExistsError:
        found = path.read_text(errors="replace")
        if found != text:
            raise WorkerFailed(
                f"{path}: term {number} of this run began elsewhere with {found}, here it would with {text} "
                "— end one of the two with `distflow stop`"
            ) from None
    finally:
        draft.unlink(missing_ok=True)


def begins(root: Path) -> dict[int, int]:
    """Training step by number of the terms that began, as far as this folder tells.

    Raises UserError for one that says something else: nobody could tell which checkpoints count.
    """
    found = {}
    for path in root.glob("term_*.json"):
        if _TERM.fullmatch(path.name):
            number, step = _noted(path)
            found[number] = step
    return found


def _noted(path: Path) -> tuple[int, int]:
    try:
        noted = json.loads(path.read_text())
        number, step = noted["number"], noted["step"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}), and says which checkpoints count — write into it what it said, "
            '{"number": TERM, "step": STEP}; the agents\' logs tell from which training step the term went on'
        ) from error
    if type(number) is not int or type(step) is not int:
        raise UserError(f"{path}: expected whole numbers for number and step, got {number!r} and {step!r}")
    return number, step


def models_of(run_dir: Path) -> Path:
    """The folder of all of them."""
    return run_dir / "hf"


def model_owed(run_dir: Path, step: int, every: int) -> bool:
    """Whether the folder that was due last, until after training step `step`, is missing; one is due every so many.

    It is made of the first checkpoint at or after the step that it was due at, which may be a later one.
    """
    if every <= 0 or step < every:
        return False
    made = [int(found[1]) for path in models_of(run_dir).glob("step_*") if (found := _FOLDER.fullmatch(path.name))]
    return not any(step - step % every <= number <= step for number in made)


def forget_model_drafts(run_dir: Path) -> None:
    """Remove folders that nobody will finish."""
    for path in models_of(run_dir).glob("draft_*"):
        if _MODEL_DRAFT.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
