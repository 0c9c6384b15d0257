"""What the `val` section of a recipe means for the plan, and what is refused."""

from __future__ import annotations

import pytest

from distflow.config.load import load_recipe
from distflow.config.paths import shipped_recipes
from distflow.errors import RecipeError
from distflow.flow.digest import digest_parts
from distflow.flow.plan import Plan
from distflow.flow.plan_text import plan_data, render_page
from distflow.flow.planner import make_plan
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.script import render_script
from distflow.flow.validation import before_training
from distflow.types import WorkerName


def plan(*overrides: str) -> Plan:
    loaded = load_recipe("quickstart", overrides)
    return make_plan(loaded.recipe, loaded.origin)


@pytest.mark.parametrize(
    "overrides, versions",
    [
        (["val.every=3"], (0, 3, 6, 8)),
        (["val.every=4"], (0, 4, 8)),
        (["val.every=4", "val.at_start=false"], (4, 8)),
        (["val.every=100"], (0, 8)),
        (["val.every=100", "val.at_start=false"], (8,)),
        (["val.prompts=5"], (0, 8)),
        (["val.at_start=false"], (8,)),
        (["val.every=3", "run.training_steps=0"], (0,)),
        (["val.at_start=false", "run.training_steps=0"], (0,)),
    ],
)
def test_when_it_is_due(overrides: list[str], versions: tuple[int, ...]) -> None:
    val = plan("run.training_steps=8", *overrides).val
    assert val is not None
    assert val.versions == versions


def test_what_it_samples() -> None:
    made = plan("val.every=3", "val.sampling={max_new_tokens: 32, temperature: 0}", "val.samples_per_prompt=4")
    assert made.val is not None
    assert made.val.settings["max_new_tokens"] == 32
    assert made.val.data == made.recipe.data
    # Engines have room for it; what training reserves is its own.
    assert made.engine_tokens("policy") == made.recipe.data.max_prompt_tokens + 32
    assert made.longest_sample("policy") == made.recipe.data.max_prompt_tokens + 4
    assert "4 samples each of all prompts of the training data, max_new_tokens 32, temperature 0" in render_page(made)
    assert plan_data(made)["val"]["versions"][:2] == (0, 3)


def test_its_prompts_are_written_like_those_of_training() -> None:
    alike = ["data.chat=true", "data.chat_template_args={enable_thinking: false}", "data.max_prompt_tokens=99"]
    other = ["val.data={source: distflow.data.arithmetic:digit_copy}", *alike]
    for overrides, tokens in ((other, 99), ([*other, "val.data.max_prompt_tokens=7"], 7)):
        recipe = load_recipe("quickstart", overrides).recipe
        assert recipe.val is not None
        assert recipe.val.data is not None
        data = recipe.val.data
        assert (data.chat, data.chat_template_args, data.max_prompt_tokens) == (
            True,
            {"enable_thinking": False},
            tokens,
        )


def test_peers_must_agree_on_it() -> None:
    without, made, other = plan(), plan("val.every=3"), plan("val.every=3", "val.prompts=5")
    assert len({digest_parts(one)["val"] for one in (without, made, other)}) == 3


def test_a_colocated_worker_generates_once_more_at_the_end() -> None:
    made = plan("val.every=3", "layout=colocated", "run.training_steps=8", "run.stop_after=5")
    assert 'w.generate("sample", w.validation(5))' in render_script(made, WorkerName("worker", 0))
    assert "w.validation" not in render_script(plan("layout=colocated"), WorkerName("worker", 0))
    assert "w.validation" not in render_script(plan("val.every=3"), WorkerName("rollout", 0))


HELD_OUT = ("flow=dpo", "val.every=3", "val.data.source=distflow.data.arithmetic:copy_digits")
ALONE = "layout.pools.checks={roles: [validate], count: 2, slots: 512}"


def test_a_pool_of_its_own_does_what_the_generating_pool_does() -> None:
    made = plan("val.every=3", ALONE)
    assert [pool.name for pool in made.pools] == ["rollout", "trainer", "checks"]
    assert made.validating == made.pool("checks")
    assert made.pool("checks").steps == made.pool("rollout").steps
    assert made.worker(WorkerName("checks", 1)).slots == 512, "not bounded by the batch of training"
    assert {edge.source for edge in made.edges if edge.kind == "lease"} == {"rollout", "checks"}
    assert 'w.send("val_samples", groups)' in render_script(made, WorkerName("checks", 0))
    assert "validates policy" in render_page(made)


def test_it_asks_the_services_that_the_generating_pool_asks() -> None:
    made = plan("val.every=3", ALONE, "layout=services", "layout.pools.judge={steps: [reward]}")
    assert [edge.source for edge in made.edges if edge.name == "reward"] == ["rollout", "checks"]
    script = 'for batch in w.requests("reward"):'
    assert script in render_script(made, WorkerName("judge", 0))


