"""What the options of the plug-ins here have in common: keys that a plug-in does not know are refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from distflow.config.suggest import did_you_mean
from distflow.errors import UserError


def check_keys(section: str, plugin: str, options: Mapping[str, Any], known: Collection[str], hint: str = "") -> None:
    """Raises UserError for the first key of `section` that `plugin` does not know; `hint` is where it may belong."""
    for name, value in options.items():
        if name not in known:
            expected = did_you_mean(name, known)
            raise UserError(f"{section}.{name} {value!r}: {plugin} has no such option — {expected}{hint}")
