"""Values that cannot work are refused before anything starts, and what is likely to be a mistake is warned of."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from distflow.config.plugins import LIBRARIES, PluginLibrary
from distflow.config.schema import ModelConfig
from distflow.errors import Problems, RecipeError
from distflow.flow.model_roles import check_shapes, model_types
from distflow.flow.plan import Plan
from distflow.flow.recipe_check import check_imports, plan_recipe
from distflow.flow.step_declaration import read_declaration
from distflow.launch.deploy.host_checks import problems_here
from tests.flow.conftest import Folder

SAMPLE, REWARD, INIT = "flow.steps.sample.with", "flow.steps.reward.with", "models.policy.init"


def planned(*overrides: str) -> Plan:
    return plan_recipe("quickstart", ["layout=split", *overrides])[1]


@pytest.mark.parametrize(
    ("family", "usual"), [("qwen2", 32), ("mistral", 8), ("gemma2", 4), ("llama", 0), ("gpt2", 0), ("nonsuch", 0)]
)
def test_heads_that_are_left_out_are_those_of_the_family(family: str, usual: int) -> None:
    problems = Problems(str)
    sizes = {"model_type": family, "hidden_size": 60, "num_attention_heads": 6}
    check_shapes(
        {"policy": ModelConfig(init=sizes), "other": ModelConfig(init=sizes | {"num_key_value_heads": 2})}, problems
    )
    told = f"left out, it is {usual} in {family}, which does not divide the 6 num_attention_heads — 6, or a number"
    assert [problem.key for problem in problems] == ["models.policy.init.num_key_value_heads"] * bool(usual)
    assert all(told in str(problem) for problem in problems)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{SAMPLE}.temperature=-0.5", f"{SAMPLE}.temperature — -0.5 is not allowed — expected a number >= 0"),
        (f"{SAMPLE}.top_p=1.5", f"{SAMPLE}.top_p — 1.5 is not allowed — expected a number > 0, <= 1"),
        (f"{SAMPLE}.top_p=0", f"{SAMPLE}.top_p — 0 is not allowed"),
        (f"{SAMPLE}.top_k=-1", f"{SAMPLE}.top_k — -1 is not allowed"),
        (f"{SAMPLE}.max_new_tokens=0", f"{SAMPLE}.max_new_tokens — 0 is not allowed"),
        (f"{REWARD}.timeout_s=0", f"{REWARD}.timeout_s — 0 is not allowed — expected a number > 0"),
        (f"{REWARD}.max_error_rate=5", f"{REWARD}.max_error_rate — 5 is not allowed — expected a number >= 0, <= 1"),
        (f"{INIT}.hidden_size=65", "65 cannot be divided by the 4 num_attention_heads — 64 or 68, or other heads"),
        (f"{INIT}.num_key_value_heads=3", "3 does not divide the 4 num_attention_heads"),
        (f"{INIT}.model_type=qwen22", "no causal language model of model_type 'qwen22' — did you mean 'qwen2'?"),
        (
            'models.policy.tokenizer="chars:012345678"',
            "lacks '9=', which the prompts of distflow.data.arithmetic:copy",
        ),
    ],
)
def test_values_that_cannot_work(override: str, message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        planned(override)
    assert message in str(refused.value)


def test_they_are_told_beside_other_mistakes() -> None:
    with pytest.raises(RecipeError) as refused:
        planned(f"{SAMPLE}.top_p=2", f"{INIT}.hidden_size=65", "run.sed=1")
    assert len(str(refused.value).splitlines()) == 3


def test_values_at_the_edge_can_work() -> None:
    planned(f"{SAMPLE}.temperature=0", f"{SAMPLE}.top_p=1", f"{REWARD}.max_error_rate=0", f"{INIT}.head_dim=32")
    planned(f"{INIT}.hidden_size=65", f"{INIT}.head_dim=16")


def test_a_model_folder_is_looked_at_too(tmp_path: Path) -> None:
    config = {"model_type": "nonsuch", "hidden_size": 65, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError) as refused:
        planned(f"models.policy.path={tmp_path}")
    told = str(refused.value)
    assert "models.policy.path — 65 cannot be divided by the 4 num_attention_heads in its config.json" in told
    assert "model_type 'nonsuch'" in told
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 64, "auto_map": {}}))
    planned(f"models.policy.path={tmp_path}")


def test_the_families_that_transformers_builds_are_known_without_importing_it() -> None:
    from transformers.models.auto import modeling_auto

    assert model_types("tokens") == set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert model_types("score") == set(modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)


def test_steps_declare_what_a_number_must_be(folder: Folder) -> None:
    """By text in place of names; it is read from the source, and checked there."""
    text = (
        "@step(role='score', reads=[], writes=['x'], choices={'n': '%s'})\ndef mine(batch, ctx, *, n: int = 1): ...\n"
    )
    call = f"{folder.step(text % '>= 1, < 9')}:mine"
    assert read_declaration(call).spec.ranges == {"n": ">= 1, < 9"}
    folder.write(
        "mine.yaml", f"defaults: [quickstart, _self_]\nflow: {{steps: {{own: {{call: '{call}', with: {{n: 9}}}}}}}}\n"
    )
    with pytest.raises(RecipeError, match=r"flow.steps.own.with.n — 9 is not allowed — expected a number >= 1, < 9"):
        plan_recipe(folder.recipe)
    folder.write("steps.py", "from distflow import step\n" + text % "at least 1")
    with pytest.raises(RecipeError, match=r"choices=\{'n': 'at least 1'\}\) must be a list of names, or bounds as in"):
        plan_recipe(folder.recipe)


def test_other_tools_words_among_the_settings_of_a_step() -> None:
    with pytest.raises(
        RecipeError,
        match=r"update\.with\.ppo_epochs — unknown setting — did you mean batch\.epochs \(passes over the samples",
    ):
        planned("flow.steps.update.with.ppo_epochs=4")
    with pytest.raises(RecipeError, match=r"with\.stop_words — unknown setting — did you mean .*\.stop\?"):
        planned("flow.steps.sample.with.stop_words='</s>'")
    with pytest.raises(RecipeError, match=r"with\.tools — unknown setting — a generate step of your own, which"):
        planned("flow.steps.sample.with.tools=[search]")


def test_what_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = "layout.pools.rollout"
    lacking = PluginLibrary("no_such", "get {python}")
    monkeypatch.setattr("distflow.launch.deploy.host_checks.LIBRARIES", {planned().workers[0].engine: lacking})
    plan = planned(f"{rollout}.device=cuda:7", f"{rollout}.each={{1: {{device: 'cuda:9'}}}}")
    told = [str(problem) for problem in problems_here(plan, lambda key: "here")]
    assert len(told) == 3
    assert told[0].startswith(f"here: {rollout}.engine — needs the package 'no_such', which is not installed for ")
    assert told[1].startswith(
        f"here: {rollout}.device — cuda:7, but this host has 0 GPUs available (by nvidia-smi) — set"
    )
    assert told[2].startswith(f"here: {rollout}.each.1.device — cuda:9, but")
    other = planned(f"{rollout}.python=/usr/bin/python3")
    assert problems_here(other, lambda key: "here", ask_pythons=False) == [], "that Python is asked itself"


def test_null_for_a_setting_that_has_a_value_by_default() -> None:
    with pytest.raises(RecipeError, match=r"with\.stop — expected text, or a list .* got null — .*, or leave it out"):
        planned("flow.steps.sample.with.stop=null")
    with pytest.raises(RecipeError, match=r"with\.logit_bias — expected .* got null — .*, or leave it out"):
        planned("flow.steps.sample.with.logit_bias=null")


def lacking(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let these modules look as if they were not installed."""
    known = {
        name: replace(library, module=f"no_{library.module}") if library.module in modules else library
        for name, library in LIBRARIES.items()
    }
    monkeypatch.setattr("distflow.launch.deploy.host_checks.LIBRARIES", known)


