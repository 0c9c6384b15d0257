"""Which fields the owner dumps beside the standard ones, and that they travel to it."""

from __future__ import annotations

import pytest

from distflow.errors import RecipeError
from distflow.flow.plan import Plan
from distflow.flow.recipe_check import plan_recipe
from tests.flow.conftest import Folder

NOVELTY = "@step(role='score', reads=['response_ids'], writes=['novelty', 'stats/*'])\ndef novelty(batch, ctx): ...\n"
OWN = "@step(role='score', reads=[], writes=['own'], fills={'own': 0.0})\ndef own(batch, ctx): ...\n"


def planned(folder: Folder, *overrides: str) -> Plan:
    return plan_recipe(folder.recipe, ["flow.steps.novelty.call=./steps.py:novelty", *overrides])[1]


def test_what_the_users_steps_write_is_dumped_and_sent_there(folder: Folder) -> None:
    """Also what only one worker writes; what nobody reads and no plug-in wrote is not sent."""
    folder.step(NOVELTY + OWN)
    plan = planned(folder, 'layout.pools.rollout.each={1: {steps: ["+./steps.py:own"]}}')
    assert {"novelty", "stats/*", "advantage", "own"} <= set(plan.dump_fields)
    edge = plan.edge("samples")
    assert {"novelty", "stats/*", "own"} <= set(edge.fields)
    assert edge.fills == {"own": 0.0}
    assert "advantage" not in edge.fields, "it is written behind the edge"
    assert plan_recipe("quickstart")[1].dump_fields == ()


def test_other_fields_can_be_named_and_none(folder: Folder) -> None:
    folder.step(NOVELTY)
    assert planned(folder, "run.dump_fields=[]").dump_fields == ()
    assert planned(folder, "run.dump_rollouts=0").dump_fields == ()
    plan = planned(folder, "run.dump_fields=[stats/mean,prompt_ids,reward]")
    assert plan.dump_fields == ("stats/mean", "prompt_ids"), "rewards are there in any case"
    assert {"stats/*", "prompt_ids"} <= set(plan.edge("samples").fields)
    assert "novelty" not in plan.edge("samples").fields


def test_a_field_that_no_step_writes_is_refused(folder: Folder) -> None:
    folder.step(NOVELTY)
    with pytest.raises(
        RecipeError, match=r"run.dump_fields — no step of the flow writes 'novlty' — did you mean 'novelty'"
    ):
        planned(folder, "run.dump_fields=[novlty]")
