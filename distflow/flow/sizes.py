"""The size of a model, read from its configuration and the headers of its files, without torch or its weights.

Shapes: X width, A query heads × head width, K key/value heads × head width, I width of the feed-forward layer.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from distflow.config.paths import CHARS_PREFIX
from distflow.config.schema import ModelConfig
from distflow.errors import UserError

Matrix = tuple[str, int, int]
"""The end of a layer's name, rows, columns."""
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
WIDE = 4
"""Bytes of a gradient, moment or master, which are at least float32."""
_BLOCK = 256
"""Elements that optimizer adamw_8bit quantizes together."""
PUBLISHED = 3
"""Versions of the weights in a host's shared memory."""
PINNED = 1
"""One more where they are also read over a network: it is not overwritten while it is being read."""
FETCHED = 2
"""Versions in the shared memory of a host that fetches them: the one in use and served to others, and the next."""
CHAINED = 0.5
"""So many versions' bytes the deltas between versions take at most, on a host that publishes to others or fetches."""
MOST_DELTAS = 32
"""And so many of them at most, each of which has open files there: a host that is further behind takes all."""
PARTS_KEPT = 2
"""Versions of which a trainer keeps its own part, where it sends that itself; who gets them keeps one, whole."""
GATED = ("llama", "mistral", "qwen2", "qwen3")
"""Families with gated feed-forward layers, without experts."""
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")
"""Families with experts. The parameters of both kinds can be counted from the configuration (embeddings are untied
unless it says otherwise); other families need their files."""
_SCALES = re.compile(r"\.(weight_scale|weight_scale_inv|input_scale|activation_scale)$")
"""In the files of models in fp8: no parameters, but what the stored numbers are multiplied by."""
_SPECIAL_CHARS = 2
"""Tokens of `chars:…` besides its characters: padding, end of sequence."""
_NOT_ADAPTED = r"embed|lm_head|wte|wpe|norm|\.experts\.|^score"
"""In the names of matrices that are no linear layers of their own, or the output layer."""
_HEADER_LIMIT = 64 << 20
_MISTRAL_WINDOW = 4096
"""What transformers takes for a Mistral whose configuration does not name its window."""
_WIDTH = ("hidden_size", "n_embd")
_LAYERS = ("num_hidden_layers", "n_layer")
_HEADS = ("num_attention_heads", "n_head")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the memory of a model depends on."""

    parameters: int
    """Tied parameters count once."""
    vocabulary: int
    outputs: int
    """Numbers that its head gives for a token: one for each of the vocabulary, or a single value."""
    layers: int
    width: int
    query: int
    key_value: int
    """Width of the keys, and of the values."""
    feed_forward: int
    active: int
    """Width of the feed-forward layers that compute a token: with experts, only the chosen ones."""
    dtype_bytes: int
    gated: bool
    """Whether it is of one of the families above."""
    packs: bool
    """Whether training can share prompts and compute no padding (`backend_options.packed`)."""
    optimizer: str = "adamw"
    expanded: int = 0
    """Numbers of a token's keys and values in a layer, of all heads, where these have a latent vector; 0: none."""
    adapters: int = 0
    """Parameters of its adapters; 0: it has none, and is trained whole."""
    adapted: int = 0
    """Parameters of the matrices that have adapters."""
    narrow: int = 0
    """Parameters that a backend keeps in 4 bits."""

    @property
    def trained(self) -> int:
        """Parameters that are trained, if the model is."""
        return self.adapters or self.parameters

    @property
    def published(self) -> int:
        """Bytes of a version of it."""
        return self.trained * self.dtype_bytes

    @property
    def moments(self) -> int:
        """Bytes of what the optimizer keeps of all that is trained, besides masters."""
        wide = max(WIDE, self.dtype_bytes)
        if self.optimizer == "adamw_8bit":
            # A byte for each of the two, and a float32 for each block of them.
            return 2 * self.trained + 2 * WIDE * self.trained // _BLOCK
        # Muon has one for the matrices within the layers.
        ends = 0 if self.adapters else (self.vocabulary + self.outputs) * self.width
        alone = max(0, self.trained - ends) if self.optimizer == "muon" else 0
        return wide * (2 * self.trained - alone)

    @property
    def weights(self) -> int:
        """Bytes, in the model's dtype."""
        return self.parameters * self.dtype_bytes

    @property
    def held(self) -> int:
        """Bytes of the weights in a backend: those of 4 bits have a float32 for each block of 64."""
        return (self.parameters - self.narrow) * self.dtype_bytes + self.narrow * 9 // 16

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return self.layers * 2 * self.key_value * self.dtype_bytes

    @property
    def expanded_kv_bytes(self) -> int:
        """The same in an engine that keeps no latent vectors, but what all heads read."""
        return self.layers * (self.expanded or 2 * self.key_value) * self.dtype_bytes


