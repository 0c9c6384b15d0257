"""Reward models: each text gets what transformers gives it alone, and what cannot be judged is refused or replaced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
)

from distflow.data.batch import Batch, Ragged
from distflow.errors import RecipeError, UserError
from distflow.flow.recipe_check import plan_recipe
from distflow.runtime.protocols import BackendSpec
from distflow.runtime.steps import StepContext
from distflow.testing.backend_contract import tiny_model
from distflow.workers.backends.torch_backend import TorchBackend
from distflow.workers.exporting import write_model
from distflow.workers.models import build_model
from distflow.workers.reward_model import judge
from distflow.workers.tokenizers import CharTokenizer

CHARS = "chars:0123456789=: abcdefghijklmnopqrstuvwxyz<>"
WIDTH = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen2": (Qwen2Config, {"num_key_value_heads": 1, "pad_token_id": 0}),
    "llama-without-padding": (LlamaConfig, {"pad_token_id": None}),
    "bert": (BertConfig, {"pad_token_id": 0}),
}
TEXTS = [("12=", "21"), ("1234567890=", "0987654321"), ("7=", ""), ("55=", "55")]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def folder_of(kind: str, path: Path, labels: int = 1, longest: int = 64) -> Path:
    """A sequence classifier in Hugging Face format."""
    make, settings = KINDS[kind]
    tokenizer = CharTokenizer(CHARS)
    config = make(vocab_size=len(tokenizer.tokens), max_position_embeddings=longest, **WIDTH, **settings)
    config.num_labels = labels
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    tokenizer.save(path)
    return path


def backend_of(path: Path, *, deterministic: bool = False) -> TorchBackend:
    section = {**tiny_model(head="score"), "init": None, "path": str(path), "tokenizer": None}
    return TorchBackend(BackendSpec(section, "cpu", False, 0, 10, {}, deterministic=deterministic))


def alone(path: Path, rows: Sequence[Sequence[int]]) -> Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([list(row)])).logits[0, 0] for row in rows])


def batch(texts: Sequence[tuple[str, str]]) -> Batch:
    prompts, responses = zip(*texts, strict=True)
    return Batch({"prompt_text": Ragged.from_texts(prompts), "response_text": Ragged.from_texts(responses)})


def test_what_is_trained_from_a_language_model_begins_at_zero(tmp_path: Path) -> None:
    tokenizer = CharTokenizer(CHARS)
    make, settings = KINDS["qwen2"]
    config = make(vocab_size=len(tokenizer.tokens), max_position_embeddings=64, **WIDTH, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    section = {**tiny_model(head="score"), "init": None, "path": str(tmp_path), "tokenizer": None}
    backend = TorchBackend(BackendSpec(section, "cpu", True, 0, 10, {}))
    rows = [backend.encode(*text) for text in TEXTS]
    found = backend.rate_texts(rows)
    assert found.tolist() == [0.0] * len(TEXTS)
    backend.accumulate((found * torch.tensor([1.0, -1.0, 0.0, 0.0])).sum())
    assert backend.apply(1.0) > 0
    after = backend.rate_texts(rows)
    assert len(set(after.tolist())) == len(TEXTS)
    torch.testing.assert_close(backend.score_texts(rows, tokens=0), after.detach().float())
    with pytest.raises(UserError, match="lacks score.weight; `head: score` needs a sequence classifier's folder"):
        TorchBackend(BackendSpec(section, "cpu", False, 0, 10, {}))
    frozen = backend_of(folder_of("qwen2", tmp_path / "frozen"))
    with pytest.raises(ValueError, match="rate_texts on a frozen model"):
        frozen.rate_texts(rows)


def test_texts_are_judged_together_without_a_padding_token(tmp_path: Path) -> None:
    """Whatever their last tokens are: a decoder takes those that are padding for no part of the text."""
    path = folder_of("llama-without-padding", tmp_path)
    backend, rows = backend_of(path), [[5, 4, 0], [7, 1], [9, 8, 7, 2], [3], [0, 0, 0, 0, 0]]
    together: list[int] = []
    backend._model.register_forward_pre_hook(
        lambda model, args, given: together.append(len(given["input_ids"])), with_kwargs=True
    )
    found = backend.score_texts(rows, tokens=0)
    assert together == [5]
    assert backend._model.config.pad_token_id is None
    torch.testing.assert_close(found, alone(path, rows), rtol=1e-5, atol=1e-6)


def test_an_exported_judge_has_the_padding_token_of_its_tokenizer(tmp_path: Path) -> None:
    path = folder_of("llama-without-padding", tmp_path / "judge")
    section = {**tiny_model(head="score"), "init": None, "tokenizer": None, "path": str(path), "dtype": "float32"}
    model = build_model(section, device="cpu", seed=0, load_weights=True)
    (tmp_path / "to").mkdir()
    write_model({f"model.{name}": value for name, value in model.named_parameters()}, section, tmp_path / "to")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "to")
    assert loaded.config.pad_token_id == 0
    rows = [[5, 4, 3, 2], [7, 6]]
    padded = torch.tensor([rows[0], [*rows[1], 0, 0]])
    together = loaded(input_ids=padded, attention_mask=(padded != 0).long()).logits[:, 0]
    torch.testing.assert_close(together, alone(path, rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [0, 16])
def test_a_row_gets_what_it_gets_alone(kind: str, tokens: int, tmp_path: Path) -> None:
    path = folder_of(kind, tmp_path)
    backend = backend_of(path)
    rows = [backend.encode(prompt, response) for prompt, response in TEXTS]
    found = backend.score_texts(rows, tokens=tokens)
    torch.testing.assert_close(found, alone(path, rows), rtol=1e-5, atol=1e-6)
    assert len(set(found.tolist())) == len(rows), "different texts, different numbers"


def test_under_deterministic_the_rows_beside_it_change_no_bit(tmp_path: Path) -> None:
    backend = backend_of(folder_of("qwen2", tmp_path), deterministic=True)
    rows = [backend.encode(*text) for text in TEXTS]
    together = backend.score_texts(rows, tokens=0).tolist()
    assert together == [backend.score_texts([row], tokens=0).item() for row in rows]


def test_texts_are_turns_in_the_models_own_chat_template(tmp_path: Path) -> None:
    path = folder_of("qwen2", tmp_path)
    plain = backend_of(path).encode("12=", "21")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    turns = backend_of(path).encode("12=", "21")
    tokens = CharTokenizer(CHARS)
    assert plain == tokens.encode("12=21")
    assert turns == tokens.encode("<user>12=<assistant>21")


def test_the_step_scales_and_replaces_groups_with_a_text_that_is_too_long(tmp_path: Path) -> None:
    path = folder_of("qwen2", tmp_path, longest=12)
    backend = backend_of(path)
    ctx = StepContext("judge", models={"judge": backend}, model="judge")
    judged = judge(batch(TEXTS), ctx, scale=2.0)
    fitting = [0, 2, 3]
    expected = 2 * alone(path, [backend.encode(*TEXTS[number]) for number in fitting])
    torch.testing.assert_close(judged.dense("reward")[fitting], expected, rtol=1e-5, atol=1e-6)
    assert judged.dense("score").tolist() == judged.dense("reward").tolist()
    assert judged.texts("drop_reason") == ["", "longer than the reward model's 12 tokens", "", ""]
    assert ctx.metrics.drain()["reward/too_long"] == 1


def test_a_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    two = folder_of("qwen2", tmp_path / "two", labels=2)
    with pytest.raises(UserError, match="gives 2 numbers for a text; expected one"):
        backend_of(two)
    headless = folder_of("qwen2", tmp_path / "headless")
    AutoModelForSequenceClassification.from_pretrained(headless).base_model.save_pretrained(headless)
    with pytest.raises(UserError, match=r"lacks score.weight; .* needs a sequence classifier"):
        backend_of(headless)


def test_a_step_that_needs_another_head_is_told_so(tmp_path: Path) -> None:
    backend = backend_of(folder_of("qwen2", tmp_path))
    with pytest.raises(ValueError, match="the model has `head: score`, and the step needs one with `head: value`"):
        backend.values(Batch({}), grad=False)
    critic = TorchBackend(BackendSpec(tiny_model(head="value"), "cpu", False, 0, 10, {}))
    with pytest.raises(ValueError, match="`head: value`, and the step needs one with `head: score`"):
        critic.score_texts([[1]], tokens=0)


JUDGED = [
    "+models.judge={head: score}",
    "flow.steps.reward={call: 'distflow.workers.reward_model:judge', model: judge}",
]


def test_the_plan_holds_it_frozen_where_the_step_runs() -> None:
    plan = plan_recipe("quickstart", [*JUDGED, "layout=split"])[1]
    assert plan.pool("rollout").frozen == ("judge",)
    assert [worker.models for worker in plan.workers] == [("judge",), ("judge",), ("policy",)]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["+models.critic.head=score", "flow=ppo"], "models.critic.head — step 'critic_update' trains it"),
        ([*JUDGED, "layout.pools.rollout.backend=fsdp"], "'fsdp' divides models over training workers"),
        ([*JUDGED, "layout=colocated", "layout.pools.worker.backend=fsdp"], "'fsdp' cannot hold 'judge', whose head"),
    ],
)
def test_what_cannot_be_is_refused_before_the_start(overrides: list[str], told: str) -> None:
    with pytest.raises(RecipeError) as refused:
        plan_recipe("quickstart", overrides)
    assert told in str(refused.value)
