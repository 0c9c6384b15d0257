"""Steps get models that give what they need, and whose tokens are the policy's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distflow.errors import RecipeError, UserError
from distflow.flow.model_fit import position_problems
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.step_declaration import read_declaration
from tests.flow.conftest import TEACHER, Folder

Refused = Callable[..., str]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
JUDGE = ["models.judge={head: score}", "flow.steps.reward={call: 'distflow.workers.reward_model:judge', model: judge}"]
REFERENCE = "flow=grpo_kl"


def refusal(*overrides: str) -> str:
    with pytest.raises(RecipeError) as refused:
        plan_recipe("quickstart", overrides)
    return str(refused.value)


def model_folder(path: Path, architecture: str, vocabulary: dict[str, int], size: int = 16, **config: Any) -> Path:
    path.mkdir()
    known = {"model_type": "llama", "architectures": [architecture], "vocab_size": size, **SIZES, **config}
    (path / "config.json").write_text(json.dumps(known))
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return path


DIGITS = {token: number for number, token in enumerate(("<pad>", "<eos>", *"0123456789="))}
"""The quickstart's tokens."""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["flow=ppo", "models.critic.head=tokens"],
            "command line: models.critic.head — step 'values' needs a model that gives a value for each token; "
            "'critic' has `head: tokens` — models.critic.head=value",
        ),
        (
            ["flow=ppo", "models.critic=null"],
            "command line: models.critic — step 'values' needs a model that gives a value for each token; 'critic' has "
            "`head: tokens` — models.critic.head=value",
        ),
        (
            ["flow=ppo", "flow.steps.values.model=policy"],
            "command line: flow.steps.values.model — step 'values' needs a model that gives a value for each token; "
            "'policy' has `head: tokens` — flow.steps.values.model=critic, or a model of its own",
        ),
        (
            [REFERENCE, "models.reference.head=value"],
            "command line: models.reference.head — step 'reference' needs a model that gives log-probs of tokens",
        ),
        (
            ["flow=ppo", "flow.steps.old_logprobs.model=critic", "batch.epochs=2"],
            "flow.steps.old_logprobs.model — step 'old_logprobs' needs a model that gives log-probs of tokens; 'cri",
        ),
        (
            [JUDGE[1]],
            "flow.steps.reward.model — step 'reward' needs a model that gives one number for a whole text; 'judge' has "
            "`head: tokens` — models.judge.head=score",
        ),
        (
            ["models.judge={head: value}", JUDGE[1]],
            "models.judge.head — step 'reward' needs a model that gives one ",
        ),
        (
            [JUDGE[0], "flow.steps.reward={call: 'distflow.workers.reward_model:judge'}"],
            "flow.steps.reward.model — step 'reward' needs a model that gives one number for a whole text (head: "
            "score), and names none — add model: judge",
        ),
    ],
)
def test_a_model_that_does_not_give_what_a_step_needs(overrides: list[str], message: str) -> None:
    assert message in refusal(*overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "step 'teacher' needs a model of its own, and 'teacher' is a copy of 'policy', which learns nothing from"),
        (["models.teacher.dtype=bfloat16"], "models.teacher.path=FOLDER, a model with the same tokens"),
        (["flow.steps.teacher.model=policy"], "step 'teacher' needs another model than the policy"),
        ([TEACHER.replace("9=", "9+")], "their vocabularies differ: token 12 is '=', and there it is '+'"),
    ],
)
def test_a_teacher_is_another_model_with_the_same_tokens(overrides: list[str], message: str) -> None:
    assert message in refusal("flow=distill", *overrides)


def test_models_that_do_are_accepted() -> None:
    for overrides in (["flow=ppo"], [REFERENCE], JUDGE, ["flow=ppo", "batch.epochs=2", *JUDGE]):
        plan_recipe("quickstart", overrides)


