"""The ZeRO stage of a pool, as a key of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distflow.flow.recipe_check import plan_recipe
from tests.flow.conftest import Folder

TRAINER = "layout.pools.trainer"
DEEPSPEED = f"{TRAINER}.backend=deepspeed"


def _options(*overrides: str) -> list[object]:
    plan = plan_recipe("quickstart", [*overrides])[1]
    return [dict(worker.backend_options) for worker in plan.workers if worker.name.pool == "trainer"]


def test_the_backend_gets_it_among_its_options() -> None:
    assert _options(DEEPSPEED, f"{TRAINER}.zero=3") == [{"zero": 3}]
    assert _options(DEEPSPEED, f"{TRAINER}.zero=1", f"{TRAINER}.backend_options={{packed: false}}") == [
        {"packed": False, "zero": 1}
    ]
    assert _options(DEEPSPEED) == [{}]


def test_another_backend_drops_it(folder: Folder) -> None:
    folder.write(
        "mine.yaml", "defaults: [quickstart, _self_]\nlayout: {pools: {trainer: {backend: deepspeed, zero: 3}}}\n"
    )
    plan = plan_recipe(str(folder.path / "mine.yaml"), [f"{TRAINER}.backend=torch"])[1]
    assert [dict(w.backend_options) for w in plan.workers if w.name.pool == "trainer"] == [{}]


@pytest.mark.parametrize(
    ("spelled", "notes"), [("zero=1", 0), ("backend_options={zero: 0}", 0), ("zero=2", 1), ("threads=1", 1)]
)
def test_the_plan_says_which_stages_need_all_workers(spelled: str, notes: int) -> None:
    plan = plan_recipe("quickstart", [DEEPSPEED, f"{TRAINER}.count=2", f"{TRAINER}.{spelled}"])[1]
    assert len(plan.notes) == notes


def test_workers_with_another_stage_are_refused(refused: Callable[..., str], folder: Folder) -> None:
    folder.write(
        "mine.yaml",
        "defaults: [quickstart, _self_]\n"
        "layout: {pools: {trainer: {count: 2, backend: deepspeed, zero: 1,"
        " each: {'1': {backend_options: {zero: 3}}}}}}\n",
    )
    assert "zero — 1, and layout.pools.trainer.each.1.backend_options.zero is 3 — keep one of them" in refused()
