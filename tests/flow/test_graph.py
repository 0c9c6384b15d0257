"""The graph, placement and models: what a plan refuses, and in which words."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from distflow.errors import RecipeError
from distflow.flow.recipe_check import check_imports, plan_recipe
from distflow.flow.step import GENERATED

Refused = Callable[..., str]


def test_a_flow_of_own_steps_is_planned(folder) -> None:
    plan = plan_recipe(folder.recipe)[1]
    assert [step.name for step in plan.steps] == ["sample", "reward", "advantage", "update"]
    read = [field for field in GENERATED if field not in ("prompt_ids", "task", "rollout_logprobs")]
    assert plan.edge("samples").fields == (*read, "reward", "rewards/*")


def test_the_order_follows_from_the_fields_not_from_the_file(folder) -> None:
    overrides = ["flow.steps.update.with.use_values=true", f"+flow.steps.late.call={folder.path}/steps.py:values"]
    plan = plan_recipe(folder.recipe, [*overrides, "+flow.steps.late.model=critic"])[1]
    assert [step.name for step in plan.steps] == ["sample", "reward", "advantage", "late", "update"]
    assert "prompt_ids" in plan.edge("samples").fields


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["~flow.steps.advantage"],
            "line: flow.steps.advantage — step 'update' reads the field 'advantage', which no step of the flow writes",
        ),
        (["~flow.steps.advantage"], 'add to flow.steps:  advantage: {call: "distflow.workers.trainer:advantage"}'),
        (
            ["flow.steps.update.with.use_values=true"],
            "reads the field 'values' because use_values is True, which no step of the flow writes",
        ),
        (
            ["flow.steps.again={call: ./steps.py:reward}"],
            "flow.steps.again — writes the field 'reward', and so does step 'reward' — keep one of them",
        ),
        (["~flow.steps.sample"], "no step has the role 'generate'"),
        (["layout.pools.rollout.roles=[generate]"], "no pool takes the role 'score' (step 'reward') — add score to"),
        (["layout.pools.trainer.roles=[train,score]"], "the pools rollout, trainer all take step 'reward'"),
        (["layout.pools.rollout.steps=[rewrd]"], "the flow has no step 'rewrd' — did you mean 'reward'?"),
        (
            ["layout.pools.trainer.count=9"],
            "command line: layout.pools.trainer.count — 8 ledgers are too few for 9 training workers — batch.ledgers=9",
        ),
        (
            ["layout.pools.idle.count=1"],
            "layout.pools.idle — the layout gives pool idle no roles, so no step runs on it",
        ),
        (
            [
                "layout.pools.trainer.roles=[]",
                "layout.pools.trainer.steps=[update]",
                "layout.pools.b.steps=[advantage]",
            ],
            "layout.pools.b.steps — step 'advantage' of role 'train', without a model, runs where the samples are",
        ),
        (["layout.pools.rollout.engine=tourch"], "there is no engine 'tourch' — did you mean 'torch'?"),
        (
            ["layout.pools.trainer.backend=megatron"],
            "there is no backend 'megatron' — allowed: deepspeed, fsdp, torch, or a class as module:name",
        ),
        (["layout.pools.trainer.zero=2"], "trainer.zero — backend 'torch' has no ZeRO stages — add backend: deepspeed"),
        (
            ["layout.pools.trainer.backend=deepspeed", "layout.pools.trainer.zero=4"],
            "layout.pools.trainer.zero — 4 should be less than or equal to 3",
        ),
        (
            [
                "layout.pools.trainer.backend=deepspeed",
                "layout.pools.trainer.zero=2",
                "layout.pools.trainer.backend_options={zero: 3}",
            ],
            "layout.pools.trainer.zero — 2, and layout.pools.trainer.backend_options.zero is 3 — keep one of them",
        ),
        (["layout.pools.rollout.each.7.threads=2"], "pool 'rollout' has no worker '7' — expected 0 to 1"),
        (["flow.steps.sample.model=polcy"], "flow.steps.sample.model — models has no 'polcy' — did you mean 'policy'?"),
        (["~flow.steps.sample.model"], "a generate step needs a model — add model: policy"),
        (["flow.steps.update.model=polici"], "models has no 'polici' — did you mean 'policy'?"),
        (["flow.steps.update.model=critic"], "no train step trains 'policy', which the flow generates with"),
        (["flow.steps.update=null"], "command line: flow.steps.update — no train step trains 'policy', which the flow"),
        (
            ["flow.steps.advantage.with.scal=2"],
            "flow.steps.advantage.with.scal — unknown setting — did you mean 'scale'?",
        ),
        (["flow.steps.advantage.with.scale=null"], "flow.steps.advantage.with.scale — expected a number, got null"),
        (["flow.steps.advantage.with.scale=big"], "flow.steps.advantage.with.scale — expected a number, got 'big'"),
        (["flow.steps.advantage.with.weights=0.5"], "with.weights — expected a list of numbers, or null, got 0.5"),
        (["flow.steps.reward.call=./steps.py:reword"], "defines no 'reword' at its top level; did you mean 'reward'?"),
        (["flow.steps.reward.call=./stepps.py:reward"], "there is no file"),
        (
            ["flow.steps.reward.call=reward"],
            "'reward' does not name a function: expected module:name or ./file.py:name",
        ),
        (["flow.steps.reward.with.function=./no.py:f"], "flow.steps.reward.with.function — "),
        (["data.source=distflow.data.arithmetic:copy_digit"], "data.source — distflow.data.arithmetic:copy_digit"),
        (["data.with.digit=3"], "data.with.digit — unknown setting — did you mean 'digits'?"),
        (
            ["models.policy.path=./nowhere"],
            "models.policy.path — there is no folder nowhere — correct the path; hub ids",
        ),
        (["models.policy.tokenizer=./nowhere"], "models.policy.tokenizer — there is no folder nowhere"),
        (["batch.ledgers=32", "batch.prompts=33"], "33 prompts do not divide into 32 ledgers"),
    ],
)
def test_one_mistake(overrides: list[str], message: str, refused: Refused) -> None:
    assert message in refused(*overrides)


def test_a_circle_is_refused(folder, refused: Refused) -> None:
    folder.step("@step(role='score', reads=['b'], writes=['a'])\ndef one(batch, ctx): ...\n")
    folder.step("@step(role='score', reads=['a'], writes=['b'])\ndef two(batch, ctx): ...\n")
    text = refused("flow.steps.one.call=./steps.py:one", "flow.steps.two.call=./steps.py:two")
    assert "the steps one, two wait for each other's fields" in text


def test_a_generating_step_cannot_read_what_only_training_writes(folder, refused: Refused) -> None:
    folder.step("@step(role='score', reads=['values'], writes=['bonus'])\ndef late(batch, ctx): ...\n")
    steps = ["flow.steps.values={call: ./steps.py:values,model: policy}", "flow.steps.late.call=./steps.py:late"]
    text = refused(*steps)
    assert "runs on pool 'rollout' and reads 'values', which step 'values' writes only after" in text
    assert "add late to the `steps` of the training pool" in text
    placed = plan_recipe(folder.recipe, [*steps, "layout.pools.trainer.steps=[late]"])[1]
    assert list(placed.home.steps) == ["advantage", "update", "values", "late"]


def test_only_score_steps_drop_samples(folder, refused: Refused) -> None:
    folder.step("@step(role='forward', reads=['response_ids'], writes=['drop_reason'])\ndef drops(batch, ctx): ...\n")
    text = refused("flow.steps.drops={call: ./steps.py:drops, model: reference}")
    assert "flow.steps.drops — has the role 'forward' and writes 'drop_reason', by which only score steps" in text


DROPS = """\
@step(role='score', reads=['reward'], writes=[], may_write=['drop_reason'])
def filter(batch, ctx, *, on_error: str = 'drop'): ...

