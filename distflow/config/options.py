"""What the options of the plug-ins here have in common: keys that a plug-in does not know are refused by name, and what
fits neither model nor device is refused by the plan, as by the worker."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from distflow.config.suggest import did_you_mean
from distflow.errors import UserError


@dataclass(frozen=True, slots=True)
class PluginUse:
    """What an engine or backend is used for: its options' `check` raises UserError where they do not go with it."""

    model: Mapping[str, Any]
    """A `models.<name>` section, as plain values."""
    device: str
    """cpu, cuda or cuda:N; auto: only the worker will know."""
    model_name: str = "NAME"
    pool: str = "NAME"
    trained: bool = False
    """Whether a backend trains the model, or runs it frozen."""
    offload: bool = False
    """Whether an engine gives its memory back while the worker trains."""
    shares_device: bool = False
    """Whether models are on an engine's device."""
    slots: int = 1
    """Of an engine: samples side by side."""
    longest: int = 0
    """Of an engine, the longest sample in tokens; 0: not known."""
    deterministic: bool = False
    """Whether the run is to repeat to the last bit (`run.deterministic`)."""
    heads: int = 0
    """Attention heads of the model; 0: not known."""


def check_keys(section: str, plugin: str, options: Mapping[str, Any], known: Collection[str], hint: str = "") -> None:
    """Raises UserError for the first key of `section` that `plugin` does not know; `hint` is where it may belong."""
    for name, value in options.items():
        if name not in known:
            expected = did_you_mean(name, known)
            raise UserError(f"{section}.{name} {value!r}: {plugin} has no such option — {expected}{hint}")
