"""Edges follow from what steps read and write and where they run; what the runtime cannot do yet is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from distflow.config.load import load_recipe
from distflow.errors import Problems, RecipeError
from distflow.flow.edges import Edge
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.structure import build_structure
from distflow.flow.wiring import wire
from distflow.types import WorkerName
from tests.flow.conftest import Folder

CRITIC = """
@step(role="train", reads=["values", "response_ids", "advantage"], writes=[])
def critic_update(batch, ctx): ...
"""
VALUES = "flow.steps.values={call: ./steps.py:values, model: critic}"
OWN_CRITIC = [
    VALUES,
    "flow.steps.critic_update={call: ./steps.py:critic_update, model: critic}",
    "layout.pools.critic.count=2",
    "layout.pools.critic.steps=[values,critic_update]",
]
REFERENCE = [VALUES, "layout.pools.reference.steps=[values]"]
JUDGE = ["layout.pools.judge.steps=[reward]"]
BOTH = ("prompt_ids", "response_ids")
"""What the step reads, and for how many tokens it writes values."""


def edges(folder: Folder, *overrides: str) -> dict[tuple[str, str], Edge]:
    """By kind and name, whether the runtime can do it or not."""
    recipe = load_recipe(folder.recipe, overrides).recipe
    problems = Problems(lambda key: "recipe")
    structure = build_structure(recipe.flow, recipe.layout, recipe.models, problems, recipe.run)
    assert structure is not None, problems
    assert problems == []
    return {(edge.kind, edge.name): edge for edge in wire(structure)}


def ends(edge: Edge) -> tuple[Any, ...]:
    return edge.source, edge.target, edge.steps, edge.fields, edge.back, edge.when, edge.version


def test_samples_and_weights_are_the_edges_of_two_pools(folder: Folder) -> None:
    found = edges(folder)
    assert list(found) == [("lease", "samples"), ("weights", "policy")]
    lease, weights = found.values()
    assert (lease.source, lease.target, lease.steps) == ("rollout", "trainer", ("sample", "reward"))
    assert (weights.source, weights.target, weights.model, weights.reader) == ("trainer", "rollout", "policy", "engine")


def test_on_one_pool_they_begin_and_end_there(folder: Folder) -> None:
    plan = plan_recipe(folder.recipe, ["layout=colocated"])[1]
    assert [(edge.kind, edge.source, edge.target) for edge in plan.edges] == [
        ("lease", "worker", "worker"),
        ("weights", "worker", "worker"),
    ]


def test_a_score_step_elsewhere_is_asked_for_before_the_samples_are_sent(folder: Folder) -> None:
    folder.change('writes=["reward", "rewards/*"]', 'writes=["reward"], may_write=["rewards/*", "drop_reason"]')
    found = edges(folder, *JUDGE)
    judge = (
        "rollout",
        "judge",
        ("reward",),
        ("uid", "sample", "response_ids"),
        ("reward", "rewards/*", "drop_reason", "left_out"),
        "before custody",
        "",
    )
    assert ends(found["call", "reward"]) == judge
    assert {"reward", "rewards/*"} <= set(found["lease", "samples"].fields)


def test_a_frozen_model_elsewhere_is_asked_by_owners_on_arrival(folder: Folder) -> None:
    found = edges(folder, *REFERENCE)
    reference = (
        "trainer",
        "reference",
        ("values",),
        ("uid", "sample", *BOTH),
        ("values",),
        "on arrival",
        "frozen",
    )
    assert ends(found["call", "values"]) == reference
    assert "prompt_ids" in found["lease", "samples"].fields, "the owners send it on"
    assert {kind for kind, _ in found} == {"lease", "weights", "call"}


def test_a_second_trained_model_is_asked_for_its_exact_version_and_gets_rows(folder: Folder) -> None:
    folder.step(CRITIC)
    found = edges(folder, *OWN_CRITIC)
    values = ("trainer", "critic", ("values",), ("uid", "sample", *BOTH), ("values",), "in window", "exact")
    assert ends(found["call", "values"]) == values
    rows = found["rows", "critic_rows"]
    assert (rows.source, rows.target, rows.model, rows.steps) == ("trainer", "critic", "critic", ("critic_update",))
    assert rows.fields == ("values", "response_ids", "advantage")
    assert [name for kind, name in found if kind == "weights"] == ["policy"], "nobody else computes with the critic"


def test_beside_the_policy_a_second_trained_model_needs_no_edge(folder: Folder) -> None:
    folder.step(CRITIC)
    plan = plan_recipe(folder.recipe, OWN_CRITIC[:2])[1]
    assert [edge.kind for edge in plan.edges] == ["lease", "weights"]
    assert {model.name: (model.home, model.generated_by) for model in plan.models} == {
        "policy": ("trainer", ("rollout",)),
        "critic": ("trainer", ()),
    }


POLICY_VALUES = "flow.steps.values={call: ./steps.py:values, model: policy}"


def test_a_forward_step_runs_where_its_model_is_trained(folder: Folder) -> None:
    """Whatever pool takes the role forward: elsewhere it would compute with the first version for ever."""
    roles = ["layout.pools.rollout.roles=[generate,score,forward]", "layout.pools.trainer.roles=[train]"]
    plan = plan_recipe(folder.recipe, [POLICY_VALUES, *roles])[1]
    assert "values" in plan.pool("trainer").steps
    frozen = plan_recipe(folder.recipe, [VALUES, *roles])[1]
    assert "values" in frozen.pool("rollout").steps
    assert frozen.pool("rollout").frozen == ("critic",)


def test_computing_with_a_trained_model_elsewhere_is_refused(folder: Folder, refused: Callable[..., str]) -> None:
    named = [POLICY_VALUES, "layout.pools.rollout.steps=[values]"]
    found = edges(folder, *named)
    readers = [(edge.target, edge.reader) for edge in found.values() if edge.kind == "weights"]
    assert ("rollout", "forward") in readers
    text = refused(*named)
    assert "layout.pools.rollout.steps — step 'values' computes with 'policy', which is trained on another" in text
    assert "remove values from them: it then runs where 'policy' is trained" in text


def test_what_the_runtime_cannot_do_yet_is_refused_by_name(folder: Folder, refused: Callable[..., str]) -> None:
    folder.step(CRITIC)
    message = "step 'reward' of role 'score' on the pool that trains critic: not built yet — leave it to 'rollout'"
    steps = "layout.pools.critic.steps=[values,critic_update,reward]"
    assert f"layout.pools.critic.steps — {message}" in refused(*OWN_CRITIC, steps)
    message = "step 'sample' of role 'generate' on the pool that trains critic: not built yet — leave it to a pool that"
    assert message in refused(*OWN_CRITIC, "layout.pools.critic.steps=[values,critic_update,sample]")


def test_the_home_of_the_policy_is_where_its_update_is(folder: Folder, refused: Callable[..., str]) -> None:
    folder.step(CRITIC)
    message = (
        "layout.pools.critic.steps — step 'advantage' of role 'train', without a model, runs where the samples are: on "
        "pool 'critic', which trains 'policy' — leave it to pool 'critic', or what trains 'policy' to pool 'trainer'"
    )
    assert message in refused(*OWN_CRITIC, "layout.pools.critic.steps=[values,critic_update,update]")


def test_a_model_has_one_home(folder: Folder, refused: Callable[..., str]) -> None:
    folder.step(CRITIC)
    twice = "flow.steps.critic_more={call: ./steps.py:critic_update, model: critic}"
    message = (
        "layout.pools — model 'critic' is trained on the pools trainer, critic — give all of its train steps to one"
    )
    assert message in refused(*OWN_CRITIC, twice)


def test_what_is_asked_for_on_arrival_reads_nothing_that_is_written_later(
    folder: Folder, refused: Callable[..., str]
) -> None:
    folder.change('reads=["prompt_ids"], writes=["values"]', 'reads=["prompt_ids", "advantage"], writes=["values"]')
    text = refused(*REFERENCE)
    assert "runs on pool 'reference' and reads 'advantage', which step 'advantage' writes only after" in text


def test_that_is_told_beside_the_mistakes_of_other_sections(folder: Folder, refused: Callable[..., str]) -> None:
    folder.change('writes=["reward", "rewards/*"]', 'writes=["reward", "rewards/*"], scope="batch"')
    text = refused("run.sed=1", *JUDGE)
    assert "run.sed — unknown key" in text
    assert "runs on pool 'judge' for the workers of 'rollout' and has batch scope" in text


def test_each_worker_has_the_ends_of_its_pools_edges(folder: Folder) -> None:
    plan = plan_recipe(folder.recipe, JUDGE)[1]
    ports = {pool: plan.worker(WorkerName(pool, 0)).ports for pool in ("rollout", "judge", "trainer")}
    assert {pool: [(port.edge, port.end, port.peer) for port in found] for pool, found in ports.items()} == {
        "rollout": [("samples", "holds", "trainer"), ("reward", "asks", "judge"), ("policy", "reads", "trainer")],
        "judge": [("reward", "answers", "rollout")],
        "trainer": [("samples", "owns", "rollout"), ("policy", "publishes", "rollout")],
    }
    assert plan.serves("judge")
    assert not plan.serves("rollout")


@pytest.mark.parametrize("context", ["ctx", "mine"])
def test_a_step_that_others_ask_for_keeps_nothing(folder: Folder, refused: Callable[..., str], context: str) -> None:
    folder.change("def reward(batch, ctx, *, function", f"def reward(batch, {context}, *, function")
    folder.change("weight: float | None = None): ...", f"weight: float | None = None):\n    {context}.state['n'] = 1")
    text = refused(*JUDGE)
    assert "flow.steps.reward — runs on pool 'judge' for the workers of 'rollout' and uses ctx.state" in text
    assert "write a function of the batch alone, or add reward to the `steps` of rollout" in text
    plan_recipe(folder.recipe)  # where the samples are, it may


def test_nor_does_one_that_owners_ask_for(folder: Folder, refused: Callable[..., str]) -> None:
    folder.change("def values(batch, ctx): ...", "def values(batch, ctx):\n    ctx.state['n'] = 1")
    text = refused(*REFERENCE)
    assert "flow.steps.values — runs on pool 'reference' for the workers of 'trainer' and uses ctx.state" in text
    assert "or add values to the `steps` of trainer" in text


def test_nor_does_it_see_a_whole_batch(folder: Folder, refused: Callable[..., str]) -> None:
    folder.change('writes=["reward", "rewards/*"]', 'writes=["reward", "rewards/*"], scope="batch"')
    assert "for the workers of 'rollout' and has batch scope, but it is asked for group by group" in refused(*JUDGE)


@pytest.mark.parametrize("layout", ["split", "services"])
def test_a_score_step_cannot_compute_with_the_policy(layout: str) -> None:
    """Nobody would ever give its workers a version."""
    with pytest.raises(RecipeError, match=r"flow\.steps\.reward\.model — step 'reward' computes with 'policy', which"):
        plan_recipe("quickstart", [f"layout={layout}", "flow.steps.reward.model=policy"])
