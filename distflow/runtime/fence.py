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

from distflow.errors import WorkerFailed

_TERM = re.compile(r"term_(\d+)\.json")


def open_term(root: Path, number: int, step: int, members: Sequence[str]) -> None:
    """Note that a term begins at a training step; raises WorkerFailed if it began otherwise already."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / f"term_{number:06d}.json"
    text = json.dumps({"number": number, "step": step, "members": sorted(members)})
    draft = root / f".{path.name}.{secrets.token_hex(4)}"
    try:
        draft.write_text(text)
        # A link is made once, also on file systems over a network, and then the whole text is there.
        os.link(draft, path)
    except FileExistsError:
        if path.read_text() != text:
            raise WorkerFailed(
                f"{path}: term {number} of this run began elsewhere with {path.read_text()}, here it would with {text} "
                "— end one of the two with `distflow stop`"
            ) from None
    finally:
        draft.unlink(missing_ok=True)


def begins(root: Path) -> dict[int, int]:
    """Training step by number of the terms that began, as far as this folder tells."""
    found = {}
    for path in root.glob("term_*.json"):
        if _TERM.fullmatch(path.name):
            noted = json.loads(path.read_text())
            found[int(noted["number"])] = int(noted["step"])
    return found
