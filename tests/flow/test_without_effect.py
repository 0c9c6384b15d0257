"""Keys that are given and change nothing: overrides are refused, a user's own files get a warning, ours none."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from distflow.errors import RecipeError
from distflow.flow.recipe_check import plan_recipe
from tests.flow.conftest import TEACHER, Folder

ROLLOUT, TRAINER = "layout.pools.rollout", "layout.pools.trainer"
SERVICES = "layout=services"
NOTHING = "generates nothing — remove it, or set it for pool 'rollout'"
NO_MODEL = "pool 'rollout' trains and holds no model — remove it, or set it for pool 'trainer'"
FLOWS = sorted(path.stem for path in (Path(__file__).parents[2] / "recipes" / "flow").glob("*.yaml"))
REFERENCE = ("flow=grpo_kl", "models.reference.head=tokens")


@pytest.mark.parametrize(
    ("overrides", "key", "why"),
    [
        ((), f"{TRAINER}.engine=sglang", f"pool 'trainer' {NOTHING}"),
        ((), f"{TRAINER}.engine_options={{packed: true}}", NOTHING),
        ((), f"{TRAINER}.slots=8", NOTHING),
        ((), f"{TRAINER}.each.0.slots=8", NOTHING),
        ((), f"{ROLLOUT}.backend=fsdp", NO_MODEL),
        ((), f"{ROLLOUT}.each.1.backend_options={{packed: true}}", NO_MODEL),
        ((f"{ROLLOUT}.backend=deepspeed",), f"{ROLLOUT}.zero=2", NO_MODEL),
        ((), f"{ROLLOUT}.sample_memory_mb=9000", "pool 'rollout' trains nothing, .* for pool 'trainer'"),
        ((SERVICES,), "layout.pools.reward.device=cpu", "pool 'reward' has neither an engine nor a model"),
        ((), "layout.stealing=true", f"has one worker, and none to share with .* {TRAINER}.count=2 or more"),
        (REFERENCE, "models.reference.optimizer.lr=0.1", "no step trains model 'reference'"),
        (REFERENCE, "models.reference.gradient_checkpointing=true", "no step trains model 'reference'"),
        ((), "models.policy.optimizer.momentum=0.5", "name is 'adamw', and only muon has it"),
        ((), "models.policy.optimizer.decay_steps=5", "schedule is 'constant', and only wsd has a decay"),
        ((), "models.policy.optimizer.min_lr=1e-9", "schedule is 'constant', which never decays"),
        (("models.policy.dtype=bfloat16",), "weights.encoding=bf16", "the weights are in bfloat16, which is not"),
        (REFERENCE, "models.reference.tokenizer=chars:01", "model 'reference' is a copy of 'policy', and has its"),
    ],
)
def test_what_a_pool_or_model_does_not_do_is_refused_on_the_command_line(
    overrides: tuple[str, ...], key: str, why: str
) -> None:
    name = key.partition("=")[0].replace(".", r"\.")
    with pytest.raises(RecipeError, match=rf"command line: {name} — has no effect: .*{why}"):
        plan_recipe("quickstart", [*overrides, key])


@pytest.mark.parametrize(
    ("overrides", "key", "why"),
    [
        (["run.dump_rollouts=0"], "run.dump_limit_mb=7", "run.dump_rollouts is 0: nothing is dumped"),
        (["run.dump_rollouts=0"], "run.trackers.tensorboard.samples=4", "run.dump_rollouts is 0: there are no samples"),
        (["run.trace=false"], "run.trace_limit_mb=7", "run.trace is false"),
        (["run.training_steps=5"], "run.hf_every=6", "run.training_steps is 5, so no folder is ever due"),
        (["run.training_steps=5"], "run.stop_after=6", "run.training_steps is 5"),
        ([], "run.keep_best=critic/score", "only the last state is saved"),
        ([], "flow.steps.update.with.kl=k1", "kl_coef is 0.0 — remove it, or set kl_coef"),
        (["flow=ppo"], "flow.steps.token_rewards.with.kl=k2", "kl_coef is 0.0"),
        ([], "flow.steps.reward.with.processes=9", "timeout_s is None"),
        (["flow.steps.sample.with.temperature=0"], "flow.steps.sample.with.top_k=3", "temperature is 0"),
    ],
)
def test_what_another_setting_switches_off_is_a_warning(overrides: list[str], key: str, why: str) -> None:
    name, _, _ = key.partition("=")
    plan = plan_recipe("quickstart", [*overrides, key])[1]
    told = [text for text in plan.warnings if "no effect" in text]
    assert len(told) == 1
    assert told[0].startswith(f"warning: command line: {name} has no effect: ")
    assert why in told[0]
    assert set(told) <= set(plan.notes), "the page and `validate` show it too"
    assert not [text for text in plan_recipe("quickstart", overrides)[1].warnings if "no effect" in text]


def test_a_file_of_the_users_may_serve_several_layouts(folder: Folder) -> None:
    folder.write("mine.yaml", "defaults: [quickstart, _self_]\nlayout: {pools: {trainer: {slots: 8}}}\n")
    (told,) = [text for text in plan_recipe(folder.recipe)[1].warnings if "no effect" in text]
    assert told.startswith(f"warning: mine.yaml:2: {TRAINER}.slots has no effect: pool 'trainer' generates nothing")
    run_folder = folder.write("recipe.yaml", _resolved(folder))
    again = plan_recipe(str(run_folder), resolved=True)[1]
    assert not [text for text in again.warnings if "no effect" in text], "it was told when the run began"


def _overrides(flow: str) -> list[str]:
    return [f"flow={flow}", *([TEACHER] if flow == "distill" else [])]


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("layout", ["split", "async", "colocated", "services", "critic"])
def test_shipped_files_are_silent(flow: str, layout: str) -> None:
    plan = plan_recipe("quickstart", [*_overrides(flow), f"layout={layout}"])[1]
    assert not [text for text in plan.warnings if "no effect" in text]


@pytest.mark.parametrize("flow", FLOWS)
def test_shipped_flows_have_what_several_updates_need(flow: str) -> None:
    plan = plan_recipe("quickstart", [*_overrides(flow), "batch.epochs=2"])[1]
    # Losses on samples of the data have no ratio to a policy that sampled them.
    assert plan.reads or "old_logprobs" in [step.name for step in plan.steps]
    assert plan.warnings == ()


def test_a_run_that_repeats_to_the_last_bit_leases_in_the_order_of_the_data() -> None:
    with pytest.raises(RecipeError, match=r"layout\.schedule — has no effect: run\.deterministic is true: groups are"):
        plan_recipe("quickstart", ["run.deterministic=true", "layout.schedule=longest_first"])


def test_samples_that_are_read_from_the_data_have_no_schedule() -> None:
    with pytest.raises(RecipeError, match=r"layout\.schedule — has no effect: step 'read' reads the samples from the"):
        plan_recipe("quickstart", ["flow=sft", "layout.schedule=longest_first"])


def test_what_does_have_an_effect_passes() -> None:
    plan_recipe("quickstart", ["layout.schedule=longest_first"])
    plan_recipe("quickstart", ["flow=grpo_kl", SERVICES, "layout.pools.reference.backend_options={packed: true}"])
    plan_recipe("quickstart", [f"{TRAINER}.count=2", "layout.stealing=true", "layout.hedging=true"])
    plan_recipe("quickstart", [f"{TRAINER}.slots=64", f"{ROLLOUT}.backend=torch"])  # nothing else would happen
    critic = ["flow=ppo", "layout=critic", "models.critic.optimizer.lr=0.1"]
    plan_recipe("quickstart", [*critic, "layout.pools.critic.sample_memory_mb=999"])


@pytest.mark.parametrize(("key", "allowed"), [("hedging", "repeatable"), ("partial_rollouts", "replay")])
def test_the_environment_of_a_generate_step_decides_what_may_be_done_with_its_samples(
    folder: Folder, key: str, allowed: str
) -> None:
    plan_recipe(folder.recipe, [f"layout.{key}=true"])
    folder.change('scope="group")\nasync', 'scope="group", environment=[])\nasync')
    folder.change("max_new_tokens: int = 4)", "max_new_tokens: int = 4, max_tokens: int = 8)")
    plan_recipe(folder.recipe)
    with pytest.raises(RecipeError, match=rf"layout\.{key} — has no effect: .* declare .*{allowed}"):
        plan_recipe(folder.recipe, [f"layout.{key}=true"])


def test_a_policy_that_is_never_trained_is_a_warning() -> None:
    (told,) = plan_recipe("quickstart", ["flow=ppo", "run.training_steps=4", "batch.critic_warmup=4"])[1].warnings
    assert told == "warning: batch.critic_warmup is 4, and run.training_steps 4: the policy is never trained"


def test_a_kl_term_in_the_reward_and_in_the_loss_is_a_warning() -> None:
    in_loss = "flow.steps.update.with.kl_coef=0.1"
    (told,) = plan_recipe("quickstart", ["flow=reinforce_plus_plus", in_loss])[1].warnings
    assert "kl_coef is 0.01 in step 'token_rewards', in the reward, and 0.1 in step 'update', in the loss" in told
    one = "flow.steps.token_rewards.with.kl_coef=0"
    for overrides in (["flow=reinforce_plus_plus"], ["flow=reinforce_plus_plus", in_loss, one], ["flow=grpo_kl"]):
        assert plan_recipe("quickstart", overrides)[1].warnings == ()


def _resolved(folder: Folder) -> str:
    return yaml.safe_dump(plan_recipe(folder.recipe)[0].resolved)
