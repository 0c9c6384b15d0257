"""A recipe whose prompts clients put: what is refused, and that commands know that there is nothing to show."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from distflow.config.load import load_recipe
from distflow.errors import RecipeError
from distflow.flow.plan import Plan
from distflow.flow.planner import make_plan
from distflow.launch.commands.config import validate
from distflow.launch.commands.data import preview

OTHER = "distflow.data.arithmetic:copy_digits"


def plan(recipe: str, *overrides: str) -> Plan:
    loaded = load_recipe(recipe, overrides)
    return make_plan(loaded.recipe, loaded.origin)


def test_the_plan_names_the_source() -> None:
    assert plan("fed").recipe.data.fed
    assert not plan("quickstart").recipe.data.fed


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["data.shuffle=true"], "data.shuffle", "in the order in which they come"),
        (["data.overlong=drop"], "data.overlong", "clients are told"),
        (["data.difficulty.retire_solved=2"], "data.difficulty", "which prompts there are is not known"),
        (["flow=sft"], "data.source", "reads the samples from the data"),
        (["val={every: 5}"], "val.data", "come from clients, later on"),
        (["data.with.rows=0"], "data.with.rows", "0 is not allowed"),
        (["data.with.ahead=-1"], "data.with.ahead", "-1 is not allowed"),
        (["data.with={rows: many}"], "data.with.rows", "expected a whole number"),
        (
            [
                "data.source=null",
                "data.with={}",
                "data.mix.a={source: 'distflow.data.fed:by_clients', with: {rows: 3}}",
            ],
            "data.mix.a.source",
            "its only source",
        ),
        (
            [f"data={{source: '{OTHER}'}}", "val.data={source: 'distflow.data.fed:by_clients', with: {rows: 3}}"],
            "val.data.source",
            "its only source",
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], key: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan("fed", *overrides)
    found = [problem for problem in caught.value.problems if problem.key == key]
    assert found, str(caught.value)
    assert message in found[0].message
    assert found[0].hint


def test_there_is_no_prompt_to_show_before_the_run() -> None:
    awaited = "prompts come from clients while the run goes on (Client.put_prompts)\n"
    shown = CliRunner().invoke(preview, ["fed"], standalone_mode=False)
    assert (shown.return_value, shown.output) == (0, awaited)
    checked = CliRunner().invoke(validate, ["fed", "--deep"], standalone_mode=False)
    assert checked.return_value == 0
    assert awaited in checked.output
