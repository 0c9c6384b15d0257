"""A worker's own YAML: written by the planner, editable, read by the worker."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from distflow.errors import RecipeError
from distflow.flow.document import Place, WorkerDocument, document_text, read_worker_document, worker_document
from distflow.flow.planner import make_plan
from distflow.flow.recipe_check import plan_recipe
from distflow.types import WorkerName

ROSTER = {"rollout/0": "ipc:///a", "trainer/0": "ipc:///b"}


def written(tmp_path: Path, *overrides: str, **changes: Any) -> Path:
    loaded, plan = plan_recipe("quickstart", overrides)
    name = WorkerName("rollout", 1)
    document = worker_document(plan, name, Place(tmp_path, ROSTER), recipe_source=str(loaded.source))
    path = tmp_path / "rollout-1.yaml"
    path.write_text(document_text({**document, **changes}))
    return path


def read(path: Path) -> WorkerDocument:
    return read_worker_document(path)


def test_a_worker_computes_the_plan_that_was_written(tmp_path: Path) -> None:
    overrides = ["flow=grpo_kl", "layout.pools.rollout.each.1.threads=2"]
    original = plan_recipe("quickstart", overrides)[1]
    document = read(written(tmp_path, *overrides))
    plan = make_plan(document.recipe)
    name = WorkerName.parse(document.worker)
    assert plan.digest == original.digest
    assert plan.worker(name) == original.worker(name)
    assert (document.roster, document.term, document.resume) == (ROSTER, 0, None)


def test_settings_edited_there_are_used(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text().replace("  threads: 1\n", "  threads: 7\n", 1))
    document = read(path)
    plan = make_plan(document.recipe)
    assert plan.worker(WorkerName("rollout", 1)).threads == 7
    assert plan.worker(WorkerName("rollout", 0)).threads == 1
    assert plan.digest == plan_recipe("quickstart")[1].digest


def test_infinity_stays_a_number(tmp_path: Path) -> None:
    document = read(written(tmp_path, "flow.steps.update.with.clip=[0.2,inf]"))
    assert document.recipe.flow.steps["update"].with_["clip"] == [0.2, math.inf]


def test_nan_in_the_settings_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text().replace("  engine_options: {}\n", "  engine_options:\n    x: .nan\n", 1))
    with pytest.raises(RecipeError, match=r"settings\.engine_options\.x — nan is not a number"):
        read(path)


def test_a_script_and_a_checkpoint_may_be_named(tmp_path: Path) -> None:
    document = read(written(tmp_path, script="rollout-1.py", resume="/c/step_000100", term=2))
    assert (document.script, document.resume, document.term) == ("rollout-1.py", "/c/step_000100", 2)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"worker": "rollout/9"}, r"rollout-1\.yaml:21: worker — the recipe has no worker 'rollout/9' — rollout/0"),
        ({"settings": {"threds": 1}}, r"settings\.threds — unknown key — did you mean 'threads'"),
        ({"settings": {"threads": "two"}}, r"settings\.threads — expected a whole number, got 'two'"),
        ({"format": 2}, r"rollout-1\.yaml:20: format — 2 should be less than or equal to 1"),
        ({"rooster": {}}, r"rooster — unknown key — did you mean 'roster'"),
        ({"recipe": {}}, r"run — required"),
    ],
)
def test_nonsense_is_refused_with_its_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        read(written(tmp_path, **changes))
