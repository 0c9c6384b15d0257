"""What callers of a `Client` give it, looked at before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

from distflow.data.decoding import MOST, shown
from distflow.errors import UserError

MOST_CHARACTERS = 64
"""Of a consumer's name."""


def check_request(fields: Sequence[str], consumer: str, rows: int, tokens: int, timeout: float | None) -> None:
    """Raise UserError unless samples can be asked for so."""
    listed = isinstance(fields, Sequence) and not isinstance(fields, str | bytes) and len(fields) > 0
    if not (listed and all(isinstance(name, str) and name for name in fields)):
        raise UserError(f"fields: expected a list of names such as ['prompt_text', 'reward'], got {fields!r}")
    check_consumer(consumer)
    for what, value in (("rows", rows), ("tokens", tokens)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MOST:
            raise UserError(f"{what}: expected a whole number, 0 for any number, got {shown(value)}")
    check_seconds("timeout", timeout)


def check_consumer(name: str) -> None:
    """Raise UserError unless this can be the name of a consumer."""
    if not (isinstance(name, str) and 0 < len(name) <= MOST_CHARACTERS):
        raise UserError(f"consumer: expected a name of 1 to {MOST_CHARACTERS} characters, got {str(name)[:80]!r}")


def check_site(site: str, sites: Sequence[str]) -> None:
    """Raise UserError unless a host of the run stands at this site; "": at none."""
    if site and site not in sites:
        there = ", ".join(sorted({one for one in sites if one})) or "none: its hosts file names no sites"
        raise UserError(f"site: expected one of the run's sites ({there}), got {str(site)[:80]!r}")


def check_seconds(what: str, value: float | None) -> None:
    """Raise UserError unless this is a number of seconds, or None."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value < 0:
        raise UserError(f"{what}: expected a number of seconds, got {value!r}")
