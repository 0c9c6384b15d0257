"""The table of model families: what it refuses, where, and what it only warns of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distflow.errors import RecipeError
from distflow.flow.families import FAMILIES
from distflow.flow.model_roles import model_types
from distflow.flow.recipe_check import plan_recipe
from distflow.launch.deploy.host_checks import needs_of_workers
from tests.families import FAMILIES as INITS

TYPE = "models.policy.init.model_type"


def problems(*overrides: str) -> list[str]:
    try:
        plan_recipe("quickstart", overrides)
    except RecipeError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    "family, reason",
    [
        ("minimax", "(lightning attention, and attention; experts): its layers need a cache of their own"),
        ("deepseek_v32", "(latent attention (MLA) to tokens that an indexer chooses; experts): its cache has no place"),
    ],
)
def test_what_an_engine_cannot_keep_is_refused_with_the_cure(family: str, reason: str) -> None:
    (told,) = problems(f"{TYPE}={family}")
    assert told.startswith(f"command line: {TYPE} — engine torch does not take model_type '{family}' {reason}")
    others = [name for name in ("sglang", "vllm") if f"engine {name}" not in FAMILIES[family].refused]
    assert told.endswith(f"; engine {' or '.join(others)}, or a model of another family")


def test_a_folder_is_refused_by_its_text_model(tmp_path: Path) -> None:
    """As of a multimodal model, whose config.json has the text model in a section of its own."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "wrapper", "text_config": {"model_type": "minimax"}})
    )
    told = problems(f"models.policy.path={tmp_path}", "models.policy.init=null")
    assert any(line.startswith("command line: models.policy.path — engine torch does not take") for line in told), told


def test_only_the_engine_that_cannot_keep_it_refuses_it() -> None:
    other = ["layout.pools.rollout.engine=sglang", "layout.pools.rollout.count=2"]
    assert problems(f"{TYPE}=deepseek_v32", *other) == []
    each = "layout.pools.rollout.each.1.engine=torch"
    assert ["engine torch does not take" in line for line in problems(f"{TYPE}=deepseek_v32", *other, each)] == [True]


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5_text", "deepseek_v32"])
def test_what_sglang_has_for_gpus_only_is_refused_on_cpus(family: str) -> None:
    sglang = ["layout.pools.rollout.engine=sglang", "layout.pools.rollout.count=1", f"{TYPE}={family}"]
    (told,) = problems(*sglang, "layout.pools.rollout.device=cpu")
    assert told.startswith(f"command line: {TYPE} — engine sglang does not take model_type '{family}' (")
    assert ", a GPU, or a model of another family" in told
    _, plan = plan_recipe("quickstart", sglang)
    assert needs_of_workers(plan).devices == (("layout.pools.rollout.engine", "cuda"),)


@pytest.mark.parametrize("family", ["minimax", "gemma4_text"])
def test_what_sglang_cannot_load_is_refused_everywhere(family: str) -> None:
    sglang = ["layout.pools.rollout.engine=sglang", "layout.pools.rollout.count=1", f"{TYPE}={family}"]
    (told,) = problems(*sglang, "layout.pools.rollout.device=cuda")
    assert told.startswith(f"command line: {TYPE} — engine sglang does not take model_type '{family}' (")
    assert "a GPU" not in told


def test_layers_that_no_cache_has_are_refused_in_any_family(tmp_path: Path) -> None:
    config = {"model_type": "unheard_of", "layer_types": ["chunked_attention", "full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = problems(f"models.policy.path={tmp_path}", "models.policy.init=null")
    wanted = (
        "models.policy.path — engine torch does not take model_type 'unheard_of': it has layers of type chunked_att"
    )
    assert any(line.startswith(f"command line: {wanted}") for line in told), told


def test_a_family_that_nobody_tried_is_a_warning() -> None:
    _, plan = plan_recipe("quickstart", [f"{TYPE}=granite"])
    (warning,) = [note for note in plan.warnings if "table of families" in note]
    assert warning.startswith("warning: models.policy — model_type 'granite' is not in the table of families")


def test_the_table_has_a_tiny_model_of_each_family_that_transformers_knows() -> None:
    assert FAMILIES.keys() == INITS.keys()
    assert FAMILIES.keys() <= model_types("tokens")


def test_a_head_that_transformers_lacks_is_told() -> None:
    assert "lfm2" in model_types("tokens") - model_types("value")
    chars = "models.critic.tokenizer='chars:0123456789='"
    told = problems("flow=ppo", "models.critic.init={model_type: lfm2}", chars, "models.critic.head=value")
    assert any("has no token classifier of model_type 'lfm2'" in line for line in told), told


KEY = "models.policy.attn_implementation"
PINNED = f"some/kernel@{'0a' * 20}"
HALF = "models.policy.dtype=bfloat16"
CPU = "layout.pools.trainer.device=cpu"


@pytest.mark.parametrize(
    "overrides, message",
    [
        ([f"{KEY}=flash2"], "'flash2' is not allowed — allowed: auto, sdpa, eager, flash_attention_2"),
        ([f"{KEY}=some/kernel"], "'some/kernel' names code that may change — allowed: "),
        ([f"{KEY}=some/kernel@main"], "'some/kernel@main' names code that may change — allowed: "),
        ([f"{KEY}=flash_attention_2"], "flash_attention_2: it computes in bfloat16 and float16, and models.policy.dt"),
        (
            [f"{KEY}=flash_attention_3", HALF, CPU],
            "flash_attention_3: it needs a GPU, and the device is cpu; sdpa, eag",
        ),
        ([f"{KEY}={PINNED}", HALF, CPU], f"{PINNED}: it needs a GPU, and the device is cpu; sdpa, eager or auto"),
        ([f"{KEY}=flex_attention", CPU], "flex_attention: it needs a GPU, and the device is cpu; sdpa, eager or auto"),
        ([f"{KEY}=sdpa", f"{TYPE}=gpt_oss"], "sdpa: transformers has it not for model_type 'gpt_oss'; eager, flash_at"),
        (
            [f"{KEY}=flex_attention", f"{TYPE}=qwen3_next"],
            "flex_attention: transformers has it not for model_type 'qwen",
        ),
    ],
)
def test_attention_that_cannot_be_is_refused(overrides: list[str], message: str) -> None:
    assert problems(*overrides)[0].startswith(f"command line: {KEY} — {message}")


def test_attention_of_ones_own_choice_is_not_batch_invariant() -> None:
    (told,) = problems(f"{KEY}=eager", "run.deterministic=true")
    assert "attn_implementation eager is not batch-invariant, only auto is" in told


@pytest.mark.parametrize("chosen", ["flash_attention_2", PINNED, "flex_attention"])
def test_a_host_without_gpus_is_told_before_the_launch(chosen: str) -> None:
    _, plan = plan_recipe("quickstart", [f"{KEY}={chosen}", HALF])
    assert (KEY, "cuda") in needs_of_workers(plan).devices
    _, plain = plan_recipe("quickstart", [f"{KEY}=eager", HALF])
    assert needs_of_workers(plain).devices == ()


def test_a_copy_computes_attention_as_the_policy_does() -> None:
    _, plan = plan_recipe("quickstart", ["flow=grpo_kl", f"{KEY}=eager"])
    assert {model.attn_implementation for model in plan.recipe.models.values()} == {"eager"}
    assert len(plan.recipe.models) > 1
