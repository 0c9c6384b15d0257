"""Which checkpoints still count after training workers began anew: one file for every term that began, made once.

    checkpoints/term_000002.json    {"number": 2, "step": 40, "members": ["trainer/0", "trainer/2"]}

A term can be opened once in a folder: whoever comes second with other contents has lost. A checkpoint of a former term
counts if every later term began at its training step or at a later one; a forgotten process that still finishes an
older one (after `step` of a later term) changes nothing, whenever it does so.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from distflow.errors import UserError, WorkerFailed

_TERM = re.compile(r"term_(\d+)\.json")


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
