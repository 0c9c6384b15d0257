"""Engines that make torch's default process group, on workers that train in it."""

import pytest

from distflow.config.plugins import ENGINES
from distflow.errors import RecipeError
from distflow.flow.recipe_check import plan_recipe

COLOCATED = ("layout=colocated", "layout.pools.worker.engine=vllm")


@pytest.mark.parametrize(
    "given",
    [
        COLOCATED,
        ("layout.pools.rollout.engine=vllm", "layout.pools.trainer.count=2", "layout.pools.trainer.backend=fsdp"),
        ("layout=colocated", "layout.pools.worker.count=2", "layout.pools.worker.engine=sglang"),
    ],
)
def test_alone_or_apart_it_may_be_any_engine(given: tuple[str, ...]) -> None:
    assert plan_recipe("quickstart", given)[1].workers[0].engine in (ENGINES["vllm"], ENGINES["sglang"])


@pytest.mark.parametrize("change", ["count=2", "backend=fsdp", "backend=deepspeed"])
def test_colocated_with_a_group_it_is_refused(change: str) -> None:
    with pytest.raises(RecipeError, match=r"layout.pools.worker.engine — vllm cannot share .* as in layout=split"):
        plan_recipe("quickstart", [*COLOCATED, f"layout.pools.worker.{change}"])


def test_one_such_worker_is_enough() -> None:
    given = ["layout=colocated", "layout.pools.worker.count=2", "layout.pools.worker.each.1.engine=vllm"]
    with pytest.raises(RecipeError, match=r"layout.pools.worker.each.1.engine — vllm cannot share a worker"):
        plan_recipe("quickstart", given)
