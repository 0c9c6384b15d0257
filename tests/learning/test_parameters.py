"""Published and exported weights equal those of a transformers checkpoint, by name and by value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from distflow.errors import UserError
from distflow.runtime.checkpoint.format import put_together
from distflow.runtime.protocols import BackendSpec, EngineSpec
from distflow.testing.backend_contract import tiny_model
from distflow.types import Version
from distflow.workers.backends.torch_backend import TorchBackend
from distflow.workers.engines.torch_engine import TorchEngine
from distflow.workers.exporting import export_model
from distflow.workers.models import build_model
from distflow.workers.parameters import constants_of, stored_model
from tests.families import FAMILIES as FAMILIES_TRIED

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "tie_word_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "num_experts": 3, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**EXPERTS, "num_experts": 3, "head_dim": 8},
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 3, "tie_word_embeddings": False},
}
CHARS = "chars:abcdefghijklmnopqrstu"


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["deepseek_v3", "gemma4_text", "lfm2_moe"])
def test_what_training_leaves_as_it_is_reaches_engines_and_exports(tmp_path: Path, family: str, dtype: str) -> None:
    """A router's bias or a layer's scale: tensors of the checkpoint that are no parameters."""
    made = build_model({"init": FAMILIES_TRIED[family]}, device="cpu", seed=5, load_weights=True)
    constants = constants_of(made)
    for number, constant in enumerate(constants.values()):
        constant.copy_(0.5 + number + torch.arange(constant.numel()))
    made.save_pretrained(tmp_path / "from")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "from", dtype=getattr(torch, dtype))
    constants = constants_of(made)
    if family == "deepseek_v3":
        assert all(constant.dtype == torch.float32 for constant in constants.values()), "rounded, it would route anew"
    model = {**tiny_model(dtype=dtype), "init": None, "path": str(tmp_path / "from"), "tokenizer": CHARS}
    backend = TorchBackend(BackendSpec(model, "cpu", True, 5, 1, {}))
    published = dict(backend.named_shards())
    state = put_together(list(backend.state_shards()))
    export_model(state, model, [], tmp_path / "to")
    exported = load_file(tmp_path / "to" / "model.safetensors")
    assert constants
    for name, constant in constants.items():
        for found in (published[name], exported[name]):
            assert found.dtype == constant.dtype
            assert torch.equal(found, constant)
    engine = TorchEngine(EngineSpec(model, "cpu", 1, 64, 0, {}))
    engine.begin_update(Version(0, 0))
    engine.update(published.items())
    engine.end_update()
    row = [3, 4, 5, 6, 7, 8]
    with torch.no_grad():
        expected = made(input_ids=torch.tensor([row])).logits[0].float().log_softmax(-1)
    (scored,) = engine.logprobs([row])
    tolerance = 1e-4 if dtype == "float32" else 0.1
    assert scored == pytest.approx([float(expected[at, token]) for at, token in enumerate(row[1:])], abs=tolerance)


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