def test_all_packages_that_a_recipe_needs_are_told_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, "math_verify", "datasets", "wandb")
    plan = plan_recipe("gsm8k", ["run.trackers.wandb.project=x"])[1]
    tracker, reward, data = problems_here(plan, lambda key: "here")
    assert [one.key for one in (tracker, reward, data)] == [
        "run.trackers.wandb",
        "flow.steps.reward.with.function",
        "data.source",
    ]
    assert "needs the package 'no_datasets'" in data.message
    assert "(val.data.source too)" in data.message
    python = shlex.quote(sys.executable)
    assert data.hint.endswith(
        f"all 3 at once: {python} -m pip install 'wandb>=0.18' 'math-verify[antlr4_9_3]>=0.8' 'datasets>=3.0'"
    )
    lacking(monkeypatch, "reasoning_gym")
    overrides = ["models.policy.path=hub/id", "flow.steps.reward.with.function={one: {function: reasoning_gym}}"]
    (problem,) = problems_here(plan_recipe("reasoning", overrides)[1], lambda key: "here")
    assert "(data.source too)" in problem.message, "one package, of which two keys ask"
    assert "-m pip install 'reasoning-gym>=0.1.20'; or name a Python that has it" in problem.hint


def test_packages_that_files_of_prompts_need(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lacking(monkeypatch, "pyarrow")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "train-00000.parquet").touch()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1="}\n')
    mixed = f"{{a: {{source: {tmp_path}/tables}}, b: {{source: {tmp_path}/rows.jsonl}}}}"
    (problem,) = problems_here(planned(f"data.mix={mixed}"), lambda key: "here")
    assert problem.key == "data.mix.a.source"
    assert "needs the package 'no_pyarrow'" in problem.message
    assert problems_here(planned(f"data.source={tmp_path}/rows.jsonl"), lambda key: "here") == []


