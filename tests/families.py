"""A tiny model of each family that is tried: its `init` section."""

from __future__ import annotations

from typing import Any

VOCABULARY = 23
_SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "tie_word_embeddings": False},
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MANY = {**_EXPERTS, "num_experts": 4}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
}
_DELTA = {
    **{"layer_types": ["linear_attention", "full_attention"], "head_dim": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4},
}
_TURNS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "smollm3": {},
    "olmo2": {},
    "olmo3": {**_TURNS, "num_key_value_heads": 4},
    "phi3": {},
    "gemma2": {**_TURNS, "head_dim": 8},
    "gemma3_text": {**_TURNS, "head_dim": 8},
    "gemma4_text": {
        **{**_TURNS, "num_hidden_layers": 4, "layer_types": 2 * _TURNS["layer_types"], "head_dim": 8},
        **{"global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
        # The last two layers read the keys of the first two.
        "num_kv_shared_layers": 2,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_MANY, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**_MANY, "head_dim": 8},
    "glm4_moe": {**_ROUTED, "n_group": 1, "head_dim": 8},
    "gpt_oss": {**_TURNS, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "deepseek_v2": {**_ROUTED, **_LATENT, "n_group": 2},
    "deepseek_v3": {**_ROUTED, **_LATENT, "n_group": 2},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "lfm2_moe": {
        **{**_MANY, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    },
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 8, "intermediate_size_mlp": 48},
    "minimax": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "deepseek_v32": {
        **{**_ROUTED, **_LATENT, "n_group": 2, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4},
    },
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_MANY, "shared_expert_intermediate_size": 24},
    "qwen3_next": {**_DELTA, **_MANY, "shared_expert_intermediate_size": 24},
}
_LACK = {"qwen3_5_moe_text": ("intermediate_size",)}
"""What a family's configuration does not have."""
FAMILIES: dict[str, dict[str, Any]] = {
    family: {
        "model_type": family,
        **{name: value for name, value in (_SIZES | own).items() if name not in _LACK.get(family, ())},
    }
    for family, own in _OWN.items()
}