def model_size(model: ModelConfig) -> ModelSize:
    """The size of a `models.<name>` section; raises UserError if it cannot be known here."""
    config = model_config(model)
    family = str(config.get("model_type", "unknown"))
    width, layers, heads = (_number(config, names) for names in (_WIDTH, _LAYERS, _HEADS))
    latent = config.get("kv_lora_rank")
    head = _number(config, ("head_dim",), max(1, width // heads))
    if latent:
        head = _number(config, ("qk_nope_head_dim",)) + _number(config, ("qk_rope_head_dim",))
    vocabulary = _number(config, ("vocab_size",))
    size = ModelSize(
        parameters=_in_files(Path(model.path)) if model.path is not None else 0,
        vocabulary=vocabulary,
        outputs=vocabulary if model.head == "tokens" else 1,
        layers=layers,
        width=width,
        query=heads * head,
        # Engines keep the latent vector and the rotary key for keys and values alike.
        key_value=(latent + _number(config, ("qk_rope_head_dim",))) // 2
        if latent
        else _number(config, ("num_key_value_heads",), heads) * head,
        feed_forward=_number(config, ("intermediate_size", "n_inner"), 4 * width),
        active=_active(config) or _number(config, ("intermediate_size", "n_inner"), 4 * width),
        dtype_bytes=DTYPE_BYTES[model.dtype],
        gated=family in GATED,
        packs=family in GATED
        and model.head != "score"
        and model.attn_implementation == "auto"
        and _attends_everywhere(config),
        optimizer=model.optimizer.name,
        expanded=heads * (head + _number(config, ("v_head_dim",))) if latent else 0,
    )
    if size.parameters:
        # The files of a language model have an output layer that a value head replaces.
        spare = 0 if model.head != "value" or config.get("tie_word_embeddings") else (vocabulary - 1) * width
        size = replace(size, parameters=size.parameters - spare)
        matrices = gated_matrices(size) if family in GATED else _matrices_in(Path(str(model.path)))
        return _with_adapters(size, model, matrices)
    if family not in GATED + EXPERTS:
        raise UserError(f"the number of parameters of model_type {family!r} is not known without its safetensors")
    if latent and (model.lora or model.quantize):
        raise UserError(f"adapters and 4 bits of model_type {family!r} are not counted without its safetensors")
    size = replace(size, parameters=_gated_parameters(config, family, size, head))
    # Adapters are on linear layers alone, which experts are not.
    matrices = gated_matrices(size) if family in GATED else [m for m in gated_matrices(size) if m[0] in _ATTENTION]
    return _with_adapters(size, model, matrices)


def gated_matrices(size: ModelSize) -> list[Matrix]:
    """The linear layers of a model of the families above, without the output layer."""
    one = [
        ("q_proj", size.query, size.width),
        ("k_proj", size.key_value, size.width),
        ("v_proj", size.key_value, size.width),
        ("o_proj", size.width, size.query),
        ("gate_proj", size.feed_forward, size.width),
        ("up_proj", size.feed_forward, size.width),
        ("down_proj", size.width, size.feed_forward),
    ]
    return one * size.layers


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def _with_adapters(size: ModelSize, model: ModelConfig, matrices: Sequence[Matrix]) -> ModelSize:
    lora = model.lora
    if model.quantize is not None:
        size = replace(size, narrow=sum(rows * columns for _, rows, columns in matrices))
    if lora is None:
        return size
    found = [m for m in matrices if lora.targets == "all-linear" or any(adapts(one, m[0]) for one in lora.targets)]
    adapters = lora.rank * sum(rows + columns for _, rows, columns in found)
    return replace(size, adapters=adapters, adapted=sum(rows * columns for _, rows, columns in found))


def adapts(target: str, layer: str) -> bool:
    """Whether an entry of `lora.targets` may mean a layer, of whose name the end is known."""
    return target.rpartition(".")[2] == layer.rpartition(".")[2]


def attention_heads(model: ModelConfig) -> int:
    """Attention heads of a `models.<name>` section; 0 if that cannot be known here."""
    try:
        return _number(model_config(model), _HEADS)
    except UserError:
        return 0


def configuration(model: ModelConfig) -> Mapping[str, Any]:
    """The configuration of a model in transformers, as far as it can be known here; empty if not at all."""
    try:
        return model_config(model)
    except UserError:
        return {}


def model_config(model: ModelConfig) -> Mapping[str, Any]:
    """The configuration of a `models.<name>` section as transformers reads it; raises UserError if unknown here."""
    if model.init is not None:
        chars = model.tokenizer is not None and model.tokenizer.startswith(CHARS_PREFIX)
        own = {"vocab_size": len(set(str(model.tokenizer)[len(CHARS_PREFIX) :])) + _SPECIAL_CHARS} if chars else {}
        return {**own, **model.init}
    path = Path(str(model.path)) / "config.json"
    try:
        config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path.parent} has no config.json that can be read here") from error
    # Multimodal models keep the text model in a section of its own.
    return {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config


def _number(config: Mapping[str, Any], names: tuple[str, ...], default: int = 0) -> int:
    for name in names:
        if type(config.get(name)) is int and config[name] > 0:
            return int(config[name])
    if not default:
        raise UserError(f"its configuration has no {names[0]}")
    return default


def _attends_everywhere(config: Mapping[str, Any]) -> bool:
    """Tell whether every layer attends to the whole past."""
    windowed = config.get("model_type") == "mistral" and config.get("sliding_window", _MISTRAL_WINDOW) is not None
    windowed = windowed or bool(config.get("use_sliding_window"))
    return set(config.get("layer_types") or ["full_attention"]) == {"full_attention"} and not windowed


def stored_dtype(model: ModelConfig) -> str | None:
    """The type of the weights in a model's folder as its configuration says it; None: not known here, or another."""
    config = configuration(model) if model.path is not None else {}
    said = str(config.get("dtype") or config.get("torch_dtype") or "")
    return said if said in DTYPE_BYTES else None


def _active(config: Mapping[str, Any]) -> int:
    """Active width of a mixture of experts, the chosen ones and the shared one; 0 for other models."""
    if config.get("model_type") == "mixtral":
        return _number(config, ("num_experts_per_tok",), 2) * _number(config, ("intermediate_size",), 1)
    chosen, width, shared = (
        int(config[name]) if type(config.get(name)) is int else 0
        for name in ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    )
    if config.get("model_type") == "gpt_oss":
        width = _number(config, ("intermediate_size",), 1)
    shared += width * int(config.get("n_shared_experts") or 0)
    return chosen * width + shared if chosen * width else 0


def _gated_parameters(config: Mapping[str, Any], family: str, size: ModelSize, head: int) -> int:
    """Parameters of attention layers, with the biases of the family or the configuration, and gated feed-forward."""
    width, projected = size.width, size.query + 2 * size.key_value
    attention = width * (projected + size.query) if not config.get("kv_lora_rank") else _latent(config, width)
    if family == "qwen2" or (family == "qwen2_moe" and config.get("qkv_bias", True)):
        attention += projected
    elif family == "gpt_oss":
        attention += projected + width + size.query // head  # and a sink for each head
    elif family == "glm4_moe":
        attention += (projected if config.get("attention_bias") else 0) + 2 * head * bool(config.get("use_qk_norm"))
    elif config.get("attention_bias") and family not in ("mistral", "mixtral", "qwen2_moe"):
        attention += projected + width
    attention += 2 * head if family in ("qwen3", "qwen3_moe") else 0
    if family in EXPERTS:
        return size.layers * (attention + 2 * width) + _forward_with_experts(config, family, size) + _ends(config, size)
    forward = 3 * width * size.feed_forward
    forward += 2 * size.feed_forward + width if config.get("mlp_bias") and family == "llama" else 0
    return size.layers * (attention + forward + 2 * width) + _ends(config, size)


def _latent(config: Mapping[str, Any], width: int) -> int:
    """Parameters of multi-head latent attention (arXiv 2405.04434), with the norms of the latent vectors."""
    heads, latent = _number(config, _HEADS), _number(config, ("kv_lora_rank",))
    rotary, plain, value = (_number(config, (f"{name}_head_dim",)) for name in ("qk_rope", "qk_nope", "v"))
    query = heads * (rotary + plain)
    rank = int(config.get("q_lora_rank") or 0)
    queries = rank * (width + 1 + query) if rank else width * query
    return queries + width * (latent + rotary) + latent * (1 + heads * (plain + value)) + heads * value * width


def _ends(config: Mapping[str, Any], size: ModelSize) -> int:
    """Parameters of embeddings, last norm and output layer."""
    tied = config.get("tie_word_embeddings") and size.outputs == size.vocabulary
    return size.width * (size.vocabulary + 1 + (0 if tied else size.outputs))


def _forward_with_experts(config: Mapping[str, Any], family: str, size: ModelSize) -> int:
    """Parameters of the feed-forward layers of all layers: experts with their router, or dense ones."""
    alike = family in ("mixtral", "gpt_oss")
    wide = size.feed_forward if alike else _number(config, ("moe_intermediate_size",))
    experts = _number(config, ("num_local_experts", "num_experts", "n_routed_experts"))
    sparse = experts * (3 * wide + 1) * size.width
    if family == "qwen2_moe":
        sparse += (3 * _number(config, ("shared_expert_intermediate_size",)) + 1) * size.width
    if family == "gpt_oss":
        sparse += experts * (2 * wide + size.width + 1)  # biases, of the router too
    sparse += 3 * int(config.get("n_shared_experts") or 0) * wide * size.width
    every, dense = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
    first = int(config.get("first_k_dense_replace") or 0)
    with_experts = sum((layer + 1) % every == 0 and layer not in dense for layer in range(first, size.layers))
    return with_experts * sparse + (size.layers - with_experts) * 3 * size.width * size.feed_forward


def _in_files(folder: Path) -> int:
    """Parameters in all *.safetensors of a folder, by their headers; 0 if none can be read."""
    return sum(map(_in_file, sorted(folder.glob("*.safetensors"))))


def _matrices_in(folder: Path) -> list[Matrix]:
    """The matrices of a folder's files that are likely to be linear layers within the model, by their names."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in _header(path).items():
            layer, _, last = name.rpartition(".")
            if last == "weight" and len(entry["shape"]) == 2 and not re.search(_NOT_ADAPTED, name):
                found.append((layer, int(entry["shape"][0]), int(entry["shape"][1])))
    return found


def _in_file(path: Path) -> int:
    return sum(prod(entry["shape"]) for name, entry in _header(path).items() if not _SCALES.search(name))


def _header(path: Path) -> Mapping[str, Any]:
    """What a safetensors file says of its tensors, by name; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            length = file.read(8)
            size = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
            header = json.loads(file.read(size)) if 0 < size <= _HEADER_LIMIT else {}
    except (OSError, ValueError):
        return {}
    return {name: entry for name, entry in header.items() if "shape" in entry}
