"""Which model families of transformers the backends and engines take, as one table. Imports no torch.

Each row is tried by the tests with a tiny model: two training steps and an export for each backend, and tokens of the
torch engine against the model's own forward. docs/models.md shows the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distflow.config.plugins import BACKENDS, ENGINES, PluginUse
from distflow.config.schema import ATTENTION
from distflow.errors import KeyedError

HALF = ("bfloat16", "float16")
"""What kernels that need a GPU compute in."""
_SHORT = {full: f"backend {short}" for short, full in BACKENDS.items()}
_SHORT |= {full: f"engine {short}" for short, full in ENGINES.items()}


@dataclass(frozen=True, slots=True)
class Family:
    """A `model_type` of transformers."""

    layers: str
    """What its layers do with past tokens."""
    attention: tuple[str, ...] = ATTENTION
    """What transformers has for it as `attn_implementation`; the first is taken unless a recipe names another."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why an engine or a backend does not take it, by kind and name, as in `engine torch`."""
    on_gpus: Mapping[str, str] = field(default_factory=dict)
    """Why they take it on GPUs only."""


LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "linear_attention", "conv"})
"""What the torch engine keeps the past of, by the names of transformers."""
_NO_FLEX = ATTENTION[:-1]
_STATES = {"engine sglang": "SGLang keeps the states of linear attention on GPUs only"}
_PLAIN = "attention"
_WINDOWS = "attention, in windows too"
_LATENT = "latent attention (MLA)"
_DELTA = "gated delta rule, and attention"
_CONVOLUTION = "convolutions, and attention"

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "smollm3", "olmo2", "phi3"), Family(_PLAIN)),
    **dict.fromkeys(("mistral", "olmo3", "gemma2", "gemma3_text"), Family(_WINDOWS)),
    "gemma4_text": Family(
        "attention, in windows of narrower heads too; layers share keys",
        refused={"engine sglang": "SGLang 0.5 cannot read its configuration, in which layers differ"},
    ),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe"), Family(f"{_PLAIN}; experts")),
    "gpt_oss": Family(
        "attention with sinks, in windows too; experts",
        attention=ATTENTION[1:],
        on_gpus={"engine sglang": "SGLang has no attention with sinks on CPUs"},
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), Family(f"{_LATENT}; experts")),
    "lfm2": Family(_CONVOLUTION),
    "lfm2_moe": Family(f"{_CONVOLUTION}; experts"),
    "qwen3_5_text": Family(_DELTA, attention=_NO_FLEX, on_gpus=_STATES),
    **dict.fromkeys(
        ("qwen3_5_moe_text", "qwen3_next"), Family(f"{_DELTA}; experts", attention=_NO_FLEX, on_gpus=_STATES)
    ),
    "llama4_text": Family(
        "attention, within chunks too; experts",
        attention=("sdpa", "eager", "flex_attention"),
        refused={"engine torch": "it has no masks of chunks"},
    ),
    "minimax": Family(
        "lightning attention, and attention; experts",
        refused={
            "engine torch": "its layers need a cache of their own, which has no slots",
            "engine sglang": "SGLang has no model for it, and cannot load its experts through transformers",
        },
    ),
    "deepseek_v32": Family(
        f"{_LATENT} to tokens that an indexer chooses; experts",
        attention=ATTENTION[:2],
        refused={"engine torch": "its cache has no place for what the indexer keeps"},
        on_gpus={"engine sglang": "SGLang has no kernels for the indexer on CPUs"},
    ),
}
"""By `model_type`."""


def usual_attention(config: Mapping[str, Any]) -> str:
    """How attention of a model with this configuration is computed unless its section says it."""
    family = FAMILIES.get(str(config.get("model_type")))
    return ATTENTION[0] if family is None else family.attention[0]


def needs_gpu(chosen: str) -> bool:
    """Tell whether an `attn_implementation` needs a GPU: on a CPU, flex has no backward pass, and NaN in short rows."""
    return chosen not in ("auto", "sdpa", "eager")


def refuse_attention(use: PluginUse) -> None:
    """Raise KeyedError for an `attn_implementation` that the family, the device or the dtype of a model rules out.

    `use`: that of a backend; engines have attention of their own.
    """
    chosen = str(use.model.get("attn_implementation") or "auto")
    if chosen == "auto":
        return
    family = FAMILIES.get(str(use.config.get("model_type")))
    rest, wrong = "sdpa, eager or auto", ""
    if family is not None and chosen in ATTENTION and chosen not in family.attention:
        wrong = f"transformers has it not for model_type {use.config['model_type']!r}"
        rest = f"{', '.join(family.attention)} or auto"
    elif needs_gpu(chosen) and use.device == "cpu":
        wrong = "it needs a GPU, and the device is cpu"
    elif needs_gpu(chosen) and chosen != "flex_attention" and use.model["dtype"] not in HALF:
        wrong = f"it computes in {' and '.join(HALF)}, and models.{use.model_name}.dtype is {use.model['dtype']}"
        rest = f"{rest}; or dtype bfloat16"
    if wrong:
        raise KeyedError(f"models.{use.model_name}.attn_implementation", f"{chosen}: {wrong}; {rest}")


def refuse_family(use: PluginUse, plugin: str) -> None:
    """Raise KeyedError for a model that the table says an engine or a backend does not take.

    `plugin`: its full name; what is not distflow's own is not in the table.
    """
    name, family = _SHORT.get(plugin, ""), FAMILIES.get(str(use.config.get("model_type")))
    key = f"models.{use.model_name}.{'path' if use.model.get('path') is not None else 'init.model_type'}"
    if family is None:
        others = sorted({*(use.config.get("layer_types") or ())} - LAYER_TYPES)
        if others and name == "engine torch":
            message = f"{name} does not take model_type {use.config.get('model_type')!r}: it has layers of type "
            kept = f"{', '.join(others)}, and only {', '.join(sorted(LAYER_TYPES))} are supported"
            raise KeyedError(key, f"{message}{kept}; engine sglang or vllm, or a model of another family")
        return
    here = {**family.on_gpus, **family.refused} if use.device == "cpu" else family.refused
    if name not in here:
        return
    kind = name.partition(" ")[0]
    table = ENGINES if kind == "engine" else BACKENDS
    others = [short for short in table if f"{kind} {short}" not in here]
    cures = [f"{kind} {' or '.join(others)}"] if others else []
    cures += ["a GPU"] if name not in family.refused else []
    message = f"{name} does not take model_type {use.config['model_type']!r} ({family.layers}): {here[name]}"
    raise KeyedError(key, f"{message}; {', '.join([*cures, 'or a model of another family'])}")


def only_on_gpus(config: Mapping[str, Any], plugin: str) -> bool:
    """Tell whether an engine or a backend takes a model with this configuration on GPUs only."""
    family = FAMILIES.get(str(config.get("model_type")))
    return family is not None and _SHORT.get(plugin) in family.on_gpus


def untried(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Warnings about models that are of none of the families; `configs` by the names of models, as far as known."""
    for name, config in configs.items():
        family = config.get("model_type")
        if family is not None and family not in FAMILIES:
            yield (
                f"warning: models.{name} — model_type {str(family)!r} is not in the table of families that are tried "
                "(docs/models.md): whether backend and engine take it is found out at launch"
            )
