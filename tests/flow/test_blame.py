"""A problem of several keys is that of the key nearest to the user, and null takes away what a lower layer gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.errors import RecipeError
from distflow.flow.plan import Plan
from distflow.flow.recipe_check import plan_recipe

BASE = "defaults: [quickstart, _self_]\n"
KL = "defaults: [quickstart, {override /flow: grpo_kl}, _self_]\n"
NO_KL = "flow.steps.update.with.kl_coef=0"


def mine(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def planned(folder: Path, text: str, *overrides: str) -> Plan:
    return plan_recipe(mine(folder, text), overrides)[1]


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as refused:
        planned(folder, text, *overrides)
    return str(refused.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("", ["layout.pools.trainer.count=16"], "command line: layout.pools.trainer.count — 8 ledgers are too few for"),
        (
            "layout: {pools: {trainer: {count: 16}}}\n",
            [],
            "mine.yaml:2: layout.pools.trainer.count — 8 ledgers are too few for 16 training workers",
        ),
        (
            "layout: {pools: {trainer: {count: 8}}}\n",
            ["batch.ledgers=4"],
            "command line: batch.ledgers — 4 ledgers are",
        ),
        (
            "run: {deterministic: true}\n",
            ["layout.max_staleness=2"],
            "command line: layout.max_staleness — with layout.max_staleness 2, timing decides",
        ),
        ("run: {deterministic: true}\n", ["layout=async"], "async.yaml:4: layout.max_staleness — with layout.max_st"),
        ("layout: {max_staleness: 2}\n", ["run.deterministic=true"], "command line: run.deterministic — with layout"),
        (
            "layout: {refresh: at_bound}\n",
            ["layout.max_staleness=unbounded"],
            "command line: layout.max_staleness — at_bound never takes newer weights",
        ),
        (
            "layout: {on_failure: shrink, pools: {trainer: {count: 2}}}\n",
            ["layout.pools.trainer.count=1"],
            "command line: layout.pools.trainer.count — shrink continues without a training worker",
        ),
        (
            "layout: {pools: {trainer: {sample_memory_mb: 4}}}\n",
            ["batch.prompts=512"],
            "command line: batch.prompts — sample_memory_mb 4 is too little for one training step: 512 groups",
        ),
        (
            "layout: {pools: {trainer: {sample_memory_mb: 4}}}\n",
            ["flow.steps.sample.with.max_new_tokens=4000"],
            "command line: flow.steps.sample.with.max_new_tokens — sample_memory_mb 4 is too little",
        ),
        (
            "",
            ["layout.pools.rollout.roles=[generate]"],
            "command line: layout.pools.rollout.roles — no pool takes the role 'score' (step 'reward')",
        ),
        ("", ["layout.pools.rollout=null"], "command line: layout.pools.rollout — no pool takes the role 'generate'"),
        (
            "",
            ["flow.steps.update.with.kl_coef=0.1"],
            "command line: flow.steps.update.with.kl_coef — step 'update' reads the field 'ref_logprobs' because "
            "kl_coef is 0.1, which no step of the flow writes — add to flow.steps:  reference: {call:",
        ),
        (
            "flow: {steps: {old_logprobs: null}}\n",
            ["batch.epochs=2"],
            "command line: batch.epochs — step 'update' reads the field 'old_logprobs' because batch.minibatches × ",
        ),
        (
            "models: {policy: {dtype: float64}}\n",
            ["layout.pools.trainer.backend=deepspeed"],
            "command line: layout.pools.trainer.backend — with models.policy.dtype: float64 with backend deepspeed",
        ),
        (
            "",
            ["flow.steps.second={call: 'distflow.workers.reward:verify'}"],
            "command line: flow.steps.second — writes the field 'reward', and so does step 'reward'",
        ),
    ],
)
def test_the_key_that_the_user_touched_is_blamed(text: str, overrides: list[str], message: str, tmp_path: Path) -> None:
    assert message in refusal(tmp_path, BASE + text, *overrides)


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("flow: {steps: {reference: null}}\n", [NO_KL]),
        ("", ["flow.steps.reference=null", NO_KL]),
        ("", ["~flow.steps.reference", NO_KL]),
        ("", ["flow={steps: {reference: null}}", NO_KL]),
    ],
)
def test_null_takes_a_step_away(text: str, overrides: list[str], tmp_path: Path) -> None:
    assert "reference" in planned(tmp_path, KL, NO_KL).recipe.flow.steps
    assert "reference" not in planned(tmp_path, KL + text, *overrides).recipe.flow.steps


def test_null_takes_pools_models_and_single_workers_away(tmp_path: Path) -> None:
    services = "defaults: [quickstart, {model@models.judge: tiny}, _self_, {override /layout: services}]\n"
    services += "layout: {pools: {rollout: {each: {'0': {threads: 2}, '1': {slots: 7}}}}}\n"
    assert "judge" in planned(tmp_path, services).recipe.models
    gone = ["layout.pools.reference=null", "models.judge=null", "layout.pools.rollout.each.1=null"]
    recipe = planned(tmp_path, services, *gone).recipe
    assert list(recipe.layout.pools) == ["rollout", "reward", "trainer"]
    assert list(recipe.models) == ["policy"]
    assert list(recipe.layout.pools["rollout"].each) == ["0"]


def test_what_was_taken_away_may_be_given_anew(tmp_path: Path) -> None:
    """Nothing of what was there before is left."""
    text = KL + "flow: {steps: {update: null}}\n"
    again = 'flow.steps.update={call: "distflow.workers.trainer:update", model: policy}'
    assert planned(tmp_path, text, again).recipe.flow.steps["update"].with_ == {}


def test_taking_away_what_is_needed_is_told_where_that_is_done(tmp_path: Path) -> None:
    told = "flow.steps.reference — step 'update' reads the field 'ref_logprobs' because kl_coef is 0.001"
    assert f"command line: {told}" in refusal(tmp_path, KL, "flow.steps.reference=null")
    assert f"mine.yaml:2: {told}" in refusal(tmp_path, KL + "flow: {steps: {reference: null}}\n")


def test_taking_away_what_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    message = refusal(tmp_path, KL + "flow: {steps: {refrence: null}}\n", "models.critic=null")
    assert "mine.yaml:2: flow.steps.refrence — null removes it, and there is none of this name — did you" in message
    assert "did you mean 'reference'?" in message
    assert "command line: models.critic — null removes it" in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "flow.steps.advantge={call: 'distflow.workers.trainer:advantage'}",
            "flow.steps.advantge — writes the field 'advantage', and so does step 'advantage' — did you mean "
            "flow.steps.advantage? Otherwise keep one of them",
        ),
        (
            "layout.pools.trainr.count=2",
            "layout.pools.trainr — the layout gives pool trainr no roles, so no step runs on",
        ),
        ("layout.pools.trainr.count=2", "did you mean 'trainer'? Otherwise set it for rollout, trainer"),
        (
            "models.polcy.dtype=float64",
            "models.polcy — has no effect: no step uses model 'polcy' — did you mean 'policy'?",
        ),
        (
            "models.other.head=value",
            "no step uses model 'other' — remove it, or name it as the `model` of a step: sample",
        ),
    ],
)
def test_names_of_the_users_own_that_are_near_others(override: str, message: str, tmp_path: Path) -> None:
    assert message in refusal(tmp_path, BASE, override)


def test_a_model_that_no_step_uses_is_told_once(tmp_path: Path) -> None:
    plan = planned(tmp_path, BASE + "models: {polcy: {dtype: float64}}\n")
    (note,) = [note for note in plan.notes if "polcy" in note]
    assert note.endswith("mine.yaml:2: models.polcy has no effect: no step uses model 'polcy' — did you mean 'policy'?")
    plan = planned(tmp_path, BASE, "model@models.judge=tiny")
    assert "no step uses model 'judge'" in plan.notes
