"""What a recipe gives and the flow has no work for is left out, and the plan says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from distflow.errors import RecipeError
from distflow.flow.digest import digest_parts
from distflow.flow.document import Place, document_text, read_worker_document, worker_document
from distflow.flow.plan import Plan
from distflow.flow.plan_text import render_page
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.script import render_script
from distflow.types import WorkerName
from tests.flow.conftest import Folder

NO_KL = ["flow=grpo_kl", "flow.steps.update.with.kl_coef=0"]
VALUES = "flow.steps.values={call: ./steps.py:values, model: critic}"
JUDGE = ["layout.pools.judge.roles=[score]", "layout.pools.rollout.steps=[reward]"]


def planned(*overrides: str) -> Plan:
    return plan_recipe("quickstart", overrides)[1]


def test_a_forward_step_whose_field_nobody_reads_is_left_out() -> None:
    plan = planned(*NO_KL)
    assert [step.name for step in plan.steps] == ["sample", "reward", "advantage", "update"]
    assert "reference" not in render_script(plan, WorkerName("trainer", 0))
    assert plan.worker(WorkerName("trainer", 0)).models == ("policy",)
    assert [model.name for model in plan.models] == ["policy"]
    assert plan.notes == ("step 'reference' is left out: nothing reads ref_logprobs",)
    assert plan.notes[0] in render_page(plan)
    assert "reference" in [step.name for step in planned("flow=grpo_kl").steps]


def test_its_model_stays_in_the_recipe() -> None:
    """A run that sets kl_coef to 0 can be resumed from the checkpoints that it wrote before."""
    assert planned(*NO_KL).recipe.models == planned("flow=grpo_kl").recipe.models


@pytest.mark.parametrize("read", [["run.dump_fields=[ref_logprobs]"], ["run.dump_fields=['ref_*']"]])
def test_what_is_dumped_is_read(read: list[str]) -> None:
    assert "reference" in [step.name for step in planned(*NO_KL, *read).steps]
    assert "reference" not in [step.name for step in planned(*NO_KL, *read, "run.dump_rollouts=0").steps]


def test_fields_of_a_users_own_step_are_dumped_unless_nothing_is(folder: Folder) -> None:
    def names(*overrides: str) -> list[str]:
        return [step.name for step in plan_recipe(folder.recipe, [VALUES, *overrides])[1].steps]

    assert "values" in names()
    assert "values" not in names("run.dump_fields=[]")
    assert "values" in names("run.dump_fields=[]", "flow.steps.update.with.use_values=true")


def test_a_step_that_only_feeds_such_a_step_is_left_out_too(folder: Folder) -> None:
    folder.step("@step(role='forward', reads=['values'], writes=['spread'])\ndef spread(batch, ctx): ...\n")
    folder.step("@step(role='forward', reads=['values'], writes=[])\ndef measure(batch, ctx): ...\n")
    spread = "flow.steps.spread={call: ./steps.py:spread, model: critic}"
    plan = plan_recipe(folder.recipe, [VALUES, spread, "run.dump_fields=[]"])[1]
    assert [step.name for step in plan.steps] == ["sample", "reward", "advantage", "update"]
    assert len([note for note in plan.notes if "is left out" in note and "old_logprobs" not in note]) == 2
    measure = "flow.steps.measure={call: ./steps.py:measure, model: critic}"
    kept = plan_recipe(folder.recipe, [VALUES, measure, "run.dump_fields=[]"])[1]
    assert {"values", "measure"} <= {step.name for step in kept.steps}, "a step that writes nothing is there for itself"


def test_score_and_train_steps_stay(folder: Folder) -> None:
    folder.step("@step(role='score', reads=['response_ids'], writes=['length'])\ndef length(batch, ctx): ...\n")
    folder.step("@step(role='train', reads=['advantage'], writes=['spare'])\ndef spare(batch, ctx): ...\n")
    steps = ["flow.steps.length.call=./steps.py:length", "flow.steps.spare.call=./steps.py:spare"]
    plan = plan_recipe(folder.recipe, [*steps, "run.dump_fields=[]"])[1]
    assert {"length", "spare"} <= {step.name for step in plan.steps}


def test_a_pool_of_which_the_flow_needs_nothing_is_left_out(tmp_path: Path) -> None:
    plan = planned(*JUDGE, "layout.pools.judge.count=3")
    assert "pool 'judge' is left out: no step of the flow runs on it" in plan.notes
    assert [pool.name for pool in plan.pools] == ["rollout", "trainer"]
    assert digest_parts(plan) == digest_parts(planned())
    file = tmp_path / "trainer-0.yaml"
    place = Place(tmp_path, {})
    file.write_text(document_text(worker_document(plan, WorkerName("trainer", 0), place, recipe_source="here")))
    assert set(read_worker_document(file).recipe.layout.pools) == {"rollout", "trainer"}
    file.write_text(file.read_text().replace("worker: trainer/0", "worker: judge/0"))
    with pytest.raises(RecipeError, match="the recipe has no worker 'judge/0' — rollout/0, rollout/1, trainer/0"):
        read_worker_document(file)


def test_a_pool_that_was_given_no_role_is_a_mistake(refused: Callable[..., str]) -> None:
    assert "the layout gives pool judge no roles, so no step runs on it" in refused("layout.pools.judge.count=2")


def test_a_pool_of_a_shipped_layout_is_found_there(refused: Callable[..., str]) -> None:
    text = refused("layout.pools.critic.count=2")
    assert (
        "pool critic no roles, so no step runs on it — set it for rollout, trainer, or choose another layout: " in text
    )
    assert text.rstrip().endswith("layout=critic has it")
    text = refused("layout=self_play", "layout.pools.solver_rollout.steps=[]")
    assert "command line: layout.pools.solver_rollout.steps — the layout gives pool solver_rollout no roles" in text


def test_a_step_of_another_shipped_flow_may_be_named(refused: Callable[..., str]) -> None:
    plan = planned("layout.pools.trainer.steps=[reference]")
    assert plan.notes == ("layout.pools.trainer.steps names 'reference', which this flow lacks",)
    assert planned(*NO_KL, "layout.pools.trainer.steps=[reference]").notes == planned(*NO_KL).notes
    text = refused("layout.pools.trainer.steps=[referense]")
    assert "layout.pools.trainer.steps.0 — the flow has no step 'referense'" in text
