"""`run.deterministic` promises equal bits: what cannot keep that is refused by the plan, by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distflow.config.plugins import PluginUse
from distflow.errors import RecipeError, UserError
from distflow.exchange.lease_settings import planned_settings
from distflow.flow.plan_text import render_page
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.script import render_script
from distflow.types import WorkerName
from distflow.workers.engines.sglang_options import SGLangOptions
from distflow.workers.engines.vllm_options import VLLMOptions

ROLLOUT = "layout.pools.rollout"
SGLANG, VLLM = f"{ROLLOUT}.engine=sglang", f"{ROLLOUT}.engine=vllm"
SCORING = ["flow=grpo_kl", f"{ROLLOUT}.roles=[generate, score, forward]", "layout.pools.trainer.roles=[train]"]
QWEN2 = {"model_type": "qwen2", "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32}


def refusal(*overrides: str, recipe: str = "quickstart") -> str:
    plan_recipe(recipe, overrides)
    with pytest.raises(RecipeError) as refused:
        plan_recipe(recipe, ["run.deterministic=true", *overrides])
    return str(refused.value)


def test_the_shipped_layouts_of_staleness_0_can_repeat() -> None:
    for layout in ("split", "colocated"):
        plan_recipe("quickstart", ["run.deterministic=true", f"layout={layout}"])
    plan_recipe("quickstart", ["run.deterministic=true", "flow=grpo_kl"])


def test_training_waits_for_the_whole_batch_and_the_plan_says_so() -> None:
    plan = plan_recipe("quickstart", ["run.deterministic=true"])[1]
    assert "computed when the whole batch has arrived" in render_page(plan)
    assert "  # the whole batch" in render_script(plan, WorkerName("trainer", 0))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["layout=async"],
            "run.deterministic — with layout.max_st",
        ),
        (["layout.max_staleness=unbounded"], "layout.max_staleness unbounded, timing decides"),
        (
            ["layout.on_failure=shrink", "layout.pools.trainer.count=2"],
            "layout.on_failure — a run that continues with fewer training workers sums in another order",
        ),
        ([f"{ROLLOUT}.device=cuda"], "engine 'torch' repeats to the last bit on CPUs only, and layout.pools.rollout"),
        (
            [*SCORING, SGLANG, f"{ROLLOUT}.device=cuda"],
            "step 'reference' scores groups in batches as they",
        ),
        (
            [f"{ROLLOUT}.engine_options.decoder=module"],
            "decoder 'module' is not batch-invariant: run.deterministic",
        ),
        (
            [SGLANG, f"{ROLLOUT}.device=cpu"],
            "SGLang repeats to the last bit on GPUs only, and layout.pools.rollout",
        ),
        (
            [VLLM, f"{ROLLOUT}.device=cpu"],
            "vLLM repeats to the last bit on GPUs only, and layout.pools.rollout",
        ),
        (
            [SGLANG, f"{ROLLOUT}.engine_options.attention_backend=torch_native"],
            "attention_backend 'torch_native': expected fa3, fa4, flashinfer, triton, with which results do not depend",
        ),
        (
            [VLLM, f"{ROLLOUT}.engine_options.seeded=false"],
            "seeded false: run.deterministic needs random numbers",
        ),
        (
            ["models.policy.init.model_type=gemma2"],
            "models.policy.init.model_type — model 'policy': model_type 'gemma2' is not computed batch-inv",
        ),
        (
            ["models.policy.init.rope_parameters={rope_type: dynamic, factor: 2.0}"],
            "rotary embeddings of type 'dynamic' depend on the longest row of a batch",
        ),
    ],
)
def test_what_cannot_repeat_is_refused(overrides: list[str], message: str) -> None:
    assert message in refusal(*overrides)


def test_models_on_disk_are_judged_by_their_configuration(tmp_path: Path) -> None:
    mixtral = {**QWEN2, "model_type": "mixtral", "vocab_size": 13, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(mixtral))
    message = refusal("models.policy.init=null", f"models.policy.path={tmp_path}")
    assert "models.policy.path — model 'policy': model_type 'mixtral' is not computed batch-invariantly" in message
    windowed = {**mixtral, "model_type": "mistral", "sliding_window": 16}
    (tmp_path / "config.json").write_text(json.dumps(windowed))
    assert "set sliding_window to null" in refusal("models.policy.init=null", f"models.policy.path={tmp_path}")


def test_sglang_and_vllm_are_told_to_run_in_their_own_deterministic_modes() -> None:
    use = PluginUse({"dtype": "bfloat16"}, "cuda:0", deterministic=True)
    options = SGLangOptions.parse({})
    options.check(use)
    assert options.server_args(use, 11, 0)["enable_deterministic_inference"] is True
    plain = PluginUse({"dtype": "bfloat16"}, "cuda:0")
    assert "enable_deterministic_inference" not in options.server_args(plain, 11, 0)
    with pytest.raises(UserError, match="enable_deterministic_inference is set by distflow"):
        SGLangOptions.parse({"args": {"enable_deterministic_inference": False}}).check(use)
    VLLMOptions.parse({}).check(use)


@pytest.mark.parametrize(
    "words, repeats",
    [
        ((), True),
        ((SGLANG,), False),
        ((VLLM,), True),
        ((VLLM, f"{ROLLOUT}.engine_options.seeded=false"), False),
        (("layout.pools.rollout.each={1: {engine: sglang}}",), False),
        ((f"{ROLLOUT}.engine=distflow.testing.emulated:EmulatedEngine",), True),
    ],
)
def test_slow_groups_are_copied_where_a_copy_has_the_same_tokens(words: tuple[str, ...], repeats: bool) -> None:
    _, plan = plan_recipe("quickstart", ["layout=split", *words])
    assert planned_settings(plan, plan.owner_plan).copies_slow is repeats
