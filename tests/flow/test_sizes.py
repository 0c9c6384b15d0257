"""How large a model is, without building it: against the models themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from distflow.config.schema import ModelConfig
from distflow.errors import UserError
from distflow.flow.sizes import model_size
from distflow.workers.models import load_config, outline

SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6}
FAMILIES = [
    {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True},
    {"model_type": "llama", "num_key_value_heads": 3, "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", "head_dim": 32, "num_key_value_heads": 2},
    {"model_type": "mistral", "num_key_value_heads": 2},
    {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    {"model_type": "qwen2", "num_key_value_heads": 6},
    {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True},
]


def section(init: dict[str, Any]) -> ModelConfig:
    return ModelConfig(init={**SIZES, **init}, tokenizer="chars:0123456789=")


@pytest.mark.parametrize("init", FAMILIES, ids=lambda init: " ".join(map(str, init.values())))
def test_parameters_and_cache_are_those_of_the_model(init: dict[str, Any]) -> None:
    model = section(init)
    size = model_size(model)
    built = outline(model.model_dump())
    assert size.parameters == sum(parameter.numel() for parameter in built.parameters())
    assert size.vocabulary == built.get_input_embeddings().num_embeddings
    attention = built.model.layers[0].self_attn
    assert size.kv_bytes == 3 * 4 * (attention.k_proj.out_features + attention.v_proj.out_features)


def test_files_are_counted_by_their_headers(tmp_path: Path) -> None:
    """Of any family that says its sizes; what is no such file counts for nothing."""
    init = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 50}
    config = load_config({"init": init})
    built = outline({"init": init})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    model = ModelConfig(path=str(tmp_path))
    with pytest.raises(UserError, match="'gpt2' is not known without its safetensors"):
        model_size(model)
    parameters = {
        name: parameter.new_zeros(parameter.shape, device="cpu") for name, parameter in built.named_parameters()
    }
    half = len(parameters) // 2
    names = list(parameters)
    save_file({name: parameters[name] for name in names[:half]}, tmp_path / "model-1.safetensors")
    save_file({name: parameters[name] for name in names[half:]}, tmp_path / "model-2.safetensors")
    (tmp_path / "pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "empty.safetensors").write_text("")
    size = model_size(model)
    assert size.parameters == sum(tensor.numel() for tensor in parameters.values())
    assert (size.width, size.layers, size.feed_forward, size.key_value) == (32, 2, 128, 32)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ModelConfig(path="some/hub-id"), "some/hub-id has no config.json that can be read here"),
        (ModelConfig(init={"model_type": "qwen2"}, tokenizer="x"), "its configuration has no hidden_size"),
        (section({"model_type": "qwen2", "num_attention_heads": 0}), "its configuration has no num_attention_heads"),
    ],
)
def test_what_cannot_be_known_is_said(model: ModelConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        model_size(model)


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
PUBLISHED = {
    "DeepSeek-V3": (
        671.0,
        576,
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "q_lora_rank": 1536,
            "first_k_dense_replace": 3,
            "vocab_size": 129280,
            **LATENT,
        },
    ),
    "DeepSeek-V2-Lite": (
        15.7,
        576,
        {
            "model_type": "deepseek_v2",
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "n_shared_experts": 2,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "vocab_size": 102400,
            **LATENT,
        },
    ),
    "GLM-4.5-Air": (
        106.9,
        2048,
        {
            "model_type": "glm4_moe",
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "vocab_size": 151552,
            "attention_bias": True,
        },
    ),
    "gpt-oss-20b": (
        20.9,
        1024,
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "vocab_size": 201088,
            "attention_bias": True,
        },
    ),
}
"""Billions of parameters, numbers that are cached of a token in a layer, and what the published configuration says."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_with_experts_are_as_large_as_they_are_said_to_be(name: str) -> None:
    billions, cached, config = PUBLISHED[name]
    size = model_size(ModelConfig(init=config, tokenizer="some/tokenizer", dtype="bfloat16"))
    assert size.parameters / 1e9 == pytest.approx(billions, abs=0.05)
    assert size.kv_bytes == size.layers * cached * 2
    heads, latent = config["num_attention_heads"], "kv_lora_rank" in config
    assert size.expanded_kv_bytes == (size.layers * heads * (128 + 64 + 128) * 2 if latent else size.kv_bytes)
