"""`offload: true` where nothing could come of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distflow.flow.recipe_check import plan_recipe
from tests.flow.conftest import Folder

WORKER = "layout.pools.worker"
COLOCATED = ("layout=colocated", f"{WORKER}.offload=true")
REFERENCE = ["flow=grpo_kl", "run.dump_fields=[ref_logprobs]"]


def test_the_worker_gets_it() -> None:
    assert [worker.offload for worker in plan_recipe("quickstart", COLOCATED)[1].workers] == [True]
    assert [worker.offload for worker in plan_recipe("quickstart", ["layout=colocated"])[1].workers] == [False]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["layout.pools.trainer.offload=true"],
            "layout.pools.trainer.offload — pool 'trainer' does not both generate and train, so nothing takes turns on "
            "its devices — remove it, or give all roles to one pool, as in layout=colocated",
        ),
        (
            [*COLOCATED, f"{WORKER}.engine=sglang", f"{WORKER}.device=cpu"],
            "engine 'sglang' gives memory back on GPUs only — engine: torch, a GPU, or remove offload",
        ),
        (
            [*COLOCATED, f"{WORKER}.count=2", f"{WORKER}.each.1={{engine: sglang, device: cpu}}"],
            "engine 'sglang' gives memory back on GPUs only",
        ),
        (
            [*COLOCATED, *REFERENCE, f"{WORKER}.backend=deepspeed", f"{WORKER}.zero=3"],
            "backend 'deepspeed' cannot offload 'reference', which is frozen, in ZeRO stage 3 — zero: 2, or fsdp",
        ),
        (
            [*COLOCATED, f"{WORKER}.backend=deepspeed", f"{WORKER}.zero=1", "models.policy.dtype=bfloat16"],
            "backend 'deepspeed' cannot offload 'policy' in ZeRO stage 1 with bfloat16",
        ),
        (
            [*COLOCATED, f"{WORKER}.backend=deepspeed", f"{WORKER}.backend_options={{offload_optimizer: true}}"],
            "offload_optimizer keeps moments and masters in the CPU's memory all the time — keep one of the two",
        ),
    ],
    ids=lambda value: "" if isinstance(value, list) else value[:40],
)
def test_it_is_refused_with_a_reason_and_a_cure(
    overrides: list[str], expected: str, refused: Callable[..., str]
) -> None:
    assert expected in refused(*overrides)


def test_a_step_that_would_use_a_model_that_is_away_is_refused(refused: Callable[..., str], folder: Folder) -> None:
    folder.write(
        "scored.py",
        "from distflow import step\n\n\n"
        '@step(role="score", reads=["response_ids"], writes=["guess"])\n'
        "def guess(batch, ctx):\n    return batch\n",
    )
    folder.write(
        "mine.yaml",
        "defaults: [quickstart, {override /layout: colocated}, _self_]\n"
        "flow: {steps: {guess: {call: ./scored.py:guess, model: judge}}}\n"
        "layout: {pools: {worker: {offload: true}}}\n",
    )
    assert "step 'guess' uses model 'judge' while the worker generates, when models are offloaded" in refused()
