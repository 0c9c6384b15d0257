"""`did you mean …` for names that do not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like `name`, if any is like it at all: 1 is equal, 0 has nothing in common."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'? allowed: x, y, z`."""
    names = sorted(known)
    close = nearest(name, names)
    guess = f"did you mean {close!r}? " if close is not None else ""
    return f"{guess}allowed: {', '.join(names) or '(nothing)'}"