def test_settings_that_transformers_refuses_are_found_by_a_deep_look() -> None:
    plan = planned(f"{INIT}.hiden_size=64")
    (problem,) = check_imports(plan, lambda key: "here")
    assert str(problem).startswith(
        "here: models.policy — models: `init` of model_type 'qwen2' has no setting hiden_size"
    )


@pytest.mark.parametrize("greedy", [f"{SAMPLE}.temperature=0", f"{SAMPLE}.temperature=0.0", f"{SAMPLE}.top_k=1"])
def test_samples_that_are_all_alike_are_warned_of_where_they_are_compared(greedy: str) -> None:
    (warning,) = planned(greedy).warnings
    assert warning.startswith("warning: step 'sample' takes the likeliest token each time, and step 'advantage' comp")
    assert planned(f"{SAMPLE}.temperature=0.1").warnings == ()


def test_one_sample_a_prompt_is_warned_of_where_samples_are_compared(folder: Folder) -> None:
    (warning,) = planned("batch.samples_per_prompt=1").warnings
    assert warning.startswith("warning: batch.samples_per_prompt is 1, and step 'advantage' compares the samples")
    assert planned("batch.samples_per_prompt=2").warnings == ()
    folder.step(
        "@step(role='train', reads=['reward'], writes=['advantage'])\ndef absolute(batch, ctx): ...\n",
    )
    overrides = ["batch.samples_per_prompt=1", "flow.steps.advantage.call=./steps.py:absolute"]
    assert plan_recipe(folder.recipe, overrides)[1].warnings == ()


def test_a_number_where_a_list_is_expected_is_told_how_one_is_written() -> None:
    told = "clip — expected a list of numbers, got 0.2 — write a value of that kind, such as [0.2, 0.2]"
    with pytest.raises(RecipeError, match=re.escape(told)):
        plan_recipe("quickstart", ["flow.steps.update.with.clip=0.2"])
