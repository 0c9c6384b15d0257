"""Edges follow from what steps read and write and where they run; what the runtime cannot do yet is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distflow.config.load import load_recipe
from distflow.errors import Problems
from distflow.flow.edges import Edge
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.structure import build_structure
from distflow.flow.wiring import wire
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
        ("response_ids",),
        ("reward", "rewards/*", "drop_reason"),
        "before custody",
        "",
    )
    assert ends(found["call", "reward"]) == judge
    assert {"reward", "rewards/*"} <= set(found["lease", "samples"].fields)


def test_a_frozen_model_elsewhere_is_asked_by_owners_on_arrival(folder: Folder) -> None:
    found = edges(folder, *REFERENCE)
    reference = ("trainer", "reference", ("values",), ("prompt_ids",), ("values",), "on arrival", "frozen")
    assert ends(found["call", "values"]) == reference
    assert "prompt_ids" in found["lease", "samples"].fields, "the owners send it on"
    assert {kind for kind, _ in found} == {"lease", "weights", "call"}


def test_a_second_trained_model_is_asked_for_its_exact_version_and_gets_rows(folder: Folder) -> None:
    folder.step(CRITIC)
    found = edges(folder, *OWN_CRITIC)
    values = ("trainer", "critic", ("values",), ("prompt_ids",), ("values",), "in window", "exact")
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
    for overrides, pool in ((JUDGE, "judge"), (REFERENCE, "reference")):
        message = "a pool that neither generates nor trains is not built yet — give its roles to rollout or trainer"
        assert f"layout.pools.{pool} — {message}" in refused(*overrides)
    folder.step(CRITIC)
    message = "layout.pools — steps of role 'train' are placed on the pools trainer, critic; this is not built yet"
    assert message in refused(*OWN_CRITIC)
    again = "flow.steps.again={call: ./steps.py:sample, model: policy}"
    assert "flow.steps — two steps generate, sample and again; this is not built yet" in refused(again)


def test_what_is_asked_for_on_arrival_reads_nothing_that_is_written_later(
    folder: Folder, refused: Callable[..., str]
) -> None:
    folder.change('reads=["prompt_ids"], writes=["values"]', 'reads=["prompt_ids", "advantage"], writes=["values"]')
    text = refused(*REFERENCE)
    assert "runs on pool 'reference' and reads 'advantage', which step 'advantage' writes only after" in text


def test_that_is_told_beside_the_mistakes_of_other_sections(refused: Callable[..., str]) -> None:
    text = refused("run.sed=1", *JUDGE)
    assert "run.sed — unknown key" in text
    assert "a pool that neither generates nor trains is not built yet" in text
