"""What a run must have in common with the run whose checkpoint it resumes from, and what may differ.

`lineage` is about the recipe, and decides whether a checkpoint can be used; `arithmetic` is about the machine, on which
the last bits of a deterministic run depend: kernels round differently by processor, PyTorch version and threads.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from distflow.config.data_files import fingerprint
from distflow.config.load import recipe_to_mapping
from distflow.config.paths import is_data_file
from distflow.flow.data_check import all_sources
from distflow.flow.digest import digest_parts, portable
from distflow.flow.plan import Plan

FIXED = re.compile(
    r"run\.seed|batch\.(prompts|ledgers)|data\.(source|shuffle|chat|with\..*)|"
    r"models\.[^.]+\.(path|tokenizer|dtype|quantize|head|init\..*|lora(\..*)?)"
)
"""Keys that decide the order of the data and what the weights mean: with other values a checkpoint is useless."""
FREE = re.compile(r"run\.(?!training_steps$).*|layout\.(?!max_staleness$).*|limits\..*|security\..*")
"""Keys that say where and how long to run: they do not change how the run continues."""
_NAMED = re.compile(r"(layout\.pools|flow\.steps|models)\.[^.]+\.")
"""Before the keys of what users name."""
ARITHMETIC = "arithmetic"
"""Key of the arithmetic in a training worker's part of a checkpoint."""
OF_MACHINE = ("processor", "PyTorch")
"""Entries of the arithmetic that the machine decides, not the recipe."""
_CODE = "code of "
_CONTENTS = "what is in "
_VECTORS = ("avx2", "avx512f", "avx512_bf16", "amx_tile")
"""Processor features by which libraries choose their kernels."""


@dataclass(frozen=True, slots=True)
class Change:
    """One key of the recipe whose value has changed, or a pool, step or model that has come or gone as a whole."""

    key: str
    was: object
    now: object
    below: tuple[str, ...] = ()
    """The keys of what has come or gone as a whole."""

    @property
    def of_data(self) -> bool:
        """Whether a data file has other contents; no digest tells of that."""
        return self.key.startswith(_CONTENTS)

    @property
    def forbidden(self) -> bool:
        """Whether the checkpoint cannot be used with this change."""
        return any(FIXED.fullmatch(key) is not None for key in (self.key, *self.below))

    def __str__(self) -> str:
        if self.key.startswith(_CODE):
            return f"{self.key} has changed"
        if self.of_data:
            return f"{self.key} has changed: other prompts may come, or come again, than without that"
        if self.below:
            return f"{self.key} is {'new' if self.was is None else 'no longer there'}"
        return f"{self.key} was {json.dumps(self.was)}, is {json.dumps(self.now)}"


def lineage(plan: Plan) -> dict[str, Any]:
    """The parts of a plan that are compared: recipe values by key, hashes of the code and of data files."""
    values = {
        key: value
        for key, value in _leaves("", portable(recipe_to_mapping(plan.recipe)))
        if FIXED.fullmatch(key) or not FREE.fullmatch(key)
    }
    code = {name: value for name, value in digest_parts(plan).items() if name.startswith(_CODE)}
    return {**values, **code, **_contents(plan)}


def _contents(plan: Plan) -> dict[str, str]:
    """Fingerprints of the data files that are on this machine."""
    found: dict[str, str] = {}
    for key, source in all_sources(plan.recipe):
        if is_data_file(source.source):
            split = source.with_.get("split")
            known = fingerprint(Path(source.source), split if isinstance(split, str) else None)
            found |= {} if known is None else {f"{_CONTENTS}{key}.source, {Path(source.source).name},": known}
    return found


def leaves(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a recipe by dotted key."""
    return dict(_leaves("", recipe))


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The differences between two lineages, by key; what has come or gone as a whole is one of them."""
    keys = [key for key in sorted({*was, *now}) if key not in was or key not in now or was[key] != now[key]]
    # Machines that are not trained on may lack the data.
    keys = [key for key in keys if not key.startswith(_CONTENTS) or (key in was and key in now)]
    whole = dict[str, list[str]]()
    for key in keys:
        named = _NAMED.match(key)
        if named and not all(any(other.startswith(named[0]) for other in side) for side in (was, now)):
            whole.setdefault(named[0].removesuffix("."), []).append(key)
    below = {key for one in whole.values() for key in one}
    found = [Change(key, was.get(key), now.get(key)) for key in keys if key not in below]
    for name, inside in whole.items():
        there = any(key in was for key in inside)
        found.append(Change(name, name if there else None, None if there else name, tuple(inside)))
    return sorted(found, key=lambda change: change.key)


def _leaves(at: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _leaves(f"{at}.{key}" if at else str(key), below)
    else:
        yield at, value


def arithmetic(plan: Plan) -> dict[str, Any]:
    """The arithmetic of a plan's workers on this machine."""
    threads = {pool: sorted({w.threads for w in plan.workers if w.name.pool == pool}) for pool in _pools(plan)}
    return {
        **dict(zip(OF_MACHINE, (processor(), metadata.version("torch")), strict=True)),
        "training workers": len(plan.members),
        **{f"threads of {pool}": " or ".join(map(str, counts)) for pool, counts in threads.items()},
    }


def departures(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """One line for each difference between two arithmetics."""
    for name in sorted(was.keys() & now.keys()):
        if was[name] != now[name]:
            yield f"run.deterministic: {name} was {was[name]}, is {now[name]}: from here on the last bits may differ"


def processor() -> str:
    """This machine's processor model, and its features that matter for rounding."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found: dict[str, str] = {}
    for name, _, value in (line.partition(":") for line in lines):
        found.setdefault(name.strip(), value.strip())
    features = [name for name in _VECTORS if name in found.get("flags", "").split()]
    return " ".join([found.get("model name", platform.machine()), *features])


def _pools(plan: Plan) -> list[str]:
    return list(dict.fromkeys(worker.name.pool for worker in plan.workers))
