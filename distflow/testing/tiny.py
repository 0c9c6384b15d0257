"""A model of one layer and a batch for it: what contract suites compute with."""

from __future__ import annotations

from typing import Any

import torch

from distflow.config.training_schema import OptimizerConfig
from distflow.data.batch import Batch, Ragged

PROMPTS = [[3], [4, 5, 6], [7, 8], [2, 3, 4, 5, 6]]
SAMPLES = 3


def tiny_model(**changes: Any) -> dict[str, Any]:
    """A `models.<name>` section: a Qwen2 of one layer with 13 tokens, in float64 unless `dtype` says otherwise."""
    optimizer = OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01, max_grad_norm=None).model_dump()
    init = {
        "model_type": "qwen2",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    return {
        "path": None,
        "init": init | changes.pop("init", {}),
        "tokenizer": "chars:0123456789=",
        "dtype": changes.pop("dtype", "float64"),
        "optimizer": optimizer | changes.pop("optimizer", {}),
        "gradient_checkpointing": changes.pop("gradient_checkpointing", False),
        **changes,
    }


def ragged_batch() -> Batch:
    """Groups of 3 samples with prompts of 1 to 5 tokens and responses of 0 to 6, in fields prompt_ids, response_ids."""
    drawn = torch.Generator().manual_seed(3)
    lengths = [1, 4, 2, 6, 0, 3, 5, 5, 5, 1, 1, 2]
    responses = [torch.randint(1, 13, (length,), generator=drawn) for length in lengths]
    prompts = [prompt for prompt in PROMPTS for _ in range(SAMPLES)]
    return Batch(
        {
            "prompt_ids": Ragged.from_rows(prompts, torch.int64),
            "response_ids": Ragged.from_rows(responses, torch.int64),
        }
    )
