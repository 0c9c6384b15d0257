"""Which GPUs workers get on one host."""

import pytest

from distflow.errors import RecipeError, UserError
from distflow.flow.gpus import first_gpu
from distflow.flow.memory_fit import Capacity, placed
from distflow.flow.plan import Plan
from distflow.flow.recipe_check import plan_recipe

POOLS = "layout.pools"
IN_TWO = [f"{POOLS}.rollout.engine=sglang", f"{POOLS}.rollout.engine_options.tensor_parallel=2"]


def plan(*overrides: str) -> Plan:
    return plan_recipe("quickstart", list(overrides))[1]


@pytest.mark.parametrize(
    "overrides, gpus, expected",
    [
        ((), 8, [0, 1, 2]),
        ((), 2, [0, 1, 0]),
        ((), 1, [0, 0, 0]),
        ((f"{POOLS}.rollout.device=cpu",), 8, [0, 0, 0]),
        ((f"{POOLS}.trainer.count=2",), 4, [0, 1, 2, 3]),
        (tuple(IN_TWO), 8, [0, 2, 4]),
        (tuple(IN_TWO), 4, [0, 2, 0]),
        (tuple(IN_TWO), 3, [0, 0, 2]),
    ],
)
def test_pools_and_their_workers_stand_side_by_side(overrides: tuple[str, ...], gpus: int, expected: list[int]) -> None:
    workers = plan(*overrides).workers
    assert [first_gpu(workers, worker, gpus) for worker in workers] == expected


def test_the_estimate_of_memory_sees_them_there() -> None:
    shown = placed(plan(), Capacity(None, (1 << 40,) * 4))
    assert [one.place for one in shown] == ["cuda:0", "cuda:1", "cuda:2"]


def test_an_engine_over_more_gpus_than_there_are_is_refused() -> None:
    workers = plan(*IN_TWO).workers
    with pytest.raises(UserError, match=r"rollout/0 shards its model over 2 GPUs .*, but there are 1"):
        first_gpu(workers, workers[0], 1)


@pytest.mark.parametrize(
    "overrides, place",
    [
        ((f"{POOLS}.worker.engine_options.tensor_parallel=2",), r"worker\.engine_options"),
        (
            (f"{POOLS}.worker.each={{3: {{engine_options: {{tensor_parallel: 2}}}}}}",),
            r"worker\.each\.3\.engine_options",
        ),
    ],
)
def test_a_colocated_engine_over_several_gpus_is_refused_by_the_plan(overrides: tuple[str, ...], place: str) -> None:
    """GPUs would be dealt 0 2 4 6 0 2 4 6, and every second trainer would have nothing."""
    colocated = ["layout=colocated", f"{POOLS}.worker.count=8", f"{POOLS}.worker.engine=sglang"]
    with pytest.raises(RecipeError, match=rf"{place} — the engine of worker/\d shards its model over 2 GPUs, but"):
        plan(*colocated, *overrides)
    plan(*colocated, *overrides, f"{POOLS}.worker.device=cpu")
