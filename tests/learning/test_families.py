"""Every family of the table: two training steps, tokens of the torch engine, an export, and its row in the docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from distflow.config.schema import ATTENTION
from distflow.data.batch import Batch, Ragged
from distflow.errors import RecipeError, UserError
from distflow.flow.families import FAMILIES
from distflow.flow.recipe_check import plan_recipe
from distflow.runtime.checkpoint.format import put_together
from distflow.runtime.protocols import Backend, BackendSpec, EngineSpec
from distflow.testing.tiny import ragged_batch, tiny_model
from distflow.types import SampleRequest, SamplingParams, Version
from distflow.workers.backends.deepspeed_backend import DeepSpeedBackend
from distflow.workers.backends.fsdp_backend import FsdpBackend
from distflow.workers.backends.torch_backend import TorchBackend
from distflow.workers.engines.torch_engine import TorchEngine
from distflow.workers.exporting import export_model
from distflow.workers.models import build_model, outline
from tests.families import FAMILIES as INITS
from tests.learning.processes import group_of_one

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
SGLANG = "engine sglang"
CHARS = "chars:abcdefghijklmnopqrstu"
DIVIDED = ("gemma4_text", "gpt_oss", "deepseek_v3", "lfm2", "qwen3_next")
"""One family of each kind, for the backends that divide models."""


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with group_of_one():
        yield


def section(family: str) -> dict[str, Any]:
    return {**tiny_model(dtype="float32"), "init": INITS[family], "tokenizer": CHARS}


def two_steps(backend: Backend) -> list[float]:
    """The loss before each of two training steps; it falls."""
    backend.join()
    losses = []
    for step in range(2):
        scores = backend.score(ragged_batch(), temperature=1.0, grad=True, entropy=False)
        loss = -scores.logprobs_BT.sum()
        losses.append(float(loss.detach()))
        backend.accumulate(loss)
        backend.schedule_at(step)
        assert backend.apply(float(scores.mask_BT.sum())) > 0
    assert losses[1] < losses[0]
    return losses


def generated(model: dict[str, Any], backend: Backend, trained: torch.nn.Module) -> str:
    """`yes` if the torch engine gives the trained weights' log-probs, else the first words of why it refuses them."""
    try:
        engine = TorchEngine(EngineSpec(model, "cpu", 3, 64, 0, {}))
    except UserError as error:
        why = FAMILIES[model["init"]["model_type"]].refused["engine torch"]
        return f"no: {why}" if f": {why}; " in str(error) else str(error)
    engine.begin_update(Version(0, 2))
    engine.update(backend.named_shards())
    engine.end_update()
    prompts = [(3,), (4, 5, 6, 7, 8, 9), (2, 3)]
    engine.submit([SampleRequest(at, 0, ids, 5, SamplingParams(max_new_tokens=6)) for at, ids in enumerate(prompts)])
    outputs = [output for _ in range(6) for output in engine.poll()]
    assert len(outputs) == len(prompts)
    for output in outputs:
        prompt = prompts[output.position]
        row = torch.tensor([[*prompt, *output.token_ids]])
        with torch.no_grad():
            logits_LV = trained(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = logits_LV.log_softmax(-1).gather(1, row[0, len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(output.logprobs, expected, rtol=0, atol=1e-4)
    return "yes"


def validated(family: str) -> str:
    """`yes` if the recipe with such a model can be planned, else why not."""
    init = yaml.safe_dump(INITS[family], default_flow_style=True, width=1000)
    try:
        _, plan = plan_recipe("quickstart", [f"models.policy.init={init.strip()}"])
    except RecipeError as error:
        return str(error)
    assert not any("table of families" in note for note in plan.notes)
    return "yes"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_generates_and_is_exported_as_its_row_says(family: str, tmp_path: Path) -> None:
    backend = TorchBackend(BackendSpec(section(family), "cpu", True, 0, 4, {}))
    two_steps(backend)
    state = put_together(list(backend.state_shards()))
    lines = export_model(state, section(family), [], tmp_path / "hf")
    assert "differ by at most" in lines[1]
    trained = build_model({"path": str(tmp_path / "hf")}, device="cpu", seed=0, load_weights=True)
    engine = generated(section(family), backend, trained)
    said = validated(family)
    assert said == engine or engine.removeprefix("no: ") in said
    table = FAMILIES[family]
    elsewhere = f"no: {table.refused[SGLANG]}" if SGLANG in table.refused else ""
    elsewhere = f"on GPUs only: {table.on_gpus[SGLANG]}" if SGLANG in table.on_gpus else elsewhere
    row = f"| `{family}` | {table.layers} | yes | {engine} | {elsewhere} |".replace("|  |", "| |")
    assert row in PAGE.read_text(), f"{PAGE.name} needs the row\n{row}"


EYES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
AROUND = {
    "gemma3": ("gemma3_text", {**EYES, "image_size": 28, "patch_size": 14}),
    "gemma4": ("gemma4_text", {**EYES, "num_key_value_heads": 2, "head_dim": 8}),
}
"""Multimodal models: that of their text, and what sees."""


@pytest.mark.parametrize("kind", AROUND)
def test_a_multimodal_model_is_trained_on_text_as_its_text_model(kind: str, tmp_path: Path) -> None:
    text, vision = AROUND[kind]
    config = AutoConfig.for_model(kind, text_config=dict(INITS[text]), vision_config=vision)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "from")
    model = {**section(text), "init": None, "path": str(tmp_path / "from")}
    backend = TorchBackend(BackendSpec(model, "cpu", True, 0, 4, {}))
    two_steps(backend)
    export_model(put_together(list(backend.state_shards())), model, [], tmp_path / "to")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "to").eval()
    assert generated(model, backend, trained) == "yes"


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_of_the_table_is_what_transformers_has(family: str) -> None:
    kind = type(outline(section(family)))
    flash = [name for name in ATTENTION if name.startswith("flash_") and kind._supports_flash_attn]
    others = {"sdpa": kind._supports_sdpa, "eager": True, "flex_attention": kind._supports_flex_attn}
    has = {*flash, *(name for name, there in others.items() if there)}
    assert set(FAMILIES[family].attention) == has


@pytest.mark.parametrize("family", ["qwen3", "mistral", "deepseek_v3"])
@pytest.mark.parametrize("chosen", ["sdpa", "eager"])
def test_attention_as_chosen_gives_the_same_log_probs(family: str, chosen: str) -> None:
    usual, frozen = (
        TorchBackend(BackendSpec({**section(family), **changes}, "cpu", False, 0, 4, {}))
        for changes in ({}, {"attn_implementation": chosen})
    )
    assert usual.packs == (family == "qwen3")
    assert not frozen.packs
    found, expected = (one.score(ragged_batch(), temperature=1.0, grad=False, entropy=False) for one in (frozen, usual))
    torch.testing.assert_close(found.logprobs_BT, expected.logprobs_BT, rtol=0, atol=1e-4)


def test_attention_that_needs_a_gpu_is_refused_where_there_is_none() -> None:
    model = {**section("qwen3"), "attn_implementation": "flex_attention"}
    with pytest.raises(UserError, match="flex_attention: it needs a GPU, and the device is cpu"):
        TorchBackend(BackendSpec(model, "cpu", True, 0, 4, {}))


def test_the_page_has_no_other_rows() -> None:
    _, _, rest = PAGE.read_text().partition("## Families\n")
    listed = re.findall(r"^\| `(\w+)` \|", rest.partition("\n## ")[0], re.MULTILINE)
    assert listed == list(FAMILIES)


@pytest.mark.parametrize("family", DIVIDED)
def test_backends_that_divide_models_learn_the_same(family: str) -> None:
    spec = BackendSpec(section(family), "cpu", True, 0, 4, {})
    expected = two_steps(TorchBackend(spec))
    recomputing = {**section(family), "gradient_checkpointing": True}
    assert two_steps(FsdpBackend(BackendSpec(recomputing, "cpu", True, 0, 4, {}))) == pytest.approx(expected, rel=1e-5)
    divided = DeepSpeedBackend(BackendSpec(recomputing, "cpu", True, 0, 4, {"zero": 3}))
    assert two_steps(divided) == pytest.approx(expected, rel=1e-5)
    divided.close()


FAR = 3000
BACKENDS = {"torch": TorchBackend, "fsdp": FsdpBackend, "deepspeed": DeepSpeedBackend}


@pytest.mark.parametrize("backend", BACKENDS)
def test_far_positions_are_scored_in_half_precision_as_transformers_scores_them(tmp_path: Path, backend: str) -> None:
    """Their angles are as exact as in float32."""
    init = {**INITS["qwen2"], "max_position_embeddings": FAR, "initializer_range": 0.3}
    init |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    model = {**section("qwen2"), "init": init, "dtype": "bfloat16"}
    build_model(model, device="cpu", seed=0, load_weights=True).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    row_T = torch.randint(2, 20, (FAR,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logprobs_TV = loaded(row_T[None]).logits[0].float().log_softmax(-1)
    expected_T = logprobs_TV[:-1].gather(1, row_T[1:, None])[:, 0]
    made: Backend = BACKENDS[backend](BackendSpec(model, "cpu", True, 0, 4, {}))
    made.join()
    parts = (row_T[:1], row_T[1:])
    rows = [Ragged.from_rows([part.tolist()], torch.int64) for part in parts]
    batch = Batch(dict(zip(("prompt_ids", "response_ids"), rows, strict=True)))
    found_BT = made.score(batch, temperature=1.0, grad=False, entropy=False).logprobs_BT.float()
    made.close()
    assert (found_BT[0] - expected_T).abs().mean() < 0.01
