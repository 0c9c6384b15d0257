"""What follows from several keys of another tool's configuration at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distflow.config.division import Division, divide
from distflow.config.foreign import shown

RowCount = Callable[[str], int | None]
"""Counts the rows of a file; None where that cannot be told."""


def uncounted(_file: str) -> int | None:
    """Count nothing."""
    return None


TENSOR_PARALLEL = {"vllm": "tensor_parallel_size", "sglang": "tensor_parallel"}
"""The option by which an engine has several GPUs."""
REFERENCE = {"call": "distflow.workers.reference:ref_logprobs", "model": "reference"}
"""The step that asks a reference."""


class Default(NamedTuple):
    """A value that the other tool takes where nothing is said."""

    argument: str
    """Its key there."""
    value: Any
    """Its value there."""
    why: str = ""


@dataclass(slots=True)
class Together:
    """What follows from several keys."""

    flow: str = "grpo"
    layout: str = "colocated"
    made: dict[str, Any] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)
    """Keys whose value has no counterpart, with the reason."""
    settled: dict[str, str] = field(default_factory=dict)
    """Keys of which what they are here depends on others, with that."""
    says: dict[str, str] = field(default_factory=dict)
    """Keys for which nothing is needed here, with the reason."""
    told: set[str] = field(default_factory=set)
    """Keys of which the expression alone told enough."""
    engine: str = "torch"
    backend: str = "torch"
    length: str = "how long to train is not said as a number"
    """Why training steps are not known, where they are not."""
    assumed: list[str] = field(default_factory=list)
    defaults: dict[str, Default] = field(default_factory=dict)
    """By key of the recipe, what the other tool takes where nothing is said."""
    rows: dict[str, int] = field(default_factory=dict)
    """Of files of prompts that could be counted."""
    notes: dict[str, str] = field(default_factory=dict)
    """Further comments, by key of the recipe."""

    def whole_batches(self, files: Sequence[str], size: int) -> int:
        """Return the whole batches of a pass over files; 0 where rows are not known, or there is none."""
        known, rows = len(self.rows) == len(files) > 0, sum(self.rows.values())
        batches = rows // size if known else 0
        if not batches:
            self.length = f"{rows} rows are less than a batch" if known else "rows are not known here"
        return batches

    def by_default(self, key: str, here: Any, default: Default) -> None:
        """Set what the other tool takes where nothing is said, unless something else has set it."""
        if key not in self.made:
            self.made[key] = here
            self.defaults[key] = default

    def number(self, given: Mapping[str, Any], key: str, default: Any) -> Any:
        """Take a number; anything else but null is told, and the default stands for it."""
        value = given.get(key)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return default if value is None else value
        self.lacks[key] = f"{shown(value)} is no number: {shown(default)} is assumed"
        return default

    def count(self, given: Mapping[str, Any], key: str, default: int) -> int:
        """Take a whole number from 1; anything else but null is told, and the default stands for it."""
        number = self.number(given, key, default)
        if number >= 1 and number == int(number):
            return int(number)
        self.lacks[key] = f"{shown(number)} is no count: {default} is assumed"
        return default

    def choose(self, flow: str, key: str) -> None:
        """Take another flow than grpo, if no other key has chosen one."""
        if self.flow not in ("grpo", flow):
            self.lacks[key] = f"flow={flow}, but flow={self.flow} is chosen: merge the two flows by hand"
        else:
            self.flow = flow

    def divergence(self, coefficient: float, kind: str) -> None:
        """Add a divergence from a reference to the loss, of this kind; 0: none."""
        if not coefficient:
            return
        if self.flow == "grpo":
            self.flow = "grpo_kl"
        else:
            self.made["flow.steps.reference"] = dict(REFERENCE)
        self.made |= {"flow.steps.update.with.kl_coef": coefficient, "flow.steps.update.with.kl": kind}

    def minibatches(self, prompts: int, wanted: float, why: str) -> int:
        """Cut a training step into the number of equal parts that is nearest to the one that is wanted."""
        divisors = [parts for parts in range(1, prompts + 1) if prompts % parts == 0]
        parts = min(divisors, key=lambda parts: abs(parts - wanted))
        if parts != wanted:
            one = f"batch.minibatches is {parts}, of {prompts // parts} prompts each"
            self.assumed.append(f"{one}: {why}, and here they are equal parts of a training step")
        self.made |= {"batch.minibatches": parts} if parts > 1 else {}
        return parts

    def divide(self, engine: str, width: int, hosts: tuple[int, int], apart: int = 0) -> Division:
        """Choose the layout and the counts of its pools, and the option by which an engine has several GPUs."""
        most = self.made["batch.prompts"] // self.made.get("batch.minibatches", 1)
        division = divide(engine, width, hosts, most=most, apart=apart)
        self.layout, self.engine = division.layout, engine
        self.made |= {f"layout.pools.{pool}.count": count for pool, count in division.counts.items()}
        if division.width > 1:
            self.made[f"layout.pools.rollout.engine_options.{TENSOR_PARALLEL[engine]}"] = division.width
        self.assumed += division.told
        return division


def word(given: Mapping[str, Any], key: str, default: str) -> str:
    """Take a name; null: the default."""
    value = given.get(key)
    return default if value is None else str(value)


def counts_of(division: Division) -> str:
    """Write the counts of pools as keys of a recipe."""
    return ", ".join(f"layout.pools.{name}.count={count}" for name, count in division.counts.items())


def mixture(files: Sequence[Any]) -> dict[str, Any]:
    """Make sources by the names of their files, with those of folders above where several have the same."""
    paths = [str(file).rpartition(".")[0].split("/") for file in files]
    for length in range(1, max(map(len, paths)) + 1):
        names = [re.sub(r"\W+", "_", "_".join(path[-length:])).strip("_") for path in paths]
        if all(names) and len({*names}) == len(names):
            return {name: {"source": str(file)} for name, file in zip(names, files, strict=True)}
    return {f"source_{n}": {"source": str(file)} for n, file in enumerate(files)}
