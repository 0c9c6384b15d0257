"""Refuses what `run.deterministic` cannot have, as far as the recipe shows it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distflow.config.plugins import ENGINES, full_name
from distflow.config.schema import Recipe
from distflow.errors import Problems
from distflow.flow.sizes import GATED, configuration
from distflow.flow.structure import Structure

ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on the position alone, not on the longest row of the batch."""
_KEY, _STALENESS = "run.deterministic", "layout.max_staleness"


def check_deterministic(recipe: Recipe, structure: Structure, problems: Problems) -> None:
    """Refuse what a run that repeats to the last bit cannot have; engines check their options themselves."""
    if recipe.run.deterministic:
        for found in (*_of_layout(recipe), *_of_models(recipe, structure), *_of_scoring(recipe, structure)):
            others = (f"{found[0]}.path", f"{found[0]}.init.model_type", _STALENESS if found[0] == _KEY else _KEY)
            problems.add(*found, others=others)


def unsupported(config: Mapping[str, Any]) -> str:
    """Why a model with this transformers configuration cannot be computed batch-invariantly; empty if it can."""
    family = config.get("model_type")
    if family not in GATED:
        return f"model_type {family!r} is not computed batch-invariantly, only {', '.join(GATED)} are"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROTATIONS:
        return f"rotary embeddings of type {kind!r} depend on the longest row of a batch; use {', '.join(ROTATIONS)}"
    windowed = family == "mistral" or config.get("use_sliding_window")
    if windowed and config.get("sliding_window") is not None:
        return f"sliding windows (model_type {family!r}) are not computed batch-invariantly; set sliding_window to null"
    return ""


def _of_layout(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    layout = recipe.layout
    if layout.max_staleness != 0:
        yield (
            _KEY,
            f"with layout.max_staleness {layout.max_staleness}, timing decides which version generates a group: "
            "the run cannot repeat",
            f"{_KEY}=false, or {_STALENESS}=0",
        )
    if layout.on_failure == "shrink":
        yield (
            "layout.on_failure",
            "a run that continues with fewer training workers sums in another order, but run.deterministic is true",
            "layout.on_failure=restart or stop",
        )


def _of_models(recipe: Recipe, structure: Structure) -> Iterator[tuple[str, str, str]]:
    """Models that the torch engine, or any backend on a CPU, cannot compute row by row independently."""
    models, pools = structure.models, recipe.layout.pools
    used: dict[str, None] = {}
    for planned in structure.pools:
        pool = pools[planned.name]
        torch_engine = bool(planned.generates) and full_name(pool.engine, ENGINES) == ENGINES["torch"]
        if pool.device == "cpu" or torch_engine:
            used |= {node.model: None for node in structure.on(planned.name) if node.model is not None}
    for name in used:
        config = configuration(models.configs[name])
        why = unsupported(config) if config else ""
        if models.configs[name].quantize is not None:
            why = "weights of 4 bits are not computed batch-invariantly"
        if models.configs[name].attn_implementation != "auto":
            why = f"attn_implementation {models.configs[name].attn_implementation} is not batch-invariant, only auto is"
        if why:
            original = models.primary if name in models.copied else name
            yield f"models.{original}", f"model {original!r}: {why}", f"{_KEY}=false, or another model"


def _of_scoring(recipe: Recipe, structure: Structure) -> Iterator[tuple[str, str, str]]:
    """Scoring on a GPU by generating workers, which score groups in batches as they finish."""
    for planned in structure.pools:
        pool = recipe.layout.pools[planned.name]
        if planned.homes or not planned.generates or not pool.device.startswith("cuda"):
            continue  # a pool that neither trains nor generates computes each group by itself
        for node in structure.on(planned.name):
            if node.role == "forward":
                yield (
                    f"layout.pools.{planned.name}.device",
                    f"step {node.name!r} scores groups in batches as they finish, and on a GPU scores depend on the "
                    f"batch: {_KEY} cannot repeat them",
                    "cpu, or the role forward in the training pool",
                )