def test_rows_that_are_held_out_are_measured_by_the_training_workers() -> None:
    made = plan(*HELD_OUT, "val.prompts=5", "run.training_steps=8", ALONE)
    assert made.val is not None
    assert made.val.versions == (0, 3, 6, 8)
    assert made.validating is None
    assert "pool 'checks' is left out: no validation generates" in made.notes
    assert "loss and metrics of the first 5 rows of distflow.data.arithmetic:copy_digits, by the tr" in render_page(
        made
    )
    assert [str(worker.name) for worker in made.workers] == ["trainer/0"]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["val.prompts=512"], "before training step 1 512 samples are validated (val.at_start=false leaves that out)"),
        (
            ["val.prompts=8", "val.samples_per_prompt=4"],
            "before training step 1 32 samples (8 prompts × 4) are validat",
        ),
        (["val.every=2"], "validated (val.prompts=N takes the first N prompts, val.at_start=false leaves that out)"),
        (["val.every=2", "val.at_start=false"], ""),
        ([], ""),
    ],
)
def test_what_is_validated_before_training_is_said(overrides: list[str], told: str) -> None:
    found = before_training(plan_recipe("quickstart", overrides)[1])
    assert told in found
    assert bool(told) == bool(found)


def test_without_validation_it_is_left_out() -> None:
    made = plan(ALONE)
    assert made.validating is None
    assert "pool 'checks' is left out: no validation generates" in made.notes


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["run.keep_best=val/avg@1", "run.save_every=3"], "run.keep_best — val/avg@1 is measured by validation"),
        (["val.every=3", "run.keep_best=val/avg@2", "run.save_every=3"], "does not measure val/avg@2"),
        (
            ["val.every=7", "run.keep_best=val/avg@1", "run.save_every=100"],
            "no checkpoint is due after a training step",
        ),
        (["val.every=3", "layout=colocated", ALONE], "gives its weights to no other pool: not built yet"),
        (["val.every=3", "layout.pools.checks={roles: [validate, score]}"], "a pool for validation does nothing else"),
        (["val.every=3", ALONE, "layout.pools.more={roles: [validate]}"], "pool 'checks' has the role 'validate'"),
        (["val.every=0"], "val.every"),
        (["run.training_steps=0"], "run.training_steps — 0 is for validation alone"),
        (["val.every=3", "val.sampling={temprature: 1}"], "val.sampling.temprature — unknown setting"),
        (["val.every=3", "val.sampling={temperature: warm}"], "val.sampling.temperature — expected a number"),
        (["val.every=3", "val.data={source: nowhere.py:prompts}"], "val.data.source"),
        (
            ["run.stop_when={metric: val/avg@1, at_least: 1}"],
            "run.stop_when.metric — val/avg@1 is measured by validation",
        ),
        (["val.every=3", "run.stop_when={metric: val/best, at_least: 1}"], "does not measure val/best"),
        (["val.every=null", "run.stop_when={metric: val/avg@1, at_least: 1}"], "only before the first training step"),
        (["run.stop_when={metric: critic/score}"], "run.stop_when — expected one of at_least and at_most"),
        (["val.every=3", "flow=self_play"], "val — this flow generates with a further model"),
        (["val.every=3", "flow=sft"], "val.data — step 'read' reads the samples from the data, and nothing is gen"),
        ([*HELD_OUT, "val.samples_per_prompt=4"], "val.samples_per_prompt — step 'read' reads the samples"),
        ([*HELD_OUT, "val.sampling={temperature: 1}"], "val.sampling — step 'read' reads the samples"),
        ([*HELD_OUT, "run.keep_best=val/loss", "run.save_every=3"], "run.keep_best_mode — max would keep"),
    ],
)
def test_what_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        plan(*overrides)
    assert message in str(error.value)


JUDGED = ["run.save_every=4", "run.keep_best=val/avg@1", "run.stop_when={metric: val/avg@1, at_least: 1}"]


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_run_that_is_cut_short_before_its_first_validation_is_told_so(steps: int) -> None:
    _, made = plan_recipe("quickstart", ["val.every=4", *JUDGED, f"run.training_steps={steps}"])
    assert made.val is not None
    assert made.val.versions == (0, steps)
    why = f"has no effect: run.training_steps is {steps}, so validation is only before the first and after the last"
    for key in ("run.stop_when", "run.keep_best"):
        assert any(f"{key} {why}" in warning for warning in made.warnings)
    _, longer = plan_recipe("quickstart", ["val.every=4", *JUDGED, "run.training_steps=5"])
    assert not any("validation" in warning for warning in longer.warnings)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_every_shipped_recipe_can_be_tried_with_a_few_steps(steps: int) -> None:
    for name in shipped_recipes():
        if name != "reasoning":
            plan_recipe(name, [f"run.training_steps={steps}"], need_files=False)
