"""Flows that read their samples from the data: what a plan says, and what is refused beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from distflow.errors import PluginError, RecipeError
from distflow.flow.graph_text import mermaid
from distflow.flow.plan import Plan
from distflow.flow.plan_text import render_page
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.script import render_script
from distflow.flow.step_declaration import read_declaration
from distflow.types import WorkerName

SCRIPT = '''"""{worker} of run quickstart. Written from its recipe; this text is what runs."""


def script(w):
    for t in w.training_steps():
        for batch in w.read("read", t):  # its own share of the data
            w.call("update", batch)  # accumulates
        w.apply("policy")  # optimizer step, exact global denominator
        w.save(t + 1)
'''


def planned(*overrides: str) -> Plan:
    return plan_recipe("quickstart", list(overrides))[1]


@pytest.mark.parametrize("layout, worker", [("colocated", "worker/0"), ("split", "trainer/0"), ("async", "trainer/0")])
def test_there_are_training_workers_alone(layout: str, worker: str) -> None:
    plan = planned("flow=sft", f"layout={layout}")
    assert [str(one.name) for one in plan.workers] == [worker]
    assert (plan.edges, plan.generating, plan.workers[0].engine) == ((), (), None)
    assert render_script(plan, WorkerName.parse(worker)) == SCRIPT.format(worker=worker)
    page = render_page(plan)
    assert "none: the training workers read the samples from the data" in page
    assert "32 rows of the data a training step, one sample each: a group" in page
    assert "version(s) old" not in page
    assert ("pool 'rollout' is left out" in page) == (layout != "colocated")
    assert "home of policy" in mermaid(plan)


def test_several_updates_cut_the_whole_batch() -> None:
    text = render_script(planned("flow=sft", "batch.minibatches=2"), WorkerName("trainer", 0))
    assert 'w.read("read", t):  # its own share of the data, the whole batch' in text
    assert "for part in w.minibatches(batch):  # 1 epoch of 2 parts" in text


def test_what_training_waits_for_with_labels() -> None:
    text = render_script(planned("flow=kto"), WorkerName("trainer", 0))
    assert 'w.each("reference", w.read("read", t)):  # its own share of the data, the whole batch' in text
    assert 'batch = w.call("kl_point", batch)\n            w.call("update", batch)' in text
    asked = render_script(planned("flow=dpo", "layout=services"), WorkerName("trainer", 0))
    assert 'for batch in w.ask("reference", w.read("read", t)):  # its own share of the data' in asked


def test_a_reward_model_is_trained() -> None:
    plan = planned("flow=reward_model", "layout.pools.trainer.count=2")
    assert (plan.primary, plan.recipe.models["policy"].head, plan.batch.samples_per_prompt) == ("policy", "score", 2)
    text = render_script(plan, WorkerName("trainer", 1))
    assert 'w.call("update", batch)  # accumulates' in text


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["flow=reward_model", "layout.pools.trainer.backend=fsdp"],
            "layout.pools.trainer.backend — 'fsdp' cannot hold 'policy', whose head is score — backend: torch",
        ),
        (["flow=reward_model", "models.policy.head=tokens"], "needs a model that gives one number for a whole text"),
        (["flow=reward_model", "models.policy.lora={rank: 2}"], "models.policy.lora — a model with `head: score`"),
        (["flow=dpo", "models.policy.head=score"], "models.policy.head — step 'update' trains it, and a model with"),
        (["flow=dpo", "flow.steps.update.with.beta=0"], "flow.steps.update.with.beta — 0 is not allowed"),
        (["flow=dpo", "flow.steps.update.with.loss=hinge"], "there is no 'hinge' — allowed: ipo, sigmoid"),
        (["flow=kto", "flow.steps.kl_point=null"], "reads the field 'kl_point', which no step of the flow writes"),
    ],
)
def test_what_is_refused_of_preferences(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        planned(*overrides)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["val.every=3"],
            "val.data — step 'read' reads the samples from the data, and nothing is generated: validation needs",
        ),
        (["batch.target_kl=0.1", "batch.epochs=2"], "batch.target_kl — step 'read' reads the samples from the data"),
        (["batch.critic_warmup=3"], "batch.critic_warmup — this flow trains no critic"),
        (["batch.samples_per_prompt=4"], "batch.samples_per_prompt — has no effect: step 'read' makes 1 of each row"),
        (["layout.max_staleness=2"], "layout.max_staleness — has no effect: step 'read' reads the samples"),
        (["layout=colocated", "layout.pools.worker.slots=4"], "pool 'worker' generates nothing — remove it"),
        (["flow.steps.read.with.max_response_tokens=0"], "max_response_tokens — 0 is not allowed"),
        (["flow.steps.read.model=policy"], "flow.steps.read.model — reads a row of the data, with no model"),
        (
            ["flow.steps.reward={call: 'distflow.workers.reward:verify'}"],
            "flow.steps.reward — has the role 'score', and step 'read' reads the samples from the data — remove it",
        ),
        (
            ["flow.steps.sample={call: 'distflow.workers.rollout:sample', model: policy}"],
            "flow.steps.sample — has the role 'generate', and step 'read' reads the samples from the data",
        ),
        (
            ["flow.steps.sample.with.max_new_tokens=4"],
            "command line: flow.steps.sample — flow sft has no step 'sample' — ",
        ),
        (
            ["flow.steps.other={call: 'distflow.workers.supervised:sft', model: another}"],
            "several models trained on samples of the data are not built yet",
        ),
    ],
)
def test_what_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        planned("flow=sft", *overrides)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "declared, message",
    [
        ("@step(role='read', reads=['task'], writes=[])\ndef f(row): ...", r"'f' has the role read, and gets a row"),
        ("@step(role='read', reads=[], writes=[], samples=0)\ndef f(row): ...", "samples=0.*1 or more"),
        ("@step(role='read', reads=[], writes=[])\ndef f(batch, ctx): ...", r"expected def f\(row, \*, setting"),
        ("@step(role='score', reads=[], writes=[], samples=2)\ndef f(b, c): ...", r"samples=…\) is for the role read"),
    ],
)
def test_wrong_declarations(declared: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "s.py"
    file.write_text(f"from distflow import step\n{declared}\n")
    with pytest.raises(PluginError, match=message):
        read_declaration(f"{file}:f")


def test_a_step_needs_room_for_its_responses(tmp_path: Path) -> None:
    file = tmp_path / "s.py"
    file.write_text("from distflow import step\n@step(role='read', reads=[], writes=[])\ndef f(row): ...\n")
    with pytest.raises(RecipeError, match="a read step needs the settings max_response_tokens with literal defaults"):
        planned("flow=sft", f"flow.steps.read.call={file}:f")