def test_what_a_step_needs_is_declared_or_found_in_its_source(folder: Folder) -> None:
    told = {
        "declared": ("head='value'", "ctx.mine"),
        "found": ("scope='sample'", "ctx.backend.values(batch, grad=False)"),
        "both": ("scope='sample'", "ctx.backend.values(batch), ctx.backend.score(batch)"),
    }
    for name, (argument, body) in told.items():
        folder.step(f"@step(role='forward', reads=[], writes=['x'], {argument})\ndef {name}(batch, ctx):\n    {body}\n")
    heads = {name: read_declaration(f"{folder.path}/steps.py:{name}").head for name in told}
    assert heads == {"declared": "value", "found": "value", "both": None}


def test_a_users_own_step_is_checked_too(folder: Folder, refused: Refused) -> None:
    folder.change("def values(batch, ctx): ...", "def values(batch, ctx): ctx.backend.values(batch, grad=False)")
    values = "flow.steps.values={call: ./steps.py:values, model: policy}"
    message = refused(values, "flow.steps.update.with.use_values=true")
    assert "flow.steps.values.model — step 'values' needs a model that gives a value for each token" in message
    folder.step("@step(role='forward', reads=[], writes=['x'], head='logits')\ndef other(batch, ctx): ...\n")
    message = refused("flow.steps.other.call=./steps.py:other")
    assert "@step(head='logits'); allowed: score, tokens, value" in message


@pytest.mark.parametrize(
    ("architecture", "more", "head", "message"),
    [
        ("LlamaForSequenceClassification", {}, "tokens", "a classifier: it has no log-probs of tokens"),
        ("LlamaForCausalLM", {}, "score", "a language model: it lacks the layer that `head: score` needs"),
        ("LlamaForSequenceClassification", {}, "score", "with 2 labels, and a reward is one number"),
        ("LlamaForSequenceClassification", {"num_labels": 3}, "score", "with 3 labels, and a reward is one number"),
        ("LlamaForSequenceClassification", {"id2label": {"0": "LABEL_0"}}, "score", ""),
        ("LlamaForCausalLM", {}, "tokens", ""),
        ("LlamaForTokenClassification", {}, "value", ""),
    ],
)
def test_the_class_of_a_folder(
    architecture: str, more: dict[str, Any], head: str, message: str, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "there", architecture, DIGITS, **more)
    steps = {"tokens": [REFERENCE], "score": JUDGE, "value": ["flow=ppo"]}[head]
    name = {"tokens": "reference", "score": "judge", "value": "critic"}[head]
    overrides = [*steps, f"models.{name}={{path: '{folder}', head: {head}}}"]
    if message:
        assert f"command line: models.{name}.path — {folder} has a {architecture}" in refusal(*overrides)
        assert message in refusal(*overrides)
    else:
        plan_recipe("quickstart", overrides)


CRITIC = "models.critic={{path: '{}', head: value}}"


def test_a_model_whose_tokens_stand_for_something_else(tmp_path: Path) -> None:
    other = model_folder(tmp_path / "other", "LlamaForCausalLM", {**DIGITS, "8": 11, "9": 10})
    fewer = model_folder(tmp_path / "fewer", "LlamaForCausalLM", {token: n for token, n in DIGITS.items() if n < 12})
    small = model_folder(tmp_path / "small", "LlamaForCausalLM", DIGITS, size=12)
    message = refusal("flow=ppo", CRITIC.format(other))
    assert "command line: models.critic.path — step 'values' gives 'critic' the tokens of 'policy', and" in message
    assert "vocabularies differ: token 10 is '8', and there it is '9' — a model with the tokenizer of" in message
    assert "token 12 is '=', and there it is none" in refusal("flow=ppo", CRITIC.format(fewer))
    assert "it knows 12 tokens, and the tokenizer has 13" in refusal("flow=ppo", CRITIC.format(small))
    assert "models.reference.path — step 'reference' gives" in refusal(REFERENCE, f"models.reference.path={other}")


