"""What the plan takes from the declaration of a generate step: its environment, its room, its fields."""

from __future__ import annotations

import pytest

from distflow.errors import UserError
from distflow.flow.recipe_check import plan_recipe
from distflow.flow.step import GENERATED, SEQUENCES
from tests.flow.conftest import Folder

SAMPLE = '@step(role="generate", reads=[], writes=[], scope="group")'


def test_the_shipped_steps_may_be_continued_and_copied() -> None:
    for recipe in ("quickstart", "two_turns"):
        step = plan_recipe(recipe)[1].generate_step
        assert (step.allows("replay"), step.allows("repeatable")) == (True, True), recipe


@pytest.mark.parametrize(
    "body, named",
    [
        ("import time\n    time.sleep(1)", "time.sleep(…) at "),
        ("import requests\n    if ctx:\n        requests.get('http://tools')", "requests.get(…) at "),
        ("import subprocess\n    subprocess.run(['ls'], check=True)", "subprocess.run(…) at "),
        ("from time import sleep as wait\n    wait(1)", "time.sleep(…) at "),
        ("import requests as web\n    web.post('http://tools')", "requests.post(…) at "),
        ("from urllib import request\n    request.urlopen('http://tools')", "urllib.request.urlopen(…) at "),
        ("import time\n    async def tool():\n        time.sleep(1)\n    await tool()", "time.sleep(…) at "),
        ("import time, asyncio\n    await asyncio.to_thread(lambda: time.sleep(1))", ""),
        ("import time\n    def tool():\n        time.sleep(1)", ""),
        ("import asyncio\n    await asyncio.sleep(1)", ""),
    ],
)
@pytest.mark.parametrize("kind", ["async def", "def"])
def test_what_blocks_in_a_coroutine_is_told_before_the_run(folder: Folder, body: str, named: str, kind: str) -> None:
    if kind == "def" and "await" in body:
        return
    folder.change("async def sample", f"{kind} sample")
    folder.change("max_new_tokens: int = 4): ...", f"max_new_tokens: int = 4):\n    {body}")
    found = [line for line in plan_recipe(folder.recipe)[1].warnings if "asyncio.to_thread" in line]
    assert len(found) == (1 if named and kind == "async def" else 0)
    assert all(named in line for line in found)


def test_what_blocks_in_a_coroutine_of_the_same_file_is_told_too(folder: Folder) -> None:
    more = "import time\n\n\nasync def tool():\n    time.sleep(1)\n\n\nasync def other():\n    time.sleep(2)\n\n\n"
    folder.change(SAMPLE, more + SAMPLE)
    folder.change("max_new_tokens: int = 4): ...", "max_new_tokens: int = 4):\n    await tool()\n    await tool()")
    (told,) = [line for line in plan_recipe(folder.recipe)[1].warnings if "asyncio.to_thread" in line]
    file = folder.path / "steps.py"
    line = file.read_text().splitlines().index("    time.sleep(1)") + 1
    assert f"calls time.sleep(…) at {file}:{line}, which holds up" in told


@pytest.mark.parametrize("allowed", [[], ["replay"], ["repeatable"]])
def test_an_environment_allows_what_it_lists(folder: Folder, allowed: list[str]) -> None:
    folder.change(SAMPLE, f'@step(role="generate", reads=[], writes=[], environment={allowed!r})')
    folder.change("max_new_tokens: int = 4", "max_new_tokens: int = 4, max_tokens: int = 30")
    step = plan_recipe(folder.recipe)[1].generate_step
    assert [step.allows(what) for what in ("replay", "repeatable")] == ["replay" in allowed, "repeatable" in allowed]


def test_memory_and_slots_have_room_for_an_environments_tokens() -> None:
    plan = plan_recipe("two_turns", ["flow.steps.sample.with.max_tokens=20"])[1]
    assert (plan.response_tokens, plan.longest_sample("policy")) == (80, plan.recipe.data.max_prompt_tokens + 20)
    more = [f"flow.steps.sample.with.{name}" for name in ("max_tokens=20", "max_sample_tokens=30")]
    assert plan_recipe("two_turns", more)[1].response_tokens == 30
    one, two = (plan_recipe("two_turns", [f"flow.steps.sample.with.max_tokens={most}"])[1] for most in (12, 60_000))
    assert two.owner_plan.sample_memory_mb > one.owner_plan.sample_memory_mb


@pytest.mark.parametrize(
    "given, named",
    [
        (["max_tokens=4000"], "max_sample_tokens (16000 now, 4 × max_tokens), data.max_prompt_tokens"),
        (["max_tokens=4000", "max_sample_tokens=9000"], "max_sample_tokens (9000 now), data.max_prompt_tokens"),
    ],
)
def test_where_memory_is_too_little_for_an_environment_the_cure_names_its_bound(given: list[str], named: str) -> None:
    settings = [f"flow.steps.sample.with.{one}" for one in given]
    with pytest.raises(UserError) as refused:
        plan_recipe("two_turns", ["layout.pools.trainer.sample_memory_mb=4", *settings])
    assert "sample_memory_mb 4 is too little for one training step" in str(refused.value)
    assert f", or lower {named} or batch.prompts" in str(refused.value)


def test_an_environment_needs_a_bound(folder: Folder) -> None:
    folder.change(SAMPLE, '@step(role="generate", reads=[], writes=[], environment=[])')
    with pytest.raises(UserError, match="flow.steps.sample — its environment's tokens need room too, .* max_tokens"):
        plan_recipe(folder.recipe)


def test_further_numbers_travel_with_the_fields_of_every_sample() -> None:
    plan = plan_recipe("two_turns")[1]
    assert plan.generate_step.writes == (*GENERATED, *SEQUENCES, "reward", "score", "rewards/second")
    assert {"reward", "score", "rewards/second"} <= set(plan.edge("samples").fields)


def test_a_setting_that_the_runtime_needs_is_missed_with_everything_else(folder: Folder) -> None:
    folder.change("max_new_tokens: int = 4", "most: int = 4")
    with pytest.raises(UserError, match="(?s)batch.prompts — 31 .* needs the settings max_new_tokens with literal"):
        plan_recipe(folder.recipe, ["batch.prompts=31"])
    given = ["flow=ppo", f"flow.steps.sample.call={folder.path}/steps.py:sample"]
    with pytest.raises(UserError, match="command line: flow.steps.sample — a generate .* example max_new_tokens: int"):
        plan_recipe("quickstart", given)
