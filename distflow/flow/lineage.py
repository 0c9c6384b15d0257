"""What a run has in common with the one whose checkpoint it goes on from: what may differ, and what may not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distflow.config.load import recipe_to_mapping
from distflow.flow.digest import digest_parts, portable
from distflow.flow.plan import Plan

FIXED = re.compile(
    r"run\.seed|batch\.(prompts|ledgers)|data\.(source|shuffle|chat|with\..*)|models\.[^.]+\.(path|tokenizer|dtype|init\..*)"
)
"""Keys that decide the order of the data and what the weights mean: a checkpoint is nothing without them."""
FREE = re.compile(r"run\.(?!training_steps$).*|layout\.(?!max_staleness$).*|limits\..*|security\..*")
"""Keys that say where and for how long: whatever they are, the run goes on as it would have."""
_CODE = "code of step "


@dataclass(frozen=True, slots=True)
class Change:
    """One key of the recipe that is not what it was."""

    key: str
    was: object
    now: object

    @property
    def forbidden(self) -> bool:
        """The checkpoint cannot be used with it."""
        return FIXED.fullmatch(self.key) is not None

    def __str__(self) -> str:
        if self.key.startswith(_CODE):
            return f"{self.key} has changed"
        return f"{self.key} was {json.dumps(self.was)}, is {json.dumps(self.now)}"


def lineage(plan: Plan) -> dict[str, Any]:
    """What of a plan is compared: values of its recipe by key, and a hash of the code of each shared step."""
    values = {
        key: value
        for key, value in _leaves("", portable(recipe_to_mapping(plan.recipe)))
        if FIXED.fullmatch(key) or not FREE.fullmatch(key)
    }
    code = {name: value for name, value in digest_parts(plan).items() if name.startswith(_CODE)}
    return {**values, **code}


def leaves(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a recipe by their keys with dots."""
    return dict(_leaves("", recipe))


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """What differs between two lineages, by key."""
    keys = [key for key in sorted({*was, *now}) if key not in was or key not in now or was[key] != now[key]]
    return [Change(key, was.get(key), now.get(key)) for key in keys]


def _leaves(at: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _leaves(f"{at}.{key}" if at else str(key), below)
    else:
        yield at, value