@step(role='score', reads=['reward'], writes=[])
def named(batch, ctx, *, only: bool = False):
    return batch.with_columns(drop_reason=reasons(batch)) if only else batch

@step(role='score', reads=['values'], writes=['drop_reason'])
def late(batch, ctx): ...
"""


def test_samples_that_have_arrived_are_not_dropped(folder, refused: Refused) -> None:
    folder.step(DROPS)
    step = "flow.steps.filter.call=./steps.py:filter"
    there = "layout.pools.trainer.steps=[filter]"
    text = refused(step, there)
    assert "flow.steps.filter — may drop samples and runs on pool 'trainer' after they have arrived" in text
    assert "add filter to the `steps` of 'rollout', or of a service, or set on_error to zero or stop" in text
    assert plan_recipe(folder.recipe, [step])[1].pool("rollout").steps == ("sample", "reward", "filter")
    for good in ([step, there, "flow.steps.filter.with.on_error=zero"], [step, "layout=colocated"]):
        plan_recipe(folder.recipe, good)
    late = ["flow.steps.values={call: ./steps.py:values,model: policy}", "flow.steps.late.call=./steps.py:late"]
    assert "let it read only what is written before the samples are sent" in refused("layout=colocated", *late)


def test_a_step_that_may_drop_samples_that_have_arrived_is_told(folder) -> None:
    folder.step(DROPS)
    step = "flow.steps.named.call=./steps.py:named"
    (warning,) = plan_recipe(folder.recipe, [step, "layout.pools.trainer.steps=[named]"])[1].warnings
    assert warning.startswith("warning: step 'named' names drop_reason or left_out and runs on pool 'trainer': a")
    assert plan_recipe(folder.recipe, [step])[1].warnings == ()


def test_the_shipped_rewards_on_the_training_pool(refused: Refused) -> None:
    """They drop what they cannot judge, unless they are told not to."""
    there = "layout.pools.trainer.steps=[reward]"
    with pytest.raises(RecipeError, match=r"flow\.steps\.reward — may drop samples .* or set on_error to zero or stop"):
        plan_recipe("quickstart", [there])
    with pytest.raises(RecipeError, match=r"reward — may leave samples out .* or set on_error to zero or stop"):
        plan_recipe("quickstart", [there, "flow.steps.reward.with.on_error=leave_out"])
    plan_recipe("quickstart", [there, "flow.steps.reward.with.on_error=stop"])


def test_what_a_step_may_write_is_part_of_the_plan() -> None:
    steps = {step.name: step for step in plan_recipe("quickstart", ["run.dump_fields=[rewards/part]"])[1].steps}
    assert steps["reward"].may_write == ("rewards/*", "extra/*", "drop_reason", "left_out")


def test_on_one_worker_such_a_step_runs_behind_the_crossing(folder) -> None:
    folder.step("@step(role='score', reads=['values'], writes=['bonus'])\ndef late(batch, ctx): ...\n")
    steps = ["flow.steps.values={call: ./steps.py:values,model: policy}", "flow.steps.late.call=./steps.py:late"]
    plan = plan_recipe(folder.recipe, ["layout=colocated", *steps])[1]
    assert plan.edge("samples").steps == ("sample", "reward")


def test_a_plugin_with_the_wrong_signature(folder, refused: Refused) -> None:
    folder.write("mine.py", "def bad(prompt, response): ...\ndef good(sample): ...\n")
    shipped = "flow.steps.reward={call: 'distflow.workers.reward:verify'}"
    name = "flow.steps.reward.with.function"
    text = refused(shipped, f"{name}=./mine.py:bad")
    assert "'bad' has the wrong signature (prompt, response) — expected def bad(sample)" in text
    assert name not in refused(shipped, f"{name}=./mine.py:good", "flow.steps.update.with.x=1")


REWARD = "flow.steps.reward={call: 'distflow.workers.reward:verify'}"
UPDATE = "flow.steps.update={call: 'distflow.workers.trainer:update'}"
ADVANTAGE = "flow.steps.advantage={call: 'distflow.workers.trainer:advantage'}"
OR_FUNCTION = ", or a function as module:name or ./file.py:name"


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            [REWARD, "flow.steps.reward.with.function=exactmatch"],
            "flow.steps.reward.with.function — there is no 'exactmatch' — did you mean 'exact_match'? "
            "allowed: digits_copied, exact_match, format, length_penalty, math, reasoning_gym, regex" + OR_FUNCTION,
        ),
        (
            [REWARD, "flow.steps.reward.with.on_error=a.b:c"],
            "flow.steps.reward.with.on_error — there is no 'a.b:c' — allowed: drop, leave_out, stop, zero",
        ),
        (
            [UPDATE, "flow.steps.update.with.loss=poo"],
            "there is no 'poo' — did you mean 'ppo'? allowed: aipo, cispo, decoupled_ppo, gspo, ppo, reverse_kl"
            + OR_FUNCTION,
        ),
        ([UPDATE, "flow.steps.update.with.kl=k4"], "flow.steps.update.with.kl — there is no 'k4' — "),
        (
            [UPDATE, "flow.steps.update.with.aggregate=token-meen"],
            "there is no 'token-meen' — did you mean 'token-mean'?",
        ),
        (
            [UPDATE, f"flow.steps.update.with.aggregate=seq-mean-token-sum-norm/{'9' * 5000}"],
            "there is no 'seq-mean-token-sum-norm/9999999999",
        ),
        *(
            (
                [UPDATE, f"flow.steps.update.with.aggregate=seq-mean-token-sum-norm{constant}"],
                f"there is no 'seq-mean-token-sum-norm{constant}' — did you mean 'seq-mean-token-sum-norm/N'?",
            )
            for constant in ("", "/", "/0", "/1.5")
        ),
    ],
)
def test_a_name_that_is_no_choice(overrides: list[str], message: str, refused: Refused) -> None:
    assert message in refused(*overrides)


@pytest.mark.parametrize(
    "override",
    [
        "reward.with.function=math",
        "reward.with.on_error=zero",
        "update.with.kl=k1",
        "update.with.aggregate=seq-mean-token-sum-norm/1024",
        "update.with.loss=./mine.py:loss",
        "advantage.with.normalize=none",
    ],
)
def test_a_name_that_is_a_choice(override: str, folder) -> None:
    folder.write("mine.py", "def loss(terms, *, clip=1): ...\n")
    step, _, setting = override.replace(".with.", "=").partition("=")
    key, _, value = setting.partition("=")
    plan = plan_recipe("quickstart", [f"flow.steps.{override}"])[1]
    settings = next(found.settings for found in plan.steps if found.name == step)
    assert str(settings[key]).endswith(value.removeprefix("./"))


def test_a_field_that_nobody_writes_is_told_where_the_call_was_replaced(folder, refused: Refused) -> None:
    folder.step("@step(role='train', reads=['bonus'], writes=[])\ndef greedy(batch, ctx): ...\n")
    lines = ["defaults: [quickstart, _self_]", "flow:", "  steps:", "    update:", "      call: ./steps.py:greedy"]
    folder.write("mine.yaml", "\n".join(lines) + "\n")
    assert "mine.yaml:5: flow.steps.update — reads the field 'bonus', which no step of the flow writes" in refused()


@pytest.mark.parametrize(
    "signature", ["terms", "terms, *, clip", "terms, *, clip=(0.1, 0.1), eps=0.1", "terms, **rest"]
)
def test_a_loss_takes_settings_of_its_own(signature: str, folder) -> None:
    folder.write("mine.py", f"def loss({signature}): ...\n")
    overrides = ["flow.steps.update.with.loss=./mine.py:loss"]
    overrides += ["flow.steps.update.with.clip=[0.2,0.3]"] if "clip" in signature else []
    loaded, plan = plan_recipe("quickstart", overrides)
    assert check_imports(plan, loaded.origin) == []
    settings = next(step for step in plan.steps if step.name == "update").settings
    assert settings.get("clip") == ([0.2, 0.3] if "clip" in signature else None)
    assert settings.get("eps") == (0.1 if "eps" in signature else None)
    assert settings["kl"] == "k3"


@pytest.mark.parametrize("signature", ["", "terms, old", "logprobs_BT, old_logprobs_BT, advantages_BT, *, clip"])
def test_a_loss_with_other_arguments_is_refused(signature: str, folder, refused: Refused) -> None:
    folder.write("mine.py", f"def loss({signature}): ...\n")
    text = refused(UPDATE, "flow.steps.update.with.loss=./mine.py:loss")
    assert f"'loss' has the wrong signature ({signature}) — expected def loss(terms, *, setting=default, …)" in text


@pytest.mark.parametrize(
    "source, given, message",
    [
        ("def loss(terms, *, clip): ...", "", "update.with.clip — required, but not given"),
        ("def loss(terms, *, clip): ...", "clip=high", ""),
        ("def loss(terms, *, clip: float): ...", "clip=high", "update.with.clip — expected a number, got 'high'"),
        ("def loss(terms, *, clip=1.0): ...", "clib=2.0", "update.with.clib — unknown setting — did you mean 'clip'?"),
        ("def loss(terms, *, clip=1.0): ...", "cap=null", ""),
        ("def loss(terms, *, kl=1.0): ...", "", "'loss' has a setting 'kl', and so has the step itself: rename it"),
        ("class loss: ...", "", "'loss' is a class; expected a plain function"),
    ],
)
def test_settings_of_a_loss_are_checked(source: str, given: str, message: str, folder, refused: Refused) -> None:
    folder.write("mine.py", source + "\n")
    overrides = [f"flow.steps.update.with.{given}"] if given else []
    if message:
        assert message in refused(UPDATE, "flow.steps.update.with.loss=./mine.py:loss", *overrides)
    else:
        plan_recipe("quickstart", ["flow.steps.update.with.loss=./mine.py:loss", *overrides])


@pytest.mark.parametrize(
    "body, missing",
    [
        ("terms.logprobs - terms.ref_logprobs", "ref_logprobs"),
        ("terms['teacher']", "teacher"),
        ("terms['teacher'] if terms.has('teacher') else terms.logprobs", None),
        ("terms.ref_logprobs if terms.has('ref_logprobs') else terms.logprobs", None),
        ("terms.advantages * terms.old_logprobs * terms.mask * terms.lengths", None),
        ("terms.logprobs.ref_logprobs", None),
    ],
)
def test_fields_that_a_loss_reads_are_found_in_its_source(
    body: str, missing: str | None, folder, refused: Refused
) -> None:
    folder.write("mine.py", f"def loss(terms):\n    return {body}\n")
    chosen = "flow.steps.update.with.loss=./mine.py:loss"
    if missing is None:
        plan_recipe("quickstart", [chosen])
        return
    because = "because loss is "
    assert f"flow.steps.update — reads the field {missing!r} {because}" in refused(UPDATE, chosen)


def test_a_field_that_a_loss_asks_for_is_read_where_a_step_writes_it(folder) -> None:
    folder.write("mine.py", "def loss(terms):\n    return terms['ref_logprobs'] if terms.has('ref_logprobs') else 0\n")
    chosen = ["flow.steps.update.with.loss=./mine.py:loss"]
    reference = "flow.steps.reference={call: 'distflow.workers.reference:ref_logprobs', model: reference}"
    for overrides, read in ((chosen, False), ([*chosen, reference], True)):
        _, plan = plan_recipe("quickstart", overrides)
        update = next(step for step in plan.steps if step.name == "update")
        assert ("ref_logprobs" in update.reads) == read


def test_an_advantage_reads_what_its_function_takes(folder, refused: Refused) -> None:
    folder.write("mine.py", "def own(rewards_B, values_B): ...\ndef scaled(lengths_B, rewards_B, *, scale=2.0): ...\n")
    text = refused(ADVANTAGE, "flow.steps.advantage.with.function=./mine.py:own")
    assert "'own' has the wrong signature (rewards_B, values_B) — expected def own(rewards_B, group_B, " in text
    assert "with any of these arguments" in text
    text = refused(ADVANTAGE, "flow.steps.advantage.with.function=remax")
    assert "reads the field 'baseline' because function is 'remax'" in text
    _, plan = plan_recipe("quickstart", ["flow.steps.advantage.with.function=./mine.py:scaled"])
    advantage = next(step for step in plan.steps if step.name == "advantage")
    assert set(advantage.reads) == {"response_ids", "response_mask", "left_out", "reward"}
    assert advantage.settings["scale"] == 2.0


def test_problems_of_different_sections_are_reported_together(refused: Refused) -> None:
    text = refused("run.sed=1", "batch.prompts=33", "flow.steps.advantage.with.scal=2", "data.with.digit=1")
    for part in ("run.sed — unknown key", "33 prompts", "advantage.with.scal — unknown", "data.with.digit — unknown"):
        assert part in text
    assert len(text.splitlines()) == 4


def test_a_model_with_a_value_head_generates_nothing(refused: Refused) -> None:
    text = refused("models.policy.head=value")
    assert "models.policy.head — step 'sample' generates with it, and a model with `head: value` has no next " in text


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["batch.minibatches=3"], "batch.minibatches — 3 mini-batches do not divide the 4 prompts of a ledger"),
        (["batch.target_kl=0.1"], "batch.target_kl — target_kl leaves out further epochs, and there is only one"),
        (["batch.critic_warmup=5"], "batch.critic_warmup — this flow trains no critic — 0, or flow=ppo"),
        (
            ["batch.epochs=2", "flow.steps.old_logprobs=null"],
            "reads the field 'old_logprobs' because batch.minibatches × batch.epochs is more than 1",
        ),
    ],
)
def test_updates_that_cannot_be(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        plan_recipe("quickstart", [o if "null" not in o else "~flow.steps.old_logprobs" for o in overrides])


def test_old_log_probs_are_computed_only_if_there_are_several_updates() -> None:
    for overrides, there in (([], False), (["batch.epochs=2"], True), (["batch.minibatches=2"], True)):
        plan = plan_recipe("quickstart", overrides)[1]
        assert any(step.name == "old_logprobs" for step in plan.steps) == there
        assert plan.streamed != there


def test_missing_model_folders_are_found_beside_other_mistakes(refused: Refused) -> None:
    text = refused("run.sed=1", "models.policy.path=./nowhere")
    assert "there is no folder nowhere" in text
    assert "run.sed" in text


@pytest.mark.parametrize(
    ("layout", "pools"),
    [("split", ["rollout", "trainer"]), ("async", ["rollout", "trainer"]), ("colocated", ["worker"])],
)
def test_the_layouts_that_a_cure_names_have_these_pools(layout: str, pools: list[str]) -> None:
    assert list(plan_recipe("quickstart", [f"layout={layout}"])[1].recipe.layout.pools) == pools
