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
