"""What a plan says about backends that divide a model over workers."""

from __future__ import annotations

from collections.abc import Callable

from distflow.flow.recipe_check import plan_recipe
from tests.flow.conftest import Folder

FSDP = "layout.pools.trainer.backend=fsdp"


def test_the_plan_says_so() -> None:
    plan = plan_recipe("quickstart", [FSDP, "layout.pools.trainer.count=2"])[1]
    (note,) = plan.notes
    assert note.startswith("backend 'fsdp' divides models over the 2 worker(s) of 'trainer', which all take part")
    assert note.endswith("and deal their samples by cost")
    (alone,) = plan_recipe("quickstart", [FSDP])[1].notes
    assert alone == "backend 'fsdp' divides models over the 1 worker(s) of 'trainer'"
    assert plan_recipe("quickstart", [])[1].notes == ()


def test_a_plug_in_says_it_in_its_class(folder: Folder) -> None:
    file = folder.write("mine.py", "class Mine:\n    lockstep: bool = True\n\nclass Other:\n    lockstep = False\n")
    backends = [f"layout.pools.trainer.backend={file}:{name}" for name in ("Mine", "Other")]
    notes = [plan_recipe("quickstart", [backend])[1].notes for backend in backends]
    assert [len(found) for found in notes] == [1, 0]


def test_a_divided_model_stands_on_the_training_pool(refused: Callable[..., str], folder: Folder) -> None:
    folder.write("mine.yaml", "defaults: [quickstart, {override /flow: grpo_kl}, _self_]\n")
    message = refused("layout.pools.rollout.steps=[reference]", "layout.pools.rollout.backend=fsdp")
    assert "layout.pools.rollout.backend" in message
    assert "'fsdp' divides models over training workers, and this pool runs reference" in message
    assert "backend: torch, or give the step to pool 'trainer'" in message


def test_all_its_workers_have_the_same_options(refused: Callable[..., str], folder: Folder) -> None:
    folder.write(
        "mine.yaml",
        "defaults: [quickstart, _self_]\n"
        "layout: {pools: {trainer: {count: 2, backend: fsdp, each: {'1': {backend_options: {packed: false}}}}}}\n",
    )
    message = refused()
    assert "layout.pools.trainer.each.1.backend_options" in message
    assert "the workers that 'fsdp' divides a model over need the same options" in message