def test_a_policy_of_other_tokens_is_blamed_if_the_user_changed_it(tmp_path: Path) -> None:
    text = "defaults: [quickstart, _self_, {override /flow: ppo}]\nmodels: {critic: {init: {model_type: llama, "
    sizes = ", ".join(f"{name}: {size}" for name, size in SIZES.items())
    (tmp_path / "mine.yaml").write_text(f"{text}{sizes}}}, tokenizer: 'chars:0123456789='}}}}\n")
    plan_recipe(str(tmp_path / "mine.yaml"))
    with pytest.raises(RecipeError, match=r"command line: models\.policy\.tokenizer — step 'values' gives"):
        plan_recipe(str(tmp_path / "mine.yaml"), ["models.policy.tokenizer='chars:=0123456789'"])


def test_models_that_read_the_policys_tokens_or_texts_of_their_own(tmp_path: Path) -> None:
    same = model_folder(tmp_path / "same", "LlamaForCausalLM", DIGITS)
    more = model_folder(tmp_path / "more", "LlamaForCausalLM", {**DIGITS, "+": 13})
    for folder in (same, more):
        plan_recipe("quickstart", ["flow=ppo", CRITIC.format(folder)])
    one = {"id2label": {"0": "LABEL_0"}}
    words = model_folder(tmp_path / "words", "LlamaForSequenceClassification", {"good": 0, "bad": 1}, **one)
    plan_recipe("quickstart", [f"models.judge={{path: '{words}', head: score}}", JUDGE[1]])


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"model_type": "llama", **SIZES, "max_position_embeddings": 40}, 40),
        ({"model_type": "llama", **SIZES, "max_position_embeddings": 64, "rope_parameters": YARN}, 64),
        (
            {
                "model_type": "qwen3",
                **SIZES,
                "num_key_value_heads": 2,
                "max_position_embeddings": 16,
                "rope_scaling": YARN,
            },
            16,
        ),
        (
            {
                "model_type": "gemma3",
                "text_config": {"model_type": "gemma3_text", **SIZES, "max_position_embeddings": 24},
            },
            24,
        ),
    ],
)
@pytest.mark.parametrize("more", [0, 1])
def test_samples_longer_than_the_positions_of_a_model_are_told_before_engines_are(
    tmp_path: Path, config: dict[str, Any], positions: int, more: int
) -> None:
    from transformers import AutoConfig

    from distflow.workers.engines.samples import RequestLimits

    (tmp_path / "config.json").write_text(json.dumps(config))
    words = [f"models.policy.path={tmp_path}", "data.max_prompt_tokens=10"]
    words.append(f"flow.steps.sample.with.max_new_tokens={positions - 10 + more}")
    _, plan = plan_recipe("quickstart", words, need_files=False)
    found = [str(one) for one in position_problems(plan, lambda key: "recipe.yaml:1")]
    assert len(found) == more
    assert [one.partition(": ")[2] in " ".join(plan.warnings) for one in found] == [True] * more
    loaded = AutoConfig.from_pretrained(tmp_path)
    if more:
        assert f"behind it are {positions + 1}, and model 'policy' has {positions} positions" in found[0]
        with pytest.raises(UserError, match=rf"slots of {positions + 1} tokens .* model's {positions} positions"):
            RequestLimits.of(loaded, plan.engine_tokens("policy"))
    else:
        assert RequestLimits.of(loaded, plan.engine_tokens("policy")).max_tokens == positions


def test_what_validation_and_further_models_generate_counts_too() -> None:
    for words in (["val.sampling={max_new_tokens: 60}"], ["flow=self_play", "flow.steps.solve.with.max_new_tokens=60"]):
        _, plan = plan_recipe("quickstart", words)
        assert [one.key for one in position_problems(plan, lambda key: "")] == ["data.max_prompt_tokens"]
    emulated = "layout.pools.rollout.engine=distflow.testing.emulated:EmulatedEngine"
    _, plan = plan_recipe("quickstart", ["flow.steps.sample.with.max_new_tokens=60", emulated])
    assert not list(position_problems(plan, lambda key: ""))
