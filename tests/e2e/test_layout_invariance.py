"""The same recipe on any layout: the same prompts, the same tokens, the same gradients."""

from typing import Any

import pytest

from tests.e2e.runs import Launch, Run

LAYOUTS = {
    "colocated": ["layout=colocated"],
    "1+1": ["layout=split", "layout.pools.rollout.count=1"],
    "3+1": ["layout=split", "layout.pools.rollout.count=3"],
}


def tokens(run: Run) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    lines = run.dumps()
    found = {(*line["uid"], line["sample"]): (line["step"], line["prompt"], *line["response_ids"]) for line in lines}
    assert len(found) == len(lines), "a sample was trained on twice"
    return found


def norms(run: Run) -> list[float]:
    return [line["actor/grad_norm"] for line in run.metrics()]


@pytest.mark.parametrize(("dtype", "steps", "tolerance"), [("float64", 10, 1e-6), ("float32", 3, 1e-3)])
def test_one_worker_or_several_give_the_same_run(launch: Launch, dtype: str, steps: int, tolerance: float) -> None:
    settings = [f"models.policy.dtype={dtype}", f"run.training_steps={steps}"]
    runs = {}
    for layout, overrides in LAYOUTS.items():
        runs[layout] = launch("quickstart", *settings, *overrides)
        assert runs[layout].wait() == 0, runs[layout].output
    reference = runs.pop("colocated")
    assert len(tokens(reference)) == steps * 32 * 8
    for layout, run in runs.items():
        assert tokens(run) == tokens(reference), layout
        assert norms(run) == pytest.approx(norms(reference), rel=tolerance), layout
