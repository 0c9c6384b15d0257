"""Which model families of transformers the backends and engines take, as one table. Imports no torch.

Each row is tried by the tests with a tiny model: two training steps and an export for each backend, and tokens of the
torch engine against the model's own forward. docs/models.md shows the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distflow.config.plugins import BACKENDS, ENGINES, PluginUse
from distflow.errors import KeyedError

_SHORT = {full: f"backend {short}" for short, full in BACKENDS.items()}
_SHORT |= {full: f"engine {short}" for short, full in ENGINES.items()}


@dataclass(frozen=True, slots=True)
class Family:
    """A `model_type` of transformers."""

    layers: str
    """What its layers do with past tokens."""
    attention: str = "sdpa"
    """How attention is computed unless a recipe says it: transformers has no sdpa for some."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why an engine or a backend does not take it, by kind and name, as in `engine torch`."""


_PLAIN = "attention"
_WINDOWS = "attention, in windows too"
_LATENT = "latent attention (MLA)"
_DELTA = "gated delta rule, and attention"
_CONVOLUTION = "convolutions, and attention"

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "smollm3", "olmo2", "phi3"), Family(_PLAIN)),
    **dict.fromkeys(("mistral", "olmo3", "gemma2", "gemma3_text"), Family(_WINDOWS)),
    "gemma4_text": Family("attention, in windows of narrower heads too; layers share keys"),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe"), Family(f"{_PLAIN}; experts")),
    "gpt_oss": Family("attention with sinks, in windows too; experts", attention="eager"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), Family(f"{_LATENT}; experts")),
    "lfm2": Family(_CONVOLUTION),
    "lfm2_moe": Family(f"{_CONVOLUTION}; experts"),
    "qwen3_5_text": Family(_DELTA),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), Family(f"{_DELTA}; experts")),
    "minimax": Family(
        "lightning attention, and attention; experts",
        refused={"engine torch": "its layers need a cache of their own, which has no slots"},
    ),
    "deepseek_v32": Family(
        f"{_LATENT} to tokens that an indexer chooses; experts",
        refused={"engine torch": "its cache has no place for what the indexer keeps"},
    ),
}
"""By `model_type`."""


def usual_attention(config: Mapping[str, Any]) -> str:
    """How attention of a model with this configuration is computed unless its section says it."""
    family = FAMILIES.get(str(config.get("model_type")))
    return "sdpa" if family is None else family.attention


def refuse_family(use: PluginUse, plugin: str) -> None:
    """Raise KeyedError for a model that the table says an engine or a backend does not take.

    `plugin`: its full name; what is not distflow's own is not in the table.
    """
    name, family = _SHORT.get(plugin, ""), FAMILIES.get(str(use.config.get("model_type")))
    if family is None or name not in family.refused:
        return
    kind, _, short = name.partition(" ")
    table = ENGINES if kind == "engine" else BACKENDS
    others = [other for other in table if other != short and f"{kind} {other}" not in family.refused]
    cure = f"{kind} {' or '.join(others)}, or a model of another family" if others else "use a model of another family"
    key = "path" if use.model.get("path") is not None else "init.model_type"
    message = f"{name} does not take model_type {use.config['model_type']!r} ({family.layers}): {family.refused[name]}"
    raise KeyedError(f"models.{use.model_name}.{key}", f"{message}; {cure}")


def untried(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Warnings about models that are of none of the families; `configs` by the names of models, as far as known."""
    for name, config in configs.items():
        family = config.get("model_type")
        if family is not None and family not in FAMILIES:
            yield (
                f"warning: models.{name} — model_type {str(family)!r} is not in the table of families that are tried "
                "(docs/models.md): whether backend and engine take it is found out at launch"
            )
