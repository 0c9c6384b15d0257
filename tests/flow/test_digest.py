"""Two workers may talk if and only if they agree on what matters."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from distflow.config.load import recipe_to_mapping
from distflow.flow.digest import digest_parts
from distflow.flow.lineage import FIXED, changes, leaves, lineage
from distflow.flow.plan import Plan
from distflow.flow.recipe_check import plan_recipe


def planned(recipe: str, *overrides: str) -> Plan:
    return plan_recipe(recipe, overrides, need_files=False)[1]


def parts(recipe: str, *overrides: str) -> dict[str, str]:
    return digest_parts(planned(recipe, *overrides))


def differing(*overrides: str) -> set[str]:
    one, other = parts("quickstart"), parts("quickstart", *overrides)
    return {name for name in one | other if one.get(name) != other.get(name)}


@pytest.mark.parametrize(
    "override",
    [
        "layout.pools.rollout.count=5",
        "layout.pools.trainer.count=2",
        "security.encrypt=all",
        "weights.encoding=fp8",
        "layout.pools.rollout.hosts=[a]",
        "layout.pools.rollout.slots=8",
        "layout.pools.rollout.each.0.threads=2",
        "layout.pools.rollout.device=cpu",
        "limits.restarts=9",
        "run.save_every=3",
        "run.name=other",
    ],
)
def test_private_matters_change_nothing(override: str) -> None:
    assert differing(override) == set()


def test_how_many_workers_answer_calls_changes_nothing() -> None:
    """They join and leave while the run goes on."""
    one, three = (parts("quickstart", "layout=services", f"layout.pools.reward.count={n}") for n in (1, 3))
    assert one == three
    assert {name for name, text in one.items() if text != parts("quickstart")[name]} == {"edges", "flow"}


@pytest.mark.parametrize(
    "override, part",
    [
        ("batch.prompts=64", "batch"),
        ("layout.max_staleness=1", "batch"),
        ("run.seed=1", "run"),
        ("run.training_steps=3", "run"),
        ("flow.steps.sample.with.temperature=0.5", "flow"),
        ("models.policy.dtype=float64", "dtypes"),
        ("models.policy.optimizer.lr=1", "models"),
        ("data.with.digits=4", "data"),
        (
            "layout.pools={rollout: {count: 2, roles: ['*']}, trainer: {roles: [train]}, judge: {steps: [reward]}}",
            "edges",
        ),
        ("layout=colocated", "homes"),
    ],
)
def test_shared_matters_are_named(override: str, part: str) -> None:
    assert part in differing(override)


FIXED_KEYS = {
    "run.seed": "1",
    "batch.prompts": "64",
    "batch.ledgers": "4",
    "data.source": "distflow.data.reasoning_gym:tasks",
    "data.shuffle": "false",
    "data.chat": "true",
    "data.with.digits": "4",
    "models.policy.path": "elsewhere",
    "models.policy.tokenizer": "'chars:0123456789=x'",
    "models.policy.dtype": "float64",
    "models.policy.init.hidden_size": "96",
    "models.policy.lora": "{rank: 2}",
    "models.policy.quantize": "nf4",
}
"""A value for each kind of key that a checkpoint depends on, other than that of the recipe."""
TAKES = {"models.policy.quantize": ["models.policy.lora={rank: 2}"]}
"""What such a value takes besides."""


def kind(key: str) -> str:
    """Settings of a source and of a new model count as one kind each."""
    return re.sub(r"^(data\.with|models\.\w+\.init)\..*", r"\1", key)


@pytest.mark.parametrize("key", FIXED_KEYS)
def test_whatever_a_checkpoint_depends_on_counts(key: str) -> None:
    """A resume compares recipes only if digests differ."""
    recipe, beside = "reasoning" if key.endswith("path") else "quickstart", TAKES.get(key, [])
    if key == "data.source":
        plan = planned(recipe)
        data = plan.recipe.data.model_copy(update={"source": FIXED_KEYS[key]})
        now = digest_parts(dataclasses.replace(plan, recipe=plan.recipe.model_copy(update={"data": data})))
    else:
        now = parts(recipe, f"{key}={FIXED_KEYS[key]}", *beside)
    assert FIXED.fullmatch(key)
    assert parts(recipe, *beside) != now


def test_those_are_all_keys_of_that_kind() -> None:
    of_recipes = {key for recipe in ("quickstart", "reasoning") for key in lineage(planned(recipe))}
    # The head of the policy, which generates, cannot be another.
    fixed = {kind(key) for key in of_recipes if FIXED.fullmatch(key)} - {"models.policy.head"}
    assert fixed == {kind(key) for key in FIXED_KEYS}


def test_the_size_of_a_pool_does_not_count() -> None:
    plan = planned("quickstart")
    for name in ("rollout", "trainer"):
        pools = tuple(dataclasses.replace(pool, count=9) if pool.name == name else pool for pool in plan.pools)
        now = digest_parts(dataclasses.replace(plan, pools=pools))
        assert {part for part, value in digest_parts(plan).items() if now[part] != value} == set()


def test_the_code_of_shared_steps_counts(folder) -> None:
    before = parts(folder.recipe)
    folder.step("# a comment changes the text\n")
    after = parts(folder.recipe)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {f"code of step {name}" for name in ("sample", "reward", "advantage", "update")}


def test_the_folder_of_a_recipe_does_not_count(folder, tmp_path) -> None:
    import shutil

    before = parts(folder.recipe)
    shutil.copytree(tmp_path, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("elsewhere"))
    assert parts(str(tmp_path / "elsewhere" / "mine.yaml")) == before


def test_the_code_of_a_function_that_a_setting_names_counts(folder) -> None:
    folder.write("mine.py", "def f(sample): return 0.0\n")
    override = "flow.steps.reward.with.function=./mine.py:f"
    before = parts("quickstart", override)
    folder.write("mine.py", "def f(sample): return 1.0\n")
    after = parts("quickstart", override)
    assert {name for name in before if before[name] != after[name]} == {"code of step reward.function"}


def test_the_code_of_what_a_plug_in_imports_beside_it_counts(folder) -> None:
    folder.write("mine.py", "from helpers import f\ndef g(sample): return f(sample)\ndef rows(): return [f]\n")
    folder.write("helpers.py", "def f(sample): return 0.0\n")
    function = "flow.steps.reward.with.function={right: {function: './mine.py:g'}}"
    overrides = [function, "data.source=./mine.py:rows"]
    before = parts("quickstart", *overrides)
    folder.write("helpers.py", "def f(sample): return 1.0\n")
    after = parts("quickstart", *overrides)
    changed = {"code of step reward.function.right.function: helpers.py", "code of data.source: helpers.py"}
    assert {name for name in before if before[name] != after[name]} == changed
    plans = [planned("quickstart", *overrides)]
    folder.write("helpers.py", "def f(sample): return 2.0\n")
    plans.append(planned("quickstart", *overrides))
    told = {f"{key} has changed" for key in changed}
    assert {str(change) for change in changes(*map(lineage, plans))} == told


def test_data_files_are_known_by_their_size_and_both_ends(folder, tmp_path) -> None:
    """They are no part of the digest: a host may have a copy of its own."""
    rows, kept = [f'{{"prompt": "{n}="}}\n' for n in range(9)], tmp_path / "rows.jsonl"

    def seen(*lines: str) -> Plan:
        kept.write_text("".join(lines))
        return planned("quickstart", f"data.source={kept}")

    def told(was: dict[str, Any], plan: Plan) -> list[str]:
        return [str(change) for change in changes(was, lineage(plan))]

    before = seen(*rows)
    was = lineage(before)
    kept.touch()
    assert told(was, before) == []
    expected = "what is in data.source, rows.jsonl, has changed: other prompts may come, or come again, than without"
    for lines in ([*rows, rows[0]], [rows[1], *rows[1:]], [*rows[:-1], rows[0]]):
        after = seen(*lines)
        (line,) = told(was, after)
        assert line.startswith(expected)
        assert not any(change.forbidden for change in changes(was, lineage(after)))
        assert digest_parts(before) == digest_parts(after)
    kept.unlink()
    assert told(was, before) == [], "a machine that only watches may lack them"


def test_a_neighbour_with_the_name_of_what_is_installed_is_warned_of(folder) -> None:
    folder.write("mine.py", "import random\ndef f(sample): return random.random()\n")
    folder.write("random.py", "")
    plan = planned("quickstart", "flow.steps.reward.with.function=./mine.py:f")
    (told,) = [text for text in plan.warnings if "random" in text]
    assert "mine.py: `import random` means that of the standard library, not the one in" in told


def test_what_has_come_or_gone_as_a_whole_is_one_change() -> None:
    play, ppo = (
        leaves(recipe_to_mapping(planned("quickstart", flow).recipe)) for flow in ("flow=self_play", "flow=ppo")
    )
    assert leaves({"layout": {"pools": {"one": {"each": {}}}}}) == {"layout.pools.one.each": {}}
    found = {change.key: change for change in changes(play, ppo)}
    assert str(found["flow.steps.solve"]) == "flow.steps.solve is no longer there"
    assert str(found["flow.steps.gae"]) == "flow.steps.gae is new"
    assert str(found["flow.steps.reward.prefix"]) == 'flow.steps.reward.prefix was "solver", is null'
    assert str(found["models.critic"]) == "models.critic is new"
    assert found["models.critic"].forbidden
    assert not found["flow.steps.gae"].forbidden
    assert not any(key.startswith(("flow.steps.solve.", "models.critic.")) for key in found)
    moved = changes(*(leaves({"layout": {"pools": {name: {"count": 1, "zero": None}}}}) for name in ("one", "two")))
    assert [str(change) for change in moved] == ["layout.pools.one is no longer there", "layout.pools.two is new"]
