"""Steps that clients outside the run write: where they stand in a plan, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distflow.flow.recipe_check import check_imports, plan_recipe
from distflow.flow.script import render_script
from distflow.types import WorkerName
from tests.flow.conftest import Folder

CALL = "distflow.workers.clients:by_client"
LABELS = f"flow.steps.reward={{call: '{CALL}', with: {{reads: [response_text], writes: {{reward: number}}}}}}"
Refused = Callable[..., str]


def step(reads: str = "response_text", writes: str = "reward: number", more: str = "", call: str = CALL) -> str:
    return f"flow.steps.reward={{call: '{call}', with: {{reads: [{reads}], writes: {{{writes}}}}}{more}}}"


@pytest.mark.parametrize("layout", ["split", "async", "colocated"])
def test_owners_wait_for_what_clients_write(folder: Folder, layout: str) -> None:
    plan = plan_recipe(folder.recipe, [step(), f"layout={layout}"])[1]
    home = plan.home.name
    edge = plan.edge("reward")
    assert (edge.kind, edge.source, edge.target, edge.when) == ("client", home, home, "on arrival")
    assert (edge.fields, edge.back) == (("response_text",), ("reward",))
    assert [port.end for port in plan.worker(WorkerName(home, 0)).ports if port.edge == "reward"] == ["collects"]
    script = render_script(plan, WorkerName(home, 0))
    assert 'for batch in w.ask("reward", w.receive("samples", t)):' in script
    assert 'w.call("reward"' not in script
    assert check_imports(plan, lambda key: "recipe") == []


def test_clients_see_what_other_pools_write_on_arrival(folder: Folder) -> None:
    values = ["flow.steps.values={call: ./steps.py:values, model: critic}", "layout.pools.reference.steps=[values]"]
    edge = plan_recipe(folder.recipe, [step("response_text, values"), *values])[1].edge("reward")
    assert edge.fields == ("response_text", "values")


def test_what_they_write_is_dumped(folder: Folder) -> None:
    plan = plan_recipe(folder.recipe, [step(writes="reward: number, comment: text")])[1]
    assert set(plan.dump_fields) == {"advantage", "comment"}
    reward_alone = plan_recipe(folder.recipe, [step(), "run.dump_rollouts=0"])[1]
    assert reward_alone.edge("reward").back == ("reward",)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([step(writes="rewrd: number")], "reads the field 'reward', which no step of the flow writes"),
        ([step(reads="respons_text")], "reads the field 'respons_text', which no step of the flow writes"),
        ([step(writes="reward: numbr")], "writes 'reward' of kind 'numbr' — did you mean 'number'?"),
        ([step(writes="reward: text")], "writes 'reward' of kind 'text' — reward: number"),
        ([step(writes="reward: number, token_rewards: number")], "token_rewards: number_per_token"),
        ([step(writes="reward: number, drop_reason: text")], "writes 'drop_reason', which only other steps write"),
        ([step(writes="reward: number, rewards/x: number")], "writes 'rewards/x', which only other steps write"),
        ([step(writes="")], "names no fields — with: {reads: [prompt_text, response_text], writes: {reward: number}}"),
        ([step(more=", model: policy")], "is answered by clients, and has a model or a prefix"),
        (
            [step(), "flow.steps.labels={call: ./steps.py:labels}"],
            f"has the role client, which is for fields that a recipe names — call: {CALL}",
        ),
        (
            [step("advantage", "reward: number")],
            "the steps reward, advantage, update wait for each other's fields",
        ),
        (
            [step("late"), "flow.steps.late={call: ./steps.py:late}"],
            "shows clients 'late', which step 'late' writes only once their answers are there",
        ),
        (
            [step(), "flow.steps.early={call: ./steps.py:early}"],
            "reads 'reward', which step 'reward' writes only after the samples have gone to the training pool",
        ),
        (
            [step(writes="reward: number, comment: text"), "run.dump_rollouts=0"],
            "has clients write 'comment', which no step reads and no dump has, and training waits for it — remove it",
        ),
        (
            [step(writes="reward: number, comment: text"), "run.dump_fields=[advantage]"],
            "flow.steps.reward.with.writes — has clients write 'comment', which no step reads",
        ),
        ([step(), "val={every: 1}"], "step 'reward' has clients write the reward, and nobody judges samples of"),
    ],
)
def test_what_cannot_work_is_refused(folder: Folder, refused: Refused, overrides: list[str], message: str) -> None:
    folder.step("""
@step(role="client", reads=["response_text"], writes=["own"])
def labels(batch): ...

@step(role="train", reads=["group"], writes=["late"], scope="group")
def late(batch, ctx): ...

@step(role="score", reads=["reward"], writes=["early"])
def early(batch, ctx): ...
""")
    assert message in refused(*overrides)


def test_flows_that_read_their_samples_have_no_step_of_clients() -> None:
    from distflow.errors import RecipeError

    with pytest.raises(RecipeError, match="has the role 'client', and step 'read' reads the samples from the data"):
        plan_recipe("quickstart", ["flow=sft", f"+{step('prompt_text', 'stars: number')}"])


def test_samples_of_several_rows_are_not_written() -> None:
    from distflow.errors import RecipeError

    with pytest.raises(RecipeError, match="clients write one value for each row, and samples of 'sample' may have"):
        plan_recipe("two_turns", [step("prompt_text", "stars: number").replace("steps.reward", "steps.stars")])
