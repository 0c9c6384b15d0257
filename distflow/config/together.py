"""What follows from several keys of another tool's configuration at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distflow.config.foreign import shown


@dataclass(slots=True)
class Together:
    """What follows from several keys."""

    flow: str = "grpo"
    layout: str = "colocated"
    made: dict[str, Any] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)
    """Keys whose value has no counterpart, with the reason."""
    settings: dict[str, str] = field(default_factory=dict)
    """Keys that are settings of the reward function, with their keys here."""
    assumed: list[str] = field(default_factory=list)
    says: dict[str, str] = field(default_factory=dict)
    """Keys for which nothing is needed here, with the reason."""
    told: set[str] = field(default_factory=set)
    """Keys of which the expression alone told enough."""
    notes: dict[str, str] = field(default_factory=dict)
    """Comments, by key of the recipe."""

    def by_default(self, key: str, value: Any, note: str = "TRL's default") -> None:
        """Set what the other tool takes where nothing is said, with a comment, unless something else has set it."""
        if key not in self.made:
            self.made[key] = value
            self.notes[key] = note

    def number(self, given: Mapping[str, Any], key: str, default: Any) -> Any:
        """Take a number; anything else but null is told, and the default stands for it."""
        value = given.get(key)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return default if value is None else value
        self.lacks[key] = f"{shown(value)} is no number: {shown(default)} is assumed"
        return default


def choose(found: Together, flow: str, key: str) -> None:
    """Take another flow than grpo, if no other key has chosen one."""
    if found.flow not in ("grpo", flow):
        found.lacks[key] = f"flow={flow}, but flow={found.flow} is chosen: merge the two flows by hand"
    else:
        found.flow = flow


def clip(found: Together, low: Any, high: Any, *, named: bool) -> None:
    """Set the bounds of the ratio if the other configuration names them."""
    if named:
        found.made["flow.steps.update.with.clip"] = [low, high]


def divergence(found: Together, coefficient: float, kind: str) -> None:
    """Add a divergence from a reference to the loss, of this kind; 0: none."""
    if not coefficient:
        return
    if found.flow == "grpo":
        found.flow = "grpo_kl"
    else:
        found.made["flow.steps.reference"] = {"call": "distflow.workers.reference:ref_logprobs", "model": "reference"}
    found.made |= {"flow.steps.update.with.kl_coef": coefficient, "flow.steps.update.with.kl": kind}
