"""Two workers may talk if and only if they agree on what matters."""

from __future__ import annotations

import pytest

from distflow.flow.plan import digest_parts
from distflow.flow.recipe_check import plan_recipe


def parts(recipe: str, *overrides: str) -> dict[str, str]:
    return digest_parts(plan_recipe(recipe, overrides, need_files=False)[1])


def differing(*overrides: str) -> set[str]:
    one, other = parts("quickstart"), parts("quickstart", *overrides)
    return {name for name in one | other if one.get(name) != other.get(name)}


@pytest.mark.parametrize(
    "override",
    [
        "layout.pools.rollout.count=5",
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
        ("layout.pools.trainer.steps=[reward]", "edges"),
        ("layout=colocated", "owners"),
    ],
)
def test_shared_matters_are_named(override: str, part: str) -> None:
    assert part in differing(override)


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
