"""Published and exported weights equal those of a transformers checkpoint, by name and by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distflow.errors import UserError
from distflow.runtime.protocols import BackendSpec
from distflow.testing.backend_contract import tiny_model
from distflow.workers.backends.torch_backend import TorchBackend
from distflow.workers.models import build_model
from distflow.workers.parameters import stored_model

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "tie_word_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "num_experts": 3, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**EXPERTS, "num_experts": 3, "head_dim": 8},
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 3, "tie_word_embeddings": False},
}


def section(family: str) -> dict[str, Any]:
    return tiny_model(init={"model_type": family, **FAMILIES[family]}, dtype="float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_published_is_what_transformers_saves(tmp_path: Path, family: str) -> None:
    model = section(family)
    build_model(model, device="cpu", seed=5, load_weights=True).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    published = dict(TorchBackend(BackendSpec(model, "cpu", True, 5, 1, {})).named_shards())
    assert published.keys() == saved.keys()
    assert all(torch.equal(published[name], tensor) for name, tensor in saved.items())
    if "experts" in str(saved.keys()):
        assert any(".experts.2." in name for name in published), "one by one, as engines of other projects want them"


def test_nothing_is_copied_to_publish_experts() -> None:
    backend = TorchBackend(BackendSpec(section("qwen3_moe"), "cpu", True, 0, 1, {}))
    memory = {tensor.untyped_storage().data_ptr() for _, tensor in backend.named_shards()}
    own = {parameter.untyped_storage().data_ptr() for parameter in backend._model.parameters()}
    assert memory == own


def test_a_model_that_is_stored_otherwise_is_refused_by_name() -> None:
    """A checkpoint tensor made from several parameters could not be written tensor by tensor."""
    model = {"init": {"model_type": "hrm_text", "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}}
    with pytest.raises(UserError, match=r"model_type 'hrm_text' stores \S+ as a combination of several"):
        stored_model(model)
