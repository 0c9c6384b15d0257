"""`data.difficulty` in a recipe: what is refused, and what the plan's page says."""

from __future__ import annotations

import pytest

from distflow.config.load import load_recipe
from distflow.errors import RecipeError
from distflow.flow.plan_text import render_page
from distflow.flow.planner import make_plan

RETIRING = "data.difficulty.retire_solved=2"


def page(*overrides: str) -> str:
    loaded = load_recipe("quickstart", overrides)
    return render_page(make_plan(loaded.recipe, loaded.origin))


def test_the_plan_tells_the_pools_in_their_order() -> None:
    pools = "data.difficulty.pools={easy: {up_to: 1, weight: 0.5}, hard: {up_to: 0.3}}"
    told = "prompts by pass rate, as known after the step before: hard (up to 0.3) weight 1, easy (up to 1) weight 0.5"
    assert f"{told}\n" in page(pools)
    assert f"{told}, retired after 2 visits solved" in page(pools, RETIRING)
    assert "known after steps up to 2 before: retired after 2" in page(RETIRING, "layout=async")
    assert "pass rate" not in page()


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["data.difficulty={}"], "data.difficulty", "it has no pools and retires nothing"),
        (["data.difficulty.pools.hard.up_to=0.5"], "data.difficulty.pools.hard.up_to", "0.5 is the highest of all"),
        (["data.difficulty.pools.hard.up_to=2"], "data.difficulty.pools.hard.up_to", "2 should be less than or equal"),
        (["data.difficulty.pools.hard.weight=1"], "data.difficulty.pools.hard.up_to", "required"),
        (
            ["data.difficulty.pools={a: {up_to: 1}, b: {up_to: 1}}"],
            "data.difficulty.pools.b.up_to",
            "1 is that of pool 'a' too",
        ),
        (["data.difficulty.pools={a: {up_to: 1, weight: 0}}"], "data.difficulty.pools", "all weights are 0"),
        (["data.difficulty.pools={a b: {up_to: 1}}"], "data.difficulty.pools", "'a b' cannot be part of a metric's"),
        (["data.difficulty.retire_solved=0"], "data.difficulty.retire_solved", "0 should be greater"),
        (["data.difficulty.retire=1"], "data.difficulty.retire", "unknown key"),
        ([RETIRING, "layout.max_staleness=unbounded"], "data.difficulty", "depends on timing"),
        ([RETIRING, "flow=sft"], "data.difficulty", "reads the samples from the data"),
        ([RETIRING, "flow=self_play"], "data.difficulty", "generates with a further model"),
        ([RETIRING, "layout.pools.trainer.steps=[reward]"], "data.difficulty", "neither score nor reward"),
        (
            ["val.data={source: 'distflow.data.arithmetic:copy_digits', difficulty: {retire_solved: 1}}"],
            "val.data.difficulty",
            "the same prompts each time",
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], key: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        page(*overrides)
    found = [problem for problem in caught.value.problems if problem.key == key]
    assert found, str(caught.value)
    assert message in found[0].message
    assert found[0].hint
